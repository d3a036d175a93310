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
  num_routes_.reserve(max_entries);
  misses_.reserve(max_entries);
  scores_.assign(max_entries, 0.0);
  next_route_.assign(max_entries, 0);
  can_fetch_.assign(max_entries, 0);
  use_of_expert_.assign(geometry.num_experts, -1);
}

bool LayerPlanner::collect(const PublishView& p) {
  uses_.clear();
  num_routes_.clear();
  num_admitting_tokens_ = 0;
  total_routes_ = 0;
  bool valid = true;
  for (int t = 0; t < p.num_tokens && valid; ++t) {
    const bool admits = p.admit[t] != 0;
    bool is_padding = true;
    for (int k = 0; k < p.top_k; ++k) {
      const std::int32_t expert = p.ids[t * p.top_k + k];
      if (expert == -1) continue;
      if (expert < 0 || expert >= static_cast<std::int32_t>(geometry_.num_experts)) {
        valid = false;
        break;
      }
      is_padding = false;
      std::int32_t& use = use_of_expert_[expert];
      if (use < 0) {
        use = static_cast<std::int32_t>(uses_.size());
        uses_.push_back(ExpertUse{.expert = expert});
        num_routes_.push_back(0);
      }
      ++num_routes_[use];
      uses_[use].tokens += admits;
      ++total_routes_;
    }
    num_admitting_tokens_ += admits && !is_padding;
  }
  if (!valid) {
    for (const ExpertUse& use : uses_) use_of_expert_[use.expert] = -1;
  }
  return valid;
}

// Those that can be fetched before those that cannot; the best first: those are the ones worth a slot. Ties go to more
// routes, then to the earlier one.
void LayerPlanner::order_misses(const PublishView& p, const SlotTable& slots) {
  for (const std::int32_t i : misses_) scores_[i] = slots.score(p.layer, uses_[i].expert);
  std::sort(misses_.begin(), misses_.end(), [this](std::int32_t a, std::int32_t b) {
    if (can_fetch_[a] != can_fetch_[b]) return can_fetch_[a] > can_fetch_[b];
    if (scores_[a] != scores_[b]) return scores_[a] > scores_[b];
    if (num_routes_[a] != num_routes_[b]) return num_routes_[a] > num_routes_[b];
    return a < b;
  });
}

AbortReason LayerPlanner::plan(const PublishView& p, SlotTable& slots, double fetch_fraction, bool in_place,
                               PlanHeader& header, PlanEntry* entries, std::int32_t* routes) {
  const auto limit = static_cast<int>(p.device_only ? geometry_.max_tokens : geometry_.max_shared_tokens);
  if (p.layer < 0 || p.layer >= static_cast<int>(geometry_.num_layers) || p.num_tokens < 0 || p.num_tokens > limit ||
      p.top_k < 1 || p.top_k > static_cast<int>(geometry_.top_k) || !collect(p)) {
    return AbortReason::kBadPublish;
  }
  const std::int64_t evicted_before = slots.evicted_total();
  if (!in_place) slots.begin_publish(p.layer, uses_, num_admitting_tokens_);
  misses_.clear();
  int num_fetchable = 0;
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    can_fetch_[i] = is_fetchable(p.layer, uses_[i].expert);
    if (in_place ? can_fetch_[i] : uses_[i].slot >= 0) continue;
    misses_.push_back(static_cast<std::int32_t>(i));
    num_fetchable += can_fetch_[i];
  }
  const int num_misses = static_cast<int>(misses_.size());
  const bool refused = p.device_only && num_fetchable < num_misses;
  int num_fetches = 0;
  header.num_admitted = 0;
  if (!in_place) {
    if (!refused) {
      order_misses(p, slots);
      num_fetches = p.device_only ? num_misses : std::min(num_fetchable, plan_num_fetches(fetch_fraction, num_misses));
      for (int i = 0; i < num_fetches; ++i) {
        ExpertUse& use = uses_[misses_[i]];
        slots.admit(p.layer, use);
        header.num_admitted += use.destination >= 0;
      }
    }
    slots.end_publish(p.layer, uses_);
  }
  if (!refused) {
    header.num_hits = static_cast<std::uint32_t>(uses_.size() - misses_.size());
    header.num_fetches = static_cast<std::uint32_t>(num_fetches);
    header.num_cpu = static_cast<std::uint32_t>(num_misses - num_fetches);
    header.num_routes = static_cast<std::uint32_t>(total_routes_);
    header.num_evicted = static_cast<std::uint32_t>(slots.evicted_total() - evicted_before);
    write_entries(p, in_place, num_fetches, entries, routes);
  }
  for (const ExpertUse& use : uses_) use_of_expert_[use.expert] = -1;
  return refused ? AbortReason::kNotFetchable : AbortReason::kNone;
}

void LayerPlanner::write_entries(const PublishView& p, bool in_place, int num_fetches, PlanEntry* entries,
                                 std::int32_t* routes) {
  std::int32_t first_route = 0;
  std::int32_t num_written = 0;
  const auto write = [&](std::int32_t i, EntryKind kind) {
    entries[num_written++] =
        PlanEntry{uses_[i].expert, kind, uses_[i].slot, uses_[i].destination, first_route, num_routes_[i], {0, 0}};
    next_route_[i] = first_route;
    first_route += num_routes_[i];
  };
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    if (in_place ? can_fetch_[i] : uses_[i].slot >= 0) write(static_cast<std::int32_t>(i), EntryKind::kHit);
  }
  for (std::size_t m = 0; m < misses_.size(); ++m) {
    write(misses_[m], static_cast<int>(m) < num_fetches ? EntryKind::kFetch : EntryKind::kCpu);
  }
  const std::int32_t num_ids = p.num_tokens * p.top_k;
  for (std::int32_t route = 0; route < num_ids; ++route) {
    if (p.ids[route] >= 0) routes[next_route_[use_of_expert_[p.ids[route]]]++] = route;
  }
}

}  // namespace ft
