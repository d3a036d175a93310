// Plans of random publishes: every route exactly once, the split as configured, no victim among the named.
#include <algorithm>
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
                  const std::vector<std::uint8_t>& admit, double fraction, bool in_place, bool device_only = false) {
  Planned planned{};
  planned.entries.resize(kMaxEntries);
  planned.routes.assign(kGeometry.max_tokens * kGeometry.top_k, -7);
  const ft::PublishView publish{layer, static_cast<int>(admit.size()), 3, ids.data(), admit.data(), device_only};
  planned.refusal =
      planner.plan(publish, slots, fraction, in_place, planned.header, planned.entries.data(), planned.routes.data());
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
    const Planned planned = make_plan(planner, slots, layer, ids, admit, fraction, in_place, device_only);
    slots.check_integrity();  // compares the mirror as well
    if (planned.refusal == ft::AbortReason::kNotFetchable) {
      // Slots that were being filled before have become readable: a record without a slot is enough for a refusal.
      CHECK(device_only && std::any_of(by_expert.begin(), by_expert.end(), [&](const auto& use) {
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
      CHECK(kind == EntryKind::kCpu || entry.source_slot >= 0 || can_fetch(layer, entry.expert));
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
  test_best_scored_are_fetched();
  test_values_out_of_range();
  return 0;
}
