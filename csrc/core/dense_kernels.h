// Dense row-wise kernels. The bits of a row do not depend on the other rows of a call or on the pool's size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "record_layout.h"
#include "worker_pool.h"

namespace ft {

// out[rows, outputs] = x[rows, inputs] @ weight[outputs, inputs]^T (+ bias[outputs], may be null).
void linear(WorkerPool& pool, const float* x, std::int64_t rows, std::int64_t inputs, const void* weight, DType dtype,
            std::int64_t outputs, const float* bias, float* out);

// out may be x.
void rms_norm(WorkerPool& pool, const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t width,
              float* out);

// residual += delta, then out = rms_norm(residual). out may be delta.
void add_rms_norm(WorkerPool& pool, float* residual, const float* delta, const float* weight, float eps,
                  std::int64_t rows, std::int64_t width, float* out);

// In place over x[rows, heads, head_dim]; tables are [max_position, rotated / 2]; element i pairs with i + rotated / 2.
void rotary(WorkerPool& pool, float* x, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
            std::int64_t rotated, const std::int32_t* positions, const float* cos, const float* sin);

void silu_and_mul(WorkerPool& pool, const float* gate, const float* up, std::int64_t rows, std::int64_t width,
                  float* out);

// Softmax over logits[rows, experts]; the top_k in descending order, ties to the lower id, NaN last.
void router_topk(WorkerPool& pool, const float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k,
                 bool renormalize, float scaling, std::int32_t* ids, float* weights);

// Where one layer's keys and values lie in block-major KV memory: block b's layer part begins at
// base + b * block_stride_bytes and is [2 (k, v), block_size, num_kv_heads, head_dim] of dtype.
struct KvLayer {
  std::byte* base = nullptr;
  std::int64_t block_stride_bytes = 0;
  std::int64_t block_size = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  DType dtype = DType::kF32;

  std::int64_t head_bytes() const { return head_dim * static_cast<std::int64_t>(dtype_bytes(dtype)); }
  // Bytes of the layer's keys (or values) in one block.
  std::int64_t plane_bytes() const { return block_size * num_kv_heads * head_bytes(); }
  std::byte* key(std::int64_t block, std::int64_t offset, std::int64_t head) const {
    return base + block * block_stride_bytes + (offset * num_kv_heads + head) * head_bytes();
  }
  std::byte* value(std::int64_t block, std::int64_t offset, std::int64_t head) const {
    return key(block, offset, head) + plane_bytes();
  }
};

// keys and values [rows, num_kv_heads, head_dim]; slot = block * block_size + offset, -1: skipped. BF16 rounds to
// nearest even. Two rows must not share a slot.
void kv_store(WorkerPool& pool, const float* keys, const float* values, const std::int64_t* slots, std::int64_t rows,
              const KvLayer& kv);

// Causal attention of a ragged batch; see paged_attention in freetoken/_native.pyi. Every block named by a row's keys
// must be valid.
struct PagedAttention {
  const float* queries = nullptr;            // [num_tokens, num_heads, head_dim]
  const std::int32_t* row_starts = nullptr;  // [num_rows + 1]
  const std::int32_t* positions = nullptr;   // [num_tokens]
  const std::int32_t* block_tables = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t max_blocks = 0;
  std::int64_t num_heads = 0;
  float scale = 1.0f;
  std::int64_t sliding_window = 0;  // 0: none
  float* out = nullptr;             // [num_tokens, num_heads * head_dim]
};

void paged_attention(WorkerPool& pool, const PagedAttention& call, const KvLayer& kv);

}  // namespace ft
