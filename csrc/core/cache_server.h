// ExpertCache's thread: answers every publish with a plan and hands the CPU share on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "client_wait.h"
#include "layer_planner.h"
#include "lookahead.h"
#include "mailbox.h"
#include "route_log.h"
#include "slot_table.h"
#include "split_planner.h"

namespace ft {

// One publish that has been left behind, as its stamps and plan tell it. Times in nanoseconds, 0 where they are not
// known (a stage was skipped, or took less than the client's clock shows).
struct LayerTiming {
  std::int64_t layer = 0, num_tokens = 0;
  std::int64_t num_hits = 0, num_fetches = 0, num_cpu = 0;
  std::int64_t own_ns = 0;    // the client's hits and fetches, from its plan on
  std::int64_t wait_ns = 0;   // the client waited for the CPU share after that
  std::int64_t start_ns = 0;  // from the plan until CpuExecutor took its share
  std::int64_t cpu_ns = 0;    // CpuExecutor's work on it
  std::int64_t turn_ns = 0;   // from the end of that work (or the plan) until the next publish was seen
};

// Sums of LayerTiming over publishes that had the part in question; counts are of those publishes.
struct TimingTotals {
  std::int64_t own = 0, own_ns = 0;
  std::int64_t cpu = 0, cpu_ns = 0, start_ns = 0, wait_ns = 0, turn_ns = 0;
};

// hits + fetches + cpu are distinct experts: a record that is split by tiles counts as a fetch (and as `split`), and in
// bytes by its shares.
struct CacheCounters {
  std::int64_t hits = 0, fetches = 0, cpu = 0, admitted = 0, evicted = 0, split = 0;
  std::int64_t fetched_bytes = 0, cpu_bytes = 0;
  std::int64_t publishes = 0, resident = 0, in_flight = 0;
  // Hints, records copied ahead for them, and those of these that were used. All are in fetched_bytes, the used ones in
  // fetches.
  std::int64_t hints = 0, copied_ahead = 0, used_ahead = 0;
  std::int64_t plan_ns = 0;  // time spent on planning
  TimingTotals timing;
};

class CacheServer {
 public:
  static constexpr std::size_t kRouteLogBytes = std::size_t{16} << 20;

  // record_bytes: by layer. device_client: the client rings no bells. fetchable: see LayerPlanner. num_tiles: of the
  // records, by layer, where one may be split; empty: none is. Throws std::invalid_argument when sizes of the parts do
  // not match, or fraction is not in [0, 1].
  CacheServer(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<SlotTable> slots, double fetch_fraction, bool in_place,
              int spin_us, std::vector<std::int64_t> record_bytes, bool device_client = false,
              std::vector<std::uint8_t> fetchable = {}, std::vector<std::int32_t> num_tiles = {});
  ~CacheServer();
  CacheServer(const CacheServer&) = delete;
  CacheServer& operator=(const CacheServer&) = delete;

  // Once; throws std::logic_error afterwards, and when the slot table already belongs to a server. From here to stop()
  // the thread owns the slot table, and the mailbox's slot_of is in step with it.
  void start();
  // Idempotent, from any thread. Aborts the mailbox when a publish is unanswered; slots in flight become free.
  void stop();

  // For a device client, any thread: publishes will come soon; none will before the next notice.
  void notice() { wait_.notice(mailbox_->req().bell); }
  void rest() { wait_.rest(); }

  // The split from the next publish on: a fixed share of the misses, or by live rates that start as `costs`. With
  // watch_rates they are measured from then on beside a fixed share too, when the plan is out. Any thread, any time.
  // Throw std::invalid_argument.
  void set_fetch_fraction(double fraction);
  void set_auto_split(const SplitCosts& costs);
  void watch_rates(const SplitCosts& costs);
  // Of decode steps, as of a recent publish; nothing while no rates are measured. Any thread, any time.
  std::optional<SplitPlanner::Status> split_status() const;
  // Whether hints are answered with records to copy; they are where it pays (see Lookahead). Any thread, any time.
  void set_lookahead(bool on) { lookahead_on_.store(on, std::memory_order_relaxed); }
  struct LookaheadStatus {
    double accuracy = 0.0;  // of recent guesses, the mean of all layers
    double idle_ns = 0.0;   // of the bus from one layer to the next
  };
  LookaheadStatus lookahead_status() const;
  // SlotTable's, while a server owns it: between two publishes. Any thread, any time.
  Vacated vacate(int num_slots);
  void finish_vacate();
  void cancel_vacate();
  void grow(int num_slots);
  void empty(int num_slots);  // no step runs
  std::vector<double> scores();
  // What was published, if somebody wants to know. Any thread.
  RouteLog& route_log() { return route_log_; }
  // Any thread, any time. Cumulative but for resident and in_flight.
  CacheCounters counters() const;
  // [num_layers, 3]: hits, fetches, cpu.
  std::vector<std::int64_t> layer_counters() const;

 private:
  void serve();
  bool answer(std::uint32_t seq);
  void answer_hint(std::uint32_t seq);
  std::int32_t choose_ahead(const HintRequest& hint);
  std::int32_t take_ahead(const RequestHeader& request);
  void observe_idle(const RequestHeader& request, const LayerTiming& previous);
  void count(int layer, const PlanHeader& header);
  void show_slots();
  LayerTiming timing_of_previous(std::int64_t seen_ns);
  void count_timing(const LayerTiming& timing);

  struct PublishedPlan {
    std::uint32_t seq = 0, layer = 0, num_tokens = 0;
    std::uint64_t step_id = 0;
    std::uint32_t num_hits = 0, num_fetches = 0, num_cpu = 0;
    std::int64_t planned_ns = 0;  // 0: there is none
    LayerShares shares;           // empty when the split had no say
  };

  void set_splits(const SplitCosts& costs);
  void take_next_splits();
  SplitPlanner* current_split(const PublishView& publish);
  void observe_split(const LayerTiming& timing);
  void show_split();

  // One writer at a time (under table_); relaxed, because each figure stands alone.
  struct Counter {
    std::atomic<std::int64_t> value{0};
    void add(std::int64_t n) { value.store(value.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
    void set(std::int64_t n) { value.store(n, std::memory_order_relaxed); }
    std::int64_t get() const { return value.load(std::memory_order_relaxed); }
  };

  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<SlotTable> slots_;
  mutable std::mutex table_;  // over slots_, while the thread runs
  std::atomic<double> fetch_fraction_;
  const bool in_place_;
  const std::vector<std::int64_t> record_bytes_;
  const std::vector<std::int32_t> num_tiles_;  // 1 where none is split
  ClientWait wait_;
  LayerPlanner planner_;
  RouteLog route_log_;

  // The server thread takes a new planner, and shows what its own does, only when nobody else has the lock: it never
  // waits for it.
  mutable std::mutex split_mutex_;
  // Publishes of few tokens and of many have rates of their own: kernels and bounds differ.
  static constexpr int kDecodeTokens = 16;
  struct Splits {
    explicit Splits(const SplitCosts& costs) : decode(costs), prefill(costs) {}
    SplitPlanner& of(int num_tokens) { return num_tokens <= kDecodeTokens ? decode : prefill; }
    SplitPlanner decode, prefill;
  };
  std::unique_ptr<Splits> next_splits_;
  std::optional<SplitPlanner::Status> shown_split_;
  std::atomic<bool> has_next_split_{false};
  std::atomic<bool> auto_split_{false};
  std::unique_ptr<Splits> splits_;  // of the server thread

  Counter hits_, fetches_, cpu_, split_, admitted_, evicted_, fetched_bytes_, cpu_bytes_, publishes_, resident_,
      in_flight_, plan_ns_, hints_, copied_ahead_, used_ahead_;
  struct {
    Counter own, own_ns, cpu, cpu_ns, start_ns, wait_ns, turn_ns;
  } timing_;
  // The latest publish, of the server thread.
  PublishedPlan previous_;
  Lookahead lookahead_;
  std::atomic<bool> lookahead_on_{false};
  struct Foretold {
    std::uint64_t step_id = 0;
    std::uint32_t layer = 0;
    std::int32_t expert = -1;  // -1: nothing
    bool copied = false;
  };
  // Of a layer: the hint about the next one may come before this one's publish.
  Foretold& foretold(std::uint32_t layer) { return foretold_[layer % 2]; }
  Foretold foretold_[2];
  bool was_copied_ = false;  // a record for the publish seen now, in the layer before it
  std::vector<Counter> layers_;

  std::mutex lifecycle_;
  bool started_ = false;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ft
