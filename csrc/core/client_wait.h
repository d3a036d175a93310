// How a server waits for work that may come from a client that rings no bells (a GPU).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "futex.h"

namespace ft {

// Without a device client: spin, then sleep on the bell, as everywhere. With one, nobody may ring, so the server spins
// while work is likely (for spin_us after a notice and after each piece of work) and then naps. A nap lasts a sixteenth
// of the time since, so that work that comes unannounced is late by that fraction of the pause before it; an idle
// engine naps 10 ms at a time. A bell or a notice ends a nap at once.
//
// notice() and rest() may be called from any thread; wait() and worked() by the server's thread.
class ClientWait {
 public:
  ClientWait(bool device_client, int spin_us)
      : device_client_(device_client),
        spin_us_(spin_us),
        spin_ns_(static_cast<std::int64_t>(spin_us) * 1000),
        spin_until_ns_(monotonic_ns()) {}

  bool device_client() const { return device_client_; }

  // Work is coming: spin for spin_us at least from now on.
  void notice(Bell& bell) {
    worked();
    bell.ring();
  }

  // No work is likely before the next notice. (Work that comes all the same is found.)
  void rest() { spin_until_ns_.store(monotonic_ns(), std::memory_order_seq_cst); }

  // A piece of work was done; the next may follow at once.
  void worked() { spin_until_ns_.store(monotonic_ns() + spin_ns_, std::memory_order_seq_cst); }

  // Returns when ready() is true. Its state is loaded with seq_cst, and stored so by all but the device client.
  template <class Ready>
  void wait(Bell& bell, const Ready& ready) {
    if (!device_client_) {
      bell.wait(ready, spin_us_, -1);
      return;
    }
    while (!ready()) {
      const std::int64_t until_ns = spin_until_ns_.load(std::memory_order_seq_cst);
      const std::int64_t over_ns = monotonic_ns() - until_ns;
      if (over_ns < 0) {
        for (int i = 0; i < 32 && !ready(); ++i) cpu_relax();
        continue;
      }
      const auto wanted = [&] { return ready() || spin_until_ns_.load(std::memory_order_seq_cst) != until_ns; };
      bell.wait(wanted, 0, std::clamp((over_ns + spin_ns_) / 16, kShortestNapNs, kLongestNapNs));
    }
  }

 private:
  static constexpr std::int64_t kShortestNapNs = 50'000;
  static constexpr std::int64_t kLongestNapNs = 10'000'000;

  const bool device_client_;
  const int spin_us_;
  const std::int64_t spin_ns_;
  std::atomic<std::int64_t> spin_until_ns_;
};

}  // namespace ft
