// CRC-32C (Castagnoli), reflected, initial value and final xor 0xffffffff.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ft {

// Continues from `crc` (0 to start): crc32c(b, crc32c(a)) == crc32c(a + b). Uses the SSE4.2 instruction where present.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc = 0);

// The portable table version, for tests and processors without the instruction.
std::uint32_t crc32c_table(const void* data, std::size_t size, std::uint32_t crc = 0);

namespace detail {

// Tables that advance a raw CRC register over kCrcStripeBytes zero bytes.
inline constexpr std::size_t kCrcStripeBytes = 4096;
using CrcShiftTable = std::uint32_t[4][256];
const CrcShiftTable& crc_stripe_shift();

std::uint32_t crc32c_sse42(const void* data, std::size_t size, std::uint32_t crc, const CrcShiftTable& stripe_shift);

}  // namespace detail
}  // namespace ft
