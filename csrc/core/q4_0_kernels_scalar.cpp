// Q4_0 products in plain C++: for processors without AVX2, and the reference for the vectors.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "q4_0_kernels.h"

namespace ft::detail {
namespace {

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 31u;
  const std::uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The codes of 32 values; returns their scale.
float quantize(const float* x, std::int8_t* low, std::int8_t* high) {
  std::uint32_t largest = 0;  // as bits, magnitudes ascend up to infinity and then NaN
  for (std::int64_t i = 0; i < kQ4Block; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float peak;
  std::memcpy(&peak, &largest, sizeof peak);
  const bool usable = peak >= 1e-30f && std::isfinite(peak);
  const float inverse = usable ? 127.0f / peak : 0.0f;
  for (std::int64_t i = 0; i < kQ4Block; ++i) {
    const float scaled = usable ? x[i] * inverse : 0.0f;
    // Rounds to the nearest integer, ties to even.
    (i < 16 ? low[i] : high[i - 16]) = static_cast<std::int8_t>((scaled + 12582912.0f) - 12582912.0f);
  }
  return peak < 1e-30f ? 0.0f : peak / 127.0f;
}

std::int32_t offset(const std::int8_t* low, const std::int8_t* high) {
  std::int32_t sum = 0;
  for (int i = 0; i < 4; ++i) sum += low[i] + high[i];
  return -8 * sum;
}

void quantize_row(const float* x, std::int64_t n, Q8Chunk* out) {
  std::memset(static_cast<void*>(out), 0, static_cast<std::size_t>(q8_chunks(n)) * sizeof(Q8Chunk));
  for (std::int64_t block = 0; block < n / kQ4Block; ++block) {
    Q8Chunk& chunk = out[block / Q8Chunk::kBlocks];
    const std::int64_t within = block % Q8Chunk::kBlocks;
    Q8Chunk::Codes& codes = chunk.codes[within / 4];
    std::int8_t* low = codes.low + within % 4 * 16;
    std::int8_t* high = codes.high + within % 4 * 16;
    chunk.scales[within] = quantize(x + block * kQ4Block, low, high);
    for (int i = 0; i < 4; ++i) chunk.offsets[within * 4 + i] = offset(low + 4 * i, high + 4 * i);
  }
}

void quantize_block(const float* x, Q8Block* out) {
  out->scale = quantize(x, out->low, out->high);
  for (int i = 0; i < 4; ++i) out->offsets[i] = offset(out->low + 4 * i, out->high + 4 * i);
}

std::int32_t dot_block(const std::uint8_t* nibbles, const std::int8_t* low, const std::int8_t* high) {
  std::int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += ((nibbles[i] & 15) - 8) * low[i] + ((nibbles[i] >> 4) - 8) * high[i];
  return sum;
}

void dot_rows(const Q4Rows& weights, std::int64_t n, const Q8Chunk* const* activations, std::int64_t num_rows,
              const float* bias, float* out, std::int64_t out_stride) {
  const std::int64_t blocks = n / kQ4Block;
  for (std::int64_t c = 0; c < weights.count; ++c) {
    const std::uint8_t* q = weights.nibbles + c * blocks * kQ4BlockBytes;
    const std::uint16_t* d = weights.scales + c * blocks;
    for (std::int64_t r = 0; r < num_rows; ++r) {
      float sum = 0.0f;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const Q8Chunk& chunk = activations[r][b / Q8Chunk::kBlocks];
        const std::int64_t within = b % Q8Chunk::kBlocks;
        const Q8Chunk::Codes& codes = chunk.codes[within / 4];
        const std::int32_t dot =
            dot_block(q + b * kQ4BlockBytes, codes.low + within % 4 * 16, codes.high + within % 4 * 16);
        sum += static_cast<float>(dot) * (half_to_float(d[b]) * chunk.scales[within]);
      }
      out[r * out_stride + c] = bias == nullptr ? sum : sum + bias[c];
    }
  }
}

void add_down(const std::uint8_t* nibbles, const std::uint16_t* scales, std::int64_t row_blocks,
              std::int64_t num_outputs, const Q8Block* const* activations, std::int64_t num_rows, float* sums,
              std::int64_t sum_stride, std::int64_t /*ahead_bytes*/) {
  for (std::int64_t i = 0; i < num_outputs; ++i) {
    const float d = half_to_float(scales[i * row_blocks]);
    for (std::int64_t r = 0; r < num_rows; ++r) {
      const Q8Block& block = *activations[r];
      const std::int32_t dot = dot_block(nibbles + i * row_blocks * kQ4BlockBytes, block.low, block.high);
      sums[r * sum_stride + i] += static_cast<float>(dot) * (d * block.scale);
    }
  }
}

void finish_down(const float* sums, std::int64_t num_outputs, float factor, float* out) {
  for (std::int64_t i = 0; i < num_outputs; ++i) out[i] = factor * sums[i];
}

}  // namespace

const Q4Kernels& q4_kernels_scalar() {
  static constexpr Q4Kernels table = {quantize_row, quantize_block, dot_rows, add_down, finish_down};
  return table;
}

}  // namespace ft::detail
