// How the work is cut. Three kinds of items, handed out in this order:
//
// 1. a token's hidden row is quantised;
// 2. some intermediate columns of one job: gate and up dots and the activation, for all routes of the job; whoever
//    finishes a block of 32 columns quantises it;
// 3. a range of outputs of one job: the sum over all columns, in ascending order, for all routes, written as it is
//    final.
//
// What passes from one kind to the next is small (a few bytes per element), so there are no partial rows to add up, and
// how columns and outputs are cut does not show in the bits. An item waits only for those that it depends on: the first
// outputs of one job are computed while the last columns of another still are.
//
// Each weight is read by one item. With more than four routes the item passes over it again, from the second-level
// cache.
#include "q4_0_experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "ordered_work.h"
#include "q4_0_kernels.h"
#include "row_kernels.h"

namespace ft::detail {
namespace {

// Small items level the end out; large ones read memory in longer runs.
constexpr std::int64_t kItemsPerWorker = 8;
constexpr std::int64_t kMinOutputs = 64;
constexpr std::int64_t kMaxOutputs = 256;
constexpr std::int64_t kMinColumns = 8;
static_assert(kMinOutputs % kQ4Block == 0 && kMaxOutputs % kQ4Block == 0 && kQ4Block % kMinColumns == 0);

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

// Memory that the workers of one call share.
struct Shared {
  Q8Chunk* hidden = nullptr;  // [tokens, chunks]
  Q8Block* blocks = nullptr;  // activations, see Job::first_row
  float* inner = nullptr;     // the same before quantisation, 32 floats a block; null when items are whole blocks
};

class Plan {
 public:
  Plan(int num_workers, std::span<const ExpertJob> jobs, const ExpertBatch& batch) : batch_(batch) {
    chunks_ = q8_chunks(batch.hidden_size);
    token_row_.assign(static_cast<std::size_t>(batch.num_tokens), -1);
    for (const ExpertJob& job : jobs) {
      if (job.num_routes <= 0) continue;
      jobs_.push_back({&job, job.layout->intermediate / kQ4Block, 0, 0});
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
    const std::int64_t enough = kItemsPerWorker * num_workers;
    columns_ = kQ4Block;
    while (columns_ > kMinColumns && num_blocks_ * (kQ4Block / columns_) < enough) columns_ /= 2;
    const auto num_jobs = static_cast<std::int64_t>(jobs_.size());
    outputs_ = std::clamp(batch.hidden_size * num_jobs / enough / kMinOutputs * kMinOutputs, kMinOutputs, kMaxOutputs);
    ranges_ = (batch.hidden_size + outputs_ - 1) / outputs_;
    column_items_ = num_blocks_ * (kQ4Block / columns_);
    finished_jobs_ = std::make_unique<Countdown[]>(jobs_.size());
    if (columns_ != kQ4Block)
      finished_blocks_ = std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(num_blocks_));
  }

  std::int64_t num_items() const {
    return num_tokens() + column_items_ + static_cast<std::int64_t>(jobs_.size()) * ranges_;
  }
  std::int64_t multiply_adds() const { return multiply_adds_; }
  std::size_t shared_bytes() const {
    const std::size_t inner = columns_ == kQ4Block ? 0 : kQ4Block * sizeof(float);
    return static_cast<std::size_t>(num_tokens() * chunks_) * sizeof(Q8Chunk) +
           static_cast<std::size_t>(num_rows_) * (sizeof(Q8Block) + inner);
  }

  // Runs items until none is left; on any number of workers that share `memory`.
  void work(const Q4Kernels& kernels, const RowKernels& rows, WorkQueue& queue, std::byte* memory) {
    Shared shared;
    shared.hidden = reinterpret_cast<Q8Chunk*>(memory);
    shared.blocks = reinterpret_cast<Q8Block*>(shared.hidden + num_tokens() * chunks_);
    if (columns_ != kQ4Block) shared.inner = reinterpret_cast<float*>(shared.blocks + num_rows_);
    run_ahead(
        queue, [&](std::int64_t item) { prefetch(item); },
        [&](std::int64_t item, const auto& soon) {
          if (item < num_tokens()) {
            soon();
            kernels.quantize_row(batch_.hidden + static_cast<std::int64_t>(tokens_[item]) * batch_.hidden_size,
                                 batch_.hidden_size, shared.hidden + item * chunks_);
            quantized_.done();
          } else if (item - num_tokens() < column_items_) {
            quantized_.wait(num_tokens());
            run_columns(kernels, rows, item - num_tokens(), shared, soon);
          } else {
            const std::int64_t at = item - num_tokens() - column_items_;
            const Job& job = jobs_[static_cast<std::size_t>(at / ranges_)];
            finished_jobs_[at / ranges_].wait(job.num_blocks);
            run_outputs(kernels, job, at % ranges_ * outputs_, shared, soon);
          }
        });
  }

 private:
  // Where the weights of some columns of a job lie.
  struct Columns {
    const std::byte* gate;
    const std::byte* gate_scales;
    const std::byte* up;
    const std::byte* up_scales;
  };

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens_.size()); }

  const Job& job_of_block(std::int64_t block) const {
    return *std::prev(std::upper_bound(jobs_.begin(), jobs_.end(), block,
                                       [](std::int64_t b, const Job& job) { return b < job.first_block; }));
  }

  static Columns find_columns(const Job& job, std::int64_t column) {
    const RecordLayout& layout = *job.expert->layout;
    const std::byte* tile = job.expert->record + column / layout.tile_columns * layout.tile_stride_bytes;
    const std::int64_t row = column % layout.tile_columns;
    const std::int64_t nibbles = row * layout.hidden / 2;
    const std::int64_t scales = row * (layout.hidden / kQ4Block) * 2;
    return {tile + layout.gate_offset + nibbles, tile + layout.gate_scales_offset + scales,
            tile + layout.up_offset + nibbles, tile + layout.up_scales_offset + scales};
  }

  // An output range's parts of the tiles are too far apart for the hardware to foresee: tiles in flight.
  std::int64_t tiles_ahead(const RecordLayout& layout) const {
    const std::int64_t part = outputs_ * (layout.tile_columns / 2);
    return std::max<std::int64_t>(2, (kAheadBytes + part - 1) / part);
  }

  void prefetch(std::int64_t item) const {
    if (item < num_tokens()) return;
    if (item - num_tokens() < column_items_) {
      const std::int64_t column = (item - num_tokens()) * columns_;
      const Job& job = job_of_block(column / kQ4Block);
      const Columns columns = find_columns(job, column - job.first_block * kQ4Block);
      const std::int64_t bytes = std::min(kAheadBytes, columns_ * job.expert->layout->hidden / 2);
      prefetch_range(columns.gate, bytes);
      prefetch_range(columns.gate_scales, bytes / 8);
    } else {
      const std::int64_t at = item - num_tokens() - column_items_;
      const Job& job = jobs_[static_cast<std::size_t>(at / ranges_)];
      const RecordLayout& layout = *job.expert->layout;
      const std::int64_t first = at % ranges_ * outputs_;
      const std::int64_t bytes = std::min(outputs_, batch_.hidden_size - first) * (layout.tile_columns / 2);
      const std::int64_t per_output = layout.tile_columns / kQ4Block;
      for (std::int64_t t = 0; t < std::min<std::int64_t>(tiles_ahead(layout), layout.num_tiles); ++t) {
        const std::byte* tile = job.expert->record + t * layout.tile_stride_bytes;
        prefetch_range(tile + layout.down_offset + first * per_output * kQ4BlockBytes, bytes);
        prefetch_range(tile + layout.down_scales_offset + first * per_output * 2, bytes / 8);
      }
    }
  }

  template <typename Soon>
  void run_columns(const Q4Kernels& kernels, const RowKernels& rows, std::int64_t item, const Shared& shared,
                   const Soon& soon) {
    const Job& job = job_of_block(item * columns_ / kQ4Block);
    const std::int64_t column = item * columns_ - job.first_block * kQ4Block;
    const std::int64_t block = column / kQ4Block;
    const std::int64_t within = column % kQ4Block;
    const std::int64_t hidden = job.expert->layout->hidden;
    const std::int32_t num_routes = job.expert->num_routes;
    const Columns at = find_columns(job, column);
    alignas(64) float gate[kQ4TileRows * kQ4Block];
    alignas(64) float up[kQ4TileRows * kQ4Block];
    for (std::int32_t r = 0; r < num_routes; r += kQ4TileRows) {
      const std::int64_t count = std::min<std::int64_t>(kQ4TileRows, num_routes - r);
      const Q8Chunk* activations[kQ4TileRows];
      for (std::int64_t i = 0; i < count; ++i) {
        activations[i] = shared.hidden + token_row_[job.expert->routes[r + i] / batch_.top_k] * chunks_;
      }
      kernels.dot_rows({u8(at.gate), u16(at.gate_scales), columns_, u8(at.up), u16(at.up_scales)}, hidden, activations,
                       count, nullptr, gate, columns_);
      if (r + kQ4TileRows >= num_routes) soon();
      kernels.dot_rows({u8(at.up), u16(at.up_scales), columns_}, hidden, activations, count, nullptr, up, columns_);
      rows.silu_and_mul(gate, up, count * columns_, gate);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = job.first_row + (r + i) * job.num_blocks + block;
        if (shared.inner == nullptr) {
          kernels.quantize_block(gate + i * kQ4Block, shared.blocks + row);
        } else {
          std::memcpy(shared.inner + row * kQ4Block + within, gate + i * columns_,
                      static_cast<std::size_t>(columns_) * sizeof(float));
        }
      }
    }
    if (shared.inner != nullptr) {
      std::atomic<int>& parts = finished_blocks_[static_cast<std::size_t>(job.first_block + block)];
      if (parts.fetch_add(1, std::memory_order_acq_rel) + 1 != kQ4Block / columns_) return;
      for (std::int32_t r = 0; r < num_routes; ++r) {
        const std::int64_t row = job.first_row + r * job.num_blocks + block;
        kernels.quantize_block(shared.inner + row * kQ4Block, shared.blocks + row);
      }
    }
    finished_jobs_[&job - jobs_.data()].done();
  }

  template <typename Soon>
  void run_outputs(const Q4Kernels& kernels, const Job& job, std::int64_t first, const Shared& shared,
                   const Soon& soon) const {
    const RecordLayout& layout = *job.expert->layout;
    const std::int64_t per_tile = layout.tile_columns / kQ4Block;
    const std::int64_t count = std::min(outputs_, batch_.hidden_size - first);
    const std::int64_t ahead = tiles_ahead(layout);
    const std::int32_t num_routes = job.expert->num_routes;
    alignas(64) float sums[kQ4TileRows * kMaxOutputs];
    for (std::int32_t r = 0; r < num_routes; r += kQ4TileRows) {
      const std::int64_t routes = std::min<std::int64_t>(kQ4TileRows, num_routes - r);
      const bool last = r + kQ4TileRows >= num_routes;
      for (std::int64_t i = 0; i < routes; ++i) {
        std::memset(sums + i * kMaxOutputs, 0, static_cast<std::size_t>(count) * sizeof(float));
      }
      for (std::int64_t block = 0; block < job.num_blocks; ++block) {
        const std::int64_t at = first * per_tile + block % per_tile;
        const std::byte* tile = job.expert->record + block / per_tile * layout.tile_stride_bytes;
        const Q8Block* activations[kQ4TileRows];
        for (std::int64_t i = 0; i < routes; ++i) {
          activations[i] = shared.blocks + job.first_row + (r + i) * job.num_blocks + block;
        }
        const bool more = block + ahead * per_tile < job.num_blocks;
        if (last && block == std::max<std::int64_t>(job.num_blocks - ahead * per_tile, 0)) soon();
        kernels.add_down(u8(tile + layout.down_offset) + at * kQ4BlockBytes, u16(tile + layout.down_scales_offset) + at,
                         per_tile, count, activations, routes, sums, kMaxOutputs,
                         r == 0 && more ? ahead * layout.tile_stride_bytes : 0);
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
  std::int64_t columns_ = 0;  // of an item
  std::int64_t column_items_ = 0;
  std::int64_t outputs_ = 0;  // of a range
  std::int64_t ranges_ = 0;
  Countdown quantized_;
  std::unique_ptr<Countdown[]> finished_jobs_;           // blocks of columns done
  std::unique_ptr<std::atomic<int>[]> finished_blocks_;  // parts of them done, when items are parts
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
