// Attention over one key partition, on the Vec of whichever simd_*.h was included before; see row_kernels_impl.h.
#pragma once

#include "row_kernels_impl.h"

namespace {

using ft::detail::AttentionPartition;
using ft::detail::kKeyPartition;

constexpr int kKeyVecs = kTileColumns;       // key vectors of a score tile
constexpr int kKeyTile = kKeyVecs * kLanes;  // keys of a score tile
constexpr int kValueVecs = kTileColumns;     // value vectors of an output tile
static_assert(kKeyPartition % kKeyTile == 0);

// packed_keys[d, j] = keys[j][d] for the tiles that hold [key_begin, key_end); zero where no key is.
template <typename W>
void pack_keys(const AttentionPartition& p, int begin, int end) {
  const int dim = p.head_dim;
  for (int j = begin; j < end; j += kLanes) {
    const W* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      keys[i] = j + i >= p.key_begin && j + i < p.key_end ? reinterpret_cast<const W*>(p.keys[j + i]) : nullptr;
    }
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Vec rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = keys[i] == nullptr ? vec_zero() : load_wide(keys[i] + d);
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) vec_store(p.packed_keys + (d + i) * kKeyPartition + j, rows[i]);
    }
    for (; d < dim; ++d) {
      for (int i = 0; i < kLanes; ++i) {
        W element[kLanes] = {};
        if (keys[i] != nullptr) element[0] = keys[i][d];
        alignas(64) float wide[kLanes];
        vec_store(wide, load_wide(element));
        p.packed_keys[d * kKeyPartition + j + i] = wide[0];
      }
    }
  }
}

// scores = scale * q . k, each accumulated in ascending d.
template <int R>
inline void score_tile(const AttentionPartition& p, int row, int j) {
  Vec sum[R][kKeyVecs];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kKeyVecs; ++v) sum[r][v] = vec_zero();
  }
  const float* keys = p.packed_keys + j;
  for (int d = 0; d < p.head_dim; ++d) {
    Vec k[kKeyVecs];
    for (int v = 0; v < kKeyVecs; ++v) k[v] = vec_load(keys + d * kKeyPartition + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec q = vec_set1(p.query_rows[row + r][d]);
      for (int v = 0; v < kKeyVecs; ++v) sum[r][v] = vec_fma(q, k[v], sum[r][v]);
    }
  }
  const Vec scale = vec_set1(p.scale);
  for (int r = 0; r < R; ++r) {
    float* scores = p.scores + (row + r) * kKeyPartition + j;
    for (int v = 0; v < kKeyVecs; ++v) vec_store(scores + v * kLanes, vec_mul(sum[r][v], scale));
  }
}

// Turns scores into exp(score - maximum), with zeros for the keys a row does not attend to. Lanes are fixed by the
// key's place in the partition, so the sum does not depend on where the tiles begin.
inline void exponentiate(const AttentionPartition& p, int row, int begin, int end) {
  constexpr float kInfinity = __builtin_inff();
  float* scores = p.scores + row * kKeyPartition;
  const int first = p.first_key[row];
  const int last = p.end_key[row];
  if (first >= last) {
    for (int j = begin; j < end; ++j) scores[j] = 0.0f;
    p.maxima[row] = -kInfinity;
    p.sums[row] = 0.0f;
    return;
  }
  for (int j = begin; j < first; ++j) scores[j] = -kInfinity;
  for (int j = last; j < end; ++j) scores[j] = -kInfinity;
  Vec largest = vec_load(scores + begin);
  for (int j = begin + kLanes; j < end; j += kLanes) largest = vec_max(largest, vec_load(scores + j));
  const float maximum = vec_reduce_max(largest);
  const Vec m = vec_set1(maximum);
  Vec total = vec_zero();
  for (int j = begin; j < end; j += kLanes) {
    const Vec e = vec_exp(vec_sub(vec_load(scores + j), m));
    vec_store(scores + j, e);
    total = vec_add(total, e);
  }
  p.maxima[row] = maximum;
  p.sums[row] = vec_reduce_add(total);
}

// out[row, d ..] = sum over keys of score * value, in ascending key order.
template <int R, int V, typename W>
inline void value_tile(const AttentionPartition& p, int row, int d, std::int64_t out_stride) {
  Vec sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = vec_zero();
  }
  for (int j = p.key_begin; j < p.key_end; ++j) {
    const W* value = reinterpret_cast<const W*>(p.values[j]) + d;
    Vec w[V];
    for (int v = 0; v < V; ++v) w[v] = load_wide(value + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec weight = vec_set1(p.scores[(row + r) * kKeyPartition + j]);
      for (int v = 0; v < V; ++v) sum[r][v] = vec_fma(weight, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) vec_store(p.out + (row + r) * out_stride + d + v * kLanes, sum[r][v]);
  }
}

// The last head_dim % kLanes elements, through padded copies.
template <int R, typename W>
inline void value_tail(const AttentionPartition& p, int row, int d, std::int64_t out_stride) {
  Vec sum[R];
  for (int r = 0; r < R; ++r) sum[r] = vec_zero();
  for (int j = p.key_begin; j < p.key_end; ++j) {
    W padded[kLanes] = {};
    for (int i = 0; d + i < p.head_dim; ++i) padded[i] = reinterpret_cast<const W*>(p.values[j])[d + i];
    const Vec w = load_wide(padded);
    for (int r = 0; r < R; ++r) sum[r] = vec_fma(vec_set1(p.scores[(row + r) * kKeyPartition + j]), w, sum[r]);
  }
  for (int r = 0; r < R; ++r) vec_store(p.out + (row + r) * out_stride + d, sum[r]);
}

template <int R, typename W>
inline void attend_rows(const AttentionPartition& p, int row, int begin, int end) {
  for (int j = begin; j < end; j += kKeyTile) score_tile<R>(p, row, j);
  for (int r = 0; r < R; ++r) exponentiate(p, row + r, begin, end);
  const std::int64_t out_stride = ft::detail::packed_length(p.head_dim);
  int d = 0;
  for (; d + kValueVecs * kLanes <= p.head_dim; d += kValueVecs * kLanes) {
    value_tile<R, kValueVecs, W>(p, row, d, out_stride);
  }
  for (; d + kLanes <= p.head_dim; d += kLanes) value_tile<R, 1, W>(p, row, d, out_stride);
  if (d < p.head_dim) value_tail<R, W>(p, row, d, out_stride);
}

template <typename W>
void attend(const AttentionPartition& p) {
  const int begin = p.key_begin / kKeyTile * kKeyTile;
  const int end = (p.key_end + kKeyTile - 1) / kKeyTile * kKeyTile;
  pack_keys<W>(p, begin, end);
  int row = 0;
  for (; row + kTileRows <= p.num_rows; row += kTileRows) attend_rows<kTileRows, W>(p, row, begin, end);
  switch (p.num_rows - row) {
    case 1:
      return attend_rows<1, W>(p, row, begin, end);
    case 2:
      return attend_rows<2, W>(p, row, begin, end);
    case 3:
      return attend_rows<3, W>(p, row, begin, end);
    default:
      return;
  }
}

void attention_partition(const AttentionPartition& partition) {
  if (partition.dtype == DType::kF32) {
    attend<float>(partition);
  } else {
    attend<std::uint16_t>(partition);
  }
}

void attention_merge(float* maximum, float* sum, float* out, float next_maximum, float next_sum, const float* next_out,
                     std::int64_t head_dim) {
  if (next_sum == 0.0f) return;
  if (*sum == 0.0f) {
    *maximum = next_maximum;
    *sum = next_sum;
    __builtin_memcpy(out, next_out, static_cast<std::size_t>(head_dim) * sizeof(float));
    return;
  }
  const float joint = next_maximum > *maximum ? next_maximum : *maximum;
  const float keep = exp_scalar(*maximum - joint);
  const float add = exp_scalar(next_maximum - joint);
  *maximum = joint;
  *sum = *sum * keep + next_sum * add;
  for (std::int64_t d = 0; d < head_dim; d += kLanes) {
    vec_store(out + d, vec_fma(vec_load(next_out + d), vec_set1(add), vec_mul(vec_load(out + d), vec_set1(keep))));
  }
}

}  // namespace
