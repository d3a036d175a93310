#include "q4_0_kernels.h"

#include "cpu_info.h"

namespace ft::detail {

const Q4Kernels& q4_kernels(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      if (cpu_features().avx512_vnni) return q4_kernels_avx512vnni();
      return q4_kernels_avx2();
    case Isa::kAvx2:
      return q4_kernels_avx2();
    case Isa::kScalar:
      break;
  }
#endif
  static_cast<void>(isa);
  return q4_kernels_scalar();
}

}  // namespace ft::detail
