#include "cache_server.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace ft {
namespace {

double checked_fraction(double fraction) {
  if (!(fraction >= 0.0 && fraction <= 1.0)) {
    throw std::invalid_argument("cache server: fetch_fraction " + std::to_string(fraction) + " is not in 0..1");
  }
  return fraction;
}

}  // namespace

CacheServer::CacheServer(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<SlotTable> slots, double fetch_fraction,
                         bool in_place, int spin_us, std::vector<std::int64_t> record_bytes, bool device_client,
                         std::vector<std::uint8_t> fetchable, std::vector<std::int32_t> num_tiles)
    : mailbox_(std::move(mailbox)),
      slots_(std::move(slots)),
      fetch_fraction_(checked_fraction(fetch_fraction)),
      in_place_(in_place),
      record_bytes_(std::move(record_bytes)),
      num_tiles_(num_tiles.empty() ? std::vector<std::int32_t>(mailbox_->geometry().num_layers, 1)
                                   : std::move(num_tiles)),
      wait_(device_client, spin_us),
      planner_(mailbox_->geometry(), mailbox_->max_entries(), std::move(fetchable)),
      route_log_(mailbox_->geometry().num_layers, kRouteLogBytes),
      lookahead_(static_cast<int>(mailbox_->geometry().num_layers)),
      layers_(static_cast<std::size_t>(mailbox_->geometry().num_layers) * 3) {
  const MailboxGeometry& g = mailbox_->geometry();
  if (slots_->num_layers() != static_cast<int>(g.num_layers) ||
      slots_->num_experts() != static_cast<int>(g.num_experts)) {
    throw std::invalid_argument("cache server: the slot table is for " + std::to_string(slots_->num_layers()) +
                                " layers of " + std::to_string(slots_->num_experts()) + " experts, the mailbox for " +
                                std::to_string(g.num_layers) + " of " + std::to_string(g.num_experts));
  }
  if (record_bytes_.size() != g.num_layers) {
    throw std::invalid_argument("cache server: record_bytes has " + std::to_string(record_bytes_.size()) +
                                " entries for " + std::to_string(g.num_layers) + " layers");
  }
  if (num_tiles_.size() != g.num_layers) {
    throw std::invalid_argument("cache server: num_tiles has " + std::to_string(num_tiles_.size()) + " entries for " +
                                std::to_string(g.num_layers) + " layers");
  }
  for (const std::int32_t tiles : num_tiles_) {
    if (tiles < 1 || tiles > 0xffff) {
      throw std::invalid_argument("cache server: num_tiles " + std::to_string(tiles) + " is not in 1..65535");
    }
  }
  if (spin_us < 0) throw std::invalid_argument("cache server: spin_us " + std::to_string(spin_us) + " is negative");
}

CacheServer::~CacheServer() { stop(); }

void CacheServer::start() {
  std::lock_guard lock(lifecycle_);
  if (started_) throw std::logic_error("cache server: started before");
  slots_->acquire_owner();
  started_ = true;
  slots_->set_mirror(mailbox_->slot_of());
  show_slots();
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (...) {
    slots_->set_mirror(nullptr);
    slots_->release_owner();
    throw;
  }
}

void CacheServer::stop() {
  std::lock_guard lock(lifecycle_);
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  mailbox_->req().bell.ring();
  thread_.join();
  if (mailbox_->req().load() != mailbox_->plan().load()) mailbox_->abort();
  slots_->set_mirror(nullptr);
  slots_->invalidate_in_flight();
  in_flight_.set(0);
  slots_->release_owner();
}

void CacheServer::set_fetch_fraction(double fraction) {
  fetch_fraction_.store(checked_fraction(fraction), std::memory_order_relaxed);
  auto_split_.store(false, std::memory_order_seq_cst);
}

void CacheServer::set_auto_split(const SplitCosts& costs) {
  set_splits(costs);
  auto_split_.store(true, std::memory_order_seq_cst);
}

void CacheServer::watch_rates(const SplitCosts& costs) { set_splits(costs); }

void CacheServer::set_splits(const SplitCosts& costs) {
  auto next = std::make_unique<Splits>(costs);
  std::lock_guard lock(split_mutex_);
  next_splits_ = std::move(next);
  shown_split_ = next_splits_->decode.status();
  has_next_split_.store(true, std::memory_order_seq_cst);
}

void CacheServer::take_next_splits() {
  if (!has_next_split_.load(std::memory_order_relaxed)) return;
  std::unique_lock lock(split_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  splits_ = std::move(next_splits_);
  has_next_split_.store(false, std::memory_order_relaxed);
}

std::optional<SplitPlanner::Status> CacheServer::split_status() const {
  std::lock_guard lock(split_mutex_);
  return shown_split_;
}

// Null while the share is fixed.
SplitPlanner* CacheServer::current_split(const PublishView& publish) {
  if (!auto_split_.load(std::memory_order_relaxed)) return nullptr;
  take_next_splits();
  return splits_ != nullptr ? &splits_->of(publish.num_tokens) : nullptr;
}

void CacheServer::observe_split(const LayerTiming& timing) {
  if (splits_ == nullptr || timing.own_ns == 0) return;
  const SplitTiming split{.shares = previous_.shares,
                          .device_ns = static_cast<double>(timing.own_ns),
                          .wait_ns = static_cast<double>(timing.wait_ns),
                          .cpu_ns = static_cast<double>(timing.cpu_ns),
                          .start_ns = static_cast<double>(timing.start_ns),
                          .bus_busy = was_copied_};
  splits_->of(static_cast<int>(timing.num_tokens)).observe(split);
}

void CacheServer::show_split() {
  if (splits_ == nullptr) return;
  std::unique_lock lock(split_mutex_, std::try_to_lock);
  if (lock.owns_lock() && next_splits_ == nullptr) shown_split_ = splits_->decode.status();
}

Vacated CacheServer::vacate(int num_slots) {
  std::lock_guard lock(table_);
  Vacated vacated = slots_->vacate(num_slots);
  evicted_.add(vacated.num_evicted);
  show_slots();
  return vacated;
}

void CacheServer::finish_vacate() {
  std::lock_guard lock(table_);
  slots_->finish_vacate();
}

void CacheServer::cancel_vacate() {
  std::lock_guard lock(table_);
  slots_->cancel_vacate();
}

void CacheServer::grow(int num_slots) {
  std::lock_guard lock(table_);
  slots_->grow(num_slots);
}

void CacheServer::empty(int num_slots) {
  std::lock_guard lock(table_);
  slots_->empty(num_slots);
  show_slots();
}

void CacheServer::show_slots() {
  resident_.set(slots_->num_resident());
  in_flight_.set(slots_->num_in_flight());
}

std::vector<double> CacheServer::scores() {
  std::lock_guard lock(table_);
  return slots_->scores();
}

void CacheServer::serve() {
  pthread_setname_np(pthread_self(), "ft-cache");
  std::uint32_t answered = mailbox_->plan().load(), hinted = mailbox_->hint_answered();
  const auto ready = [&] {
    return mailbox_->req().load() != answered || mailbox_->hint().load() != hinted || mailbox_->aborted() ||
           stopping_.load(std::memory_order_seq_cst);
  };
  for (;;) {
    wait_.wait(mailbox_->req().bell, ready);
    if (mailbox_->aborted() || stopping_.load(std::memory_order_seq_cst)) return;
    try {
      if (mailbox_->req().load() != answered) {  // what is waited for comes first
        answered = mailbox_->req().load();
        if (!answer(answered)) return;
      } else {
        hinted = mailbox_->hint().load();
        answer_hint(hinted);
      }
      wait_.worked();
    } catch (...) {  // the client must not wait for this plan, and an exception must not leave the thread
      mailbox_->abort(AbortReason::kCacheFailed);
      return;
    }
  }
}

// False after a fault; the mailbox is aborted then.
bool CacheServer::answer(std::uint32_t seq) {
  const std::int64_t seen_ns = monotonic_ns();
  std::lock_guard lock(table_);  // taken by others for a change of capacity, and for a figure now and then
  __builtin_prefetch(mailbox_->ids());
  __builtin_prefetch(mailbox_->admit());
  const RequestHeader request = mailbox_->request();
  PlanHeader& header = mailbox_->plan_header();
  const PublishView publish{
      static_cast<int>(request.layer),
      static_cast<int>(request.num_tokens),
      static_cast<int>(request.top_k),
      mailbox_->ids(),
      mailbox_->admit(),
      (request.flags & kDeviceOnly) != 0,
      request.layer < record_bytes_.size() ? static_cast<double>(record_bytes_[request.layer]) : 0.0,
      (request.flags & (kSplittable | kDeterministic)) == kSplittable && request.layer < num_tiles_.size() &&
              request.num_tokens <= kDecodeTokens  // with more, part of a record is nothing
          ? num_tiles_[request.layer]
          : 1,
      take_ahead(request),
      (request.flags & kStaged) != 0};
  SplitPlanner* const split = current_split(publish);
  AbortReason refusal = AbortReason::kNone;
  const bool wants_rows = (request.flags & kDeterministic) != 0;
  if (request.seq != seq || (wants_rows && mailbox_->geometry().route_rows == 0)) {
    refusal = AbortReason::kBadPublish;
  } else if ((request.flags & kDeviceClient) != 0 && !wait_.device_client()) {
    refusal = AbortReason::kNoBell;  // this publish was found by chance
  } else {
    refusal = planner_.plan(publish, *slots_, fetch_fraction_.load(std::memory_order_relaxed), in_place_, header,
                            mailbox_->entries(), mailbox_->routes(), split);
  }
  if (refusal != AbortReason::kNone) {
    mailbox_->abort(refusal);
    return false;
  }
  header.seq = seq;
  if (route_log_.wants(request.layer, request.num_tokens)) {
    route_log_.push(
        RouteRecord{request.step_id, request.layer, request.num_tokens, static_cast<std::uint16_t>(request.top_k),
                    static_cast<std::uint16_t>(request.flags), 0},
        mailbox_->ids(), mailbox_->weights(), mailbox_->admit());
  }
  // The client may publish again, and so overwrite the request, as soon as it has the plan: nothing of it is read
  // below.
  const PlanHeader plan = header;
  if (request.num_tokens == 1 && request.top_k < kBriefPieces) mailbox_->write_brief(seq, request.top_k);
  mailbox_->plan().publish(seq);
  const std::int64_t planned_ns = monotonic_ns();
  CpuShare share{};
  share.step_id = request.step_id;
  share.seq = seq;
  share.layer = request.layer;
  share.num_tokens = request.num_tokens;
  share.top_k = request.top_k;
  share.flags = request.flags;
  share.first_entry = plan.num_hits + plan.num_fetches;
  share.num_entries = plan.num_cpu;
  // Shares are taken one by one: a full ring means nobody takes any.
  if (plan.num_cpu > 0 && !mailbox_->ring().try_push(share)) {
    mailbox_->abort(AbortReason::kPartialLate);
    return false;
  }
  // From here on everybody works, and the books can be kept. Who wants to read them waits for the lock.
  planner_.settle(*slots_);
  count(publish.layer, plan);
  plan_ns_.add(planned_ns - seen_ns);
  const LayerTiming timing = timing_of_previous(seen_ns);
  LayerStamps::OfCache& stamps = mailbox_->stamps(request.layer).cache;
  stamps.seen.store(seen_ns, std::memory_order_relaxed);
  stamps.planned.store(planned_ns, std::memory_order_relaxed);
  if (previous_.planned_ns != 0) {
    count_timing(timing);
    observe_split(timing);
    observe_idle(request, timing);
  }
  previous_ = PublishedPlan{seq,
                            request.layer,
                            request.num_tokens,
                            request.step_id,
                            plan.num_hits,
                            plan.num_fetches,
                            plan.num_cpu,
                            planned_ns,
                            publish.device_only ? LayerShares{} : planner_.shares()};
  if (split == nullptr) {
    take_next_splits();
    if (splits_ != nullptr) splits_->of(publish.num_tokens).follow(previous_.shares);
  }
  show_split();
  return true;
}

CacheServer::LookaheadStatus CacheServer::lookahead_status() const {
  std::lock_guard lock(table_);
  return {lookahead_.mean_accuracy(), lookahead_.idle_ns()};
}

// A hint may be seen before the publish of the layer in which it was made, and, when this thread was busy, after that
// of the layer that it is about: then it is too late.
void CacheServer::answer_hint(std::uint32_t seq) {
  std::lock_guard lock(table_);
  const HintRequest hint = mailbox_->hint_request();
  hints_.add(1);
  mailbox_->write_ahead(seq, choose_ahead(hint));
}

// The most probable of those that no slot has, if it is to be copied. Whether it would have been right is watched in
// any case.
std::int32_t CacheServer::choose_ahead(const HintRequest& hint) {
  const MailboxGeometry& g = mailbox_->geometry();
  if (!lookahead_on_.load(std::memory_order_relaxed) || in_place_ || hint.layer >= g.num_layers) return -1;
  Foretold& told = foretold(hint.layer);
  told = Foretold{};
  if (previous_.planned_ns != 0 && previous_.step_id == hint.step_id && previous_.layer >= hint.layer) return -1;
  const std::uint32_t count = std::min(hint.num_ids, kMaxHinted);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::int32_t expert = hint.ids[i];
    if (static_cast<std::uint32_t>(expert) >= g.num_experts) continue;
    const int layer = static_cast<int>(hint.layer);
    if (slots_->holds(layer, expert) || !planner_.is_fetchable(layer, expert)) continue;
    const bool copied = lookahead_.pays(layer);
    told = Foretold{hint.step_id, hint.layer, expert, copied};
    if (!copied) return -1;
    copied_ahead_.add(1);
    return expert;
  }
  return -1;
}

// The record that was copied for this publish, if it names it; -1 otherwise.
std::int32_t CacheServer::take_ahead(const RequestHeader& request) {
  const Foretold told = foretold(request.layer);
  was_copied_ = false;
  if (told.expert < 0 || (told.step_id == request.step_id && request.layer < told.layer)) return -1;
  foretold(request.layer).expert = -1;
  const bool in_time = told.step_id == request.step_id && told.layer == request.layer && request.num_tokens == 1 &&
                       (request.flags & kDeviceOnly) == 0 && request.top_k <= mailbox_->geometry().top_k;
  const std::int32_t* ids = mailbox_->ids();
  const bool used = in_time && std::find(ids, ids + request.top_k, told.expert) != ids + request.top_k;
  was_copied_ = in_time && told.copied;
  if (in_time) lookahead_.observe(static_cast<int>(told.layer), used);
  if (told.copied && !used) fetched_bytes_.add(record_bytes_[told.layer]);
  if (!told.copied || !used) return -1;
  used_ahead_.add(1);
  return told.expert;
}

// How long the bus was idle before this publish, by the client's clock, and what a record costs there.
void CacheServer::observe_idle(const RequestHeader& request, const LayerTiming& previous) {
  if (request.num_tokens != 1 || previous.num_tokens != 1 || previous.own_ns == 0) return;
  const auto load = [](const std::atomic<std::int64_t>& ns) { return ns.load(std::memory_order_relaxed); };
  const std::int64_t own = load(mailbox_->stamps(static_cast<std::uint32_t>(previous.layer)).client.own);
  const std::int64_t published = load(mailbox_->stamps(request.layer).client.published);
  if (published > own) lookahead_.observe_idle(static_cast<double>(published - own));
  if (splits_ == nullptr) return;
  lookahead_.set_costs(splits_->decode.record_costs(static_cast<double>(record_bytes_[request.layer])));
}

// Of the publish before the one seen now; the client has left it, so its stamps are complete.
LayerTiming CacheServer::timing_of_previous(std::int64_t seen_ns) {
  const PublishedPlan& p = previous_;
  LayerStamps& stamps = mailbox_->stamps(p.layer);
  LayerTiming timing{p.layer, p.num_tokens, p.num_hits, p.num_fetches, p.num_cpu};
  const auto between = [](std::int64_t from, std::int64_t to) { return from > 0 && to > from ? to - from : 0; };
  const auto load = [](const std::atomic<std::int64_t>& ns) { return ns.load(std::memory_order_relaxed); };
  const std::int64_t published = load(stamps.client.published), planned = load(stamps.client.planned),
                     own = load(stamps.client.own), part = load(stamps.client.part);
  const bool stamped = published > 0 && static_cast<std::uint32_t>(load(stamps.client.seq)) == p.seq;
  if (stamped && planned >= published) timing.own_ns = between(planned, own);
  if (timing.own_ns > 0 && p.num_cpu > 0) timing.wait_ns = between(own, part);
  std::int64_t end = p.planned_ns;
  if (p.num_cpu > 0) {
    const std::int64_t taken = load(stamps.cpu.taken), done = load(stamps.cpu.done);
    // `done` is written after `part`, so it may be that of an earlier step for a moment.
    if (taken >= p.planned_ns && done > taken) {
      timing.start_ns = taken - p.planned_ns;
      timing.cpu_ns = done - taken;
      end = done;
    }
  }
  timing.turn_ns = between(end, seen_ns);
  return timing;
}

void CacheServer::count_timing(const LayerTiming& timing) {
  if (timing.own_ns > 0) {
    timing_.own.add(1);
    timing_.own_ns.add(timing.own_ns);
  }
  if (timing.cpu_ns > 0) {
    timing_.cpu.add(1);
    timing_.cpu_ns.add(timing.cpu_ns);
    timing_.start_ns.add(timing.start_ns);
    timing_.wait_ns.add(timing.wait_ns);
    timing_.turn_ns.add(timing.turn_ns);
  }
}

void CacheServer::count(int layer, const PlanHeader& plan) {
  hits_.add(plan.num_hits);
  fetches_.add(plan.num_fetches);
  const std::uint32_t num_cpu = plan.num_cpu - plan.num_split;
  const auto bytes = [&](double records) { return std::llround(records * static_cast<double>(record_bytes_[layer])); };
  cpu_.add(num_cpu);
  split_.add(plan.num_split);
  admitted_.add(plan.num_admitted);
  evicted_.add(plan.num_evicted);
  fetched_bytes_.add(bytes(plan.fetched_records(num_tiles_[layer])));
  cpu_bytes_.add(bytes(plan.cpu_records(num_tiles_[layer])));
  publishes_.add(1);
  show_slots();
  layers_[layer * 3].add(plan.num_hits);
  layers_[layer * 3 + 1].add(plan.num_fetches);
  layers_[layer * 3 + 2].add(num_cpu);
}

CacheCounters CacheServer::counters() const {
  std::lock_guard lock(table_);  // of a publish whose plan is out, all or nothing
  return CacheCounters{hits_.get(),
                       fetches_.get(),
                       cpu_.get(),
                       admitted_.get(),
                       evicted_.get(),
                       split_.get(),
                       fetched_bytes_.get(),
                       cpu_bytes_.get(),
                       publishes_.get(),
                       resident_.get(),
                       in_flight_.get(),
                       hints_.get(),
                       copied_ahead_.get(),
                       used_ahead_.get(),
                       plan_ns_.get(),
                       {timing_.own.get(), timing_.own_ns.get(), timing_.cpu.get(), timing_.cpu_ns.get(),
                        timing_.start_ns.get(), timing_.wait_ns.get(), timing_.turn_ns.get()}};
}

std::vector<std::int64_t> CacheServer::layer_counters() const {
  std::lock_guard lock(table_);
  std::vector<std::int64_t> counts(layers_.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) counts[i] = layers_[i].get();
  return counts;
}

}  // namespace ft
