// The route log: what is pushed comes out once, in order, around the ring's end, with a reader at the same time.
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "route_log.h"

namespace {

using ft::RouteLog;
using ft::RouteRecord;

// Publish i has i % 5 tokens of 3 experts.
void push(RouteLog& log, std::uint32_t i) {
  const std::uint32_t tokens = i % 5;
  std::vector<std::int32_t> ids(tokens * 3);
  std::vector<float> weights(tokens * 3);
  const std::vector<std::uint8_t> admit(tokens, static_cast<std::uint8_t>(i % 3));
  for (std::uint32_t r = 0; r < ids.size(); ++r) {
    ids[r] = r == 0 ? -1 : static_cast<std::int32_t>((i + r) % 100);
    weights[r] = static_cast<float>(i % 16) / 16.0f;
  }
  log.push(RouteRecord{i, i % 2, tokens, 3, 0, 0}, ids.data(), weights.data(), admit.data());
}

// Checks the records of `data` and returns the number of the next one. They are consecutive from `next`, but for gaps
// where allowed.
std::uint64_t check(const std::string& data, std::uint64_t next, bool gaps) {
  std::size_t at = 0;
  while (at < data.size()) {
    RouteRecord record;
    std::memcpy(&record, data.data() + at, sizeof(record));
    CHECK(gaps ? record.step_id >= next : record.step_id == next);
    const std::uint64_t i = record.step_id;
    CHECK(record.layer == i % 2 && record.num_tokens == i % 5 && record.top_k == 3);
    const std::size_t routes = record.num_tokens * 3;
    std::vector<std::uint16_t> halves(routes * 2);
    if (routes > 0) std::memcpy(halves.data(), data.data() + at + sizeof(record), routes * 4);
    for (std::size_t r = 0; r < routes; ++r) {
      CHECK(halves[r] == (r == 0 ? 0xffff : (i + r) % 100));
      const std::uint32_t bits = static_cast<std::uint32_t>(halves[routes + r]) << 16;
      float weight;
      std::memcpy(&weight, &bits, sizeof(weight));
      CHECK(weight == static_cast<float>(i % 16) / 16.0f);
    }
    for (std::size_t t = 0; t < record.num_tokens; ++t) {
      CHECK(data[at + sizeof(record) + routes * 4 + t] == static_cast<char>(i % 3));
    }
    at += (sizeof(record) + routes * 4 + record.num_tokens + 7) / 8 * 8;
    next = i + 1;
  }
  CHECK(at == data.size());
  return next;
}

void test_modes() {
  RouteLog log(4, 4096);
  CHECK(!log.wants(1, 1));
  log.set_mode(RouteLog::Mode::kSample, {1, 9});
  CHECK(log.wants(1, 64) && !log.wants(1, 65) && !log.wants(2, 1));
  log.set_mode(RouteLog::Mode::kAll, {});
  CHECK(log.wants(2, 65));
  log.set_mode(RouteLog::Mode::kOff, {1});
  CHECK(!log.wants(1, 1) && log.drain().empty());
}

void test_a_full_ring_drops() {
  RouteLog log(2, 500);
  log.set_mode(RouteLog::Mode::kAll, {});
  std::uint32_t i = 0;
  while (log.num_dropped() == 0) push(log, i++);
  CHECK(check(log.drain(), 0, false) == i - 1);
  push(log, i);  // there is room again
  CHECK(check(log.drain(), i, false) == i + 1);
}

void test_reader_beside_writer() {
  RouteLog log(2, 1009);
  log.set_mode(RouteLog::Mode::kAll, {});
  constexpr std::uint32_t kCount = 20000;
  std::thread writer([&] {
    for (std::uint32_t i = 0; i < kCount; ++i) push(log, i);
  });
  std::uint64_t next = 0;
  for (int i = 0; i < 2000; ++i) next = check(log.drain(), next, true);
  writer.join();
  next = check(log.drain(), next, true);
  CHECK(next <= kCount);
}

}  // namespace

int main() {
  test_modes();
  test_a_full_ring_drops();
  test_reader_beside_writer();
  return 0;
}
