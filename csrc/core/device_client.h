// The CPU device's side of the mailbox: publishes a layer, runs hits and fetches, adds CpuExecutor's share.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "expert_kernels.h"
#include "expert_store.h"
#include "mailbox.h"
#include "shared_segment.h"
#include "worker_pool.h"

namespace ft {

// The mailbox is dead. what() is "aborted", with ": reason" where nobody asked for it.
class MailboxAborted : public std::runtime_error {
 public:
  explicit MailboxAborted(AbortReason reason)
      : std::runtime_error(reason == AbortReason::kRequested ? std::string("aborted")
                                                             : std::string("aborted: ") + abort_reason_text(reason)) {}
};

// A word did not come in time. what() begins with the late actor's name.
class AnswerLate : public std::runtime_error {
 public:
  AnswerLate(const char* party, int layer, std::int64_t timeout_ns);
};

// hits + fetches + cpu are distinct experts: a split record counts as a fetch, and in bytes by its shares.
struct StepCounters {
  std::int64_t hits = 0, fetches = 0, cpu = 0, admitted = 0, evicted = 0;
  std::int64_t fetched_bytes = 0, cpu_bytes = 0, layer_steps = 0;
};

// One thread at a time.
class DeviceClient {
 public:
  // slots: the arena, or null when no plan will name a slot. Throws std::invalid_argument when the parts do not fit.
  DeviceClient(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<ExpertStore> store,
               std::shared_ptr<SharedSegment> slots, std::int64_t slot_stride_bytes, std::shared_ptr<WorkerPool> pool,
               int spin_us, double wait_timeout_s, bool deterministic);

  const MailboxGeometry& geometry() const { return mailbox_->geometry(); }

  void begin_step(std::uint64_t step_id);

  // Slots that plans may name from now on; between steps. Throws std::invalid_argument beyond the segment.
  void set_num_slots(std::int64_t num_slots);

  // out[T, H] = sum over k of weights[t, k] * FFN(ids[t, k])(hidden[t]); hidden [T, H], ids and weights [T, K], admit
  // [T]. Throws std::invalid_argument (nothing was published), AnswerLate or MailboxAborted; after the last two the
  // mailbox is dead and `out` undefined.
  void forward(int layer, int num_tokens, int top_k, const float* hidden, const std::int32_t* ids, const float* weights,
               const std::uint8_t* admit, float* out);

  const StepCounters& step_counters() const { return counters_; }

 private:
  struct Call;
  void validate(const Call& call) const;
  std::uint32_t publish(const Call& call);
  void await(Word& word, std::uint32_t seq, const char* party, AbortReason late, int layer);
  void run_own_share(const Call& call, const PlanHeader& plan, float* route_rows);
  void fill_slots(int layer, const PlanHeader& plan);
  void add_partial(const Call& call);
  std::byte* slot(std::int32_t index, int layer);

  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<ExpertStore> store_;
  std::shared_ptr<SharedSegment> slots_;
  const std::int64_t slot_stride_bytes_;
  std::int64_t num_slots_;
  std::shared_ptr<WorkerPool> pool_;
  const int spin_us_;
  const std::int64_t timeout_ns_;
  const bool deterministic_;

  std::uint64_t step_id_ = 0;
  StepCounters counters_;
  std::vector<ExpertJob> jobs_;
  std::vector<const PlanEntry*> fills_;
  std::unique_ptr<float[]> route_rows_;  // [max_shared_tokens * top_k, hidden]; not with deterministic
  std::vector<std::uint8_t> selected_;   // [max_shared_tokens * top_k]
};

}  // namespace ft
