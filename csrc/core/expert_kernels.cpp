// How the work is cut.
//
// A *unit* is up to kUnitColumns intermediate columns of one tile: gate and up dots, activation, weighted sum of down
// rows. An expert's output is the sum of its units' partial sums in ascending order, for every route and every cut, so
// a row has the same bits however the work was divided.
//
// - A job is *split* when there are too few jobs to keep all workers busy: each unit is an item of its own, reads its
//   weights once for all routes, and leaves a partial row per route in shared memory; after a barrier the partial rows
//   are added up. With one route per expert (decode) this is the whole work, and it is bound by memory.
// - Otherwise an item is a job with a block of its routes: the worker goes through all units and keeps the sums to
// itself.
//   Many routes come as several blocks, which re-read the weights, but they are bound by arithmetic.
#include "expert_kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "q4_0_experts.h"
#include "row_kernels.h"
#include "work_queue.h"

namespace ft {
namespace {

using detail::RowKernels;

constexpr std::int64_t kUnitColumns = 32;
// A split job holds a partial row per unit and route, so only jobs with few routes are split.
constexpr std::int64_t kMaxSplitRoutes = 16;
constexpr std::size_t kMaxPartialBytes = std::size_t{32} << 20;
// The packed rows of a block should leave room for a unit's weights in the second-level cache.
constexpr std::size_t kBlockBytes = std::size_t{256} << 10;
constexpr std::int64_t kMaxBlockRoutes = 32;
// Partial rows are added up in slices of this many elements, to give every worker some.
constexpr std::int64_t kReduceSlice = 512;
static_assert(kReduceSlice % detail::kMaxBlock == 0);

struct Item {
  const ExpertJob* job = nullptr;
  std::int32_t unit = -1;  // of a split job; -1: all units
  std::int32_t first_route = 0;
  std::int32_t num_routes = 0;
  std::int64_t partial = -1;  // row index of a split unit's first partial row
};

std::int64_t units_per_tile(const RecordLayout& layout) {
  return (layout.tile_columns + kUnitColumns - 1) / kUnitColumns;
}

std::int64_t num_units(const ExpertJob& job) { return job.tiles() * units_per_tile(*job.layout); }

void check(std::span<const ExpertJob> jobs, const ExpertBatch& batch) {
  const std::int64_t num_routes = static_cast<std::int64_t>(batch.num_tokens) * batch.top_k;
  for (const ExpertJob& job : jobs) {
    if (job.layout->hidden != batch.hidden_size) {
      throw std::invalid_argument("record hidden size " + std::to_string(job.layout->hidden) +
                                  " differs from the batch's " + std::to_string(batch.hidden_size));
    }
    if (job.first_tile < 0 || job.num_tiles < 0 || std::int64_t{job.first_tile} + job.tiles() > job.layout->num_tiles) {
      throw std::invalid_argument("tiles " + std::to_string(job.first_tile) + " to " +
                                  std::to_string(std::int64_t{job.first_tile} + job.tiles()) +
                                  " are not within the record's " + std::to_string(job.layout->num_tiles));
    }
    for (std::int32_t i = 0; i < job.num_routes; ++i) {
      if (job.routes[i] < 0 || job.routes[i] >= num_routes) {
        throw std::invalid_argument("route " + std::to_string(job.routes[i]) + " is not one of " +
                                    std::to_string(num_routes));
      }
    }
  }
}

class Plan {
 public:
  Plan(int num_workers, std::span<const ExpertJob> jobs, const ExpertBatch& batch) {
    stride_ = detail::packed_length(batch.hidden_size);
    const std::size_t row_bytes = static_cast<std::size_t>(stride_) * sizeof(float);
    block_routes_ =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(kBlockBytes / row_bytes) / 4 * 4, 8, kMaxBlockRoutes);
    std::vector<const ExpertJob*> order;
    for (const ExpertJob& job : jobs) {
      if (job.num_routes > 0) order.push_back(&job);
    }
    // Large jobs first, so that the small ones level the end out.
    std::stable_sort(order.begin(), order.end(),
                     [](const ExpertJob* a, const ExpertJob* b) { return a->num_routes > b->num_routes; });
    // Whole jobs while several rounds of them are left; the last round is split.
    const auto workers = static_cast<std::size_t>(num_workers);
    const std::size_t rounds = order.size() / workers;
    std::size_t whole = num_workers == 1 ? order.size() : rounds > 2 ? (rounds - 1) * workers : 0;
    std::size_t budget = kMaxPartialBytes / row_bytes;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const ExpertJob& job = *order[i];
      const auto rows = static_cast<std::size_t>(num_units(job) * job.num_routes);
      if (i < whole || job.num_routes > kMaxSplitRoutes || rows > budget) {
        for (std::int32_t r = 0; r < job.num_routes; r += static_cast<std::int32_t>(block_routes_)) {
          items_.push_back({&job, -1, r, std::min(job.num_routes - r, static_cast<std::int32_t>(block_routes_)), -1});
        }
      } else {
        budget -= rows;
        split_.push_back({&job, -1, 0, job.num_routes, partial_rows_});
        partial_rows_ += static_cast<std::int64_t>(rows);
      }
    }
    for (const Item& item : split_) {
      for (std::int64_t unit = 0; unit < num_units(*item.job); ++unit) {
        items_.push_back(
            {item.job, static_cast<std::int32_t>(unit), 0, item.num_routes, item.partial + unit * item.num_routes});
      }
    }
    for (const ExpertJob* job : order) {
      work_ +=
          static_cast<std::int64_t>(job->num_routes) * job->tiles() * job->layout->tile_columns * batch.hidden_size * 3;
    }
  }

  const std::vector<Item>& items() const { return items_; }
  // One per split job, partial naming its first partial row.
  const std::vector<Item>& split() const { return split_; }
  std::int64_t stride() const { return stride_; }
  std::int64_t block_routes() const { return block_routes_; }
  std::int64_t multiply_adds() const { return work_; }
  std::size_t partial_bytes() const { return static_cast<std::size_t>(partial_rows_ * stride_) * sizeof(float); }

 private:
  std::vector<Item> items_;
  std::vector<Item> split_;
  std::int64_t stride_ = 0;
  std::int64_t block_routes_ = 0;
  std::int64_t partial_rows_ = 0;
  std::int64_t work_ = 0;
};

// One worker's private memory and what it holds.
class Worker {
 public:
  Worker(const RowKernels& kernels, const ExpertBatch& batch, const Plan& plan, float* scratch)
      : kernels_(kernels), batch_(batch), stride_(plan.stride()) {
    packed_ = scratch;
    sums_ = packed_ + plan.block_routes() * stride_;
    temporary_ = sums_ + plan.block_routes() * stride_;
    gate_ = temporary_ + detail::kTemporaryRows * stride_;
    up_ = gate_ + plan.block_routes() * kUnitColumns;
  }

  static std::size_t scratch_floats(const Plan& plan) {
    return static_cast<std::size_t>(2 * plan.block_routes() * (plan.stride() + kUnitColumns) +
                                    detail::kTemporaryRows * plan.stride());
  }

  void run(const Item& item, float* partials) {
    pack_routes(item);
    if (item.unit >= 0) {
      run_unit(item, item.unit, partials + item.partial * stride_, true, nullptr);
      return;
    }
    const std::int64_t count = num_units(*item.job);
    for (std::int64_t unit = 0; unit < count; ++unit) {
      const std::byte* next =
          unit + 1 < count ? unit_address(*item.job, unit + 1) + item.job->layout->gate_offset : nullptr;
      run_unit(item, unit, sums_, unit == 0, next);
    }
    for (std::int32_t i = 0; i < item.num_routes; ++i) write_route(item, i, sums_ + i * stride_, 0, batch_.hidden_size);
  }

  // Adds up a slice of the partial rows of route i of a split job. Slices begin at packed blocks.
  void reduce(const Item& job, std::int32_t i, std::int64_t slice, const float* partials) {
    const std::int64_t begin = slice * kReduceSlice;
    const std::int64_t length = std::min(kReduceSlice, stride_ - begin);
    const std::int64_t count = num_units(*job.job);
    for (std::int64_t unit = 0; unit < count; ++unit) {
      kernels_.add(partials + (job.partial + unit * job.num_routes + i) * stride_ + begin, length, unit == 0, sums_);
    }
    write_route(job, i, sums_, begin, std::min(length, batch_.hidden_size - begin));
  }

 private:
  void pack_routes(const Item& item) {
    if (item.job == packed_job_ && item.first_route == packed_first_) return;
    packed_job_ = item.job;
    packed_first_ = item.first_route;
    for (std::int32_t i = 0; i < item.num_routes; ++i) {
      const std::int64_t token = item.job->routes[item.first_route + i] / batch_.top_k;
      kernels_.pack(item.job->layout->dtype, batch_.hidden + token * batch_.hidden_size, batch_.hidden_size,
                    packed_ + i * stride_);
    }
  }

  // The unit's part of its tile: add a field's offset to get at its weights.
  static const std::byte* unit_address(const ExpertJob& job, std::int64_t unit) {
    const RecordLayout& layout = *job.layout;
    const std::int64_t per_tile = units_per_tile(layout);
    const std::int64_t column = unit % per_tile * kUnitColumns;
    return job.first_byte() + unit / per_tile * layout.tile_stride_bytes +
           column * layout.hidden * static_cast<std::int64_t>(dtype_bytes(layout.dtype));
  }

  // `next` is what this worker will read afterwards, or null.
  void run_unit(const Item& item, std::int64_t unit, float* sums, bool first, const std::byte* next) {
    const RecordLayout& layout = *item.job->layout;
    const std::int64_t column = unit % units_per_tile(layout) * kUnitColumns;
    const std::int64_t columns = std::min<std::int64_t>(kUnitColumns, layout.tile_columns - column);
    const std::byte* tile = unit_address(*item.job, unit);
    const std::int64_t rows = item.num_routes;
    kernels_.dot_rows(layout.dtype, tile + layout.gate_offset, columns, layout.hidden, packed_, stride_, rows, nullptr,
                      gate_, kUnitColumns, tile + layout.up_offset);
    kernels_.dot_rows(layout.dtype, tile + layout.up_offset, columns, layout.hidden, packed_, stride_, rows, nullptr,
                      up_, kUnitColumns, tile + layout.down_offset);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* gate = gate_ + r * kUnitColumns;
      kernels_.silu_and_mul(gate, up_ + r * kUnitColumns, columns, gate);
    }
    kernels_.weighted_rows(layout.dtype, tile + layout.down_offset, columns, layout.hidden, gate_, kUnitColumns, rows,
                           sums, stride_, first, temporary_, next);
  }

  void write_route(const Item& item, std::int32_t i, const float* sum, std::int64_t begin, std::int64_t length) {
    const std::int64_t route = item.job->routes[item.first_route + i];
    kernels_.unpack_scaled(item.job->layout->dtype, sum, batch_.weights[route], length,
                           batch_.route_out + route * batch_.hidden_size + begin);
  }

  const RowKernels& kernels_;
  const ExpertBatch& batch_;
  const std::int64_t stride_;
  float* packed_ = nullptr;
  float* sums_ = nullptr;
  float* temporary_ = nullptr;
  float* gate_ = nullptr;
  float* up_ = nullptr;
  const ExpertJob* packed_job_ = nullptr;
  std::int32_t packed_first_ = -1;
};

}  // namespace

// Always deterministic: see the top of this file. The flag is there for kernels that can trade that for speed.
void run_expert_jobs(WorkerPool& pool, std::span<const ExpertJob> jobs, const ExpertBatch& batch, bool deterministic) {
  check(jobs, batch);
  const auto is_q4_0 = [](const ExpertJob& job) { return job.layout->dtype == DType::kQ4_0; };
  const auto num_q4_0 = static_cast<std::size_t>(std::count_if(jobs.begin(), jobs.end(), is_q4_0));
  if (num_q4_0 != 0 && num_q4_0 == jobs.size()) return detail::run_q4_0_jobs(pool, jobs, batch);
  if (num_q4_0 != 0) {
    std::vector<ExpertJob> sorted(jobs.begin(), jobs.end());
    std::stable_partition(sorted.begin(), sorted.end(), is_q4_0);
    const std::span<const ExpertJob> all = sorted;
    run_expert_jobs(pool, all.first(num_q4_0), batch, deterministic);
    return run_expert_jobs(pool, all.subspan(num_q4_0), batch, deterministic);
  }
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  const Plan full(pool.num_threads(), jobs, batch);
  if (full.items().empty()) return;
  const bool solo = full.multiply_adds() <= detail::kSoloWork;
  if (solo) {
    pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int) {
      const Plan plan(1, jobs, batch);
      Worker self(kernels, batch, plan,
                  static_cast<float*>(pool.scratch(0, Worker::scratch_floats(plan) * sizeof(float))));
      for (const Item& item : plan.items()) self.run(item, nullptr);
    });
    return;
  }
  struct Row {
    const Item* split_job;
    std::int32_t route;
  };
  std::vector<Row> rows;
  for (const Item& split_job : full.split()) {
    for (std::int32_t i = 0; i < split_job.num_routes; ++i) rows.push_back({&split_job, i});
  }
  const std::int64_t slices = (full.stride() + kReduceSlice - 1) / kReduceSlice;
  detail::WorkQueue items(static_cast<std::int64_t>(full.items().size()));
  detail::WorkQueue reductions(static_cast<std::int64_t>(rows.size()) * slices);
  pool.run_shared(full.partial_bytes(), [&](int worker, std::byte* shared) {
    auto* partials = reinterpret_cast<float*>(shared);
    Worker self(kernels, batch, full,
                static_cast<float*>(pool.scratch(worker, Worker::scratch_floats(full) * sizeof(float))));
    for (std::int64_t i = items.take(); i >= 0; i = items.take()) self.run(full.items()[i], partials);
    if (rows.empty()) return;
    pool.barrier(worker);
    for (std::int64_t i = reductions.take(); i >= 0; i = reductions.take()) {
      const Row& row = rows[static_cast<std::size_t>(i / slices)];
      self.reduce(*row.split_job, row.route, i % slices, partials);
    }
  });
}

void combine_routes(WorkerPool& pool, const ExpertBatch& batch, const std::uint8_t* selected, bool accumulate,
                    float* out) {
  const std::int64_t hidden = batch.hidden_size;
  const std::int64_t grain =
      std::max<std::int64_t>(1, detail::kSoloWork / std::max<std::int64_t>(1, batch.top_k * hidden));
  pool.parallel_for(batch.num_tokens, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = out + t * hidden;
      if (!accumulate) std::memset(row, 0, sizeof(float) * static_cast<std::size_t>(hidden));
      for (std::int64_t k = 0; k < batch.top_k; ++k) {
        const std::int64_t route = t * batch.top_k + k;
        if (selected != nullptr && selected[route] == 0) continue;
        const float* from = batch.route_out + route * hidden;
        for (std::int64_t h = 0; h < hidden; ++h) row[h] += from[h];
      }
    }
  });
}

}  // namespace ft
