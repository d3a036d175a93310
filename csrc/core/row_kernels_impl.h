// Generic bodies of the row kernels over the Vec of whichever simd_*.h was included before. Included by the
// row_kernels_<isa>.cpp files only, hence no include guard against a second set of flags, no std:: templates and
// nothing with external linkage: the linker must not pick a wide copy of a function that common code calls.
#pragma once

#include "row_kernels.h"

namespace {

using ft::DType;

constexpr std::int64_t kBlock = 2 * kLanes;
static_assert(ft::detail::kMaxBlock % kBlock == 0);

// Dispatches on the weight type: f(static_cast<const W*>(weights)).
template <typename F>
inline void with_weights(DType dtype, const void* weights, F f) {
  if (dtype == DType::kF32) {
    f(static_cast<const float*>(weights));
  } else {
    f(static_cast<const std::uint16_t*>(weights));
  }
}

// ------------------------------------------------------------------------------------------------ packing

void pack(DType dtype, const float* x, std::int64_t n, float* packed) {
  const std::int64_t length = ft::detail::packed_length(n);
  if (dtype == DType::kF32) {
    __builtin_memcpy(packed, x, static_cast<std::size_t>(n) * sizeof(float));
    for (std::int64_t i = n; i < length; ++i) packed[i] = 0.0f;
    return;
  }
  const std::int64_t whole = n / kBlock * kBlock;
  for (std::int64_t b = 0; b < whole; b += kBlock) {
    for (int i = 0; i < kLanes; ++i) {
      packed[b + i] = x[b + 2 * i];
      packed[b + kLanes + i] = x[b + 2 * i + 1];
    }
  }
  for (std::int64_t b = whole; b < length; b += kBlock) {
    for (int i = 0; i < kLanes; ++i) {
      packed[b + i] = b + 2 * i < n ? x[b + 2 * i] : 0.0f;
      packed[b + kLanes + i] = b + 2 * i + 1 < n ? x[b + 2 * i + 1] : 0.0f;
    }
  }
}

void unpack_scaled(DType dtype, const float* packed, float scale, std::int64_t n, float* out) {
  if (dtype == DType::kF32) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = scale * packed[i];
    return;
  }
  const std::int64_t whole = n / kBlock * kBlock;
  for (std::int64_t b = 0; b < whole; b += kBlock) {
    for (int i = 0; i < kLanes; ++i) {
      out[b + 2 * i] = scale * packed[b + i];
      out[b + 2 * i + 1] = scale * packed[b + kLanes + i];
    }
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const std::int64_t within = i - whole;
    out[i] = scale * packed[whole + (within % 2) * kLanes + within / 2];
  }
}

// The last n % kBlock elements of `rows` weight rows, zero-padded to whole blocks.
template <typename W, int C>
inline void copy_tail(const W* weights, std::int64_t stride, std::int64_t whole, std::int64_t n, W (&tail)[C][kBlock]) {
  for (int c = 0; c < C; ++c) {
    for (std::int64_t i = 0; i < kBlock; ++i) tail[c][i] = whole + i < n ? weights[c * stride + whole + i] : W{0};
  }
}

// ------------------------------------------------------------------------------------------------ dot products

// Each of the R x C products has one accumulator of kLanes lanes, fed block by block: first the a half, then the b
// half. That order is the same for every R and C.
template <int R, int C, typename W>
inline void dot_block(const W* weights, std::int64_t stride, const float* x, std::int64_t x_stride, Vec (&sum)[R][C]) {
  Vec a[C];
  Vec b[C];
  for (int c = 0; c < C; ++c) load_pair(weights + c * stride, a[c], b[c]);
  for (int r = 0; r < R; ++r) {
    const Vec xa = vec_load(x + r * x_stride);
    for (int c = 0; c < C; ++c) sum[r][c] = vec_fma(a[c], xa, sum[r][c]);
    const Vec xb = vec_load(x + r * x_stride + kLanes);
    for (int c = 0; c < C; ++c) sum[r][c] = vec_fma(b[c], xb, sum[r][c]);
  }
}

template <int R, int C, typename W>
inline void dot_tile(const W* weights, std::int64_t n, const float* x, std::int64_t x_stride, const float* bias,
                     float* out, std::int64_t out_stride) {
  Vec sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = vec_zero();
  }
  const std::int64_t whole = n / kBlock * kBlock;
  for (std::int64_t i = 0; i < whole; i += kBlock) dot_block<R, C>(weights + i, n, x + i, x_stride, sum);
  if (whole != n) {
    W tail[C][kBlock];
    copy_tail<W, C>(weights, n, whole, n, tail);
    dot_block<R, C>(&tail[0][0], kBlock, x + whole, x_stride, sum);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const float value = vec_reduce_add(sum[r][c]);
      out[r * out_stride + c] = bias == nullptr ? value : value + bias[c];
    }
  }
}

template <int R, int C, typename W>
inline void dot_columns(const W* weights, std::int64_t n, std::int64_t& column, std::int64_t num_columns,
                        const float* x, std::int64_t x_stride, const float* bias, float* out, std::int64_t out_stride) {
  for (; column + C <= num_columns; column += C) {
    dot_tile<R, C>(weights + column * n, n, x, x_stride, bias == nullptr ? nullptr : bias + column, out + column,
                   out_stride);
  }
}

// One row at a time is bound by memory: eight weight rows in flight hide the latency of the sums.
template <typename W>
void dot_single_row(const W* weights, std::int64_t num_columns, std::int64_t n, const float* x, const float* bias,
                    float* out) {
  std::int64_t column = 0;
  dot_columns<1, 8>(weights, n, column, num_columns, x, 0, bias, out, 0);
  dot_columns<1, 1>(weights, n, column, num_columns, x, 0, bias, out, 0);
}

// Several rows: a group of columns stays in the first-level cache while all rows pass over it.
template <int C, typename W>
void dot_row_tiles(const W* weights, std::int64_t n, const float* x, std::int64_t x_stride, std::int64_t num_rows,
                   const float* bias, float* out, std::int64_t out_stride) {
  std::int64_t row = 0;
  for (; row + kTileRows <= num_rows; row += kTileRows) {
    dot_tile<kTileRows, C>(weights, n, x + row * x_stride, x_stride, bias, out + row * out_stride, out_stride);
  }
  x += row * x_stride;
  out += row * out_stride;
  switch (num_rows - row) {
    case 1:
      return dot_tile<1, C>(weights, n, x, x_stride, bias, out, out_stride);
    case 2:
      return dot_tile<2, C>(weights, n, x, x_stride, bias, out, out_stride);
    case 3:
      return dot_tile<3, C>(weights, n, x, x_stride, bias, out, out_stride);
    default:
      return;
  }
}

void dot_rows(DType dtype, const void* weights, std::int64_t num_columns, std::int64_t n, const float* packed,
              std::int64_t packed_stride, std::int64_t num_rows, const float* bias, float* out,
              std::int64_t out_stride) {
  with_weights(dtype, weights, [&](const auto* w) {
    if (num_rows == 1) return dot_single_row(w, num_columns, n, packed, bias, out);
    std::int64_t column = 0;
    for (; column + kTileColumns <= num_columns; column += kTileColumns) {
      dot_row_tiles<kTileColumns>(w + column * n, n, packed, packed_stride, num_rows,
                                  bias == nullptr ? nullptr : bias + column, out + column, out_stride);
    }
    for (; column < num_columns; ++column) {
      dot_row_tiles<1>(w + column * n, n, packed, packed_stride, num_rows, bias == nullptr ? nullptr : bias + column,
                       out + column, out_stride);
    }
  });
}

// ------------------------------------------------------------------------------------------------ weighted sums

// R sums x B blocks in registers over all columns; every element is accumulated in ascending column order.
template <int R, int B, typename W>
inline void weighted_tile(const W* weights, std::int64_t stride, std::int64_t num_columns, const float* coefficients,
                          std::int64_t coefficient_stride, float* sum, std::int64_t sum_stride, bool first) {
  Vec part[R][2 * B];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2 * B; ++v) part[r][v] = vec_zero();
  }
  for (std::int64_t c = 0; c < num_columns; ++c) {
    Vec w[2 * B];
    for (int b = 0; b < B; ++b) load_pair(weights + c * stride + b * kBlock, w[2 * b], w[2 * b + 1]);
    for (int r = 0; r < R; ++r) {
      const Vec k = vec_set1(coefficients[r * coefficient_stride + c]);
      for (int v = 0; v < 2 * B; ++v) part[r][v] = vec_fma(k, w[v], part[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2 * B; ++v) {
      float* p = sum + r * sum_stride + v * kLanes;
      vec_store(p, first ? part[r][v] : vec_add(vec_load(p), part[r][v]));
    }
  }
}

template <int R, typename W>
inline void weighted_tail(const W* weights, std::int64_t whole, std::int64_t num_columns, std::int64_t n,
                          const float* coefficients, std::int64_t coefficient_stride, float* sum,
                          std::int64_t sum_stride, bool first) {
  constexpr int kChunk = 32;
  // The padded copies keep the tile's code; a chunk boundary would change the order, so all columns go through one tile
  // as long as they fit, and callers never pass more.
  W tail[kChunk][kBlock];
  for (std::int64_t c = 0; c < num_columns; ++c) {
    for (std::int64_t i = 0; i < kBlock; ++i) tail[c][i] = whole + i < n ? weights[c * n + whole + i] : W{0};
  }
  weighted_tile<R, 1>(&tail[0][0], kBlock, num_columns, coefficients, coefficient_stride, sum, sum_stride, first);
}

// One sum is bound by memory: eight columns at a time are read front to back.
template <int R, int B, typename W>
void weighted_row_tile(const W* weights, std::int64_t num_columns, std::int64_t n, const float* coefficients,
                       std::int64_t coefficient_stride, float* sum, std::int64_t sum_stride, bool first) {
  const std::int64_t whole = n / kBlock * kBlock;
  std::int64_t i = 0;
  for (; i + B * kBlock <= whole; i += B * kBlock) {
    weighted_tile<R, B>(weights + i, n, num_columns, coefficients, coefficient_stride, sum + i, sum_stride, first);
  }
  for (; i < whole; i += kBlock) {
    weighted_tile<R, 1>(weights + i, n, num_columns, coefficients, coefficient_stride, sum + i, sum_stride, first);
  }
  if (whole != n) {
    weighted_tail<R>(weights, whole, num_columns, n, coefficients, coefficient_stride, sum + whole, sum_stride, first);
  }
}

void weighted_rows(DType dtype, const void* weights, std::int64_t num_columns, std::int64_t n,
                   const float* coefficients, std::int64_t coefficient_stride, std::int64_t num_rows, float* sum,
                   std::int64_t sum_stride, bool first) {
  constexpr int kBlocks = kTileColumns / 2;  // the same register budget as a dot tile
  with_weights(dtype, weights, [&](const auto* w) {
    std::int64_t row = 0;
    for (; row + kTileRows <= num_rows; row += kTileRows) {
      weighted_row_tile<kTileRows, kBlocks>(w, num_columns, n, coefficients + row * coefficient_stride,
                                            coefficient_stride, sum + row * sum_stride, sum_stride, first);
    }
    const float* k = coefficients + row * coefficient_stride;
    float* s = sum + row * sum_stride;
    switch (num_rows - row) {
      case 1:
        return weighted_row_tile<1, 4>(w, num_columns, n, k, coefficient_stride, s, sum_stride, first);
      case 2:
        return weighted_row_tile<2, kBlocks>(w, num_columns, n, k, coefficient_stride, s, sum_stride, first);
      case 3:
        return weighted_row_tile<3, kBlocks>(w, num_columns, n, k, coefficient_stride, s, sum_stride, first);
      default:
        return;
    }
  });
}

void add(const float* x, std::int64_t n, bool first, float* sum) {
  if (first) {
    __builtin_memcpy(sum, x, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) sum[i] = sum[i] + x[i];
}

// ------------------------------------------------------------------------------------------------ elementwise

// Relative error below 2e-7 for x in [-87.3, 88.3]; 0 below, the value at 88.3 above; NaN stays NaN.
inline Vec vec_exp(Vec x) {
  constexpr float kLowest = -87.33f;
  const Vec bounded = vec_min(vec_set1(88.37f), vec_max(vec_set1(kLowest), x));
  const Vec n = vec_round(vec_mul(bounded, vec_set1(1.44269504f)));
  // ln 2 in two parts: the first has few enough bits for an exact product.
  Vec r = vec_fma(n, vec_set1(-0.693359375f), bounded);
  r = vec_fma(n, vec_set1(2.12194440e-4f), r);
  // Minimax polynomial of exp(r) = 1 + r + r^2 q(r) on [-ln2/2, ln2/2].
  Vec q = vec_set1(1.9875691500e-4f);
  q = vec_fma(q, r, vec_set1(1.3981999507e-3f));
  q = vec_fma(q, r, vec_set1(8.3334519073e-3f));
  q = vec_fma(q, r, vec_set1(4.1665795894e-2f));
  q = vec_fma(q, r, vec_set1(1.6666665459e-1f));
  q = vec_fma(q, r, vec_set1(5.0000001201e-1f));
  const Vec p = vec_add(vec_fma(q, vec_mul(r, r), r), vec_set1(1.0f));
  return vec_zero_where_less(vec_scale_pow2(p, n), x, kLowest);
}

inline float exp_scalar(float x) {
  alignas(64) float lanes[kLanes];
  vec_store(lanes, vec_exp(vec_set1(x)));
  return lanes[0];
}

inline Vec silu_times(Vec gate, Vec up) {
  const Vec denominator = vec_add(vec_set1(1.0f), vec_exp(vec_sub(vec_zero(), gate)));
  return vec_mul(vec_div(gate, denominator), up);
}

void silu_and_mul(const float* gate, const float* up, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) vec_store(out + i, silu_times(vec_load(gate + i), vec_load(up + i)));
  if (i < n) {
    const int left = static_cast<int>(n - i);
    vec_store_partial(out + i, silu_times(vec_load_partial(gate + i, left), vec_load_partial(up + i, left)), left);
  }
}

void rms_norm(const float* x, const float* weight, float eps, std::int64_t n, float* out) {
  constexpr int kSums = 4;
  Vec sum[kSums];
  for (Vec& s : sum) s = vec_zero();
  std::int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
    for (int k = 0; k < kSums; ++k) {
      const Vec v = vec_load(x + i + k * kLanes);
      sum[k] = vec_fma(v, v, sum[k]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = vec_load(x + i);
    sum[0] = vec_fma(v, v, sum[0]);
  }
  if (i < n) {
    const Vec v = vec_load_partial(x + i, static_cast<int>(n - i));
    sum[1] = vec_fma(v, v, sum[1]);
  }
  const float mean = vec_reduce_add(vec_add(vec_add(sum[0], sum[1]), vec_add(sum[2], sum[3]))) / static_cast<float>(n);
  const Vec scale = vec_set1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i + kLanes <= n; i += kLanes) {
    vec_store(out + i, vec_mul(vec_mul(vec_load(x + i), scale), vec_load(weight + i)));
  }
  if (i < n) {
    const int left = static_cast<int>(n - i);
    vec_store_partial(out + i,
                      vec_mul(vec_mul(vec_load_partial(x + i, left), scale), vec_load_partial(weight + i, left)), left);
  }
}

void softmax(const float* x, std::int64_t n, float* out) {
  const std::int64_t whole = n / kLanes * kLanes;
  const int left = static_cast<int>(n - whole);
  float maximum = x[0];
  for (std::int64_t i = 1; i < n; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  const Vec m = vec_set1(maximum);
  Vec total = vec_zero();
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    const Vec e = vec_exp(vec_sub(vec_load(x + i), m));
    vec_store(out + i, e);
    total = vec_add(total, e);
  }
  if (left != 0) {
    vec_store_partial(out + whole, vec_exp(vec_sub(vec_load_partial(x + whole, left), m)), left);
    total = vec_add(total, vec_load_partial(out + whole, left));
  }
  const float scale = 1.0f / vec_reduce_add(total);
  for (std::int64_t i = 0; i < n; ++i) out[i] *= scale;
}

float read_sum(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const float*>(data);
  const std::size_t count = bytes / sizeof(float);
  Vec sum[8];
  for (Vec& s : sum) s = vec_zero();
  std::size_t i = 0;
  for (; i + 8 * kLanes <= count; i += 8 * kLanes) {
    for (int k = 0; k < 8; ++k) sum[k] = vec_add(sum[k], vec_load(p + i + k * kLanes));
  }
  for (int k = 1; k < 8; ++k) sum[0] = vec_add(sum[0], sum[k]);
  return vec_reduce_add(sum[0]);
}

}  // namespace
