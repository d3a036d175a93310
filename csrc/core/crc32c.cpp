#include "crc32c.h"

#include <array>

#include "cpu_info.h"

namespace ft {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // reflected

struct ByteTables {
  // entry[k][b]: the register after byte b and k zero bytes.
  std::array<std::array<std::uint32_t, 256>, 8> entry;
};

constexpr ByteTables make_byte_tables() {
  ByteTables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t value = b;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    tables.entry[0][b] = value;
  }
  for (std::uint32_t b = 0; b < 256; ++b) {
    for (std::size_t k = 1; k < 8; ++k) {
      const std::uint32_t before = tables.entry[k - 1][b];
      tables.entry[k][b] = (before >> 8) ^ tables.entry[0][before & 0xff];
    }
  }
  return tables;
}

constexpr ByteTables kTables = make_byte_tables();

// Product of two polynomials modulo the CRC polynomial; bit 31 is the coefficient of x^0.
std::uint32_t multiply_mod(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

struct StripeShift {
  detail::CrcShiftTable table;

  StripeShift() {
    std::uint32_t power = 0x00800000u;  // x^8: one zero byte
    std::uint32_t shift = 0x80000000u;  // x^0
    for (std::size_t n = detail::kCrcStripeBytes; n != 0; n >>= 1) {
      if (n & 1) shift = multiply_mod(shift, power);
      power = multiply_mod(power, power);
    }
    for (int byte = 0; byte < 4; ++byte) {
      for (std::uint32_t value = 0; value < 256; ++value) table[byte][value] = multiply_mod(shift, value << (8 * byte));
    }
  }
};

}  // namespace

namespace detail {

const CrcShiftTable& crc_stripe_shift() {
  static const StripeShift shift;
  return shift.table;
}

}  // namespace detail

std::uint32_t crc32c_table(const void* data, std::size_t size, std::uint32_t crc) {
  const auto* p = static_cast<const unsigned char*>(data);
  const auto& t = kTables.entry;
  crc = ~crc;
  for (; size >= 8; size -= 8, p += 8) {
    crc ^= static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
           static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
    crc = t[7][crc & 0xff] ^ t[6][(crc >> 8) & 0xff] ^ t[5][(crc >> 16) & 0xff] ^ t[4][crc >> 24] ^ t[3][p[4]] ^
          t[2][p[5]] ^ t[1][p[6]] ^ t[0][p[7]];
  }
  for (; size != 0; --size, ++p) crc = (crc >> 8) ^ t[0][(crc ^ *p) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) {
#if defined(__x86_64__)
  static const bool hardware = cpu_features().sse42;
  if (hardware) return detail::crc32c_sse42(data, size, crc, detail::crc_stripe_shift());
#endif
  return crc32c_table(data, size, crc);
}

}  // namespace ft
