// Plans of random publishes: every route exactly once, the split as configured, no victim among the named.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "layer_planner.h"

namespace {

using ft::EntryKind;
using ft::PlanEntry;
using ft::PlanHeader;

constexpr ft::MailboxGeometry kGeometry{12, 3, 16, 2, 10, 8};
constexpr int kMaxEntries = 10;

struct Planned {
  ft::AbortReason refusal;
  PlanHeader header{};
  std::vector<PlanEntry> entries;
  std::vector<std::int32_t> routes;
};

Planned make_plan(ft::LayerPlanner& planner, ft::SlotTable& slots, int layer, const std::vector<std::int32_t>& ids,
                  const std::vector<std::uint8_t>& admit, double fraction, bool in_place, bool device_only = false,
                  int num_tiles = 1, ft::SplitPlanner* split = nullptr, bool staged = false) {
  Planned planned{};
  planned.entries.resize(kMaxEntries + 1);
  planned.routes.assign(kGeometry.max_tokens * kGeometry.top_k, -7);
  const ft::PublishView publish{
      layer, static_cast<int>(admit.size()), 3, ids.data(), admit.data(), device_only, 1e6, num_tiles, -1, staged};
  planned.refusal = planner.plan(publish, slots, fraction, in_place, planned.header, planned.entries.data(),
                                 planned.routes.data(), split);
  planner.settle(slots);
  return planned;
}

void test_rounding() {
  CHECK(ft::plan_num_fetches(0.5, 1) == 1 && ft::plan_num_fetches(0.5, 3) == 2 && ft::plan_num_fetches(0.5, 4) == 2);
  CHECK(ft::plan_num_fetches(0.49, 1) == 0 && ft::plan_num_fetches(0.25, 2) == 1);
  for (int misses = 0; misses < 40; ++misses) {
    CHECK(ft::plan_num_fetches(1.0, misses) == misses && ft::plan_num_fetches(0.0, misses) == 0);
  }
}

// unreadable_percent: share of the records that the device cannot fetch.
void test_random_publishes(int num_slots, double fraction, bool in_place, unsigned seed, unsigned unreadable_percent) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> fetchable(unreadable_percent > 0 ? 20 : 0, 1);
  for (std::uint8_t& record : fetchable) record = random() % 100 >= unreadable_percent;
  const auto can_fetch = [&](int layer, int expert) { return fetchable.empty() || fetchable[layer * 10 + expert]; };
  ft::LayerPlanner planner(kGeometry, kMaxEntries, fetchable);
  ft::SlotTable slots(2, 10, num_slots);
  std::vector<std::int32_t> slot_of(20, 77);
  slots.set_mirror(slot_of.data());
  int refusals = 0;
  for (int step = 0; step < 800; ++step) {
    const bool device_only = random() % 4 == 0;
    const bool staged = device_only && random() % 2 == 0;
    const int max_tokens = static_cast<int>(device_only ? kGeometry.max_tokens : kGeometry.max_shared_tokens);
    const int num_tokens = 1 + static_cast<int>(random() % max_tokens);
    std::vector<std::int32_t> ids(num_tokens * 3);
    std::vector<std::uint8_t> admit(num_tokens);
    std::map<int, std::vector<std::int32_t>> by_expert;
    std::set<int> admitting;
    for (int t = 0; t < num_tokens; ++t) {
      const bool is_padding = random() % 4 == 0;
      admit[t] = random() % 3;
      for (int k = 0; k < 3; ++k) {
        const int expert = is_padding ? -1 : static_cast<int>(random() % 10);
        ids[t * 3 + k] = expert;
        if (is_padding) continue;
        by_expert[expert].push_back(t * 3 + k);
        if (admit[t]) admitting.insert(expert);
      }
    }
    const int layer = static_cast<int>(random() % 2);
    std::set<int> mirrored;
    for (int expert = 0; expert < 10; ++expert) {
      const bool was_filled = slots.lookup(layer, expert) >= 0;
      CHECK(was_filled == (slot_of[layer * 10 + expert] >= 0));
      if (was_filled) mirrored.insert(expert);
    }
    const Planned planned =
        make_plan(planner, slots, layer, ids, admit, fraction, in_place, device_only, 1, nullptr, staged);
    slots.check_integrity();  // compares the mirror as well
    if (planned.refusal == ft::AbortReason::kNotFetchable) {
      // Slots that were being filled before have become readable: a record without a slot is enough for a refusal.
      CHECK(device_only && !staged && std::any_of(by_expert.begin(), by_expert.end(), [&](const auto& use) {
              return !can_fetch(layer, use.first) && mirrored.count(use.first) == 0;
            }));
      ++refusals;
      continue;
    }
    CHECK(planned.refusal == ft::AbortReason::kNone);
    const PlanHeader& header = planned.header;
    CHECK(header.num_entries() == by_expert.size());
    std::size_t next_route = 0;
    std::set<int> sources;
    std::set<int> destinations;
    for (std::uint32_t i = 0; i < header.num_entries(); ++i) {
      const PlanEntry& entry = planned.entries[i];
      const EntryKind kind = i < header.num_hits                        ? EntryKind::kHit
                             : i < header.num_hits + header.num_fetches ? EntryKind::kFetch
                                                                        : EntryKind::kCpu;
      CHECK(entry.kind == kind);
      const auto found = by_expert.find(entry.expert);
      CHECK(found != by_expert.end());
      CHECK(static_cast<std::size_t>(entry.first_route) == next_route);
      CHECK(std::equal(found->second.begin(), found->second.end(), planned.routes.begin() + entry.first_route));
      CHECK(static_cast<std::size_t>(entry.num_routes) == found->second.size());
      next_route += found->second.size();
      by_expert.erase(found);
      CHECK((entry.source_slot >= 0) == (kind == EntryKind::kHit && !in_place));
      CHECK(kind == EntryKind::kCpu || entry.source_slot >= 0 || staged || can_fetch(layer, entry.expert));
      CHECK(!device_only || kind != EntryKind::kCpu);
      if (entry.source_slot >= 0) CHECK(sources.insert(entry.source_slot).second);
      if (entry.destination_slot >= 0) {
        CHECK(kind == EntryKind::kFetch && admitting.count(entry.expert) && entry.destination_slot < num_slots);
        CHECK(destinations.insert(entry.destination_slot).second);
      }
    }
    CHECK(by_expert.empty() && next_route == header.num_routes);
    CHECK(destinations.size() == header.num_admitted);
    for (const int slot : destinations) CHECK(sources.count(slot) == 0);  // no victim among the named
    const int misses = static_cast<int>(header.num_fetches + header.num_cpu);
    const int wanted = in_place ? 0 : device_only ? misses : ft::plan_num_fetches(fraction, misses);
    CHECK(static_cast<int>(header.num_fetches) <= wanted);
    if (static_cast<int>(header.num_fetches) < wanted) {  // then everything left is out of the device's reach
      for (std::uint32_t i = header.num_hits + header.num_fetches; i < header.num_entries(); ++i) {
        CHECK(!can_fetch(layer, planned.entries[i].expert));
      }
    }
    if (in_place && fetchable.empty()) CHECK(misses == 0);
    CHECK(slots.num_in_flight() == static_cast<int>(header.num_admitted));
  }
  if (in_place) CHECK(slots.num_free() == num_slots);
  CHECK((refusals > 0) == !fetchable.empty());
}

// The shares of a split: exactly the fraction of the missing tiles; the parts are of one record and make it up.
void test_split_records(int num_slots, double fraction, bool by_rates, unsigned seed, unsigned unreadable_percent) {
  constexpr int kTiles = 5;
  std::mt19937 random(seed);
  std::vector<std::uint8_t> fetchable(unreadable_percent > 0 ? 20 : 0, 1);
  for (std::uint8_t& record : fetchable) record = random() % 100 >= unreadable_percent;
  const auto can_fetch = [&](int layer, int expert) { return fetchable.empty() || fetchable[layer * 10 + expert]; };
  ft::LayerPlanner planner(kGeometry, kMaxEntries, fetchable);
  ft::SlotTable slots(2, 10, num_slots);
  ft::SplitCosts costs;
  costs.fetch = costs.fetch_beside = ft::SideCost{1e3, 0.05, 0.0};
  costs.cpu = costs.cpu_beside = ft::SideCost{2e3, 0.03, 0.01};
  ft::SplitPlanner rates(costs);
  int splits = 0, exact = 0;
  for (int step = 0; step < 800; ++step) {
    const int num_tokens = 1 + static_cast<int>(random() % kGeometry.max_shared_tokens);
    std::vector<std::int32_t> ids(num_tokens * 3);
    std::vector<std::uint8_t> admit(num_tokens);
    std::map<int, std::set<std::int32_t>> by_expert;
    for (std::size_t r = 0; r < ids.size(); ++r) {
      ids[r] = static_cast<std::int32_t>(random() % 10);
      by_expert[ids[r]].insert(static_cast<std::int32_t>(r));
      admit[r / 3] = random() % 3;
    }
    const int layer = static_cast<int>(random() % 2);
    const bool device_only = unreadable_percent == 0 && step % 7 == 0;
    const Planned planned =
        make_plan(planner, slots, layer, ids, admit, fraction, false, device_only, kTiles, by_rates ? &rates : nullptr);
    slots.check_integrity();
    CHECK(planned.refusal == ft::AbortReason::kNone);
    const PlanHeader& header = planned.header;
    const std::uint32_t num_own = header.num_hits + header.num_fetches;
    CHECK(header.num_entries() == by_expert.size() + header.num_split && header.num_entries() <= kMaxEntries + 1);
    CHECK(header.num_routes == ids.size());
    std::map<int, int> tiles_of;
    std::uint32_t own_routes = 0;
    for (std::uint32_t i = 0; i < header.num_entries(); ++i) {
      const PlanEntry& entry = planned.entries[i];
      const bool is_part = header.num_split != 0 && (i + 1 == num_own || i == num_own);
      CHECK(is_part == (entry.num_tiles != 0));
      CHECK(entry.kind == (i < header.num_hits ? EntryKind::kHit : i < num_own ? EntryKind::kFetch : EntryKind::kCpu));
      if (entry.kind == EntryKind::kFetch) CHECK(can_fetch(layer, entry.expert));
      tiles_of[entry.expert] += is_part ? entry.num_tiles : kTiles;
      const std::set<std::int32_t> routes(planned.routes.begin() + entry.first_route,
                                          planned.routes.begin() + entry.first_route + entry.num_routes);
      CHECK(routes == by_expert[entry.expert]);
      if (i < num_own) {
        CHECK(entry.first_route == static_cast<std::int32_t>(own_routes));  // so a device's routes are the first ones
        own_routes += entry.num_routes;
      }
    }
    for (const auto& [expert, tiles] : tiles_of) CHECK(tiles == kTiles);
    if (header.num_split != 0) {
      const PlanEntry &own = planned.entries[num_own - 1], &rest = planned.entries[num_own];
      CHECK(own.expert == rest.expert && own.first_route == rest.first_route && own.source_slot < 0);
      CHECK(own.destination_slot < 0 && rest.destination_slot < 0 && !device_only);
      CHECK(own.first_tile == 0 && own.num_tiles == static_cast<int>(header.split_tiles) && own.num_tiles > 0);
      CHECK(rest.first_tile == own.num_tiles && rest.num_tiles == kTiles - own.num_tiles && rest.num_tiles > 0);
      ++splits;
    }
    const int misses = static_cast<int>(by_expert.size() - header.num_hits);
    const double fetched = header.fetched_records(kTiles);
    CHECK(std::abs(fetched + header.cpu_records(kTiles) - misses) < 1e-9);
    const ft::LayerShares& shares = planner.shares();
    if (misses > 0) CHECK(std::abs(shares.num_fetches + shares.split_part - fetched) < 1e-9);
    if (misses > 0) CHECK(shares.num_fetches + shares.num_cpu + shares.is_split() == misses);
    if (num_slots == 0 && !by_rates && !device_only && fetchable.empty()) {
      CHECK(std::abs(fetched - fraction * misses) <= 0.5 / kTiles + 1e-9);
      ++exact;
    }
  }
  CHECK((splits > 0) == (by_rates || (fraction > 0.0 && fraction < 1.0)));
  CHECK(exact > 0 || num_slots > 0 || by_rates || !fetchable.empty());
}

void test_best_scored_are_fetched() {
  ft::LayerPlanner planner(kGeometry, kMaxEntries);
  ft::SlotTable slots(2, 10, 0);
  for (int i = 0; i < 4; ++i) make_plan(planner, slots, 0, {7, 8, 7}, {1}, 0.5, false);
  const Planned planned = make_plan(planner, slots, 0, {1, 7, 2}, {1}, 0.34, false);
  CHECK(planned.header.num_fetches == 1 && planned.entries[0].expert == 7 && planned.entries[1].expert == 1);
}

void test_values_out_of_range() {
  ft::LayerPlanner planner(kGeometry, kMaxEntries);
  ft::SlotTable slots(2, 10, 4);
  const auto refused = [&](int layer, const std::vector<std::int32_t>& ids, std::size_t tokens, bool device_only) {
    const std::vector<std::uint8_t> admit(tokens, 1);
    return make_plan(planner, slots, layer, ids, admit, 1.0, false, device_only).refusal ==
           ft::AbortReason::kBadPublish;
  };
  CHECK(refused(0, {1, 10, 2}, 1, false) && refused(0, {1, -2, 2}, 1, false) && refused(2, {1, 0, 2}, 1, false));
  const std::vector<std::int32_t> padding(13 * 3, -1);
  CHECK(!refused(0, padding, 8, false) && refused(0, padding, 9, false));
  CHECK(!refused(0, padding, 12, true) && refused(0, padding, 13, true));
  CHECK(slots.num_free() == 4);
  const Planned planned = make_plan(planner, slots, 0, {1, 1, 2}, {1}, 1.0, false);  // nothing was left behind
  CHECK(planned.refusal == ft::AbortReason::kNone && planned.header.num_entries() == 2 &&
        planned.entries[0].num_routes == 2);
  CHECK(make_plan(planner, slots, 0, {-1, -1, -1}, {1}, 1.0, false).header.num_entries() == 0);
}

}  // namespace

int main() {
  test_rounding();
  unsigned seed = 1;
  for (const int num_slots : {0, 3, 8, 20}) {
    for (const double fraction : {0.0, 0.5, 1.0}) {
      for (const unsigned unreadable : {0u, 30u}) test_random_publishes(num_slots, fraction, false, seed++, unreadable);
    }
  }
  for (const unsigned unreadable : {0u, 30u}) test_random_publishes(0, 0.5, true, seed++, unreadable);
  for (const int num_slots : {0, 3, 8}) {
    for (const unsigned unreadable : {0u, 30u}) {
      for (const double fraction : {0.0, 0.3, 0.5, 1.0})
        test_split_records(num_slots, fraction, false, seed++, unreadable);
      test_split_records(num_slots, 0.0, true, seed++, unreadable);
    }
  }
  test_best_scored_are_fetched();
  test_values_out_of_range();
  return 0;
}
