#include "row_kernels.h"

namespace ft::detail {

const RowKernels& row_kernels(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx512Bf16:
      // vdpbf16ps would round activations to BF16 and flush denormals; the FMA path already saturates memory at the
      // batch sizes where the CPU takes expert work, so the extension brings error and no speed there.
    case Isa::kAvx512:
      return row_kernels_avx512();
    case Isa::kAvx2:
      return row_kernels_avx2();
    case Isa::kScalar:
      break;
  }
#endif
  static_cast<void>(isa);
  return row_kernels_scalar();
}

}  // namespace ft::detail
