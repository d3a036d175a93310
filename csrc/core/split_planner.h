// How many of a layer's missing experts the device fetches and how many the CPU runs, and how one record is split
// between them by its tiles: so that both finish together, by rates that are measured while serving.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lookahead.h"

namespace ft {

// Of one party for one layer: fixed_ns + sum over its records of bytes * (byte_ns + (routes - 1) * route_byte_ns).
struct SideCost {
  double fixed_ns = 0.0;
  double byte_ns = 0.0;
  double route_byte_ns = 0.0;
};

// What is believed before anything was measured in service. `beside`: while the other party works on the layer too.
struct SplitCosts {
  SideCost fetch, fetch_beside, cpu, cpu_beside;
  double hit_byte_ns = 0.0;       // of the device, for a resident record
  bool hits_load_memory = false;  // hits are read from the memory that the CPU reads (the CPU device)
};

// Throws std::invalid_argument naming a value that is negative or not finite, or a party without any cost per byte.
void check_split_costs(const SplitCosts& costs);

// What both parties do in one layer. `extra` routes are those beyond the first of each record.
struct LayerShares {
  int num_hits = 0, num_fetches = 0, num_cpu = 0;
  int hit_extra = 0, fetch_extra = 0, cpu_extra = 0;
  double record_bytes = 0.0;
  // One more record may be split: the share of it that the device fetches (0: none is), and its extra routes.
  double split_part = 0.0;
  int split_extra = 0;

  bool is_split() const { return split_part > 0.0; }
  bool any_fetched() const { return num_fetches > 0 || is_split(); }
  bool any_on_cpu() const { return num_cpu > 0 || is_split(); }
};

struct LayerWork {
  int num_hits = 0;
  int hit_extra = 0;
  double record_bytes = 0.0;
  // Of the misses, in the order in which they are to be fetched. The first num_fetchable can be.
  std::span<const std::int32_t> miss_routes;
  int num_fetchable = 0;
  int num_free_slots = 0;
  int num_tiles = 1;  // of a record, where one may be split
};

// What a layer took, by the mailbox's stamps: the device's own work from its plan on, and its wait for the CPU's answer
// after that (0: none that its clock shows); the CPU's work, and how long after the plan that began. Otherwise 0:
// nothing to do, or not known.
struct SplitTiming {
  LayerShares shares;
  double device_ns = 0.0;
  double wait_ns = 0.0;
  double cpu_ns = 0.0;
  double start_ns = 0.0;
  bool bus_busy = false;  // with something else while the device looked at the answer, so that a look took longer
};

// Decides by *applied* rates: those believed at first, or the live ones at the last change. Live rates are the believed
// costs times a factor for each party, alone and beside the other, a time for handing over to the CPU, and one for the
// device's look at its answer, which follow the timings. The live rates become the applied ones when their decisions
// would have saved kWorthwhile of the time of recent layers. So rates that flicker around a threshold change nothing,
// because there both sides of it cost the same, and a party that falls far behind is dropped after a few layers. A
// change back needs four times as much as the one before, until that is forgotten.
//
// A party that gets no work would never be measured again, so a share of the time (kProbeShare) is saved up for layers
// that are split otherwise: for what has not been timed for long, and, where nothing is fetched, for a fetch, since
// only fetched records can be admitted to slots. While slots are free, everything is fetched.
//
// Not thread-safe; allocates nothing after the first layers.
class SplitPlanner {
 public:
  enum Arm : int { kFetch = 0, kFetchBeside = 1, kCpu = 2, kCpuBeside = 3 };
  static constexpr int kHandoff = 4, kLook = 5, kHits = 6;
  // By Arm, of the believed time, so 2 is half as fast; then nanoseconds from the plan to the CPU's answer without its
  // work, and those that a device pays for looking at an answer that is there already; then the factor of a GPU's hits,
  // which have nothing to do with its bus.
  using Factors = std::array<double, 7>;

  struct Change {
    std::int64_t at_layer = 0;  // count of planned layers
    double gain = 0.0;          // share of recent layers' time that the new rates would have saved
    Factors before{}, after{};
    double fetched_before = 0.0, fetched_after = 0.0;  // share of the misses of the layer that tipped the scale
    int misses = 0;                                    // of that layer
  };

  struct Status {
    std::int64_t layers = 0, changes = 0, probes = 0;
    Factors live{1, 1, 1, 1, 0, 0, 1}, applied{1, 1, 1, 1, 0, 0, 1};
    std::array<std::int64_t, 4> timings{};
    double mean_misses = 0.0, mean_fetches = 0.0;  // of recent layers with misses
    double predicted_ns = 0.0, measured_ns = 0.0;  // of recent layers: the later of both parties
    Change last_change;
  };

  explicit SplitPlanner(const SplitCosts& costs);

  // Of the misses, from the front: whole records to fetch (0..num_fetchable), and how many tiles, one record after the
  // other: as many as those records have, or another number by which the later of both is earlier by more than is
  // noise. A layer that fills slots, or tries something, has whole records only.
  struct Choice {
    int whole = 0;
    int tiles = 0;
  };
  Choice choose(const LayerWork& work);
  // Instead of choose(), where another decided: counts the layer, if anything was missing.
  void follow(const LayerShares& shares);
  void observe(const SplitTiming& timing);

  const SplitCosts& costs() const { return costs_; }
  // By the live rates.
  RecordCosts record_costs(double record_bytes) const {
    return {record_bytes * costs_.fetch_beside.byte_ns * status_.live[kFetchBeside],
            record_bytes * costs_.cpu_beside.byte_ns * status_.live[kCpuBeside]};
  }
  const Status& status() const { return status_; }

  // Of one party, by the believed costs times factors; 0 when it has nothing to do.
  double device_ns(const LayerShares& shares, const Factors& factors) const;
  double cpu_ns(const LayerShares& shares, const Factors& factors) const;
  // The later of both; with a share of the CPU's the device is not through without a look at the answer.
  double layer_ns(const LayerShares& shares, const Factors& factors) const;
  // What choose() aims at: the fetches with the least layer_ns, the most of them when several have it.
  int best(const LayerWork& work, const Factors& factors);

 private:
  LayerShares shares_of(const LayerWork& work, int num_fetches, int num_tiles = 0) const;
  void sum_routes(const LayerWork& work);
  int best_of_summed(const LayerWork& work, const Factors& factors) const;
  void reconsider(const LayerWork& work, int applied_choice, int live_choice);
  static Choice whole_records(const LayerWork& work, int num_fetches);
  double choice_ns(const LayerWork& work, const Choice& choice) const;
  int best_tiles(const LayerWork& work, int whole) const;
  Choice probe(const LayerWork& work, const Choice& choice);
  bool wants(Arm arm) const;
  bool device_works(const LayerShares& shares) const;
  double hits_ns(const LayerShares& shares) const;
  double device_end_ns(const LayerShares& shares, const Factors& factors) const;
  void show_layer(double misses, double fetches, double predicted_ns);
  void settle_probe(const LayerShares& shares, double layer_ns);
  void learn_device(const SplitTiming& timing);
  void learn_answer(const SplitTiming& timing);
  void learn_hits(double predicted_ns, double measured_ns);
  void learn(Arm arm, Arm sibling, double predicted_ns, double measured_ns);

  SplitCosts costs_;
  Status status_;
  std::vector<std::int32_t> extra_before_;  // [i]: extra routes of the first i misses
  std::array<std::int64_t, 4> last_timed_{};
  std::array<int, 4> first_probes_{};
  std::array<double, 4> surprises_{};      // timings in a row that deviate far to one side; negative: faster
  double lost_ns_ = 0.0, spent_ns_ = 0.0;  // means of recent layers: lost to the applied rates, and in all
  std::int64_t handoffs_ = 0, hit_timings_ = 0;
  double saved_ns_ = 0.0;  // for probes; negative when one took longer than it was expected to
  // The last one that was paid for, until its timing comes.
  struct Probe {
    LayerShares shares;
    double usual_ns = 0.0;  // of the layer without it
    double price_ns = 0.0;
  };
  std::optional<Probe> unsettled_;
  double patience_ = 1.0;
};

}  // namespace ft
