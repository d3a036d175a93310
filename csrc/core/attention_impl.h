// Attention over one key partition, on the Vec of whichever simd_*.h was included before; see row_kernels_impl.h.
#pragma once

#include "row_kernels_impl.h"

namespace {

using ft::detail::AttentionPartition;
using ft::detail::kKeyPartition;

constexpr int kKeyVecs = 2;                  // key vectors of a score tile
constexpr int kKeyTile = kKeyVecs * kLanes;  // keys that are packed at a time
constexpr int kValueVecs = 2;                // value vectors of an output tile
// Query rows of a score or output tile, as many as leave registers for two vectors beside the sums.
constexpr int kRowTile = kTileRows * kTileColumns / 2;
static_assert(kKeyPartition % kKeyTile == 0 && kKeyTile <= ft::detail::kMaxKeyTile);

template <typename W>
inline void prefetch_rows(const std::byte* const* rows, int begin, int end, int dim) {
  for (int j = begin; j < end; ++j) {
    const std::byte* row = rows[j];
    for (std::int64_t byte = 0; byte < dim * static_cast<std::int64_t>(sizeof(W)); byte += 64) prefetch_l2(row + byte);
  }
}

// packed_keys[d, i] = keys[j + i][d] for one tile; zero where no key is.
template <typename W>
void pack_keys(const AttentionPartition& p, int j) {
  const int dim = p.head_dim;
  for (int group = 0; group < kKeyTile; group += kLanes) {
    float* packed = p.packed_keys + group;
    const W* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int key = j + group + i;
      keys[i] = key >= p.key_begin && key < p.key_end ? reinterpret_cast<const W*>(p.keys[key]) : nullptr;
    }
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Vec rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = keys[i] == nullptr ? vec_zero() : load_wide(keys[i] + d);
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) vec_store(packed + (d + i) * kKeyTile, rows[i]);
    }
    for (; d < dim; ++d) {
      for (int i = 0; i < kLanes; ++i) {
        W element[kLanes] = {};
        if (keys[i] != nullptr) element[0] = keys[i][d];
        alignas(64) float wide[kLanes];
        vec_store(wide, load_wide(element));
        packed[d * kKeyTile + i] = wide[0];
      }
    }
  }
}

// scores = scale * q . k, each accumulated in ascending d.
template <int R>
inline void score_tile(const AttentionPartition& p, int row, int j) {
  Vec sum[R][kKeyVecs];
  const float* queries[R];
  for (int r = 0; r < R; ++r) {
    queries[r] = p.query_rows[row + r];
    for (int v = 0; v < kKeyVecs; ++v) sum[r][v] = vec_zero();
  }
  for (int d = 0; d < p.head_dim; ++d) {
    Vec k[kKeyVecs];
    for (int v = 0; v < kKeyVecs; ++v) k[v] = vec_load(p.packed_keys + d * kKeyTile + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec q = vec_set1(queries[r][d]);
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
inline void weigh_values(const AttentionPartition& p, int row) {
  const std::int64_t out_stride = ft::detail::packed_length(p.head_dim);
  int d = 0;
  for (; d + kValueVecs * kLanes <= p.head_dim; d += kValueVecs * kLanes) {
    value_tile<R, kValueVecs, W>(p, row, d, out_stride);
  }
  for (; d + kLanes <= p.head_dim; d += kLanes) value_tile<R, 1, W>(p, row, d, out_stride);
  if (d < p.head_dim) value_tail<R, W>(p, row, d, out_stride);
}

// Calls f(rows in tile as a compile-time constant, first row) over all rows.
template <int R>
struct RowCount {
  static constexpr int value = R;
};

template <typename F>
inline void for_row_tiles(int num_rows, F f) {
  int row = 0;
  for (; row + kRowTile <= num_rows; row += kRowTile) f(RowCount<kRowTile>{}, row);
  for (; row + 4 <= num_rows; row += 4) f(RowCount<4>{}, row);
  switch (num_rows - row) {
    case 1:
      return f(RowCount<1>{}, row);
    case 2:
      return f(RowCount<2>{}, row);
    case 3:
      return f(RowCount<3>{}, row);
    default:
      return;
  }
}

template <typename W>
void attend(const AttentionPartition& p) {
  const int begin = p.key_begin / kKeyTile * kKeyTile;
  const int end = (p.key_end + kKeyTile - 1) / kKeyTile * kKeyTile;
  const auto clipped = [&p](int key) { return key < p.key_begin ? p.key_begin : key > p.key_end ? p.key_end : key; };
  // Rows of one head lie far apart, so the hardware does not see them coming.
  prefetch_rows<W>(p.keys, clipped(begin), clipped(begin + kKeyTile), p.head_dim);
  for (int j = begin; j < end; j += kKeyTile) {
    prefetch_rows<W>(p.keys, clipped(j + kKeyTile), clipped(j + 2 * kKeyTile), p.head_dim);
    prefetch_rows<W>(p.values, clipped(j), clipped(j + kKeyTile), p.head_dim);
    pack_keys<W>(p, j);
    for_row_tiles(p.num_rows, [&](auto rows, int row) { score_tile<decltype(rows)::value>(p, row, j); });
  }
  for (int row = 0; row < p.num_rows; ++row) exponentiate(p, row, begin, end);
  for_row_tiles(p.num_rows, [&](auto rows, int row) { weigh_values<decltype(rows)::value, W>(p, row); });
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
