#include "split_planner.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace ft {
namespace {

constexpr double kWorthwhile = 0.015;
constexpr double kProbeShare = 0.01;
// A timing moves a factor by this share of its deviation, and counts as at most so many times faster or slower.
constexpr double kGain = 1.0 / 12.0;
constexpr double kLargestDeviation = 1.386;  // ln 4
// More, where several in a row deviate by this much to the same side: that is no noise.
constexpr double kSurprise = 0.4;
constexpr double kLargestGain = 0.5;
// How much a factor follows its sibling: most of what slows a party down does so in either situation.
constexpr double kCoupling = 0.9;
constexpr double kRecent = 1.0 / 32.0;  // weight of the newest layer in the means that decide
constexpr double kShown = 1.0 / 256.0;  // and in those that are shown
constexpr double kImpatience = 4.0;
constexpr double kPatienceDecay = 0.99932;  // per layer: half of it is gone after 1,024
constexpr double kMostPatience = 16.0;
constexpr int kFirstTimings = 8;  // so many are wanted of each arm before its factor is trusted
constexpr int kFirstProbes = 12;
constexpr std::int64_t kStaleLayers = 512;
constexpr double kFactorLimit = 4096.0;
constexpr double kShortHandoffNs = 20e3;
// Splitting a record is worth so much of a layer's time, and so many nanoseconds, or it is not done.
constexpr double kSplitGain = 0.02;
constexpr double kSplitGainNs = 500.0;

void check_side(const char* name, const SideCost& side) {
  const auto check = [name](const char* field, double value) {
    if (!(value >= 0.0) || !std::isfinite(value)) {
      throw std::invalid_argument(std::string("split costs: ") + name + "." + field + " " + std::to_string(value) +
                                  " is not a finite number of at least 0");
    }
  };
  check("fixed_ns", side.fixed_ns);
  check("byte_ns", side.byte_ns);
  check("route_byte_ns", side.route_byte_ns);
  if (side.byte_ns == 0.0) throw std::invalid_argument(std::string("split costs: ") + name + ".byte_ns is 0");
}

double cost_ns(const SideCost& side, double records, double extra_routes, double bytes) {
  return side.fixed_ns + bytes * (records * side.byte_ns + extra_routes * side.route_byte_ns);
}

}  // namespace

void check_split_costs(const SplitCosts& costs) {
  check_side("fetch", costs.fetch);
  check_side("fetch_beside", costs.fetch_beside);
  check_side("cpu", costs.cpu);
  check_side("cpu_beside", costs.cpu_beside);
  if (!(costs.hit_byte_ns >= 0.0) || !std::isfinite(costs.hit_byte_ns)) {
    throw std::invalid_argument("split costs: hit_byte_ns " + std::to_string(costs.hit_byte_ns) +
                                " is not a finite number of at least 0");
  }
}

SplitPlanner::SplitPlanner(const SplitCosts& costs) : costs_(costs) {
  check_split_costs(costs);
  last_timed_.fill(-kStaleLayers);
}

bool SplitPlanner::device_works(const LayerShares& shares) const {
  return shares.any_fetched() || (costs_.hits_load_memory && shares.num_hits > 0);
}

double SplitPlanner::device_ns(const LayerShares& shares, const Factors& factors) const {
  if (shares.num_hits == 0 && !shares.any_fetched()) return 0.0;
  const bool beside = shares.any_on_cpu();
  const SideCost& side = beside ? costs_.fetch_beside : costs_.fetch;
  const double hits =
      shares.record_bytes * (shares.num_hits * costs_.hit_byte_ns + shares.hit_extra * side.route_byte_ns);
  const double fetches = cost_ns(side, shares.num_fetches + shares.split_part,
                                 shares.fetch_extra + shares.split_part * shares.split_extra, shares.record_bytes);
  // A GPU reads its own memory while records cross the bus.
  return factors[beside ? kFetchBeside : kFetch] * (costs_.hits_load_memory ? hits + fetches : std::max(hits, fetches));
}

double SplitPlanner::cpu_ns(const LayerShares& shares, const Factors& factors) const {
  if (!shares.any_on_cpu()) return 0.0;
  const double rest = shares.is_split() ? 1.0 - shares.split_part : 0.0;
  const bool beside = device_works(shares);
  const SideCost& side = beside ? costs_.cpu_beside : costs_.cpu;
  return factors[kHandoff] + factors[beside ? kCpuBeside : kCpu] * cost_ns(side, shares.num_cpu + rest,
                                                                           shares.cpu_extra + rest * shares.split_extra,
                                                                           shares.record_bytes);
}

double SplitPlanner::layer_ns(const LayerShares& shares, const Factors& factors) const {
  return std::max(device_ns(shares, factors), cpu_ns(shares, factors));
}

void SplitPlanner::sum_routes(const LayerWork& work) {
  extra_before_.resize(work.miss_routes.size() + 1);
  extra_before_[0] = 0;
  for (std::size_t i = 0; i < work.miss_routes.size(); ++i) {
    extra_before_[i + 1] = extra_before_[i] + std::max(0, work.miss_routes[i] - 1);
  }
}

// num_tiles: of the record behind the fetched ones.
LayerShares SplitPlanner::shares_of(const LayerWork& work, int num_fetches, int num_tiles) const {
  const auto misses = static_cast<int>(work.miss_routes.size());
  LayerShares shares;
  shares.num_hits = work.num_hits;
  shares.hit_extra = work.hit_extra;
  shares.num_fetches = num_fetches;
  const int num_split = num_tiles > 0 ? 1 : 0;
  shares.num_cpu = misses - num_fetches - num_split;
  shares.fetch_extra = extra_before_[num_fetches];
  shares.cpu_extra = extra_before_[misses] - extra_before_[num_fetches + num_split];
  shares.record_bytes = work.record_bytes;
  if (num_split != 0) {
    shares.split_part = static_cast<double>(num_tiles) / work.num_tiles;
    shares.split_extra = extra_before_[num_fetches + 1] - extra_before_[num_fetches];
  }
  return shares;
}

int SplitPlanner::best(const LayerWork& work, const Factors& factors) {
  sum_routes(work);
  return best_of_summed(work, factors);
}

int SplitPlanner::best_of_summed(const LayerWork& work, const Factors& factors) const {
  int choice = 0;
  double least = layer_ns(shares_of(work, 0), factors);
  for (int q = 1; q <= work.num_fetchable; ++q) {
    const double ns = layer_ns(shares_of(work, q), factors);
    if (ns > least) continue;
    least = ns;
    choice = q;
  }
  return choice;
}

int SplitPlanner::choose(const LayerWork& work) {
  ++status_.layers;
  is_usual_ = false;
  const auto misses = static_cast<int>(work.miss_routes.size());
  if (misses == 0) return 0;
  sum_routes(work);
  int choice = best_of_summed(work, status_.applied);
  const int live_choice = best_of_summed(work, status_.live);
  reconsider(work, choice, live_choice);
  if (status_.changes > 0 && status_.last_change.at_layer == status_.layers) choice = live_choice;
  saved_ns_ += kProbeShare * layer_ns(shares_of(work, choice), status_.live);
  if (work.num_free_slots > 0) {
    choice = std::max(choice, std::min(work.num_fetchable, work.num_free_slots));
  } else {
    const int probed = probe(work, choice);
    is_usual_ = probed == choice;
    choice = probed;
  }
  status_.mean_misses += kShown * (misses - status_.mean_misses);
  status_.mean_fetches += kShown * (choice - status_.mean_fetches);
  status_.predicted_ns += kShown * (layer_ns(shares_of(work, choice), status_.live) - status_.predicted_ns);
  return choice;
}

// While both work, more tiles make the device later and the CPU earlier: the best number is where they meet.
int SplitPlanner::choose_tiles(const LayerWork& work, int choice) {
  const int whole = choice * work.num_tiles;
  const auto misses = static_cast<int>(work.miss_routes.size());
  if (!is_usual_ || work.num_tiles < 2 || work.num_fetchable == 0) return whole;
  const auto shares = [&](int tiles) { return shares_of(work, tiles / work.num_tiles, tiles % work.num_tiles); };
  int low = 1, high = std::min(work.num_fetchable * work.num_tiles, misses * work.num_tiles - 1);
  while (low < high) {
    const int middle = low + (high - low) / 2;
    const LayerShares there = shares(middle);
    if (device_ns(there, status_.live) < cpu_ns(there, status_.live)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  int best = low;
  double best_ns = layer_ns(shares(best), status_.live);
  if (best > 1) {
    const double before_ns = layer_ns(shares(best - 1), status_.live);
    if (before_ns < best_ns) {
      best_ns = before_ns;
      --best;
    }
  }
  const double whole_ns = layer_ns(shares(whole), status_.live);
  if (best % work.num_tiles == 0 || best_ns > whole_ns * (1.0 - kSplitGain) || best_ns > whole_ns - kSplitGainNs)
    return whole;
  status_.mean_fetches += kShown * (static_cast<double>(best) / work.num_tiles - choice);
  status_.predicted_ns += kShown * (best_ns - whole_ns);
  return best;
}

// Whether it is time to go by the live rates.
void SplitPlanner::reconsider(const LayerWork& work, int applied_choice, int live_choice) {
  const auto news = [](std::int64_t timings) { return timings > 0 && timings < kFirstTimings; };
  if (status_.layers < kStaleLayers && std::any_of(status_.timings.begin(), status_.timings.end(), news)) {
    status_.applied = status_.live;  // the first timings are news, not a change
    return;
  }
  const double applied_ns = layer_ns(shares_of(work, applied_choice), status_.live);
  const double live_ns = layer_ns(shares_of(work, live_choice), status_.live);
  lost_ns_ += kRecent * (applied_ns - live_ns - lost_ns_);
  spent_ns_ = spent_ns_ == 0.0 ? applied_ns : spent_ns_ + kRecent * (applied_ns - spent_ns_);
  patience_ = 1.0 + (patience_ - 1.0) * kPatienceDecay;
  if (applied_choice == live_choice) return;
  const bool back =
      (live_choice > applied_choice) != (status_.last_change.fetched_after > status_.last_change.fetched_before);
  if (lost_ns_ <= kWorthwhile * (back ? patience_ : 1.0) * spent_ns_) return;
  const auto misses = static_cast<int>(work.miss_routes.size());
  status_.last_change = Change{.at_layer = status_.layers,
                               .gain = lost_ns_ / spent_ns_,
                               .before = status_.applied,
                               .after = status_.live,
                               .fetched_before = static_cast<double>(applied_choice) / misses,
                               .fetched_after = static_cast<double>(live_choice) / misses,
                               .misses = misses};
  ++status_.changes;
  status_.applied = status_.live;
  lost_ns_ = 0.0;
  patience_ = std::min(patience_ * kImpatience, kMostPatience);
}

bool SplitPlanner::wants(Arm arm) const {
  if (status_.timings[arm] < kFirstTimings && first_probes_[arm] < kFirstProbes) return true;
  return status_.layers - last_timed_[arm] >= kStaleLayers;
}

// The choice, or another one that is worth a try and paid for.
int SplitPlanner::probe(const LayerWork& work, int choice) {
  const auto misses = static_cast<int>(work.miss_routes.size());
  const double expected_ns = layer_ns(shares_of(work, choice), status_.live);
  const auto affordable = [&](int other, Arm arm) {
    if (other < 0 || other > work.num_fetchable || other == choice) return false;
    const double price_ns = std::max(0.0, layer_ns(shares_of(work, other), status_.live) - expected_ns);
    if (status_.timings[arm] < kFirstTimings && first_probes_[arm] < kFirstProbes) {
      ++first_probes_[arm];
    } else if (price_ns > saved_ns_) {
      return false;
    } else {
      saved_ns_ -= price_ns;
    }
    ++status_.probes;
    // Whether it is timed or not, it is not wanted again at once.
    last_timed_[arm] = status_.layers;
    return true;
  };
  if (choice == misses) {
    const Arm arm = misses > 1 || (costs_.hits_load_memory && work.num_hits > 0) ? kCpuBeside : kCpu;
    if (wants(arm) && affordable(misses - 1, arm)) return misses - 1;
  } else if (choice == 0) {
    const Arm arm = misses > 1 ? kFetchBeside : kFetch;
    if (affordable(1, arm)) return 1;
  } else {
    if (wants(kFetch) && affordable(misses, kFetch)) return misses;
    if (wants(kCpu) && (work.num_hits == 0 || !costs_.hits_load_memory) && affordable(0, kCpu)) return 0;
  }
  return choice;
}

void SplitPlanner::observe(const SplitTiming& timing) {
  const LayerShares& shares = timing.shares;
  if (device_works(shares) && timing.device_ns > 0.0) {
    const bool beside = shares.any_on_cpu();
    learn(beside ? kFetchBeside : kFetch, beside ? kFetch : kFetchBeside, device_ns(shares, status_.live),
          timing.device_ns);
  }
  if (shares.any_on_cpu() && timing.cpu_ns > 0.0) {
    const bool beside = device_works(shares);
    learn(beside ? kCpuBeside : kCpu, beside ? kCpu : kCpuBeside, cpu_ns(shares, status_.live) - status_.live[kHandoff],
          timing.cpu_ns);
    if (timing.handoff_ns > 0.0 && (!timing.handoff_is_bound || timing.handoff_ns < status_.live[kHandoff])) {
      learn_handoff(timing.handoff_ns);
    }
  }
  if (shares.any_fetched() || shares.any_on_cpu()) {
    status_.measured_ns +=
        kShown * (std::max(timing.device_ns, timing.cpu_ns + timing.handoff_ns) - status_.measured_ns);
  }
}

// Now and then a thread is late by milliseconds, which says little of the next layer.
void SplitPlanner::learn_handoff(double measured_ns) {
  double& handoff_ns = status_.live[kHandoff];
  const double gain = std::max(kGain, 1.0 / static_cast<double>(++handoffs_ + 1));
  handoff_ns += gain * (std::min(measured_ns, 2.0 * handoff_ns + kShortHandoffNs) - handoff_ns);
}

void SplitPlanner::learn(Arm arm, Arm sibling, double predicted_ns, double measured_ns) {
  const double deviation = std::clamp(std::log(measured_ns / predicted_ns), -kLargestDeviation, kLargestDeviation);
  if (std::abs(deviation) < kSurprise || std::signbit(deviation) != std::signbit(surprises_[arm]))
    surprises_[arm] = 0.0;
  if (std::abs(deviation) >= kSurprise) surprises_[arm] += std::copysign(1.0, deviation);
  const double repeated = std::min(kLargestGain, kGain * std::abs(surprises_[arm]));
  const double gain = std::max({kGain, repeated, 1.0 / static_cast<double>(status_.timings[arm] + 2)});
  const auto move = [this](Arm which, double by) {
    status_.live[which] = std::clamp(status_.live[which] * std::exp(by), 1.0 / kFactorLimit, kFactorLimit);
  };
  move(arm, gain * deviation);
  move(sibling, kCoupling * (status_.timings[sibling] > 0 ? std::min(gain, kGain) : gain) * deviation);
  ++status_.timings[arm];
  last_timed_[arm] = status_.layers;
}

}  // namespace ft
