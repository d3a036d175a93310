// Gated expert FFNs over records: the same code for GpuExecutor's CPU device and for CpuExecutor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "record_layout.h"
#include "worker_pool.h"

namespace ft {

// One expert, all of it or some tiles, and the routes that chose it. A route index is t * top_k + k; its hidden row is
// t. A part's rows are its contribution: those of parts that make up the record add up to the whole's.
struct ExpertJob {
  const std::byte* record = nullptr;
  const RecordLayout* layout = nullptr;
  const std::int32_t* routes = nullptr;
  std::int32_t num_routes = 0;
  std::int32_t first_tile = 0;
  std::int32_t num_tiles = 0;  // 0: all

  std::int32_t tiles() const { return num_tiles > 0 ? num_tiles : layout->num_tiles; }
  // Of the first tile that is run.
  const std::byte* first_byte() const { return record + first_tile * layout->tile_stride_bytes; }
};

struct ExpertBatch {
  const float* hidden = nullptr;   // [T, H] row-major
  const float* weights = nullptr;  // [T * top_k], indexed by route
  float* route_out = nullptr;      // [T * top_k, H]; row r = weights[r] * FFN(hidden[r / top_k])
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t hidden_size = 0;
};

// Writes every route row named by the jobs and nothing else. Each weight byte is read once per call as far as caches
// allow. With deterministic, the bits of a route row depend on the record, the hidden row and the weight only: not on
// the other jobs, the number of routes, the number of threads or which pool ran it.
void run_expert_jobs(WorkerPool& pool, std::span<const ExpertJob> jobs, const ExpertBatch& batch, bool deterministic);

// out[t] = (accumulate ? out[t] : 0) + sum of route_out[t * top_k + k] over k in ascending order where
// selected[t * top_k + k] != 0. `selected` null means all.
void combine_routes(WorkerPool& pool, const ExpertBatch& batch, const std::uint8_t* selected, bool accumulate,
                    float* out);

}  // namespace ft
