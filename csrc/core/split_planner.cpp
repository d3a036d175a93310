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
constexpr double kImpatience = 6.0;
constexpr double kPatienceDecay = 0.9999859;  // per layer: half of it is gone after 49,152, about 1,000 steps
constexpr double kMostPatience = 24.0;
constexpr int kFirstTimings = 8;  // so many are wanted of each arm before its factor is trusted
constexpr int kFirstProbes = 12;
constexpr std::int64_t kStaleLayers = 512;
constexpr double kFactorLimit = 4096.0;
constexpr double kShortHandoffNs = 20e3;
// A device that need not wait still takes a look, over the bus (5 to 7 us were measured): what is longer than this was
// waiting. Its clock may tick once in a microsecond, so what is longer than a look by less says nothing.
constexpr double kLongestLookNs = 12e3;
constexpr double kLookSlackNs = 2e3;
constexpr double kLookFalls = 0.5, kLookRises = 1.0 / 256.0;  // it is the least of what is seen
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

// Of resident records, before any factor.
double SplitPlanner::hits_ns(const LayerShares& shares) const {
  const SideCost& side = shares.any_on_cpu() ? costs_.fetch_beside : costs_.fetch;
  return shares.record_bytes * (shares.num_hits * costs_.hit_byte_ns + shares.hit_extra * side.route_byte_ns);
}

double SplitPlanner::device_ns(const LayerShares& shares, const Factors& factors) const {
  if (shares.num_hits == 0 && !shares.any_fetched()) return 0.0;
  const bool beside = shares.any_on_cpu();
  const double factor = factors[beside ? kFetchBeside : kFetch];
  const double hits = hits_ns(shares);
  const double fetches = cost_ns(beside ? costs_.fetch_beside : costs_.fetch, shares.num_fetches + shares.split_part,
                                 shares.fetch_extra + shares.split_part * shares.split_extra, shares.record_bytes);
  if (costs_.hits_load_memory) return factor * (hits + fetches);
  // A GPU reads its own memory while records cross the bus.
  return std::max(factors[kHits] * hits, shares.any_fetched() ? factor * fetches : 0.0);
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
  return std::max(device_end_ns(shares, factors), cpu_ns(shares, factors));
}

double SplitPlanner::device_end_ns(const LayerShares& shares, const Factors& factors) const {
  return device_ns(shares, factors) + (shares.any_on_cpu() ? factors[kLook] : 0.0);
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

SplitPlanner::Choice SplitPlanner::choose(const LayerWork& work) {
  ++status_.layers;
  const auto misses = static_cast<int>(work.miss_routes.size());
  if (misses == 0) return Choice{};
  sum_routes(work);
  int whole = best_of_summed(work, status_.applied);
  const int live_whole = best_of_summed(work, status_.live);
  reconsider(work, whole, live_whole);
  if (status_.changes > 0 && status_.last_change.at_layer == status_.layers) whole = live_whole;
  Choice choice{whole, whole * work.num_tiles};
  if (work.num_free_slots > 0) {
    saved_ns_ += kProbeShare * choice_ns(work, choice);
    choice = whole_records(work, std::max(whole, std::min(work.num_fetchable, work.num_free_slots)));
  } else {
    choice.tiles = best_tiles(work, whole);
    saved_ns_ += kProbeShare * choice_ns(work, choice);
    choice = probe(work, choice);
  }
  show_layer(misses, static_cast<double>(choice.tiles) / work.num_tiles, choice_ns(work, choice));
  return choice;
}

void SplitPlanner::follow(const LayerShares& shares) {
  const int misses = shares.num_fetches + shares.num_cpu + (shares.is_split() ? 1 : 0);
  if (misses == 0) return;
  ++status_.layers;
  show_layer(misses, shares.num_fetches + shares.split_part, layer_ns(shares, status_.live));
}

void SplitPlanner::show_layer(double misses, double fetches, double predicted_ns) {
  status_.mean_misses += kShown * (misses - status_.mean_misses);
  status_.mean_fetches += kShown * (fetches - status_.mean_fetches);
  status_.predicted_ns += kShown * (predicted_ns - status_.predicted_ns);
}

SplitPlanner::Choice SplitPlanner::whole_records(const LayerWork& work, int num_fetches) {
  return Choice{num_fetches, num_fetches * work.num_tiles};
}

double SplitPlanner::choice_ns(const LayerWork& work, const Choice& choice) const {
  return layer_ns(shares_of(work, choice.tiles / work.num_tiles, choice.tiles % work.num_tiles), status_.live);
}

// Of so many whole records or the tiles at which device and CPU meet: while both work, more tiles make the device later
// and the CPU earlier. By the live rates, because a little more or less changes little.
int SplitPlanner::best_tiles(const LayerWork& work, int whole) const {
  const int whole_tiles = whole * work.num_tiles;
  const auto misses = static_cast<int>(work.miss_routes.size());
  if (work.num_tiles < 2 || work.num_fetchable == 0) return whole_tiles;
  int low = 1, high = std::min(work.num_fetchable * work.num_tiles, misses * work.num_tiles - 1);
  while (low < high) {
    const int middle = low + (high - low) / 2;
    const LayerShares there = shares_of(work, middle / work.num_tiles, middle % work.num_tiles);
    if (device_end_ns(there, status_.live) < cpu_ns(there, status_.live)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  int best = low;
  double best_ns = choice_ns(work, Choice{whole, best});
  if (best > 1) {
    const double before_ns = choice_ns(work, Choice{whole, best - 1});
    if (before_ns < best_ns) {
      best_ns = before_ns;
      --best;
    }
  }
  const double whole_ns = choice_ns(work, Choice{whole, whole_tiles});
  const bool worthwhile = best_ns <= whole_ns * (1.0 - kSplitGain) && best_ns <= whole_ns - kSplitGainNs;
  return worthwhile && best % work.num_tiles != 0 ? best : whole_tiles;
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

// The choice, or another one, of whole records, that is worth a try and paid for.
SplitPlanner::Choice SplitPlanner::probe(const LayerWork& work, const Choice& choice) {
  const auto misses = static_cast<int>(work.miss_routes.size());
  const double expected_ns = choice_ns(work, choice);
  const auto affordable = [&](int other, Arm arm) {
    if (other < 0 || other > work.num_fetchable || other * work.num_tiles == choice.tiles) return false;
    const LayerShares shares = shares_of(work, other);
    const double price_ns = std::max(0.0, layer_ns(shares, status_.live) - expected_ns);
    if (status_.timings[arm] < kFirstTimings && first_probes_[arm] < kFirstProbes) {
      ++first_probes_[arm];
    } else if (price_ns > saved_ns_) {
      return false;
    } else {
      saved_ns_ -= price_ns;
      unsettled_ = Probe{shares, expected_ns, price_ns};
    }
    ++status_.probes;
    // Whether it is timed or not, it is not wanted again at once.
    last_timed_[arm] = status_.layers;
    return true;
  };
  const bool split = choice.tiles % work.num_tiles != 0;
  if (choice.whole == misses && !split) {
    const Arm arm = misses > 1 || (costs_.hits_load_memory && work.num_hits > 0) ? kCpuBeside : kCpu;
    if (wants(arm) && affordable(misses - 1, arm)) return whole_records(work, misses - 1);
  } else if (choice.whole == 0) {
    const Arm arm = misses > 1 ? kFetchBeside : kFetch;
    if (affordable(1, arm)) return whole_records(work, 1);
  } else {
    if (wants(kFetch) && affordable(misses, kFetch)) return whole_records(work, misses);
    if (wants(kCpu) && (work.num_hits == 0 || !costs_.hits_load_memory) && affordable(0, kCpu)) {
      return whole_records(work, 0);
    }
  }
  return choice;
}

void SplitPlanner::observe(const SplitTiming& timing) {
  const LayerShares& shares = timing.shares;
  if (timing.device_ns > 0.0) learn_device(timing);
  if (shares.any_on_cpu() && timing.cpu_ns > 0.0) {
    const bool beside = device_works(shares);
    learn(beside ? kCpuBeside : kCpu, beside ? kCpu : kCpuBeside, cpu_ns(shares, status_.live) - status_.live[kHandoff],
          timing.cpu_ns);
    if (timing.device_ns > 0.0) learn_answer(timing);
  }
  if (shares.any_fetched() || shares.any_on_cpu()) {
    const double ended_ns = std::max(timing.device_ns + timing.wait_ns, timing.start_ns + timing.cpu_ns);
    status_.measured_ns += kShown * (ended_ns - status_.measured_ns);
    if (unsettled_) settle_probe(shares, ended_ns);
  }
}

// Rates that were learned from parts of records may be far off for a whole one: what counts is what it took.
void SplitPlanner::settle_probe(const LayerShares& shares, double layer_ns) {
  const LayerShares& probed = unsettled_->shares;
  if (shares.is_split() || shares.num_hits != probed.num_hits || shares.num_fetches != probed.num_fetches ||
      shares.num_cpu != probed.num_cpu) {
    return;
  }
  saved_ns_ -= std::max(0.0, layer_ns - unsettled_->usual_ns) - unsettled_->price_ns;
  unsettled_.reset();
}

void SplitPlanner::learn_device(const SplitTiming& timing) {
  const LayerShares& shares = timing.shares;
  const double own_ns = costs_.hits_load_memory ? 0.0 : status_.live[kHits] * hits_ns(shares);
  if (!device_works(shares)) {
    if (own_ns > 0.0) learn_hits(own_ns, timing.device_ns);
    return;
  }
  const double predicted_ns = device_ns(shares, status_.live);
  if (predicted_ns == own_ns && timing.device_ns < own_ns) {  // this says nothing of the fetches
    learn_hits(own_ns, timing.device_ns);
    return;
  }
  const bool beside = shares.any_on_cpu();
  learn(beside ? kFetchBeside : kFetch, beside ? kFetch : kFetchBeside, predicted_ns, timing.device_ns);
}

void SplitPlanner::learn_hits(double predicted_ns, double measured_ns) {
  const double deviation = std::clamp(std::log(measured_ns / predicted_ns), -kLargestDeviation, kLargestDeviation);
  const double gain = std::max(kGain, 1.0 / static_cast<double>(++hit_timings_ + 1));
  double& factor = status_.live[kHits];
  factor = std::clamp(factor * std::exp(gain * deviation), 1.0 / kFactorLimit, kFactorLimit);
}

// Where the device waited, it saw when the answer came; where it only looked, the answer had come by then, so handing
// over takes no longer than that. A split at which both finish together shows mostly the latter: they must be able to
// bring the time down, or one late answer would move the split for good.
void SplitPlanner::learn_answer(const SplitTiming& timing) {
  double& look_ns = status_.live[kLook];
  if (timing.wait_ns > 0.0 && timing.wait_ns < kLongestLookNs) {
    const double gain = look_ns == 0.0 ? 1.0 : timing.wait_ns < look_ns ? kLookFalls : kLookRises;
    look_ns += gain * (timing.wait_ns - look_ns);
  }
  double& handoff_ns = status_.live[kHandoff];
  const double answer_ns = std::max(timing.device_ns + timing.wait_ns - timing.cpu_ns, timing.start_ns);
  // A long look over a busy bus is not the CPU's fault: there it was waited for only if it was at work still.
  const bool was_late = !timing.bus_busy || timing.device_ns < timing.start_ns + timing.cpu_ns;
  const bool waited = was_late && timing.wait_ns > look_ns + kLookSlackNs;
  if (!waited && answer_ns >= handoff_ns) return;
  // Now and then a thread is late by milliseconds, which says little of the next layer.
  const double gain = std::max(kGain, 1.0 / static_cast<double>(++handoffs_ + 1));
  handoff_ns += gain * (std::min(answer_ns, 2.0 * handoff_ns + kShortHandoffNs) - handoff_ns);
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
