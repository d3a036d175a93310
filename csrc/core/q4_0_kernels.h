// Products of Q4_0 weights (planes as in freetoken/quant/q4_0_record.py) with activations quantised to 8 bits, one
// table per instruction set.
//
// A block of 32 activations becomes codes in -127..127 and one scale, max|x| / 127, as x is read. The product of two
// blocks is the exact integer sum of (q - 8) * code, times both scales; products of blocks are added in float32. The
// integers are the same in every table, and so is every result up to the order of those additions, which depends on
// lengths alone: a result row is a fixed function of its own inputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker_pool.h"

namespace ft::detail {

inline constexpr std::int64_t kQ4Block = 32;  // weights that share a scale
inline constexpr std::int64_t kQ4BlockBytes = 16;
// Activation rows that share one pass over a weight row.
inline constexpr std::int64_t kQ4TileRows = 4;

// Sixteen blocks of an activation row. The codes stand as nibbles do: element i of a block meets low nibbles, element
// i + 16 high ones, and each holds four blocks side by side, as wide as the widest vector. offsets[i] is -8 times the
// sum of the eight codes in dword i of low and high, which turns the sum over q into the one over q - 8.
struct alignas(64) Q8Chunk {
  static constexpr std::int64_t kBlocks = 16;
  struct Codes {
    std::int8_t low[64];
    std::int8_t high[64];
  };
  Codes codes[4];
  std::int32_t offsets[64];
  float scales[16];
};

// One block on its own: the activation that a row of 32 down columns meets.
struct alignas(64) Q8Block {
  std::int8_t low[16];
  std::int8_t high[16];
  std::int32_t offsets[4];
  float scale;
};

// Rows of n weights that follow one another: n / 2 bytes of nibbles and n / 32 scales each. `next`: what is read after
// them, to be prefetched towards their end, or null.
struct Q4Rows {
  const std::uint8_t* nibbles = nullptr;
  const std::uint16_t* scales = nullptr;
  std::int64_t count = 0;
  const std::uint8_t* next_nibbles = nullptr;
  const std::uint16_t* next_scales = nullptr;
};

static constexpr std::int64_t q8_chunks(std::int64_t n) {
  return (n + kQ4Block * Q8Chunk::kBlocks - 1) / (kQ4Block * Q8Chunk::kBlocks);
}

struct Q4Kernels {
  // n / 32 blocks of a row; what is left of the last chunk counts as zeros. Blocks whose values are all below 1e-30 are
  // zero; a NaN or an infinity makes its block's scale the same, so that it is not lost.
  void (*quantize_row)(const float* x, std::int64_t n, Q8Chunk* out);
  void (*quantize_block)(const float* x, Q8Block* out);

  // out[r * out_stride + c] = dot(weight row c, activations[r]) (+ bias[c]). Weight rows follow one another.
  void (*dot_rows)(const Q4Rows& weights, std::int64_t n, const Q8Chunk* const* activations, std::int64_t num_rows,
                   const float* bias, float* out, std::int64_t out_stride);

  // sums[r * sum_stride + i] += activations[r] times one block of output i, for num_outputs (a multiple of 32) outputs.
  // Output i's block lies at nibbles + i * row_blocks * 16, its scale at scales + i * row_blocks. The order of outputs
  // inside sums is the table's own. Memory `ahead_bytes` further on is prefetched when that is not zero.
  void (*add_down)(const std::uint8_t* nibbles, const std::uint16_t* scales, std::int64_t row_blocks,
                   std::int64_t num_outputs, const Q8Block* const* activations, std::int64_t num_rows, float* sums,
                   std::int64_t sum_stride, std::int64_t ahead_bytes);
  // out[i] = factor * sum of output i, in natural order.
  void (*finish_down)(const float* sums, std::int64_t num_outputs, float factor, float* out);
};

const Q4Kernels& q4_kernels(Isa isa);

const Q4Kernels& q4_kernels_scalar();
const Q4Kernels& q4_kernels_avx2();
const Q4Kernels& q4_kernels_avx512vnni();

}  // namespace ft::detail
