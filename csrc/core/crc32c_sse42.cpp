// The hardware instruction has a latency of three cycles and a throughput of one, so three stripes run side by side and
// are joined by tables that advance a register over a stripe of zeros.
#if defined(__x86_64__)
#include <nmmintrin.h>

#include "crc32c.h"

namespace ft::detail {
namespace {

inline std::uint64_t load64(const unsigned char* p) {
  std::uint64_t value;
  __builtin_memcpy(&value, p, 8);
  return value;
}

inline std::uint64_t advance_stripe(std::uint64_t crc, const CrcShiftTable& shift) {
  return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^ shift[2][(crc >> 16) & 0xff] ^
         shift[3][(crc >> 24) & 0xff];
}

}  // namespace

std::uint32_t crc32c_sse42(const void* data, std::size_t size, std::uint32_t crc, const CrcShiftTable& stripe_shift) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t state = static_cast<std::uint32_t>(~crc);
  for (; size >= 3 * kCrcStripeBytes; size -= 3 * kCrcStripeBytes, p += 3 * kCrcStripeBytes) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kCrcStripeBytes; i += 8) {
      state = _mm_crc32_u64(state, load64(p + i));
      second = _mm_crc32_u64(second, load64(p + kCrcStripeBytes + i));
      third = _mm_crc32_u64(third, load64(p + 2 * kCrcStripeBytes + i));
    }
    state = advance_stripe(state, stripe_shift) ^ second;
    state = advance_stripe(state, stripe_shift) ^ third;
  }
  for (; size >= 8; size -= 8, p += 8) state = _mm_crc32_u64(state, load64(p));
  auto low = static_cast<std::uint32_t>(state);
  for (; size != 0; --size, ++p) low = _mm_crc32_u8(low, *p);
  return ~low;
}

}  // namespace ft::detail
#endif
