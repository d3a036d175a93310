#include "cpu_info.h"

#include <pthread.h>
#include <sched.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "text_file.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ft {
namespace {

#if defined(__x86_64__)
std::uint64_t enabled_register_state() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

CpuFeatures detect() {
  CpuFeatures features;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  features.sse42 = (c >> 20) & 1;
  const bool osxsave = (c >> 27) & 1;
  const std::uint64_t state = osxsave ? enabled_register_state() : 0;
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  const bool tiles = (state & 0x60000) == 0x60000;
  features.fma = ymm && ((c >> 12) & 1);
  features.f16c = ymm && ((c >> 29) & 1);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  const unsigned max_subleaf = a;
  features.avx2 = ymm && ((b >> 5) & 1);
  features.avx512f = zmm && ((b >> 16) & 1);
  features.avx512dq = zmm && ((b >> 17) & 1);
  features.avx512bw = zmm && ((b >> 30) & 1);
  features.avx512vl = zmm && ((b >> 31) & 1);
  features.avx512_vnni = zmm && ((c >> 11) & 1);
  features.amx_bf16 = tiles && ((d >> 22) & 1);
  features.amx_int8 = tiles && ((d >> 25) & 1);
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) features.avx512_bf16 = zmm && ((a >> 5) & 1);
  return features;
}
#else
CpuFeatures detect() { return {}; }
#endif

// -1 when the kernel does not say.
int read_topology(int cpu, const char* name) {
  const auto text = read_text_file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name);
  if (!text) return -1;
  char* end = nullptr;
  const long value = std::strtol(text->c_str(), &end, 10);
  return end == text->c_str() ? -1 : static_cast<int>(value);
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::vector<int> physical_cores() {
  // The mask grows until the kernel accepts it: machines may have more CPUs than cpu_set_t holds.
  std::vector<int> cores;
  std::set<std::pair<int, int>> seen;
  for (int capacity = 1024; capacity <= (1 << 18); capacity *= 4) {
    const std::size_t bytes = CPU_ALLOC_SIZE(capacity);
    std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(CPU_ALLOC(capacity), [](cpu_set_t* set) { CPU_FREE(set); });
    CPU_ZERO_S(bytes, mask.get());
    if (sched_getaffinity(0, bytes, mask.get()) != 0) continue;
    for (int cpu = 0; cpu < capacity; ++cpu) {
      if (!CPU_ISSET_S(cpu, bytes, mask.get())) continue;
      const int core = read_topology(cpu, "core_id");
      // Without topology files every logical CPU counts as a core.
      if (core < 0 || seen.insert({read_topology(cpu, "physical_package_id"), core}).second) cores.push_back(cpu);
    }
    break;
  }
  return cores;
}

std::string pin_current_thread(int core_id) {
  if (core_id < 0 || core_id >= (1 << 18)) return "core id " + std::to_string(core_id) + " is out of range";
  const std::size_t bytes = CPU_ALLOC_SIZE(core_id + 1);
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(CPU_ALLOC(core_id + 1), [](cpu_set_t* set) { CPU_FREE(set); });
  CPU_ZERO_S(bytes, mask.get());
  CPU_SET_S(core_id, bytes, mask.get());
  const int error = pthread_setaffinity_np(pthread_self(), bytes, mask.get());
  if (error == 0) return "";
  return "cannot pin a thread to core " + std::to_string(core_id) + ": " + std::strerror(error);
}

}  // namespace ft
