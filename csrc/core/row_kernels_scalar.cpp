#include "simd_scalar.h"

// After the vectors they are written in.
#include "attention_impl.h"
#include "row_kernels_impl.h"

namespace ft::detail {

const RowKernels& row_kernels_scalar() {
  static constexpr RowKernels table = {pack,         unpack_scaled, dot_rows, weighted_rows,       add,
                                       silu_and_mul, rms_norm,      softmax,  attention_partition, attention_merge,
                                       read_sum};
  return table;
}

}  // namespace ft::detail
