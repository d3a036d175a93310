// The vectorised primitives that dense, expert and attention kernels are built of, one table per instruction set.
//
// Every result row is a fixed function of its own inputs: the order in which a row's elements are accumulated depends
// on lengths alone, never on how many rows share a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "record_layout.h"
#include "worker_pool.h"

namespace ft::detail {

// Rows are packed in blocks of this many elements at most; packed lengths and strides are multiples of it.
inline constexpr std::int64_t kMaxBlock = 32;
// Rows of temporary memory for weighted_rows.
inline constexpr std::int64_t kTemporaryRows = 4;
// Keys per attention partition: partitions lie at multiples of it, whatever the query.
inline constexpr int kKeyPartition = 256;
// Keys that are packed at a time, at most.
inline constexpr int kMaxKeyTile = 32;

static constexpr std::int64_t packed_length(std::int64_t n) { return (n + kMaxBlock - 1) / kMaxBlock * kMaxBlock; }

// Some query rows of one KV head against the keys of one partition. Row i attends to keys first_key[i] .. end_key[i]
// (relative to the partition; empty allowed); keys outside [key_begin, key_end) are not read.
struct AttentionPartition {
  const float* const* query_rows = nullptr;  // [num_rows], head_dim floats each
  const std::int32_t* first_key = nullptr;
  const std::int32_t* end_key = nullptr;
  std::int32_t num_rows = 0;
  std::int32_t head_dim = 0;
  std::int32_t key_begin = 0;
  std::int32_t key_end = 0;
  const std::byte* const* keys = nullptr;    // [kKeyPartition]
  const std::byte* const* values = nullptr;  // [kKeyPartition]
  DType dtype = DType::kF32;
  float scale = 1.0f;
  float* packed_keys = nullptr;  // scratch [head_dim, kMaxKeyTile]
  float* scores = nullptr;       // scratch [num_rows, kKeyPartition]
  // Results: the maximum score, the sum of exp(score - maximum), the weighted sum of values [num_rows, packed
  // head_dim]. A row without keys gets sum 0 and its other results are undefined.
  float* maxima = nullptr;
  float* sums = nullptr;
  float* out = nullptr;
};

struct RowKernels {
  // Activations in the element order in which weights of `dtype` are unpacked, zero-padded to packed_length(n).
  void (*pack)(DType dtype, const float* x, std::int64_t n, float* packed);
  // out[i] = scale * packed row, in natural order.
  void (*unpack_scaled)(DType dtype, const float* packed, float scale, std::int64_t n, float* out);

  // out[r * out_stride + c] = dot(weight row c, packed activation row r) (+ bias[c]); weight rows are n elements apart.
  // `next`, here and below: the weights that will be read after these, to be prefetched towards the end, or null.
  void (*dot_rows)(DType dtype, const void* weights, std::int64_t num_columns, std::int64_t n, const float* packed,
                   std::int64_t packed_stride, std::int64_t num_rows, const float* bias, float* out,
                   std::int64_t out_stride, const void* next);

  // sum[r] (packed order) = (first ? 0 : sum[r]) + partial[r], partial[r] = sum over c of coefficient[r, c] * weight
  // row c, in ascending c from zero.
  void (*weighted_rows)(DType dtype, const void* weights, std::int64_t num_columns, std::int64_t n,
                        const float* coefficients, std::int64_t coefficient_stride, std::int64_t num_rows, float* sum,
                        std::int64_t sum_stride, bool first, float* temporary, const void* next);

  // sum = (first ? 0 : sum) + x
  void (*add)(const float* x, std::int64_t n, bool first, float* sum);

  void (*silu_and_mul)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t n, float* out);
  void (*softmax)(const float* x, std::int64_t n, float* out);

  void (*attention_partition)(const AttentionPartition& partition);
  // (maximum, sum, out) of the partitions so far, joined with those of the next one. sum 0 means empty.
  void (*attention_merge)(float* maximum, float* sum, float* out, float next_maximum, float next_sum,
                          const float* next_out, std::int64_t head_dim);

  // Reads every byte, with or without software prefetching; for measuring memory bandwidth.
  float (*read_sum)(const void* data, std::size_t bytes, bool prefetch);
};

const RowKernels& row_kernels(Isa isa);

const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace ft::detail
