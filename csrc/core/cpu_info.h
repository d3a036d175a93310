// What this processor and this process's affinity mask offer.
#pragma once

#include <string>
#include <vector>

namespace ft {

// Each flag is true when both the processor and the operating system (register state) support it.
struct CpuFeatures {
  bool sse42 = false;
  bool avx2 = false;
  bool f16c = false;
  bool fma = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;
  bool avx512dq = false;
  bool avx512_bf16 = false;
  bool avx512_vnni = false;
  bool amx_bf16 = false;
  bool amx_int8 = false;
};

const CpuFeatures& cpu_features();

// One logical CPU per physical core in the affinity mask of the calling thread, ascending.
std::vector<int> physical_cores();

// Restricts the calling thread to one logical CPU. Returns an empty string, or what went wrong.
std::string pin_current_thread(int core_id);

}  // namespace ft
