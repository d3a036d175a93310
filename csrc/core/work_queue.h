// Numbered work items handed out to the workers of one section.
#pragma once

#include <atomic>
#include <cstdint>

namespace ft::detail {

// Below this many multiply-adds, waking the pool costs more than it saves: the calling thread does it alone.
inline constexpr std::int64_t kSoloWork = 1 << 17;

class WorkQueue {
 public:
  explicit WorkQueue(std::int64_t count) : count_(count) {}

  // The next item, or -1 when none is left.
  std::int64_t take() {
    const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < count_ ? item : -1;
  }

 private:
  const std::int64_t count_;
  alignas(64) std::atomic<std::int64_t> next_{0};
};

}  // namespace ft::detail
