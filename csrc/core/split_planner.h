// How many of a layer's missing experts the device fetches and how many the CPU runs, and how one record is split
// between them by its tiles: so that both finish together, by rates that are measured while serving.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

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

// What a layer took: the device, from the plan to the end of its experts; the CPU, its work alone; and what passed
// beside that work between the plan and the arrival of the answer at the device. 0: nothing to do, or not known. A
// device that did not have to wait only shows that handing over took no longer than that (`handoff_is_bound`).
struct SplitTiming {
  LayerShares shares;
  double device_ns = 0.0;
  double cpu_ns = 0.0;
  double handoff_ns = 0.0;
  bool handoff_is_bound = false;
};

// Decides by *applied* rates: those believed at first, or the live ones at the last change. Live rates are the believed
// costs times a factor for each party, alone and beside the other, and a time for handing over to the CPU, which follow
// the timings. The live rates become the
// applied ones when their decisions would have saved kWorthwhile of the time of recent layers. So rates that flicker
// around a threshold change nothing, because there both sides of it cost the same, and a party that falls far behind is
// dropped after a few layers. A change back needs four times as much as the one before, until
// that is forgotten.
//
// A party that gets no work would never be measured again, so a share of the time (kProbeShare) is saved up for layers
// that are split otherwise: for what has not been timed for long, and, where nothing is fetched, for a fetch, since
// only fetched records can be admitted to slots. While slots are free, everything is fetched.
//
// Not thread-safe; allocates nothing after the first layers.
class SplitPlanner {
 public:
  enum Arm : int { kFetch = 0, kFetchBeside = 1, kCpu = 2, kCpuBeside = 3 };
  static constexpr int kHandoff = 4;
  // By Arm, of the believed time, so 2 is half as fast; then nanoseconds from the plan to the CPU's answer without its
  // work.
  using Factors = std::array<double, 5>;

  struct Change {
    std::int64_t at_layer = 0;  // count of planned layers
    double gain = 0.0;          // share of recent layers' time that the new rates would have saved
    Factors before{}, after{};
    double fetched_before = 0.0, fetched_after = 0.0;  // share of the misses of the layer that tipped the scale
    int misses = 0;                                    // of that layer
  };

  struct Status {
    std::int64_t layers = 0, changes = 0, probes = 0;
    Factors live{1, 1, 1, 1, 0}, applied{1, 1, 1, 1, 0};
    std::array<std::int64_t, 4> timings{};
    double mean_misses = 0.0, mean_fetches = 0.0;  // of recent layers with misses
    double predicted_ns = 0.0, measured_ns = 0.0;  // of recent layers: the later of both parties
    Change last_change;
  };

  explicit SplitPlanner(const SplitCosts& costs);

  // How many of the misses to fetch, from the front: 0..num_fetchable.
  int choose(const LayerWork& work);
  // After choose(): how many tiles to fetch, of the misses one after the other. choice * num_tiles, or another number
  // by which the later of both is earlier by more than is noise. By the live rates, because a little more or less
  // changes little; not while choose() fills slots or tries something.
  int choose_tiles(const LayerWork& work, int choice);
  void observe(const SplitTiming& timing);

  const SplitCosts& costs() const { return costs_; }
  const Status& status() const { return status_; }

  // Of one party, by the believed costs times factors; 0 when it has nothing to do.
  double device_ns(const LayerShares& shares, const Factors& factors) const;
  double cpu_ns(const LayerShares& shares, const Factors& factors) const;
  // The later of both.
  double layer_ns(const LayerShares& shares, const Factors& factors) const;
  // What choose() aims at: the fetches with the least layer_ns, the most of them when several have it.
  int best(const LayerWork& work, const Factors& factors);

 private:
  LayerShares shares_of(const LayerWork& work, int num_fetches, int num_tiles = 0) const;
  void sum_routes(const LayerWork& work);
  int best_of_summed(const LayerWork& work, const Factors& factors) const;
  void reconsider(const LayerWork& work, int applied_choice, int live_choice);
  int probe(const LayerWork& work, int choice);
  bool wants(Arm arm) const;
  bool device_works(const LayerShares& shares) const;
  void learn_handoff(double measured_ns);
  void learn(Arm arm, Arm sibling, double predicted_ns, double measured_ns);

  SplitCosts costs_;
  Status status_;
  std::vector<std::int32_t> extra_before_;  // [i]: extra routes of the first i misses
  std::array<std::int64_t, 4> last_timed_{};
  std::array<int, 4> first_probes_{};
  std::array<double, 4> surprises_{};      // timings in a row that deviate far to one side; negative: faster
  double lost_ns_ = 0.0, spent_ns_ = 0.0;  // means of recent layers: lost to the applied rates, and in all
  std::int64_t handoffs_ = 0;
  double saved_ns_ = 0.0;  // for probes
  double patience_ = 1.0;
  bool is_usual_ = false;  // the last choice was by rates alone
};

}  // namespace ft
