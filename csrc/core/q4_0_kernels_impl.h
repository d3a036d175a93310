// Generic bodies of the Q4_0 kernels over Vec of a simd_*.h and the integer vectors of the including file, which gives:
//   kVecBlocks, Codes (kVecBlocks * 16 bytes), Ints (kLanes dwords; four in a row belong to a block)
//   load_codes, load_ints, broadcast_codes, broadcast_ints (16 bytes to every block), low_nibbles, high_nibbles
//   dot_ints(offsets, q low, code low, q high, code high), to_float, add_in_fours (see below)
//   load_halves, spread (lane i of the result: lane kVecBlocks * step + i / 4), order_outputs, restore_outputs
//   quantize_codes
// Anonymous throughout, for the reason given in row_kernels_impl.h.
#pragma once

#include "q4_0_kernels.h"

namespace {

using ft::detail::Q8Block;
using ft::detail::Q8Chunk;

constexpr std::int64_t kBlockBytes = ft::detail::kQ4BlockBytes;
// Vectors of weights that one vector of scales covers.
constexpr int kSteps = kLanes / kVecBlocks;
static_assert(kSteps == 4 && Q8Chunk::kBlocks % kLanes == 0);

// -------------------------------------------------------------------------------------------- activations

inline void clear_chunk(Q8Chunk* chunk) { __builtin_memset(static_cast<void*>(chunk), 0, sizeof(Q8Chunk)); }

void quantize_row(const float* x, std::int64_t n, Q8Chunk* out) {
  const std::int64_t blocks = n / ft::detail::kQ4Block;
  if (blocks % Q8Chunk::kBlocks != 0) clear_chunk(out + blocks / Q8Chunk::kBlocks);
  for (std::int64_t block = 0; block < blocks; ++block) {
    Q8Chunk& chunk = out[block / Q8Chunk::kBlocks];
    const std::int64_t within = block % Q8Chunk::kBlocks;
    Q8Chunk::Codes& codes = chunk.codes[within / 4];
    chunk.scales[within] = quantize_codes(x + block * ft::detail::kQ4Block, codes.low + within % 4 * 16,
                                          codes.high + within % 4 * 16, chunk.offsets + within * 4);
  }
}

void quantize_block(const float* x, Q8Block* out) { out->scale = quantize_codes(x, out->low, out->high, out->offsets); }

// Memory this far on comes into the second-level cache while a row is worked on. Hardware prefetchers stop at every 4
// KiB page; measured on Zen 4, this makes one core read a third faster while it computes.
constexpr std::int64_t kPrefetchBytes = 8192;

inline void prefetch(const void* p, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(p) + line, 0, 2);
  }
}

// -------------------------------------------------------------------------------------------- rows along the blocks

// What to prefetch while row `row` is worked on: as far on in `weights`, or, past their end, in what comes next.
// Nibbles of the row itself, which are on their way already, when nothing does.
struct Ahead {
  const std::uint8_t* nibbles;
  const std::uint16_t* scales;
};

inline Ahead find_ahead(const ft::detail::Q4Rows& weights, std::int64_t blocks, std::int64_t row) {
  const std::int64_t total = weights.count * blocks;
  const std::int64_t block = row * blocks + kPrefetchBytes / kBlockBytes;
  if (block < total) return {weights.nibbles + block * kBlockBytes, weights.scales + block};
  if (weights.next_nibbles == nullptr) {
    return {weights.nibbles + row * blocks * kBlockBytes, weights.scales + row * blocks};
  }
  return {weights.next_nibbles + (block - total) * kBlockBytes, weights.next_scales + (block - total)};
}

// kLanes blocks of C weight rows (`stride` blocks apart) and R activation rows.
template <int R, int C>
inline void dot_chunk(const std::uint8_t* nibbles, const std::uint16_t* scales, std::int64_t stride,
                      const Q8Chunk* const* activations, std::int64_t chunk, int part, Vec (&sum)[C][R]) {
  Vec factor[C][R];
  for (int c = 0; c < C; ++c) {
    const Vec d = load_halves(scales + c * stride);
    for (int r = 0; r < R; ++r) {
      factor[c][r] = vec_mul(d, vec_load(activations[r][chunk].scales + part * kLanes));
    }
  }
#pragma GCC unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const int vector = part * kSteps + step;
    const int group = vector * kVecBlocks / 4;
    const int within = vector * kVecBlocks % 4 * 16;
    Codes low[C];
    Codes high[C];
    for (int c = 0; c < C; ++c) {
      const Codes q = load_codes(nibbles + (c * stride + step * kVecBlocks) * kBlockBytes);
      low[c] = low_nibbles(q);
      high[c] = high_nibbles(q);
    }
    for (int r = 0; r < R; ++r) {
      const Q8Chunk& a = activations[r][chunk];
      const Codes a_low = load_codes(a.codes[group].low + within);
      const Codes a_high = load_codes(a.codes[group].high + within);
      const Ints offsets = load_ints(a.offsets + vector * kLanes);
      for (int c = 0; c < C; ++c) {
        const Vec dot = to_float(dot_ints(offsets, low[c], a_low, high[c], a_high));
        sum[c][r] = vec_fma(dot, spread(step, factor[c][r]), sum[c][r]);
      }
    }
  }
}

template <int R, int C>
inline void dot_tile(const ft::detail::Q4Rows& weights, std::int64_t first, std::int64_t blocks,
                     const Q8Chunk* const* activations, const float* bias, float* out, std::int64_t out_stride) {
  const std::uint8_t* nibbles = weights.nibbles + first * blocks * kBlockBytes;
  const std::uint16_t* scales = weights.scales + first * blocks;
  Ahead ahead[C];
  Vec sum[C][R];
  for (int c = 0; c < C; ++c) {
    ahead[c] = find_ahead(weights, blocks, first + c);
    for (int r = 0; r < R; ++r) sum[c][r] = vec_zero();
  }
  constexpr std::int64_t kParts = Q8Chunk::kBlocks / kLanes;
  const std::int64_t whole = blocks / kLanes * kLanes;
  for (std::int64_t b = 0; b < whole; b += kLanes) {
    for (int c = 0; c < C; ++c) {
      prefetch(ahead[c].nibbles + b * kBlockBytes, kLanes * kBlockBytes);
      prefetch(ahead[c].scales + b, 1);
    }
    const std::int64_t at = b / kLanes;
    dot_chunk<R, C>(nibbles + b * kBlockBytes, scales + b, blocks, activations, at / kParts,
                    static_cast<int>(at % kParts), sum);
  }
  if (whole != blocks) {
    // The rest of each row with zeros behind it: nothing beyond the weights is read, and no scale is a stray NaN.
    std::uint8_t nibbles_left[C][kLanes * kBlockBytes] = {};
    std::uint16_t scales_left[C][kLanes] = {};
    const auto left = static_cast<std::size_t>(blocks - whole);
    for (int c = 0; c < C; ++c) {
      __builtin_memcpy(nibbles_left[c], nibbles + (c * blocks + whole) * kBlockBytes, left * kBlockBytes);
      __builtin_memcpy(scales_left[c], scales + c * blocks + whole, left * sizeof(std::uint16_t));
    }
    const std::int64_t at = whole / kLanes;
    dot_chunk<R, C>(nibbles_left[0], scales_left[0], kLanes, activations, at / kParts, static_cast<int>(at % kParts),
                    sum);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const float value = vec_reduce_add(sum[c][r]);
      out[r * out_stride + first + c] = bias == nullptr ? value : value + bias[first + c];
    }
  }
}

template <int R>
inline void dot_columns(const ft::detail::Q4Rows& weights, std::int64_t blocks, const Q8Chunk* const* activations,
                        const float* bias, float* out, std::int64_t out_stride) {
  constexpr int C = kTileColumnsOf(R);
  std::int64_t c = 0;
  for (; c + C <= weights.count; c += C) dot_tile<R, C>(weights, c, blocks, activations, bias, out, out_stride);
  for (; c < weights.count; ++c) dot_tile<R, 1>(weights, c, blocks, activations, bias, out, out_stride);
}

void dot_rows(const ft::detail::Q4Rows& weights, std::int64_t n, const Q8Chunk* const* activations,
              std::int64_t num_rows, const float* bias, float* out, std::int64_t out_stride) {
  static_assert(ft::detail::kQ4TileRows == 4);
  const std::int64_t blocks = n / ft::detail::kQ4Block;
  for (std::int64_t r = 0; r < num_rows; r += 4) {
    const Q8Chunk* const* a = activations + r;
    float* o = out + r * out_stride;
    switch (num_rows - r) {
      case 1:
        dot_columns<1>(weights, blocks, a, bias, o, out_stride);
        break;
      case 2:
        dot_columns<2>(weights, blocks, a, bias, o, out_stride);
        break;
      case 3:
        dot_columns<3>(weights, blocks, a, bias, o, out_stride);
        break;
      default:
        dot_columns<4>(weights, blocks, a, bias, o, out_stride);
    }
  }
}

// -------------------------------------------------------------------------------------------- one block per output

// The scales of kLanes outputs in natural order.
inline Vec load_output_scales(const std::uint16_t* scales, std::int64_t row_blocks) {
  if (row_blocks == 1) return load_halves(scales);
  std::uint16_t gathered[kLanes];
  for (int i = 0; i < kLanes; ++i) gathered[i] = scales[i * row_blocks];
  return load_halves(gathered);
}

// Vector v of the kLanes outputs' nibbles: outputs v * kVecBlocks onward, a block each.
inline Codes load_output_codes(const std::uint8_t* nibbles, std::int64_t row_blocks, int v) {
  const std::uint8_t* first = nibbles + v * kVecBlocks * row_blocks * kBlockBytes;
  if (row_blocks == 1) return load_codes(first);
  alignas(64) std::uint8_t gathered[kVecBlocks * kBlockBytes];
  for (int i = 0; i < kVecBlocks; ++i) {
    __builtin_memcpy(gathered + i * kBlockBytes, first + i * row_blocks * kBlockBytes, kBlockBytes);
  }
  return load_codes(gathered);
}

// add_in_fours(dots)[v + 4 l] is the sum of the four dwords of block l of dots[v], which is the dot product of output
// v * kVecBlocks + l. Sums stay in that order until the end, so only the scales are brought into it.
template <int R>
inline void add_down_rows(const std::uint8_t* nibbles, const std::uint16_t* scales, std::int64_t row_blocks,
                          std::int64_t num_outputs, const Q8Block* const* activations, float* sums,
                          std::int64_t sum_stride, std::int64_t ahead_bytes) {
  Codes a_low[R];
  Codes a_high[R];
  Ints offsets[R];
  Vec a_scale[R];
  for (int r = 0; r < R; ++r) {
    a_low[r] = broadcast_codes(activations[r]->low);
    a_high[r] = broadcast_codes(activations[r]->high);
    offsets[r] = broadcast_ints(activations[r]->offsets);
    a_scale[r] = vec_set1(activations[r]->scale);
  }
  for (std::int64_t i = 0; i < num_outputs; i += kLanes) {
    const std::uint8_t* q = nibbles + i * row_blocks * kBlockBytes;
    const std::uint16_t* d = scales + i * row_blocks;
    if (ahead_bytes != 0) {
      prefetch(q + ahead_bytes, kLanes * row_blocks * kBlockBytes);
      prefetch(reinterpret_cast<const std::uint8_t*>(d) + ahead_bytes, 1);
    }
    Codes low[4];
    Codes high[4];
    for (int v = 0; v < 4; ++v) {
      const Codes codes = load_output_codes(q, row_blocks, v);
      low[v] = low_nibbles(codes);
      high[v] = high_nibbles(codes);
    }
    const Vec scale = order_outputs(load_output_scales(d, row_blocks));
    for (int r = 0; r < R; ++r) {
      Ints dots[4];
      for (int v = 0; v < 4; ++v) dots[v] = dot_ints(offsets[r], low[v], a_low[r], high[v], a_high[r]);
      float* sum = sums + r * sum_stride + i;
      vec_store(sum, vec_fma(to_float(add_in_fours(dots)), vec_mul(scale, a_scale[r]), vec_load(sum)));
    }
  }
}

void add_down(const std::uint8_t* nibbles, const std::uint16_t* scales, std::int64_t row_blocks,
              std::int64_t num_outputs, const Q8Block* const* activations, std::int64_t num_rows, float* sums,
              std::int64_t sum_stride, std::int64_t ahead_bytes) {
  for (std::int64_t r = 0; r < num_rows; r += 4) {
    const Q8Block* const* a = activations + r;
    float* s = sums + r * sum_stride;
    const std::int64_t ahead = r == 0 ? ahead_bytes : 0;
    switch (num_rows - r) {
      case 1:
        add_down_rows<1>(nibbles, scales, row_blocks, num_outputs, a, s, sum_stride, ahead);
        break;
      case 2:
        add_down_rows<2>(nibbles, scales, row_blocks, num_outputs, a, s, sum_stride, ahead);
        break;
      case 3:
        add_down_rows<3>(nibbles, scales, row_blocks, num_outputs, a, s, sum_stride, ahead);
        break;
      default:
        add_down_rows<4>(nibbles, scales, row_blocks, num_outputs, a, s, sum_stride, ahead);
    }
  }
}

void finish_down(const float* sums, std::int64_t num_outputs, float factor, float* out) {
  const Vec k = vec_set1(factor);
  for (std::int64_t i = 0; i < num_outputs; i += kLanes) {
    vec_store(out + i, vec_mul(k, restore_outputs(vec_load(sums + i))));
  }
}

}  // namespace
