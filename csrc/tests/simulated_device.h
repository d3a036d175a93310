// Plays a GPU: a client that knows the mailbox's bytes and offsets, rings no bell, and only polls.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "expert_bank.h"
#include "mailbox.h"

namespace ft_test {

// One thread. Every check of what the servers wrote is a CHECK.
class SimulatedDevice {
 public:
  SimulatedDevice(const Bank& bank, std::shared_ptr<ft::SharedSegment> mailbox,
                  std::shared_ptr<ft::SharedSegment> arena)
      : bank_(bank), segment_(std::move(mailbox)), arena_(std::move(arena)) {
    const auto* header = reinterpret_cast<const ft::MailboxHeader*>(segment_->data());
    offsets_ = header->offsets;
    seq_ = word(offsets_.req).load(std::memory_order_relaxed);
  }

  // One layer. False when the mailbox was aborted; `out` is undefined then.
  bool forward(const Batch& batch, std::uint32_t flags, std::uint64_t step_id, std::vector<float>& out) {
    publish(batch, flags, step_id);
    if (!await(offsets_.plan)) return false;
    const ft::PlanHeader plan = *at<ft::PlanHeader>(offsets_.plan_header);
    CHECK(plan.seq == seq_);
    CHECK((flags & ft::kDeviceOnly) == 0 || plan.num_cpu == 0);
    const auto* entries = at<ft::PlanEntry>(offsets_.entries);
    check_residency(batch.layer, plan, entries);
    fill_slots(batch.layer, plan, entries);
    std::vector<double> sums(batch.num_tokens * kHidden, 0.0);
    for (std::uint32_t i = 0; i < plan.num_hits + plan.num_fetches; ++i) run_entry(batch, entries[i], sums.data());
    if (plan.num_cpu > 0) {
      if (!await(offsets_.part)) return false;
      add_cpu_share(batch, plan, entries, (flags & ft::kDeterministic) != 0, sums.data());
    }
    out.assign(sums.begin(), sums.end());
    num_cpu_ += plan.num_cpu;
    num_own_ += plan.num_hits + plan.num_fetches;
    num_split_ += plan.num_split;
    CHECK((flags & ft::kSplittable) != 0 || plan.num_split == 0);
    return true;
  }

  // What a kernel does whose wait took too long.
  void raise_abort(ft::AbortReason reason) {
    word(offsets_.abort).store(static_cast<std::uint32_t>(reason), std::memory_order_release);
  }

  // A copier's look at the residency of a layer, at any time and from any thread.
  int count_resident(int layer) const {
    int count = 0;
    for (int expert = 0; expert < kExperts; ++expert) count += slot_of(layer, expert) >= 0;
    return count;
  }

  std::int64_t num_cpu() const { return num_cpu_; }
  std::int64_t num_own() const { return num_own_; }
  std::int64_t num_split() const { return num_split_; }

 private:
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(segment_->data() + offset);
  }
  std::atomic_ref<std::uint32_t> word(std::uint64_t offset) const {
    return std::atomic_ref<std::uint32_t>(*at<std::uint32_t>(offset));
  }
  std::int32_t slot_of(int layer, int expert) const {
    std::int32_t& entry = at<std::int32_t>(offsets_.slot_of)[layer * kExperts + expert];
    return std::atomic_ref<std::int32_t>(entry).load(std::memory_order_relaxed);
  }
  std::byte* slot(std::int32_t index) const {
    CHECK(arena_ && (index + 1) * bank_.layout.stride_bytes <= static_cast<std::int64_t>(arena_->size_bytes()));
    return arena_->data() + index * bank_.layout.stride_bytes;
  }

  void publish(const Batch& batch, std::uint32_t flags, std::uint64_t step_id) {
    ++seq_;
    if ((flags & ft::kDeviceOnly) == 0) {
      std::memcpy(at<float>(offsets_.hidden), batch.hidden.data(), batch.hidden.size() * sizeof(float));
    }
    std::memcpy(at<float>(offsets_.weights), batch.weights.data(), batch.weights.size() * sizeof(float));
    std::memcpy(at<std::int32_t>(offsets_.ids), batch.ids.data(), batch.ids.size() * sizeof(std::int32_t));
    std::memcpy(at<std::uint8_t>(offsets_.admit), batch.admit.data(), batch.admit.size());
    auto* request = at<ft::RequestHeader>(offsets_.request);
    *request = ft::RequestHeader{seq_,    static_cast<std::uint32_t>(batch.layer),
                                 step_id, static_cast<std::uint32_t>(batch.num_tokens),
                                 kTopK,   flags | ft::kDeviceClient};
    word(offsets_.req).store(seq_, std::memory_order_release);
  }

  bool await(std::uint64_t offset) const {
    while (word(offset).load(std::memory_order_acquire) != seq_) {
      if (word(offsets_.abort).load(std::memory_order_acquire) != 0) return false;
      std::this_thread::yield();
    }
    return word(offsets_.abort).load(std::memory_order_acquire) == 0;
  }

  // The map lists exactly the sources of the plan's layer, and none of the slots that the plan gave away.
  void check_residency(int layer, const ft::PlanHeader& plan, const ft::PlanEntry* entries) const {
    for (std::uint32_t i = 0; i < plan.num_entries(); ++i) {
      CHECK(slot_of(layer, entries[i].expert) == entries[i].source_slot);
      if (entries[i].destination_slot < 0) continue;
      for (int l = 0; l < kLayers; ++l) {
        for (int e = 0; e < kExperts; ++e) CHECK(slot_of(l, e) != entries[i].destination_slot);
      }
    }
  }

  void fill_slots(int layer, const ft::PlanHeader& plan, const ft::PlanEntry* entries) const {
    for (std::uint32_t i = plan.num_hits; i < plan.num_hits + plan.num_fetches; ++i) {
      if (entries[i].destination_slot < 0) continue;
      std::memcpy(slot(entries[i].destination_slot), bank_.store->record(layer, entries[i].expert),
                  bank_.layout.stride_bytes);
    }
  }

  void run_entry(const Batch& batch, const ft::PlanEntry& entry, double* sums) const {
    const std::int32_t from = entry.source_slot >= 0 ? entry.source_slot : entry.destination_slot;
    const std::byte* record = from >= 0 ? slot(from) : bank_.store->record(batch.layer, entry.expert);
    const auto* routes = at<std::int32_t>(offsets_.routes) + entry.first_route;
    for (std::int32_t r = 0; r < entry.num_routes; ++r) {
      const int token = routes[r] / kTopK;
      CHECK(batch.ids[routes[r]] == entry.expert);
      bank_.add_tiles(record, entry.first_tile, entry.num_tiles > 0 ? entry.num_tiles : bank_.layout.num_tiles,
                      &batch.hidden[token * kHidden], batch.weights[routes[r]], sums + token * kHidden);
    }
  }

  void add_cpu_share(const Batch& batch, const ft::PlanHeader& plan, const ft::PlanEntry* entries, bool deterministic,
                     double* sums) const {
    const float* partial = at<float>(offsets_.partial);
    if (!deterministic) {
      for (int i = 0; i < batch.num_tokens * kHidden; ++i) sums[i] += partial[i];
      return;
    }
    const auto* routes = at<std::int32_t>(offsets_.routes);
    for (std::uint32_t i = plan.num_hits + plan.num_fetches; i < plan.num_entries(); ++i) {
      for (std::int32_t r = entries[i].first_route; r < entries[i].first_route + entries[i].num_routes; ++r) {
        const float* row = partial + static_cast<std::ptrdiff_t>(routes[r]) * kHidden;
        for (int h = 0; h < kHidden; ++h) sums[routes[r] / kTopK * kHidden + h] += row[h];
      }
    }
  }

  const Bank& bank_;
  std::shared_ptr<ft::SharedSegment> segment_;
  std::shared_ptr<ft::SharedSegment> arena_;
  ft::MailboxOffsets offsets_;
  std::uint32_t seq_;
  std::int64_t num_cpu_ = 0;
  std::int64_t num_own_ = 0;
  std::int64_t num_split_ = 0;
};

}  // namespace ft_test
