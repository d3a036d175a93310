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

// While a tile is multiplied, the weights this far ahead come into the second-level cache. Only where arithmetic and
// memory take about as long: one or two rows are faster with the hardware's own prefetching.
constexpr std::int64_t kPrefetchBytes = 32768;

inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// A run of weights that is read front to back, and what will be read after it (null: not known).
struct Stream {
  const char* begin;
  std::int64_t bytes;
  const char* next;

  // Where to prefetch while `size` bytes at p are used: `distance` further on, past the end from the front of next.
  const char* ahead(const void* p, std::int64_t size, std::int64_t distance) const {
    const std::int64_t offset = static_cast<const char*>(p) - begin + distance;
    if (offset + size <= bytes) return begin + offset;
    if (next == nullptr) return nullptr;
    return offset < bytes ? next : next + (offset - bytes);
  }
};

// stream == null: the weights are in the cache already.
template <int R, int C, typename W>
inline void dot_tile(const W* weights, std::int64_t n, const float* x, std::int64_t x_stride, const float* bias,
                     float* out, std::int64_t out_stride, const Stream* stream) {
  Vec sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = vec_zero();
  }
  constexpr std::int64_t kStep = C * kBlock * static_cast<std::int64_t>(sizeof(W));  // bytes of weights in a step
  const char* ahead = stream == nullptr ? nullptr : stream->ahead(weights, C * n * sizeof(W), kPrefetchBytes);
  const std::int64_t whole = n / kBlock * kBlock;
  for (std::int64_t i = 0; i < whole; i += kBlock) {
    if (ahead != nullptr) {
      for (std::int64_t line = 0; line < kStep; line += 64) prefetch_l2(ahead + line);
      ahead += kStep;
    }
    dot_block<R, C>(weights + i, n, x + i, x_stride, sum);
  }
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

// One or two rows are bound by memory: eight (AVX2, two rows: four) weight rows in flight hide the latency of the sums.
template <int R, int C, typename W>
void dot_few_rows(const W* weights, std::int64_t num_columns, std::int64_t n, const float* x, std::int64_t x_stride,
                  const float* bias, float* out, std::int64_t out_stride, const Stream& stream) {
  std::int64_t column = 0;
  for (; column + C <= num_columns; column += C) {
    dot_tile<R, C>(weights + column * n, n, x, x_stride, bias == nullptr ? nullptr : bias + column, out + column,
                   out_stride, &stream);
  }
  for (; column < num_columns; ++column) {
    dot_tile<R, 1>(weights + column * n, n, x, x_stride, bias == nullptr ? nullptr : bias + column, out + column,
                   out_stride, &stream);
  }
}

// Several rows: a group of columns stays in the first-level cache while all rows pass over it.
template <int C, typename W>
void dot_row_tiles(const W* weights, std::int64_t n, const float* x, std::int64_t x_stride, std::int64_t num_rows,
                   const float* bias, float* out, std::int64_t out_stride, const Stream& stream) {
  if (num_rows < kTileRows) return dot_tile<3, C>(weights, n, x, x_stride, bias, out, out_stride, &stream);
  dot_tile<kTileRows, C>(weights, n, x, x_stride, bias, out, out_stride, &stream);
  std::int64_t row = kTileRows;
  for (; row + kTileRows <= num_rows; row += kTileRows) {
    dot_tile<kTileRows, C>(weights, n, x + row * x_stride, x_stride, bias, out + row * out_stride, out_stride, nullptr);
  }
  x += row * x_stride;
  out += row * out_stride;
  switch (num_rows - row) {
    case 1:
      return dot_tile<1, C>(weights, n, x, x_stride, bias, out, out_stride, nullptr);
    case 2:
      return dot_tile<2, C>(weights, n, x, x_stride, bias, out, out_stride, nullptr);
    case 3:
      return dot_tile<3, C>(weights, n, x, x_stride, bias, out, out_stride, nullptr);
    default:
      return;
  }
}

void dot_rows(DType dtype, const void* weights, std::int64_t num_columns, std::int64_t n, const float* packed,
              std::int64_t packed_stride, std::int64_t num_rows, const float* bias, float* out, std::int64_t out_stride,
              const void* next) {
  static_assert(kTileRows == 4);
  if (num_rows <= 0) return;
  with_weights(dtype, weights, [&](const auto* w) {
    const Stream stream = {reinterpret_cast<const char*>(w), num_columns * n * static_cast<std::int64_t>(sizeof *w),
                           static_cast<const char*>(next)};
    if (num_rows == 1) {
      return dot_few_rows<1, 8>(w, num_columns, n, packed, packed_stride, bias, out, out_stride, stream);
    }
    if (num_rows == 2) {
      return dot_few_rows<2, 2 * kTileColumns>(w, num_columns, n, packed, packed_stride, bias, out, out_stride, stream);
    }
    std::int64_t column = 0;
    for (; column + kTileColumns <= num_columns; column += kTileColumns) {
      dot_row_tiles<kTileColumns>(w + column * n, n, packed, packed_stride, num_rows,
                                  bias == nullptr ? nullptr : bias + column, out + column, out_stride, stream);
    }
    for (; column < num_columns; ++column) {
      dot_row_tiles<1>(w + column * n, n, packed, packed_stride, num_rows, bias == nullptr ? nullptr : bias + column,
                       out + column, out_stride, stream);
    }
  });
}

// ------------------------------------------------------------------------------------------------ weighted sums

// Weight rows that pass over the sums at once. Several, so that few passes over the sums are needed; but for a single
// sum, which stays in the first-level cache, one row after the other is read fastest.
template <int R>
constexpr int kGroup = R == 1 ? 1 : 8;

// G weight rows front to back, onto R sums. Where a sum starts and goes is chosen per pass: from == null starts at
// zero; base != null adds the finished partial sum to it.
template <int R, int G, typename W>
inline void weighted_group(const W* weights, std::int64_t n, const float* coefficients, std::int64_t coefficient_stride,
                           const float* from, const float* base, float* to, std::int64_t stride, const Stream* stream) {
  Vec k[R][G];
  if constexpr (R * G <= 8) {
    for (int r = 0; r < R; ++r) {
      for (int g = 0; g < G; ++g) k[r][g] = vec_set1(coefficients[r * coefficient_stride + g]);
    }
  }
  const auto block = [&](const W* w, std::int64_t w_stride, std::int64_t i) {
    Vec a[R];
    Vec b[R];
    for (int r = 0; r < R; ++r) {
      a[r] = from == nullptr ? vec_zero() : vec_load(from + r * stride + i);
      b[r] = from == nullptr ? vec_zero() : vec_load(from + r * stride + i + kLanes);
    }
    for (int g = 0; g < G; ++g) {
      Vec wa;
      Vec wb;
      load_pair(w + g * w_stride, wa, wb);
      for (int r = 0; r < R; ++r) {
        const Vec scale = R * G <= 8 ? k[r][g] : vec_set1(coefficients[r * coefficient_stride + g]);
        a[r] = vec_fma(scale, wa, a[r]);
        b[r] = vec_fma(scale, wb, b[r]);
      }
    }
    for (int r = 0; r < R; ++r) {
      if (base != nullptr) {
        a[r] = vec_add(vec_load(base + r * stride + i), a[r]);
        b[r] = vec_add(vec_load(base + r * stride + i + kLanes), b[r]);
      }
      vec_store(to + r * stride + i, a[r]);
      vec_store(to + r * stride + i + kLanes, b[r]);
    }
  };
  constexpr std::int64_t kStep = G * kBlock * static_cast<std::int64_t>(sizeof(W));
  const char* ahead = stream == nullptr
                          ? nullptr
                          : stream->ahead(weights, G * n * sizeof(W), G == 1 ? kPrefetchBytes / 4 : kPrefetchBytes);
  const std::int64_t whole = n / kBlock * kBlock;
  for (std::int64_t i = 0; i < whole; i += kBlock) {
    if (ahead != nullptr) {
      for (std::int64_t line = 0; line < kStep; line += 64) prefetch_l2(ahead + line);
      ahead += kStep;
    }
    block(weights + i, n, i);
  }
  if (whole != n) {
    W tail[G][kBlock];
    copy_tail<W, G>(weights, n, whole, n, tail);
    block(&tail[0][0], kBlock, whole);
  }
}

template <int R, typename W>
void weighted_tile(const W* weights, std::int64_t num_columns, std::int64_t n, const float* coefficients,
                   std::int64_t coefficient_stride, float* sum, std::int64_t stride, bool first, float* temporary,
                   const Stream* stream) {
  // The running partial sum lives in `sum` itself when there is nothing to add it to.
  float* running = first ? sum : temporary;
  std::int64_t column = 0;
  while (column < num_columns) {
    const W* w = weights + column * n;
    const float* k = coefficients + column;
    const float* from = column == 0 ? nullptr : running;
    const std::int64_t count = num_columns - column >= kGroup<R> ? kGroup<R> : 1;
    const bool last = column + count == num_columns;
    float* to = last ? sum : running;
    const float* base = last && !first ? sum : nullptr;
    if (count == kGroup<R>) {
      weighted_group<R, kGroup<R>>(w, n, k, coefficient_stride, from, base, to, stride, stream);
    } else {
      weighted_group<R, 1>(w, n, k, coefficient_stride, from, base, to, stride, stream);
    }
    column += count;
  }
}

// Fewer rows than a tile.
template <typename W>
void weighted_remainder(const W* weights, std::int64_t num_columns, std::int64_t n, const float* coefficients,
                        std::int64_t coefficient_stride, std::int64_t num_rows, float* sum, std::int64_t stride,
                        bool first, float* temporary, const Stream* stream) {
  switch (num_rows) {
    case 1:
      return weighted_tile<1>(weights, num_columns, n, coefficients, coefficient_stride, sum, stride, first, temporary,
                              stream);
    case 2:
      return weighted_tile<2>(weights, num_columns, n, coefficients, coefficient_stride, sum, stride, first, temporary,
                              stream);
    case 3:
      return weighted_tile<3>(weights, num_columns, n, coefficients, coefficient_stride, sum, stride, first, temporary,
                              stream);
    default:
      return;
  }
}

void weighted_rows(DType dtype, const void* weights, std::int64_t num_columns, std::int64_t n,
                   const float* coefficients, std::int64_t coefficient_stride, std::int64_t num_rows, float* sum,
                   std::int64_t sum_stride, bool first, float* temporary, const void* next) {
  static_assert(kTileRows == 4 && ft::detail::kTemporaryRows == kTileRows);
  with_weights(dtype, weights, [&](const auto* w) {
    const Stream stream = {reinterpret_cast<const char*>(w), num_columns * n * static_cast<std::int64_t>(sizeof *w),
                           static_cast<const char*>(next)};
    std::int64_t row = 0;
    for (; row + kTileRows <= num_rows; row += kTileRows) {
      // After the first rows the weights are in the cache.
      weighted_tile<kTileRows>(w, num_columns, n, coefficients + row * coefficient_stride, coefficient_stride,
                               sum + row * sum_stride, sum_stride, first, temporary, row == 0 ? &stream : nullptr);
    }
    weighted_remainder(w, num_columns, n, coefficients + row * coefficient_stride, coefficient_stride, num_rows - row,
                       sum + row * sum_stride, sum_stride, first, temporary, row == 0 ? &stream : nullptr);
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
  // Where exp(-gate) would overflow the quotient is zero in float32.
  return vec_mul(vec_zero_where_less(vec_div(gate, denominator), gate, -88.0f), up);
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

float read_sum(const void* data, std::size_t bytes, bool prefetch) {
  const auto* p = static_cast<const float*>(data);
  const std::size_t count = bytes / sizeof(float);
  constexpr int kSums = 8;
  constexpr std::size_t kStep = kSums * kLanes;
  Vec sum[kSums];
  for (Vec& s : sum) s = vec_zero();
  for (std::size_t i = 0; i + kStep <= count; i += kStep) {
    if (prefetch) {
      const char* ahead = reinterpret_cast<const char*>(p + i) + kPrefetchBytes / 4;
      for (std::size_t line = 0; line < kStep * sizeof(float); line += 64) prefetch_l2(ahead + line);
    }
    for (int k = 0; k < kSums; ++k) sum[k] = vec_add(sum[k], vec_load(p + i + k * kLanes));
  }
  for (int k = 1; k < kSums; ++k) sum[0] = vec_add(sum[0], sum[k]);
  return vec_reduce_add(sum[0]);
}

}  // namespace
