// How the work is cut. Three kinds of items, handed out in this order:
//
// 1. a token's hidden row is quantised;
// 2. 32 intermediate columns of one job: gate and up dots, activation, and its quantisation, for all routes of the job;
// 3. a range of outputs of one job: the sum over all columns, in ascending order, for all routes, written as it is
// final.
//
// What passes from one kind to the next is small (a byte or two per element), so there are no partial rows to add up,
// and how outputs are cut does not show in the bits. An item waits only for those that it depends on: the first
// outputs of one job are computed while the last columns of another still are.
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

constexpr std::int64_t kMinOutputs = 64;
constexpr std::int64_t kMaxOutputs = 256;
static_assert(kMinOutputs % kQ4Block == 0 && kMaxOutputs % kQ4Block == 0);

// Tiles of an output range are fetched so far ahead of their use.
constexpr std::int64_t kAheadBytes = 8192;

void prefetch(const std::byte* p, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, 0, 2);
}

struct Job {
  const ExpertJob* expert = nullptr;
  std::int64_t first_block = 0;  // of its activations: [num_routes][columns / 32]
  std::int64_t num_columns = 0;  // blocks of 32 columns
  std::int64_t first_item = 0;   // of kind 2
};

class Plan {
 public:
  Plan(int num_workers, std::span<const ExpertJob> jobs, const ExpertBatch& batch) : batch_(batch) {
    chunks_ = q8_chunks(batch.hidden_size);
    token_row_.assign(static_cast<std::size_t>(batch.num_tokens), -1);
    for (const ExpertJob& job : jobs) {
      if (job.num_routes <= 0) continue;
      jobs_.push_back({&job, 0, job.layout->intermediate / kQ4Block, 0});
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
      job.first_item = column_items_;
      num_blocks_ += job.num_columns * job.expert->num_routes;
      column_items_ += job.num_columns;
      multiply_adds_ += 3 * job.num_columns * kQ4Block * batch.hidden_size * job.expert->num_routes;
    }
    // About four ranges for each worker, so that they end together.
    const std::int64_t even =
        batch.hidden_size * static_cast<std::int64_t>(jobs_.size()) / (4 * num_workers) / kMinOutputs * kMinOutputs;
    outputs_ = std::clamp(even, kMinOutputs, kMaxOutputs);
    ranges_ = (batch.hidden_size + outputs_ - 1) / outputs_;
    finished_ = std::make_unique<Countdown[]>(jobs_.size());
  }

  std::int64_t num_items() const {
    return static_cast<std::int64_t>(tokens_.size()) + column_items_ +
           static_cast<std::int64_t>(jobs_.size()) * ranges_;
  }
  std::int64_t multiply_adds() const { return multiply_adds_; }
  std::size_t shared_bytes() const {
    return tokens_.size() * static_cast<std::size_t>(chunks_) * sizeof(Q8Chunk) +
           static_cast<std::size_t>(num_blocks_) * sizeof(Q8Block);
  }

  // Runs items until none is left; on any number of workers that share `memory`.
  void work(const Q4Kernels& kernels, const RowKernels& rows, WorkQueue& queue, std::byte* memory) {
    auto* hidden = reinterpret_cast<Q8Chunk*>(memory);
    auto* blocks = reinterpret_cast<Q8Block*>(hidden + static_cast<std::int64_t>(tokens_.size()) * chunks_);
    const auto num_tokens = static_cast<std::int64_t>(tokens_.size());
    for (std::int64_t item = queue.take(); item >= 0; item = queue.take()) {
      if (item < num_tokens) {
        kernels.quantize_row(batch_.hidden + static_cast<std::int64_t>(tokens_[item]) * batch_.hidden_size,
                             batch_.hidden_size, hidden + item * chunks_);
        quantized_.done();
      } else if (item - num_tokens < column_items_) {
        quantized_.wait(num_tokens);
        const std::int64_t at = item - num_tokens;
        const auto job = std::prev(std::upper_bound(jobs_.begin(), jobs_.end(), at,
                                                    [](std::int64_t i, const Job& j) { return i < j.first_item; }));
        run_columns(kernels, rows, *job, at - job->first_item, hidden, blocks);
        finished_[job - jobs_.begin()].done();
      } else {
        const std::int64_t at = item - num_tokens - column_items_;
        const Job& job = jobs_[static_cast<std::size_t>(at / ranges_)];
        finished_[at / ranges_].wait(job.num_columns);
        run_outputs(kernels, job, at % ranges_ * outputs_, blocks);
      }
    }
  }

 private:
  void run_columns(const Q4Kernels& kernels, const RowKernels& rows, const Job& job, std::int64_t column,
                   const Q8Chunk* hidden, Q8Block* blocks) const {
    const RecordLayout& layout = *job.expert->layout;
    const std::int64_t per_tile = layout.tile_columns / kQ4Block;
    const std::byte* tile = job.expert->record + column / per_tile * layout.tile_stride_bytes;
    const std::int64_t first = column % per_tile * kQ4Block;  // of the tile's rows
    const std::int64_t nibbles = first * layout.hidden / 2;
    const std::int64_t scales = first * (layout.hidden / kQ4Block) * 2;
    alignas(64) float gate[kQ4TileRows * kQ4Block];
    alignas(64) float up[kQ4TileRows * kQ4Block];
    for (std::int32_t r = 0; r < job.expert->num_routes; r += kQ4TileRows) {
      const std::int64_t count = std::min<std::int64_t>(kQ4TileRows, job.expert->num_routes - r);
      const Q8Chunk* activations[kQ4TileRows];
      for (std::int64_t i = 0; i < count; ++i) {
        activations[i] = hidden + token_row_[job.expert->routes[r + i] / batch_.top_k] * chunks_;
      }
      kernels.dot_rows(u8(tile + layout.gate_offset + nibbles), u16(tile + layout.gate_scales_offset + scales),
                       kQ4Block, layout.hidden, activations, count, nullptr, gate, kQ4Block);
      kernels.dot_rows(u8(tile + layout.up_offset + nibbles), u16(tile + layout.up_scales_offset + scales), kQ4Block,
                       layout.hidden, activations, count, nullptr, up, kQ4Block);
      rows.silu_and_mul(gate, up, count * kQ4Block, gate);
      for (std::int64_t i = 0; i < count; ++i) {
        kernels.quantize_block(gate + i * kQ4Block, blocks + job.first_block + (r + i) * job.num_columns + column);
      }
    }
  }

  void run_outputs(const Q4Kernels& kernels, const Job& job, std::int64_t first, const Q8Block* blocks) const {
    const RecordLayout& layout = *job.expert->layout;
    const std::int64_t per_tile = layout.tile_columns / kQ4Block;
    const std::int64_t count = std::min(outputs_, batch_.hidden_size - first);
    // This range's parts of the next tiles are too far apart for the hardware to foresee.
    const std::int64_t part = count * per_tile * kQ4BlockBytes;
    const std::int64_t ahead = std::max<std::int64_t>(2, (kAheadBytes + part - 1) / part);
    for (std::int64_t tile = 0; tile < std::min<std::int64_t>(ahead, layout.num_tiles); ++tile) {
      const std::byte* at = job.expert->record + tile * layout.tile_stride_bytes;
      prefetch(at + layout.down_offset + first * per_tile * kQ4BlockBytes, part);
      prefetch(at + layout.down_scales_offset + first * per_tile * 2, count * per_tile * 2);
    }
    alignas(64) float sums[kQ4TileRows * kMaxOutputs];
    for (std::int32_t r = 0; r < job.expert->num_routes; r += kQ4TileRows) {
      const std::int64_t routes = std::min<std::int64_t>(kQ4TileRows, job.expert->num_routes - r);
      for (std::int64_t i = 0; i < routes; ++i) {
        std::memset(sums + i * kMaxOutputs, 0, static_cast<std::size_t>(count) * sizeof(float));
      }
      for (std::int64_t column = 0; column < job.num_columns; ++column) {
        const std::int64_t within = first * per_tile + column % per_tile;
        const std::byte* tile = job.expert->record + column / per_tile * layout.tile_stride_bytes;
        const Q8Block* activations[kQ4TileRows];
        for (std::int64_t i = 0; i < routes; ++i) {
          activations[i] = blocks + job.first_block + (r + i) * job.num_columns + column;
        }
        kernels.add_down(u8(tile + layout.down_offset) + within * kQ4BlockBytes,
                         u16(tile + layout.down_scales_offset) + within, per_tile, count, activations, routes, sums,
                         kMaxOutputs,
                         r == 0 && column + ahead * per_tile < job.num_columns ? ahead * layout.tile_stride_bytes : 0);
      }
      for (std::int64_t i = 0; i < routes; ++i) {
        const std::int64_t route = job.expert->routes[r + i];
        kernels.finish_down(sums + i * kMaxOutputs, count, batch_.weights[route],
                            batch_.route_out + route * batch_.hidden_size + first);
      }
    }
  }

  static const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
  static const std::uint16_t* u16(const std::byte* p) { return reinterpret_cast<const std::uint16_t*>(p); }

  const ExpertBatch& batch_;
  std::int64_t chunks_ = 0;              // of a hidden row
  std::vector<std::int32_t> tokens_;     // that have a route, each once
  std::vector<std::int32_t> token_row_;  // token -> index in tokens_, or -1
  std::vector<Job> jobs_;
  std::int64_t num_blocks_ = 0;
  std::int64_t column_items_ = 0;
  std::int64_t multiply_adds_ = 0;
  std::int64_t outputs_ = 0;  // of a range
  std::int64_t ranges_ = 0;
  Countdown quantized_;
  std::unique_ptr<Countdown[]> finished_;  // per job: its columns
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
