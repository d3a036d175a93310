#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "crc32c.h"

int main() {
  CHECK(ft::crc32c("123456789", 9) == 0xe3069283u);
  CHECK(ft::crc32c_table("123456789", 9) == 0xe3069283u);
  CHECK(ft::crc32c(nullptr, 0) == 0);

  std::mt19937 generator(3);
  std::vector<unsigned char> data(3 * 3 * ft::detail::kCrcStripeBytes + 100);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(generator());
  // Lengths around the stripes of the hardware version, unaligned starts, continued sums.
  const std::size_t stripe = ft::detail::kCrcStripeBytes;
  for (const std::size_t size : {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{9}, 3 * stripe - 1,
                                 3 * stripe, 3 * stripe + 1, 6 * stripe + 5, 9 * stripe + 77}) {
    for (const std::size_t start : {0, 1, 5}) {
      const std::uint32_t expected = ft::crc32c_table(data.data() + start, size);
      CHECK(ft::crc32c(data.data() + start, size) == expected);
      const std::size_t cut = size / 3;
      const std::uint32_t head = ft::crc32c(data.data() + start, cut);
      CHECK(ft::crc32c(data.data() + start + cut, size - cut, head) == expected);
    }
  }
  return 0;
}
