// Dense projections with Q4_0 weights.
#pragma once

#include <cstdint>

#include "worker_pool.h"

namespace ft {

// out[rows, outputs] = x[rows, inputs] @ W^T (+ bias[outputs], may be null). W is [outputs, inputs] as planes: nibbles
// [outputs, inputs / 2] bytes, scales [outputs, inputs / 32] float16; inputs is a multiple of 32. x is quantised to 8
// bits in blocks of 32 (see q4_0_kernels.h). The bits of a row do not depend on the other rows or the pool's size.
void linear_q4_0(WorkerPool& pool, const float* x, std::int64_t rows, std::int64_t inputs, const std::uint8_t* nibbles,
                 const std::uint16_t* scales, std::int64_t outputs, const float* bias, float* out);

}  // namespace ft
