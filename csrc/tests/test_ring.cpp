// The ring against a deque, over the wrap of its counters, and between two threads.
#include <deque>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "ring.h"

namespace {

struct Entry {
  std::uint64_t number;
  std::uint64_t copies[7];
};

Entry make_entry(std::uint64_t number) {
  Entry entry{number, {}};
  for (std::uint64_t& copy : entry.copies) copy = number * 3;
  return entry;
}

struct Storage {
  explicit Storage(std::uint32_t capacity, std::uint32_t first)
      : bytes(new (std::align_val_t(ft::kLineBytes)) std::byte[ft::Ring<Entry>::required_bytes(capacity)]) {
    auto* control = new (bytes) ft::RingControl;
    control->head.store(first);
    control->tail.store(first);
  }
  ~Storage() { ::operator delete[](bytes, std::align_val_t(ft::kLineBytes)); }
  std::byte* bytes;
};

void test_random_operations() {
  std::mt19937 random(1);
  for (const std::uint32_t capacity : {1u, 2u, 16u}) {
    Storage storage(capacity, 0xffffff00u);  // wraps after 256 entries
    ft::Ring<Entry> ring(storage.bytes, capacity);
    std::deque<std::uint64_t> model;
    std::uint64_t next = 0;
    for (int i = 0; i < 5000; ++i) {
      if (random() % 2) {
        const bool pushed = ring.try_push(make_entry(next));
        CHECK(pushed == (model.size() < capacity));
        if (pushed) model.push_back(next++);
      } else {
        Entry entry;
        const bool popped = ring.try_pop(entry);
        CHECK(popped == !model.empty());
        if (popped) {
          CHECK(entry.number == model.front() && entry.copies[6] == entry.number * 3);
          model.pop_front();
        }
      }
      CHECK(ring.empty() == model.empty());
    }
    CHECK(next > 256);
  }
}

void test_two_threads() {
  constexpr std::uint64_t kCount = 20000;
  for (const int spin_us : {0, 5}) {
    Storage storage(4, 0xfffff000u);
    ft::Ring<Entry> ring(storage.bytes, 4);
    std::thread producer([&] {
      for (std::uint64_t i = 0; i < kCount;) {
        if (ring.try_push(make_entry(i))) {
          ++i;
        } else {
          std::this_thread::yield();
        }
      }
    });
    for (std::uint64_t i = 0; i < kCount; ++i) {
      ring.bell().wait([&] { return !ring.empty(); }, spin_us, -1);
      Entry entry;
      CHECK(ring.try_pop(entry));
      CHECK(entry.number == i && entry.copies[0] == i * 3);
    }
    producer.join();
    CHECK(ring.empty());
  }
}

}  // namespace

int main() {
  test_random_operations();
  test_two_threads();
  return 0;
}
