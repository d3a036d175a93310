#include "expert_kernels.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace ft {
namespace {

float load_weight(const std::byte* base, std::int64_t index, DType dtype) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, base + index * 4, 4);
    return value;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, base + index * 2, 2);
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

void run_route(const ExpertJob& job, const ExpertBatch& batch, std::int32_t route, float* accumulator) {
  const RecordLayout& layout = *job.layout;
  const std::int64_t hidden = batch.hidden_size;
  const float* x = batch.hidden + (route / batch.top_k) * hidden;
  std::memset(accumulator, 0, sizeof(float) * hidden);
  for (std::int32_t tile = 0; tile < layout.num_tiles; ++tile) {
    const std::byte* base = job.record + tile * layout.tile_stride_bytes;
    for (std::int32_t column = 0; column < layout.tile_columns; ++column) {
      float gate = 0;
      float up = 0;
      for (std::int64_t h = 0; h < hidden; ++h) {
        gate += load_weight(base + layout.gate_offset, column * hidden + h, layout.dtype) * x[h];
        up += load_weight(base + layout.up_offset, column * hidden + h, layout.dtype) * x[h];
      }
      const float activation = gate / (1.0f + std::exp(-gate)) * up;
      for (std::int64_t h = 0; h < hidden; ++h) {
        accumulator[h] += activation * load_weight(base + layout.down_offset, column * hidden + h, layout.dtype);
      }
    }
  }
  float* out = batch.route_out + static_cast<std::int64_t>(route) * hidden;
  for (std::int64_t h = 0; h < hidden; ++h) out[h] = batch.weights[route] * accumulator[h];
}

}  // namespace

void run_expert_jobs(WorkerPool& pool, std::span<const ExpertJob> jobs, const ExpertBatch& batch, bool) {
  struct Item {
    const ExpertJob* job;
    std::int32_t route;
  };
  std::vector<Item> items;
  for (const ExpertJob& job : jobs) {
    if (job.layout->hidden != batch.hidden_size) {
      throw std::invalid_argument("record hidden size " + std::to_string(job.layout->hidden) + " differs from batch " +
                                  std::to_string(batch.hidden_size));
    }
    for (std::int32_t i = 0; i < job.num_routes; ++i) items.push_back({&job, job.routes[i]});
  }
  pool.parallel_for(static_cast<std::int64_t>(items.size()), 1,
                    [&](std::int64_t begin, std::int64_t end, int worker) {
                      auto* accumulator =
                          static_cast<float*>(pool.scratch(worker, sizeof(float) * batch.hidden_size));
                      for (std::int64_t i = begin; i < end; ++i) {
                        run_route(*items[i].job, batch, items[i].route, accumulator);
                      }
                    });
}

void combine_routes(WorkerPool& pool, const ExpertBatch& batch, const std::uint8_t* selected, bool accumulate,
                    float* out) {
  const std::int64_t hidden = batch.hidden_size;
  pool.parallel_for(batch.num_tokens, 16, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = out + t * hidden;
      if (!accumulate) std::memset(row, 0, sizeof(float) * hidden);
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
