// Work items of one section that depend on earlier ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "work_queue.h"

namespace ft::detail {

// Counts finished items of one kind. Items are handed out in order, so whoever waits here waits for items that other
// workers are busy with: no barrier, and nobody is idle while there is work that can be done. Bodies must not throw.
class alignas(64) Countdown {
 public:
  // How many are done with this one. What the others wrote before their done() is visible to the last one.
  std::int64_t done() { return finished_.fetch_add(1, std::memory_order_acq_rel) + 1; }

  // Until `count` items are done. What they wrote is visible afterwards.
  void wait(std::int64_t count) const {
    if (finished_.load(std::memory_order_acquire) >= count) return;
    for (int spins = 0; finished_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < kSpins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        std::this_thread::yield();  // fewer cores than workers: the one waited for may not be running
      }
    }
  }

 private:
  static constexpr int kSpins = 256;
  std::atomic<std::int64_t> finished_{0};
};

// Runs items until none is left. Each worker takes its next item before it runs the one it has: run(item, soon) calls
// soon() once, when the memory that the next one reads should begin to arrive, and prefetch(next) sees to that. Items
// that a worker holds are in ascending order and depend on lower ones only, so the lowest unfinished one is never
// stuck.
template <typename Prefetch, typename Run>
void run_ahead(WorkQueue& queue, const Prefetch& prefetch, const Run& run) {
  std::int64_t item = queue.take();
  if (item >= 0) prefetch(item);
  while (item >= 0) {
    const std::int64_t next = queue.take();
    run(item, [&] {
      if (next >= 0) prefetch(next);
    });
    item = next;
  }
}

// The bytes begin to come into the second-level cache.
inline void prefetch_range(const void* p, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + line, 0, 2);
}

}  // namespace ft::detail
