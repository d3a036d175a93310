// A single-producer single-consumer ring of 64-byte entries in shared memory.
#pragma once

#include <cstring>
#include <type_traits>

#include "futex.h"

namespace ft {

inline constexpr std::size_t kRingEntryBytes = 64;

// In shared memory; the entries follow. head and tail count modulo 2^32; the capacity is a power of two, so that
// positions stay consistent when they wrap.
struct RingControl {
  alignas(kLineBytes) std::atomic<std::uint32_t> head{0};  // written by the producer: entries ever pushed
  alignas(kLineBytes) std::atomic<std::uint32_t> tail{0};  // written by the consumer: entries ever taken
  alignas(kLineBytes) Bell bell;                           // the consumer sleeps here
};
static_assert(sizeof(RingControl) == 3 * kLineBytes);

// A view; copies refer to the same ring.
template <class Entry>
class Ring {
  static_assert(sizeof(Entry) == kRingEntryBytes && std::is_trivially_copyable_v<Entry>);

 public:
  static constexpr std::size_t required_bytes(std::uint32_t capacity) {
    return sizeof(RingControl) + static_cast<std::size_t>(capacity) * kRingEntryBytes;
  }

  // `base` is aligned to kLineBytes and holds a constructed RingControl; capacity is a power of two.
  Ring(std::byte* base, std::uint32_t capacity)
      : control_(reinterpret_cast<RingControl*>(base)), entries_(base + sizeof(RingControl)), capacity_(capacity) {}

  // Producer only. False when the ring is full.
  bool try_push(const Entry& entry) {
    const std::uint32_t head = control_->head.load(std::memory_order_relaxed);
    if (head - control_->tail.load(std::memory_order_acquire) == capacity_) return false;
    std::memcpy(at(head), &entry, sizeof(Entry));
    control_->head.store(head + 1, std::memory_order_seq_cst);
    control_->bell.ring();
    return true;
  }

  // Consumer only. False when the ring is empty.
  bool try_pop(Entry& entry) {
    const std::uint32_t tail = control_->tail.load(std::memory_order_relaxed);
    if (control_->head.load(std::memory_order_seq_cst) == tail) return false;
    std::memcpy(&entry, at(tail), sizeof(Entry));
    control_->tail.store(tail + 1, std::memory_order_release);
    return true;
  }

  bool empty() const {
    return control_->head.load(std::memory_order_seq_cst) == control_->tail.load(std::memory_order_seq_cst);
  }

  Bell& bell() { return control_->bell; }

 private:
  std::byte* at(std::uint32_t position) const { return entries_ + (position & (capacity_ - 1)) * kRingEntryBytes; }

  RingControl* control_;
  std::byte* entries_;
  std::uint32_t capacity_;
};

}  // namespace ft
