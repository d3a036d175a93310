// Waiting on shared memory: spin, then sleep on a futex that works between processes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ft {

// Words of different writers lie this far apart: two 64-byte lines, because adjacent lines are prefetched in pairs.
inline constexpr std::size_t kLineBytes = 128;

std::int64_t monotonic_ns();

// Sleeps while word == expected, at most timeout_ns (< 0: no limit). May return early; the caller checks again.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);
void futex_wake_all(const std::atomic<std::uint32_t>& word);

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// An event count. A waiter sleeps on the ticket, never on the state it waits for, so several parties can wake it (the
// writer of a word, an abort, a local stop) and the word keeps its single writer.
//
// Why no wake-up is lost: a waker changes the state and then reads `sleepers_`; a waiter raises `sleepers_` and then
// reads the state. All four are seq_cst, so at least one of the two sees the other. A waiter that reads the old state
// before the waker raises the ticket finds the ticket changed when it tries to sleep.
//
// Requirement: the state tested by `ready` is stored and loaded with seq_cst.
class Bell {
 public:
  // To be called after the state changed. No system call when nobody sleeps.
  void ring() {
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      ticket_.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(ticket_);
    }
  }

  // Returns true once ready() is true, false when timeout_ns (< 0: no limit) passed first. Spins for spin_us at most.
  template <class Ready>
  bool wait(const Ready& ready, int spin_us, std::int64_t timeout_ns) {
    if (ready()) return true;
    const std::int64_t start = spin_us > 0 || timeout_ns >= 0 ? monotonic_ns() : 0;
    if (spin_us > 0) {
      std::int64_t spin_ns = static_cast<std::int64_t>(spin_us) * 1000;
      if (timeout_ns >= 0 && timeout_ns < spin_ns) spin_ns = timeout_ns;
      do {
        for (int i = 0; i < 32; ++i) {
          cpu_relax();
          if (ready()) return true;
        }
      } while (monotonic_ns() - start < spin_ns);
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    bool is_ready = false;
    for (;;) {
      const std::uint32_t ticket = ticket_.load(std::memory_order_seq_cst);
      is_ready = ready();
      if (is_ready) break;
      std::int64_t left = -1;
      if (timeout_ns >= 0) {
        left = timeout_ns - (monotonic_ns() - start);
        if (left <= 0) break;
      }
      futex_wait(ticket_, ticket, left);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return is_ready;
  }

 private:
  std::atomic<std::uint32_t> ticket_{0};
  // Stays raised when a sleeping process is killed; that costs wakers a system call and nothing else.
  std::atomic<std::uint32_t> sleepers_{0};
};

// A sequence word with one writer, and the bell of those who wait for it on a line of its own.
struct Word {
  alignas(kLineBytes) std::atomic<std::uint32_t> value{0};
  alignas(kLineBytes) Bell bell;

  std::uint32_t load() const { return value.load(std::memory_order_seq_cst); }
  // Everything written before is visible to whoever sees the new value.
  void publish(std::uint32_t next) {
    value.store(next, std::memory_order_seq_cst);
    bell.ring();
  }
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "words are shared between processes");
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "a futex word is 32 bits");
static_assert(sizeof(Word) == 2 * kLineBytes);

}  // namespace ft
