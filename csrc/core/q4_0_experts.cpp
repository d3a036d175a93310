// How the work is cut. Three kinds of items, handed out in this order:
//
// 1. a token's hidden row is quantised;
// 2. a block of 32 intermediate columns of one job: gate and up dots, activation, and its quantisation, for all routes
// of
//    the job;
// 3. a range of outputs of one job: the sum over all columns, in ascending order, for all routes, written as it is
//    final.
//
// What passes from one kind to the next is small (two bytes per element), so there are no partial rows to add up, and
// how outputs are cut does not show in the bits. An item waits only for those that it depends on: the first outputs of
// one job are computed while the last columns of another still are.
//
// Each weight is read by one item. With more than four routes the item passes over it again, from the second-level
// cache.
#include "q4_0_experts.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ordered_work.h"
#include "q4_0_kernels.h"
#include "row_kernels.h"
#include "work_queue.h"

namespace ft::detail {
namespace {

// Small ranges level the end out; large ones read memory in longer runs.
constexpr std::int64_t kRangesPerWorker = 8;
constexpr std::int64_t kMinOutputs = 64;
constexpr std::int64_t kMaxOutputs = 256;
static_assert(kMinOutputs % kQ4Block == 0 && kMaxOutputs % kQ4Block == 0);

// Tiles of an output range are fetched so far ahead of their use, and so much of an item before it begins.
constexpr std::int64_t kAheadBytes = 8192;

const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
const std::uint16_t* u16(const std::byte* p) { return reinterpret_cast<const std::uint16_t*>(p); }

struct Job {
  const ExpertJob* expert = nullptr;
  std::int64_t num_blocks = 0;   // of 32 columns
  std::int64_t first_block = 0;  // index of the job's first block among those of all jobs
  std::int64_t first_row = 0;    // of its activations, num_routes rows of num_blocks blocks, among all
};

class Plan {
 public:
  Plan(int num_workers, std::span<const ExpertJob> jobs, const ExpertBatch& batch) : batch_(batch) {
    chunks_ = q8_chunks(batch.hidden_size);
    token_row_.assign(static_cast<std::size_t>(batch.num_tokens), -1);
    for (const ExpertJob& job : jobs) {
      if (job.num_routes <= 0) continue;
      jobs_.push_back({&job, std::int64_t{job.tiles()} * job.layout->tile_columns / kQ4Block, 0, 0});
      for (std::int32_t i = 0; i < job.num_routes; ++i) {
        std::int32_t& row = token_row_[static_cast<std::size_t>(job.routes[i] / batch.top_k)];
        if (row >= 0) continue;
        row = static_cast<std::int32_t>(tokens_.size());
        tokens_.push_back(job.routes[i] / batch.top_k);
      }
    }
    // Large jobs first, so that the small ones level the end out.
    std::stable_sort(jobs_.begin(), jobs_.end(),
                     [](const Job& a, const Job& b) { return a.expert->num_routes > b.expert->num_routes; });
    for (Job& job : jobs_) {
      job.first_block = num_blocks_;
      job.first_row = num_rows_;
      num_blocks_ += job.num_blocks;
      num_rows_ += job.num_blocks * job.expert->num_routes;
      multiply_adds_ += 3 * job.num_blocks * kQ4Block * batch.hidden_size * job.expert->num_routes;
    }
    const std::int64_t even =
        batch.hidden_size * static_cast<std::int64_t>(jobs_.size()) / (kRangesPerWorker * num_workers);
    outputs_ = std::clamp(even / kMinOutputs * kMinOutputs, kMinOutputs, kMaxOutputs);
    ranges_ = (batch.hidden_size + outputs_ - 1) / outputs_;
    finished_ = std::make_unique<Countdown[]>(jobs_.size());
  }

  std::int64_t num_items() const {
    return num_tokens() + num_blocks_ + static_cast<std::int64_t>(jobs_.size()) * ranges_;
  }
  std::int64_t multiply_adds() const { return multiply_adds_; }
  std::size_t shared_bytes() const {
    return static_cast<std::size_t>(num_tokens() * chunks_) * sizeof(Q8Chunk) +
           static_cast<std::size_t>(num_rows_) * sizeof(Q8Block);
  }

  // Runs items until none is left; on any number of workers that share `memory`.
  void work(const Q4Kernels& kernels, const RowKernels& rows, WorkQueue& queue, std::byte* memory) {
    auto* hidden = reinterpret_cast<Q8Chunk*>(memory);                                // [tokens, chunks]
    auto* activations = reinterpret_cast<Q8Block*>(hidden + num_tokens() * chunks_);  // see Job::first_row
    for (std::int64_t item = queue.take(); item >= 0; item = queue.take()) {
      if (item < num_tokens()) {
        kernels.quantize_row(batch_.hidden + static_cast<std::int64_t>(tokens_[item]) * batch_.hidden_size,
                             batch_.hidden_size, hidden + item * chunks_);
        quantized_.done();
      } else if (item - num_tokens() < num_blocks_) {
        run_columns(kernels, rows, item - num_tokens(), hidden, activations);
      } else {
        const std::int64_t at = item - num_tokens() - num_blocks_;
        run_outputs(kernels, static_cast<std::size_t>(at / ranges_), at % ranges_ * outputs_, activations);
      }
    }
  }

 private:
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens_.size()); }

  void run_columns(const Q4Kernels& kernels, const RowKernels& rows, std::int64_t item, const Q8Chunk* hidden,
                   Q8Block* activations) {
    const auto job = std::prev(std::upper_bound(jobs_.begin(), jobs_.end(), item,
                                                [](std::int64_t i, const Job& j) { return i < j.first_block; }));
    const std::int64_t block = item - job->first_block;
    const RecordLayout& layout = *job->expert->layout;
    const std::int64_t per_tile = layout.tile_columns / kQ4Block;
    const std::byte* tile = job->expert->first_byte() + block / per_tile * layout.tile_stride_bytes;
    const std::int64_t row = block % per_tile * kQ4Block;
    const std::int64_t nibbles = row * layout.hidden / 2;
    const std::int64_t scales = row * (layout.hidden / kQ4Block) * 2;
    Q4Rows gate_rows{u8(tile + layout.gate_offset + nibbles), u16(tile + layout.gate_scales_offset + scales), kQ4Block};
    const Q4Rows up_rows{u8(tile + layout.up_offset + nibbles), u16(tile + layout.up_scales_offset + scales), kQ4Block};
    gate_rows.next_nibbles = up_rows.nibbles;
    gate_rows.next_scales = up_rows.scales;
    prefetch_range(gate_rows.nibbles, std::min(kAheadBytes, kQ4Block * layout.hidden / 2));
    prefetch_range(gate_rows.scales, std::min(kAheadBytes, kQ4Block * layout.hidden / 2) / 8);

    quantized_.wait(num_tokens());
    alignas(64) float gate[kQ4TileRows * kQ4Block];
    alignas(64) float up[kQ4TileRows * kQ4Block];
    const std::int32_t num_routes = job->expert->num_routes;
    for (std::int32_t r = 0; r < num_routes; r += kQ4TileRows) {
      const std::int64_t count = std::min<std::int64_t>(kQ4TileRows, num_routes - r);
      const Q8Chunk* inputs[kQ4TileRows];
      for (std::int64_t i = 0; i < count; ++i) {
        inputs[i] = hidden + token_row_[job->expert->routes[r + i] / batch_.top_k] * chunks_;
      }
      kernels.dot_rows(gate_rows, layout.hidden, inputs, count, nullptr, gate, kQ4Block);
      kernels.dot_rows(up_rows, layout.hidden, inputs, count, nullptr, up, kQ4Block);
      rows.silu_and_mul(gate, up, count * kQ4Block, gate);
      for (std::int64_t i = 0; i < count; ++i) {
        kernels.quantize_block(gate + i * kQ4Block, activations + job->first_row + (r + i) * job->num_blocks + block);
      }
    }
    finished_[job - jobs_.begin()].done();
  }

  void run_outputs(const Q4Kernels& kernels, std::size_t index, std::int64_t first, const Q8Block* activations) const {
    const Job& job = jobs_[index];
    const RecordLayout& layout = *job.expert->layout;
    const std::int64_t per_tile = layout.tile_columns / kQ4Block;
    const std::int64_t count = std::min(outputs_, batch_.hidden_size - first);
    // This range's parts of the tiles are too far apart for the hardware to foresee.
    const std::int64_t part = count * per_tile * kQ4BlockBytes;
    const std::int64_t ahead = std::max<std::int64_t>(2, (kAheadBytes + part - 1) / part);
    for (std::int64_t t = 0; t < std::min<std::int64_t>(ahead, job.expert->tiles()); ++t) {
      const std::byte* tile = job.expert->first_byte() + t * layout.tile_stride_bytes;
      prefetch_range(tile + layout.down_offset + first * per_tile * kQ4BlockBytes, part);
      prefetch_range(tile + layout.down_scales_offset + first * per_tile * 2, part / 8);
    }

    finished_[index].wait(job.num_blocks);
    alignas(64) float sums[kQ4TileRows * kMaxOutputs];
    for (std::int32_t r = 0; r < job.expert->num_routes; r += kQ4TileRows) {
      const std::int64_t routes = std::min<std::int64_t>(kQ4TileRows, job.expert->num_routes - r);
      for (std::int64_t i = 0; i < routes; ++i) {
        std::memset(sums + i * kMaxOutputs, 0, static_cast<std::size_t>(count) * sizeof(float));
      }
      for (std::int64_t block = 0; block < job.num_blocks; ++block) {
        const std::int64_t at = first * per_tile + block % per_tile;
        const std::byte* tile = job.expert->first_byte() + block / per_tile * layout.tile_stride_bytes;
        const Q8Block* inputs[kQ4TileRows];
        for (std::int64_t i = 0; i < routes; ++i) {
          inputs[i] = activations + job.first_row + (r + i) * job.num_blocks + block;
        }
        const bool more = r == 0 && block + ahead * per_tile < job.num_blocks;
        kernels.add_down(u8(tile + layout.down_offset) + at * kQ4BlockBytes, u16(tile + layout.down_scales_offset) + at,
                         per_tile, count, inputs, routes, sums, kMaxOutputs,
                         more ? ahead * layout.tile_stride_bytes : 0);
      }
      for (std::int64_t i = 0; i < routes; ++i) {
        const std::int64_t route = job.expert->routes[r + i];
        kernels.finish_down(sums + i * kMaxOutputs, count, batch_.weights[route],
                            batch_.route_out + route * batch_.hidden_size + first);
      }
    }
  }

  const ExpertBatch& batch_;
  std::int64_t chunks_ = 0;              // of a hidden row
  std::vector<std::int32_t> tokens_;     // that have a route, each once
  std::vector<std::int32_t> token_row_;  // token -> index in tokens_, or -1
  std::vector<Job> jobs_;
  std::int64_t num_blocks_ = 0;
  std::int64_t num_rows_ = 0;  // activation blocks
  std::int64_t multiply_adds_ = 0;
  std::int64_t outputs_ = 0;  // of a range
  std::int64_t ranges_ = 0;
  Countdown quantized_;
  std::unique_ptr<Countdown[]> finished_;  // per job: its blocks of columns
};

}  // namespace

void run_q4_0_jobs(WorkerPool& pool, std::span<const ExpertJob> jobs, const ExpertBatch& batch) {
  const Q4Kernels& kernels = q4_kernels(pool.isa());
  const RowKernels& rows = row_kernels(pool.isa());
  Plan plan(pool.num_threads(), jobs, batch);
  WorkQueue queue(plan.num_items());
  if (plan.num_items() == 0) return;
  if (plan.multiply_adds() <= kSoloWork) {
    pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int worker) {
      plan.work(kernels, rows, queue, static_cast<std::byte*>(pool.scratch(worker, plan.shared_bytes())));
    });
    return;
  }
  pool.run_shared(plan.shared_bytes(), [&](int, std::byte* shared) { plan.work(kernels, rows, queue, shared); });
}

}  // namespace ft::detail
