#include "device_client.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu_server.h"

namespace ft {
namespace {

// Work below this is not worth waking the pool for.
constexpr std::int64_t kParallelBytes = 512 * 1024;
constexpr std::int64_t kCopyGrainBytes = 128 * 1024;

void copy_bytes(WorkerPool& pool, void* to, const void* from, std::int64_t bytes) {
  if (bytes < kParallelBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  pool.parallel_for(bytes, kCopyGrainBytes, [&](std::int64_t begin, std::int64_t end, int) {
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, end - begin);
  });
}

std::string seconds(std::int64_t ns) {
  std::string text = std::to_string(static_cast<double>(ns) / 1e9);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

}  // namespace

AnswerLate::AnswerLate(const char* party, int layer, std::int64_t timeout_ns)
    : std::runtime_error(std::string(party) + " did not answer expert layer " + std::to_string(layer) + " within " +
                         seconds(timeout_ns)) {}

struct DeviceClient::Call {
  int layer;
  int num_tokens;
  int top_k;
  const float* hidden;
  const std::int32_t* ids;
  const float* weights;
  const std::uint8_t* admit;
  float* out;

  std::int64_t num_routes() const { return static_cast<std::int64_t>(num_tokens) * top_k; }
};

DeviceClient::DeviceClient(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<ExpertStore> store,
                           std::shared_ptr<SharedSegment> slots, std::int64_t slot_stride_bytes,
                           std::shared_ptr<WorkerPool> pool, int spin_us, double wait_timeout_s, bool deterministic)
    : mailbox_(std::move(mailbox)),
      store_(std::move(store)),
      slots_(std::move(slots)),
      slot_stride_bytes_(slot_stride_bytes),
      num_slots_(slots_ && slot_stride_bytes > 0 ? static_cast<std::int64_t>(slots_->size_bytes()) / slot_stride_bytes
                                                 : 0),
      pool_(std::move(pool)),
      spin_us_(spin_us),
      timeout_ns_(static_cast<std::int64_t>(std::min(wait_timeout_s, 1e9) * 1e9)),
      deterministic_(deterministic) {
  const MailboxGeometry& g = mailbox_->geometry();
  check_store_matches("device client", *store_, g);
  if (spin_us < 0) throw std::invalid_argument("device client: spin_us " + std::to_string(spin_us) + " is negative");
  if (!(wait_timeout_s > 0.0)) {
    throw std::invalid_argument("device client: wait_timeout_s " + std::to_string(wait_timeout_s) + " is not above 0");
  }
  if (deterministic && g.route_rows == 0) {
    throw std::invalid_argument("device client: the mailbox has no rows per route, which deterministic needs");
  }
  if (slots_) {
    for (int layer = 0; layer < store_->num_layers(); ++layer) {
      if (slot_stride_bytes < store_->layout(layer).stride_bytes) {
        throw std::invalid_argument("device client: slot_stride_bytes " + std::to_string(slot_stride_bytes) +
                                    " is less than the " + std::to_string(store_->layout(layer).stride_bytes) +
                                    " of a record of layer " + std::to_string(layer));
      }
    }
  }
  const std::size_t max_routes = static_cast<std::size_t>(g.max_shared_tokens) * g.top_k;
  jobs_.reserve(mailbox_->max_entries());
  fills_.reserve(mailbox_->max_entries());
  if (!deterministic_) route_rows_.reset(new float[max_routes * g.hidden]);
  selected_.assign(max_routes, 0);
}

void DeviceClient::begin_step(std::uint64_t step_id) {
  step_id_ = step_id;
  counters_ = StepCounters{};
}

void DeviceClient::set_num_slots(std::int64_t num_slots) {
  const std::int64_t most = slots_ ? static_cast<std::int64_t>(slots_->size_bytes()) / slot_stride_bytes_ : 0;
  if (num_slots < 0 || num_slots > most) {
    throw std::invalid_argument("device client: num_slots " + std::to_string(num_slots) + " is not in 0.." +
                                std::to_string(most));
  }
  num_slots_ = num_slots;
}

void DeviceClient::forward(int layer, int num_tokens, int top_k, const float* hidden, const std::int32_t* ids,
                           const float* weights, const std::uint8_t* admit, float* out) {
  const Call call{layer, num_tokens, top_k, hidden, ids, weights, admit, out};
  validate(call);
  if (mailbox_->aborted()) throw MailboxAborted(mailbox_->abort_reason());
  if (num_tokens == 0) return;
  const std::uint32_t seq = publish(call);
  try {
    await(mailbox_->plan(), seq, "ExpertCache", AbortReason::kPlanLate, layer);
    LayerStamps::OfClient& stamps = mailbox_->stamps(layer).client;
    const auto stamp = [](std::atomic<std::int64_t>& ns) { ns.store(monotonic_ns(), std::memory_order_relaxed); };
    stamp(stamps.planned);
    const PlanHeader plan = mailbox_->plan_header();
    // With deterministic, both sides put their rows into one array: rows of different routes never overlap.
    float* route_rows = deterministic_ ? mailbox_->partial() : route_rows_.get();
    run_own_share(call, plan, route_rows);
    ExpertBatch batch{hidden, weights, route_rows, num_tokens, top_k, static_cast<std::int32_t>(geometry().hidden)};
    if (!deterministic_) combine_routes(*pool_, batch, selected_.data(), false, out);
    stamp(stamps.own);
    if (plan.num_cpu > 0) {
      await(mailbox_->part(), seq, "CpuExecutor", AbortReason::kPartialLate, layer);
      stamp(stamps.part);
    }
    if (deterministic_) {
      for (std::int64_t r = 0; r < call.num_routes(); ++r) selected_[r] = ids[r] >= 0;
      combine_routes(*pool_, batch, selected_.data(), false, out);
    } else if (plan.num_cpu > 0) {
      add_partial(call);
    }
  } catch (...) {
    // This publish is given up; the mailbox's payload may still be in use by a peer and cannot be written again.
    mailbox_->abort(AbortReason::kClientFailed);
    throw;
  }
}

void DeviceClient::validate(const Call& c) const {
  const MailboxGeometry& g = geometry();
  const auto fail = [](const std::string& what) { throw std::invalid_argument(what); };
  if (c.layer < 0 || c.layer >= static_cast<int>(g.num_layers)) {
    fail("layer " + std::to_string(c.layer) + " is not in 0.." + std::to_string(g.num_layers - 1));
  }
  if (c.num_tokens < 0 || c.num_tokens > static_cast<int>(g.max_shared_tokens)) {
    fail("hidden has " + std::to_string(c.num_tokens) + " tokens; the mailbox holds " +
         std::to_string(g.max_shared_tokens));
  }
  if (c.top_k < 1 || c.top_k > static_cast<int>(g.top_k)) {
    fail("ids has " + std::to_string(c.top_k) + " experts per token; the mailbox holds " + std::to_string(g.top_k));
  }
  for (std::int64_t r = 0; r < c.num_routes(); ++r) {
    if (c.ids[r] < -1 || c.ids[r] >= static_cast<std::int32_t>(g.num_experts)) {
      fail("ids[" + std::to_string(r / c.top_k) + ", " + std::to_string(r % c.top_k) + "] is " +
           std::to_string(c.ids[r]) + "; experts are 0.." + std::to_string(g.num_experts - 1) + ", padding is -1");
    }
  }
}

std::uint32_t DeviceClient::publish(const Call& c) {
  const std::uint32_t seq = mailbox_->req().load() + 1;
  RequestHeader& request = mailbox_->request();
  request.seq = seq;
  request.layer = static_cast<std::uint32_t>(c.layer);
  request.step_id = step_id_;
  request.num_tokens = static_cast<std::uint32_t>(c.num_tokens);
  request.top_k = static_cast<std::uint32_t>(c.top_k);
  request.flags = static_cast<std::uint32_t>(deterministic_ ? kDeterministic : kSplittable);
  const std::int64_t hidden_bytes = static_cast<std::int64_t>(c.num_tokens) * geometry().hidden * sizeof(float);
  copy_bytes(*pool_, mailbox_->hidden(), c.hidden, hidden_bytes);
  std::memcpy(mailbox_->ids(), c.ids, c.num_routes() * sizeof(std::int32_t));
  std::memcpy(mailbox_->weights(), c.weights, c.num_routes() * sizeof(float));
  std::memcpy(mailbox_->admit(), c.admit, c.num_tokens);
  LayerStamps::OfClient& stamps = mailbox_->stamps(c.layer).client;
  stamps.published.store(monotonic_ns(), std::memory_order_relaxed);
  stamps.seq.store(seq, std::memory_order_relaxed);
  mailbox_->req().publish(seq);
  return seq;
}

void DeviceClient::await(Word& word, std::uint32_t seq, const char* party, AbortReason late, int layer) {
  const auto ready = [&] { return word.load() == seq || mailbox_->aborted(); };
  const bool in_time = word.bell.wait(ready, spin_us_, timeout_ns_);
  if (mailbox_->aborted()) throw MailboxAborted(mailbox_->abort_reason());
  if (!in_time) {
    mailbox_->abort(late);
    throw AnswerLate(party, layer, timeout_ns_);
  }
}

std::byte* DeviceClient::slot(std::int32_t index, int layer) {
  if (index >= num_slots_) {
    throw std::runtime_error("ExpertCache named slot " + std::to_string(index) + " in expert layer " +
                             std::to_string(layer) + "; the arena has " + std::to_string(num_slots_));
  }
  return slots_->data() + index * slot_stride_bytes_;
}

// Copies every admitted record into its slot, all of them in one parallel section.
void DeviceClient::fill_slots(int layer, const PlanHeader& plan) {
  const RecordLayout& layout = store_->layout(layer);
  const std::int64_t bytes = layout.num_tiles * layout.tile_stride_bytes;
  fills_.clear();
  const PlanEntry* fetches = mailbox_->entries() + plan.num_hits;
  for (std::uint32_t i = 0; i < plan.num_fetches; ++i) {
    if (fetches[i].destination_slot >= 0) {
      slot(fetches[i].destination_slot, layer);
      fills_.push_back(&fetches[i]);
    }
  }
  const std::int64_t count = static_cast<std::int64_t>(fills_.size());
  if (count == 0) return;
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const PlanEntry& fill = *fills_[begin / bytes];
      const std::int64_t offset = begin % bytes;
      const std::int64_t size = std::min(end - begin, bytes - offset);
      std::memcpy(slot(fill.destination_slot, layer) + offset, store_->record(layer, fill.expert) + offset, size);
      begin += size;
    }
  };
  if (count * bytes < kParallelBytes) {
    copy(0, count * bytes);
  } else {
    pool_->parallel_for(count * bytes, kCopyGrainBytes,
                        [&](std::int64_t begin, std::int64_t end, int) { copy(begin, end); });
  }
}

// Hits from their slots (or in place), fetches from the slot they have just filled, or from the store.
void DeviceClient::run_own_share(const Call& c, const PlanHeader& plan, float* route_rows) {
  const std::uint32_t num_own = plan.num_hits + plan.num_fetches;
  bool sound = plan.num_entries() <= mailbox_->entry_room();
  for (std::uint32_t i = 0; sound && i < num_own; ++i) {
    sound = is_sound(mailbox_->entries()[i], mailbox_->routes(), store_->num_experts(),
                     store_->layout(c.layer).num_tiles, c.num_routes());
  }
  if (!sound) throw std::runtime_error("ExpertCache sent a plan that does not fit its publish");
  fill_slots(c.layer, plan);
  jobs_.clear();
  std::memset(selected_.data(), 0, c.num_routes());
  const RecordLayout& layout = store_->layout(c.layer);
  const PlanEntry* entries = mailbox_->entries();
  const std::int32_t* routes = mailbox_->routes();
  for (std::uint32_t i = 0; i < num_own; ++i) {
    const PlanEntry& e = entries[i];
    const std::int32_t from = e.source_slot >= 0 ? e.source_slot : e.destination_slot;
    const std::byte* record = from >= 0 ? slot(from, c.layer) : store_->record(c.layer, e.expert);
    jobs_.push_back(ExpertJob{record, &layout, routes + e.first_route, e.num_routes, e.first_tile, e.num_tiles});
    for (std::int32_t r = e.first_route; r < e.first_route + e.num_routes; ++r) selected_[routes[r]] = 1;
  }
  if (!jobs_.empty()) {
    const ExpertBatch batch{c.hidden,     c.weights, route_rows,
                            c.num_tokens, c.top_k,   static_cast<std::int32_t>(geometry().hidden)};
    run_expert_jobs(*pool_, jobs_, batch, deterministic_);
  }
  counters_.hits += plan.num_hits;
  counters_.fetches += plan.num_fetches;
  counters_.cpu += plan.num_cpu - plan.num_split;
  counters_.admitted += plan.num_admitted;
  counters_.evicted += plan.num_evicted;
  counters_.fetched_bytes += std::llround(plan.fetched_records(layout.num_tiles) * layout.stride_bytes);
  counters_.cpu_bytes += std::llround(plan.cpu_records(layout.num_tiles) * layout.stride_bytes);
  counters_.layer_steps += 1;
}

void DeviceClient::add_partial(const Call& c) {
  const std::int64_t count = static_cast<std::int64_t>(c.num_tokens) * geometry().hidden;
  const float* partial = mailbox_->partial();
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) c.out[i] += partial[i];
  };
  if (count * static_cast<std::int64_t>(sizeof(float)) < kParallelBytes) {
    add(0, count);
  } else {
    pool_->parallel_for(count, kCopyGrainBytes / sizeof(float),
                        [&](std::int64_t begin, std::int64_t end, int) { add(begin, end); });
  }
}

}  // namespace ft
