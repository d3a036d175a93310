#include "dense_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "row_kernels.h"
#include "work_queue.h"

namespace ft {
namespace {

using detail::RowKernels;

// Activation rows that one worker packs and passes over a group of weight rows; together they should stay in the
// second-level cache.
constexpr std::int64_t kMaxBlockRows = 32;
constexpr std::int64_t kBlockBytes = 256 << 10;
constexpr std::int64_t kMaxGroupOutputs = 64;

// Rows that make up enough work for one chunk of a light kernel.
std::int64_t rows_per_chunk(std::int64_t work_per_row) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, work_per_row));
}

std::uint16_t round_to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  // Rounding would carry a NaN with a small payload into infinity.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void store_elements(const float* from, std::int64_t n, DType dtype, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  auto* half = reinterpret_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < n; ++i) half[i] = round_to_bf16(from[i]);
}

}  // namespace

void linear(WorkerPool& pool, const float* x, std::int64_t rows, std::int64_t inputs, const void* weight, DType dtype,
            std::int64_t outputs, const float* bias, float* out) {
  if (rows == 0 || outputs == 0) return;
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  const std::int64_t stride = detail::packed_length(inputs);
  const std::int64_t fitting =
      kBlockBytes / (std::max<std::int64_t>(stride, 1) * static_cast<std::int64_t>(sizeof(float))) / 4 * 4;
  const std::int64_t block_rows = std::min(rows, std::clamp<std::int64_t>(fitting, 8, kMaxBlockRows));
  const std::int64_t num_blocks = (rows + block_rows - 1) / block_rows;
  // Small enough that every worker gets several groups, large enough that a group is worth handing out.
  const std::int64_t even = outputs / (4 * pool.num_threads()) / 8 * 8;
  const std::int64_t group = std::min(outputs, std::clamp<std::int64_t>(even, 8, kMaxGroupOutputs));
  const std::int64_t num_groups = (outputs + group - 1) / group;
  const std::int64_t row_bytes = inputs * static_cast<std::int64_t>(dtype_bytes(dtype));

  // Row blocks run fastest, so that concurrent workers share a group of weights.
  const auto work = [&](int worker, auto next_item) {
    auto* packed =
        static_cast<float*>(pool.scratch(worker, static_cast<std::size_t>(block_rows * stride) * sizeof(float)));
    std::int64_t packed_block = -1;
    for (std::int64_t item = next_item(); item >= 0; item = next_item()) {
      const std::int64_t first_row = item % num_blocks * block_rows;
      const std::int64_t count = std::min(block_rows, rows - first_row);
      const std::int64_t first_output = item / num_blocks * group;
      if (packed_block != first_row) {
        packed_block = first_row;
        for (std::int64_t r = 0; r < count; ++r) {
          kernels.pack(dtype, x + (first_row + r) * inputs, inputs, packed + r * stride);
        }
      }
      kernels.dot_rows(dtype, static_cast<const std::byte*>(weight) + first_output * row_bytes,
                       std::min(group, outputs - first_output), inputs, packed, stride, count,
                       bias == nullptr ? nullptr : bias + first_output, out + first_row * outputs + first_output,
                       outputs, nullptr);
    }
  };
  const std::int64_t num_items = num_blocks * num_groups;
  detail::WorkQueue queue(num_items);
  const auto next_item = [&] { return queue.take(); };
  if (num_items == 1 || rows * inputs * outputs <= detail::kSoloWork) {
    pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int worker) { work(worker, next_item); });
  } else {
    pool.run([&](int worker) { work(worker, next_item); });
  }
}

void rms_norm(WorkerPool& pool, const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t width,
              float* out) {
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  pool.parallel_for(rows, rows_per_chunk(width), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) kernels.rms_norm(x + r * width, weight, eps, width, out + r * width);
  });
}

void add_rms_norm(WorkerPool& pool, float* residual, const float* delta, const float* weight, float eps,
                  std::int64_t rows, std::int64_t width, float* out) {
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  pool.parallel_for(rows, rows_per_chunk(width), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      kernels.add(delta + r * width, width, false, residual + r * width);
      kernels.rms_norm(residual + r * width, weight, eps, width, out + r * width);
    }
  });
}

void rotary(WorkerPool& pool, float* x, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
            std::int64_t rotated, const std::int32_t* positions, const float* cos, const float* sin) {
  const std::int64_t half = rotated / 2;
  pool.parallel_for(rows, rows_per_chunk(heads * head_dim), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float* c = cos + positions[r] * half;
      const float* s = sin + positions[r] * half;
      for (std::int64_t head = 0; head < heads; ++head) {
        float* low = x + (r * heads + head) * head_dim;
        float* high = low + half;
        for (std::int64_t i = 0; i < half; ++i) {
          const float a = low[i];
          const float b = high[i];
          low[i] = a * c[i] - b * s[i];
          high[i] = b * c[i] + a * s[i];
        }
      }
    }
  });
}

void silu_and_mul(WorkerPool& pool, const float* gate, const float* up, std::int64_t rows, std::int64_t width,
                  float* out) {
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  pool.parallel_for(rows, rows_per_chunk(4 * width), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      kernels.silu_and_mul(gate + r * width, up + r * width, width, out + r * width);
    }
  });
}

void router_topk(WorkerPool& pool, const float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k,
                 bool renormalize, float scaling, std::int32_t* ids, float* weights) {
  const RowKernels& kernels = detail::row_kernels(pool.isa());
  pool.parallel_for(rows, rows_per_chunk(experts * 16), [&](std::int64_t begin, std::int64_t end, int worker) {
    auto* probabilities = static_cast<float*>(pool.scratch(worker, static_cast<std::size_t>(experts) * sizeof(float)));
    for (std::int64_t r = begin; r < end; ++r) {
      const float* row = logits + r * experts;
      std::int32_t* best = ids + r * top_k;
      // Insertion into a short sorted list; an equal logit stays behind the earlier id.
      std::int64_t found = 0;
      const auto rank = [](float v) { return std::isnan(v) ? -INFINITY : v; };
      for (std::int64_t e = 0; e < experts; ++e) {
        const float value = rank(row[e]);
        if (found == top_k && !(value > rank(row[best[found - 1]]))) continue;
        std::int64_t at = found < top_k ? found++ : top_k - 1;
        for (; at > 0 && value > rank(row[best[at - 1]]); --at) best[at] = best[at - 1];
        best[at] = static_cast<std::int32_t>(e);
      }
      kernels.softmax(row, experts, probabilities);
      float* out = weights + r * top_k;
      float total = 0.0f;
      for (std::int64_t k = 0; k < top_k; ++k) total += out[k] = probabilities[best[k]];
      for (std::int64_t k = 0; k < top_k; ++k) out[k] = (renormalize ? out[k] / total : out[k]) * scaling;
    }
  });
}

void kv_store(WorkerPool& pool, const float* keys, const float* values, const std::int64_t* slots, std::int64_t rows,
              const KvLayer& kv) {
  const std::int64_t width = kv.num_kv_heads * kv.head_dim;
  pool.parallel_for(rows, rows_per_chunk(2 * width), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (slots[r] < 0) continue;
      const std::int64_t block = slots[r] / kv.block_size;
      const std::int64_t offset = slots[r] % kv.block_size;
      store_elements(keys + r * width, width, kv.dtype, kv.key(block, offset, 0));
      store_elements(values + r * width, width, kv.dtype, kv.value(block, offset, 0));
    }
  });
}

}  // namespace ft
