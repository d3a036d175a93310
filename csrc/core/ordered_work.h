// Work items of one section that depend on earlier ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace ft::detail {

// Counts finished items of one kind. Items are handed out in order, so whoever waits here waits for items that other
// workers are busy with: no barrier, and nobody is idle while there is work that can be done. Bodies must not throw.
class alignas(64) Countdown {
 public:
  void done() { finished_.fetch_add(1, std::memory_order_release); }

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

// The bytes begin to come into the second-level cache.
inline void prefetch_range(const void* p, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + line, 0, 2);
}

}  // namespace ft::detail
