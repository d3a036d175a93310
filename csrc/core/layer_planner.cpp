#include "layer_planner.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace ft {

int plan_num_fetches(double fraction, int misses) {
  return std::clamp(static_cast<int>(std::round(fraction * misses)), 0, misses);
}

LayerPlanner::LayerPlanner(const MailboxGeometry& geometry, std::uint32_t max_entries,
                           std::vector<std::uint8_t> fetchable)
    : geometry_(geometry), fetchable_(std::move(fetchable)) {
  const std::size_t num_records = std::size_t{geometry.num_layers} * geometry.num_experts;
  if (!fetchable_.empty() && fetchable_.size() != num_records) {
    throw std::invalid_argument("planner: fetchable has " + std::to_string(fetchable_.size()) + " entries for " +
                                std::to_string(num_records) + " records");
  }
  uses_.reserve(max_entries);
  misses_.reserve(max_entries);
  miss_routes_.reserve(max_entries);
  scores_.assign(max_entries, 0.0);
  can_fetch_.assign(max_entries, 0);
  routes_of_.assign(geometry.num_experts, 0);
  admitting_of_.assign(geometry.num_experts, 0);
  admitting_run_of_.assign(geometry.num_experts, 0);
  next_route_of_.assign(geometry.num_experts, 0);
}

void LayerPlanner::forget_counts() {
  for (const ExpertUse& use : uses_) {
    routes_of_[use.expert] = admitting_of_[use.expert] = admitting_run_of_[use.expert] = 0;
  }
}

// The counting half of a counting sort by expert. A long publish has tens of thousands of routes, so the loop over them
// does as little as possible; meanwhile it brings in `routes`, which write_entries will fill out of order (measured:
// 130 us become 80 for 32,768 routes of 128 experts).
bool LayerPlanner::collect(const PublishView& p, const std::int32_t* routes) {
  uses_.clear();
  num_admitting_tokens_ = 0;
  num_run_tokens_ = 0;
  total_routes_ = 0;
  std::int32_t* const routes_of = routes_of_.data();
  for (int t = 0; t < p.num_tokens; ++t) {
    const std::int32_t* ids = p.ids + static_cast<std::ptrdiff_t>(t) * p.top_k;
    const std::int32_t routes_before = total_routes_;
    __builtin_prefetch(routes + static_cast<std::ptrdiff_t>(t) * p.top_k, 1);
    for (int k = 0; k < p.top_k; ++k) {
      const std::int32_t expert = ids[k];
      if (static_cast<std::uint32_t>(expert) >= geometry_.num_experts) {
        if (expert == -1) continue;
        forget_counts();
        return false;
      }
      if (routes_of[expert]++ == 0) uses_.push_back(ExpertUse{.expert = expert});
      ++total_routes_;
    }
    if (p.admit[t] == 0 || total_routes_ == routes_before) continue;
    const bool in_run = p.admit[t] == kAdmitRun;
    ++(in_run ? num_run_tokens_ : num_admitting_tokens_);
    std::int32_t* const counts = (in_run ? admitting_run_of_ : admitting_of_).data();
    for (int k = 0; k < p.top_k; ++k) {
      const std::int32_t expert = ids[k];  // read once: see write_entries
      if (static_cast<std::uint32_t>(expert) < geometry_.num_experts) ++counts[expert];
    }
  }
  for (ExpertUse& use : uses_) {
    use.tokens = admitting_of_[use.expert];
    use.run_tokens = admitting_run_of_[use.expert];
  }
  return true;
}

// Those that can be fetched before those that cannot; then by routes, because each costs the CPU time and the bus none;
// then the best for a slot, then the earlier one.
void LayerPlanner::order_misses(const PublishView& p, const SlotTable& slots) {
  for (const std::int32_t i : misses_) scores_[i] = slots.score(p.layer, uses_[i].expert);
  std::sort(misses_.begin(), misses_.end(), [this](std::int32_t a, std::int32_t b) {
    if (can_fetch_[a] != can_fetch_[b]) return can_fetch_[a] > can_fetch_[b];
    const std::int32_t routes_a = routes_of_[uses_[a].expert];
    const std::int32_t routes_b = routes_of_[uses_[b].expert];
    if (routes_a != routes_b) return routes_a > routes_b;
    if (scores_[a] != scores_[b]) return scores_[a] > scores_[b];
    return a < b;
  });
}

// Of those that are fetched, the best are the first to get a slot. Ties go to more routes, then to the earlier one.
void LayerPlanner::order_admissions(int num_fetches) {
  std::sort(misses_.begin(), misses_.begin() + num_fetches, [this](std::int32_t a, std::int32_t b) {
    if (scores_[a] != scores_[b]) return scores_[a] > scores_[b];
    const std::int32_t routes_a = routes_of_[uses_[a].expert];
    const std::int32_t routes_b = routes_of_[uses_[b].expert];
    return routes_a != routes_b ? routes_a > routes_b : a < b;
  });
}

// Of the misses in their order.
LayerPlanner::Fetches LayerPlanner::choose_fetches(const PublishView& p, const SlotTable& slots, int num_fetchable,
                                                   double fetch_fraction, SplitPlanner* split) {
  const int num_misses = static_cast<int>(misses_.size());
  if (p.device_only) return Fetches{.whole = num_misses};
  if (split == nullptr) {
    Fetches fetches{.whole = std::min(num_fetchable, plan_num_fetches(fetch_fraction, num_misses))};
    const int tiles = std::min(num_fetchable * p.num_tiles, plan_num_fetches(fetch_fraction, num_misses * p.num_tiles));
    fetches.before = tiles / p.num_tiles;
    fetches.tiles = tiles % p.num_tiles;
    return fetches;
  }
  miss_routes_.clear();
  std::int32_t miss_extra = 0;
  for (const std::int32_t i : misses_) {
    miss_routes_.push_back(routes_of_[uses_[i].expert]);
    miss_extra += miss_routes_.back() - 1;
  }
  const int num_hits = static_cast<int>(uses_.size()) - num_misses;
  const LayerWork work{.num_hits = num_hits,
                       .hit_extra = total_routes_ - miss_extra - num_misses - num_hits,
                       .record_bytes = p.record_bytes,
                       .miss_routes = miss_routes_,
                       .num_fetchable = num_fetchable,
                       .num_free_slots = slots.num_free(),
                       .num_tiles = p.num_tiles};
  const auto [whole, tiles] = split->choose(work);
  return Fetches{whole, tiles / p.num_tiles, tiles % p.num_tiles};
}

void LayerPlanner::admit_ahead(const PublishView& p, SlotTable& slots, PlanHeader& header) {
  if (ahead_ < 0) return;
  slots.admit(p.layer, uses_[ahead_]);
  header.num_admitted += uses_[ahead_].destination >= 0;
}

// Gives slots to the best of those that are fetched. Decides whether a record is split after all; then the first
// `before` misses are fetched whole and the next one in part.
void LayerPlanner::admit_fetches(const PublishView& p, SlotTable& slots, Fetches& fetches, PlanHeader& header) {
  const int count = fetches.tiles > 0 ? std::max(fetches.whole, fetches.before) : fetches.whole;
  order_admissions(count);
  for (int i = 0; i < count; ++i) {
    ExpertUse& use = uses_[misses_[i]];
    slots.admit(p.layer, use);
    if (use.destination < 0) continue;
    ++header.num_admitted;
    if (i >= fetches.before) fetches.tiles = 0;
  }
  if (fetches.tiles > 0) fetches.whole = fetches.before;
}

void LayerPlanner::note_shares(const PublishView& p, const Fetches& fetches) {
  const int num_misses = static_cast<int>(misses_.size());
  const int num_hits = static_cast<int>(uses_.size()) - num_misses;
  const int num_split = fetches.tiles > 0 ? 1 : 0;
  shares_ = LayerShares{.num_hits = num_hits,
                        .num_fetches = fetches.whole,
                        .num_cpu = num_misses - fetches.whole - num_split,
                        .record_bytes = p.record_bytes};
  shares_.hit_extra = total_routes_ - num_hits;
  for (int m = 0; m < num_misses; ++m) {
    const std::int32_t routes = routes_of_[uses_[misses_[m]].expert];
    shares_.hit_extra -= routes;
    if (m < fetches.whole) {
      shares_.fetch_extra += routes - 1;
    } else if (m == fetches.whole && num_split != 0) {
      shares_.split_extra = routes - 1;
    } else {
      shares_.cpu_extra += routes - 1;
    }
  }
  if (num_split != 0) shares_.split_part = static_cast<double>(fetches.tiles) / p.num_tiles;
}

AbortReason LayerPlanner::plan(const PublishView& p, SlotTable& slots, double fetch_fraction, bool in_place,
                               PlanHeader& header, PlanEntry* entries, std::int32_t* routes, SplitPlanner* split) {
  settle(slots);
  const auto limit = static_cast<int>(p.device_only ? geometry_.max_tokens : geometry_.max_shared_tokens);
  if (p.layer < 0 || p.layer >= static_cast<int>(geometry_.num_layers) || p.num_tokens < 0 || p.num_tokens > limit ||
      p.top_k < 1 || p.top_k > static_cast<int>(geometry_.top_k) || !collect(p, routes)) {
    return AbortReason::kBadPublish;
  }
  const std::int64_t evicted_before = slots.evicted_total();
  shares_ = LayerShares{};
  if (!in_place) slots.find_publish(p.layer, uses_);
  misses_.clear();
  ahead_ = -1;
  int num_fetchable = 0;
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    can_fetch_[i] = p.staged || is_fetchable(p.layer, uses_[i].expert);
    if (in_place ? can_fetch_[i] : uses_[i].slot >= 0) continue;
    if (!in_place && uses_[i].expert == p.ahead) {
      ahead_ = static_cast<std::int32_t>(i);
      continue;
    }
    misses_.push_back(static_cast<std::int32_t>(i));
    num_fetchable += can_fetch_[i];
  }
  const int num_misses = static_cast<int>(misses_.size());
  const bool refused = p.device_only && num_fetchable < num_misses;
  Fetches fetches;
  header.num_admitted = 0;
  unsettled_layer_ = -1;
  const bool has_ahead = ahead_ >= 0;
  if (!in_place && num_misses == 0 && !has_ahead) {
    unsettled_layer_ = p.layer;
  } else if (!in_place) {
    slots.score_publish(p.layer, uses_, num_admitting_tokens_, num_run_tokens_);
    if (!refused) {
      admit_ahead(p, slots, header);
      order_misses(p, slots);
      fetches = choose_fetches(p, slots, num_fetchable, fetch_fraction, split);
      admit_fetches(p, slots, fetches, header);
      note_shares(p, fetches);
    }
    slots.end_publish(p.layer, uses_);
  }
  if (!refused) {
    header.num_hits = static_cast<std::uint32_t>(uses_.size() - misses_.size() - has_ahead);
    header.num_split = fetches.tiles > 0 ? 1 : 0;
    header.split_tiles = static_cast<std::uint32_t>(fetches.tiles);
    header.num_fetches = static_cast<std::uint32_t>(fetches.whole) + header.num_split + has_ahead;
    header.num_cpu = static_cast<std::uint32_t>(num_misses - fetches.whole);
    header.num_routes = static_cast<std::uint32_t>(total_routes_);
    header.num_evicted = static_cast<std::uint32_t>(slots.evicted_total() - evicted_before);
    write_entries(p, in_place, fetches, entries, routes);
  }
  forget_counts();
  return refused ? AbortReason::kNotFetchable : AbortReason::kNone;
}

void LayerPlanner::settle(SlotTable& slots) {
  if (unsettled_layer_ < 0) return;
  slots.score_publish(unsettled_layer_, uses_, num_admitting_tokens_, num_run_tokens_);
  slots.end_publish(unsettled_layer_, uses_);
  unsettled_layer_ = -1;
}

void LayerPlanner::write_entries(const PublishView& p, bool in_place, const Fetches& fetches, PlanEntry* entries,
                                 std::int32_t* routes) {
  std::int32_t first_route = 0;
  std::int32_t num_written = 0;
  const auto write = [&](std::int32_t i, EntryKind kind, std::int32_t first_tile = 0, std::int32_t num_tiles = 0) {
    const ExpertUse& use = uses_[i];
    const std::int32_t num_routes = routes_of_[use.expert];
    entries[num_written++] =
        PlanEntry{use.expert, kind, use.slot, use.destination, first_route, num_routes, first_tile, num_tiles};
    next_route_of_[use.expert] = first_route;
    first_route += num_routes;
  };
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    if (in_place ? can_fetch_[i] : uses_[i].slot >= 0) write(static_cast<std::int32_t>(i), EntryKind::kHit);
  }
  if (ahead_ >= 0) write(ahead_, EntryKind::kAhead);
  for (std::size_t m = 0; m < misses_.size(); ++m) {
    const int whole = fetches.whole;
    if (static_cast<int>(m) == whole && fetches.tiles > 0) {
      write(misses_[m], EntryKind::kFetch, 0, fetches.tiles);
      first_route -= entries[num_written - 1].num_routes;  // the CPU has the same routes
      write(misses_[m], EntryKind::kCpu, fetches.tiles, p.num_tiles - fetches.tiles);
      continue;
    }
    write(misses_[m], static_cast<int>(m) < whole ? EntryKind::kFetch : EntryKind::kCpu);
  }
  const std::int32_t num_ids = p.num_tokens * p.top_k;
  std::int32_t* const next_route_of = next_route_of_.data();
  for (std::int32_t route = 0; route < num_ids; ++route) {
    const std::int32_t expert = p.ids[route];
    if (static_cast<std::uint32_t>(expert) >= geometry_.num_experts) continue;
    std::int32_t& next = next_route_of[expert];
    // Always true, unless a device overwrites ids after it gave up waiting: such a plan is void but must do no harm.
    if (next < num_ids) routes[next++] = route;
  }
}

}  // namespace ft
