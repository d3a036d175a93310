// The slot table against a model that scans everything, and its invariants over random publishes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "slot_table.h"

namespace {

using ft::ExpertUse;
using ft::SlotPolicy;
using ft::SlotTable;
using Key = std::pair<int, int>;

// The same rules without heaps: scores by the same formula, victims by looking at every resident.
struct Model {
  Model(int layers, int slots, SlotPolicy policy, double half_life)
      : policy(policy), half_life(half_life), clock(layers, 0.0) {
    for (int slot = 0; slot < slots; ++slot) free.insert(slot);
  }

  double log_score(Key key) const {
    const auto found = scores.find(key);
    return found == scores.end() ? -std::numeric_limits<double>::infinity() : found->second;
  }
  double score(Key key) const { return log_score(key) - clock[key.first]; }

  void begin(int layer, const std::vector<ExpertUse>& uses, int num_tokens) {
    ++publishes;
    for (const auto& [key, slot] : in_flight) resident[key] = slot;
    in_flight.clear();
    double decay = 1.0;
    if (policy == SlotPolicy::kCrf && num_tokens > 0) {
      clock[layer] += num_tokens / half_life;
      if (num_tokens > 1) {
        decay = (1.0 - std::exp2(-num_tokens / half_life)) / (num_tokens * (1.0 - std::exp2(-1.0 / half_life)));
      }
    }
    named.clear();
    for (const ExpertUse& use : uses) {
      const Key key{layer, use.expert};
      named.insert(key);
      if (use.tokens <= 0) continue;
      scores[key] = policy == SlotPolicy::kLru
                        ? publishes
                        : std::log2(std::exp2(log_score(key) - clock[layer]) + use.tokens * decay) + clock[layer];
    }
  }

  // -1 or an upper bound on knowledge: the victim's key, to compare slots by.
  bool admit(Key key, bool& evicts, Key& victim) {
    evicts = false;
    if (!free.empty()) return true;
    bool found = false;
    for (std::size_t layer = 0; layer < clock.size(); ++layer) {
      bool in_layer = false;
      Key worst;
      for (const auto& [candidate, slot] : resident) {
        if (candidate.first != static_cast<int>(layer) || named.count(candidate)) continue;
        if (!in_layer || log_score(candidate) < log_score(worst)) worst = candidate;
        in_layer = true;
      }
      if (in_layer && (!found || score(worst) < score(victim))) {
        victim = worst;
        found = true;
      }
    }
    if (!found) return false;
    if (policy == SlotPolicy::kCrf && score(key) <= score(victim)) return false;
    evicts = true;
    return true;
  }

  SlotPolicy policy;
  double half_life;
  std::vector<double> clock;
  double publishes = 0;
  std::map<Key, double> scores;
  std::map<Key, int> resident, in_flight;
  std::set<int> free;
  std::set<Key> named;
};

struct Publish {
  int layer;
  std::vector<ExpertUse> uses;
  int num_tokens;
};

Publish random_publish(std::mt19937& random, int layers, int experts) {
  Publish publish{static_cast<int>(random() % layers), {}, 0};
  const int admitting = random() % 4 == 0 ? 0 : 1 + static_cast<int>(random() % 3);
  publish.num_tokens = admitting;
  std::vector<int> ids(experts);
  for (int i = 0; i < experts; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), random);
  const int distinct = random() % 20 == 0 ? experts : static_cast<int>(random() % std::min(experts + 1, 5));
  for (int i = 0; i < distinct; ++i) {
    // Skewed, so that some experts are hot.
    const int expert = random() % 2 ? ids[i] : ids[i] / 2;
    const bool known = std::any_of(publish.uses.begin(), publish.uses.end(),
                                   [&](const ExpertUse& use) { return use.expert == expert; });
    if (!known)
      publish.uses.push_back(ExpertUse{.expert = expert, .tokens = static_cast<int>(random() % (admitting + 1))});
  }
  return publish;
}

void compare_contents(const SlotTable& table, const Model& model) {
  std::map<Key, int> resident;
  table.for_each_resident([&](int slot, int layer, int expert) { resident[{layer, expert}] = slot; });
  CHECK(resident == model.resident);
  CHECK(table.num_in_flight() == static_cast<int>(model.in_flight.size()));
  CHECK(table.num_free() == static_cast<int>(model.free.size()));
}

void test_against_model(SlotPolicy policy, int layers, int experts, int slots, double half_life, unsigned seed) {
  std::mt19937 random(seed);
  SlotTable table(layers, experts, slots, policy, half_life);
  Model model(layers, slots, policy, half_life);
  std::int64_t evicted = 0;
  for (int step = 0; step < 1500; ++step) {
    if (random() % 200 == 0) {
      table.invalidate_in_flight();
      for (const auto& [key, slot] : model.in_flight) model.free.insert(slot);
      model.in_flight.clear();
    }
    if (random() % 500 == 0) {
      table.invalidate_all();
      for (auto* map : {&model.in_flight, &model.resident}) {
        for (const auto& [key, slot] : *map) model.free.insert(slot);
        map->clear();
      }
    }
    Publish publish = random_publish(random, layers, experts);
    table.begin_publish(publish.layer, publish.uses, publish.num_tokens);
    model.begin(publish.layer, publish.uses, publish.num_tokens);
    for (ExpertUse& use : publish.uses) {
      const Key key{publish.layer, use.expert};
      const auto found = model.resident.find(key);
      CHECK(use.slot == (found == model.resident.end() ? -1 : found->second));
      CHECK(table.score(publish.layer, use.expert) == model.score(key));
    }
    for (ExpertUse& use : publish.uses) {
      if (use.slot >= 0 || random() % 3 == 0) continue;  // hits, and misses that go to the CPU
      const Key key{publish.layer, use.expert};
      bool evicts = false;
      Key victim;
      const bool admitted = use.tokens > 0 && model.admit(key, evicts, victim);
      table.admit(publish.layer, use);
      CHECK((use.destination >= 0) == admitted);
      if (!admitted) continue;
      if (evicts) {
        CHECK(use.destination == model.resident.at(victim));
        CHECK(model.named.count(victim) == 0);
        model.resident.erase(victim);
        ++evicted;
      } else {
        CHECK(model.free.erase(use.destination) == 1);
      }
      model.in_flight[key] = use.destination;
      CHECK(table.lookup(publish.layer, use.expert) == -1);  // not readable yet
    }
    table.end_publish(publish.layer, publish.uses);
    CHECK(table.evicted_total() == evicted);
    if (step % 10 == 0) {
      table.check_integrity();
      compare_contents(table, model);
    }
  }
  table.check_integrity();
  compare_contents(table, model);
}

// The stored logarithm against the definition: the sum of 2^(-age / half_life) over all uses.
void test_score_definition() {
  constexpr double kHalfLife = 8.0;
  SlotTable table(1, 4, 2, SlotPolicy::kCrf, kHalfLife);
  std::mt19937 random(3);
  std::vector<int> used_at;
  for (int token = 1; token <= 300; ++token) {
    std::vector<ExpertUse> uses;
    if (random() % 3 == 0) {
      uses.push_back(ExpertUse{.expert = 2, .tokens = 1});
      used_at.push_back(token);
    }
    table.begin_publish(0, uses, 1);
    table.end_publish(0, uses);
    if (used_at.empty()) continue;
    double sum = 0.0;
    for (const int at : used_at) sum += std::exp2(-(token - at) / kHalfLife);
    CHECK(std::abs(std::exp2(table.score(0, 2)) - sum) < 1e-9 * sum);
  }
  CHECK(std::isinf(table.score(0, 1)));
}

// One publish of n tokens that all chose the expert scores like n publishes of one.
void test_score_of_batches() {
  SlotTable one_by_one(1, 1, 0, SlotPolicy::kCrf, 32.0);
  SlotTable batched(1, 1, 0, SlotPolicy::kCrf, 32.0);
  std::vector<ExpertUse> single{ExpertUse{.expert = 0, .tokens = 1}};
  for (int i = 0; i < 48; ++i) one_by_one.begin_publish(0, single, 1);
  std::vector<ExpertUse> all{ExpertUse{.expert = 0, .tokens = 48}};
  batched.begin_publish(0, all, 48);
  CHECK(std::abs(one_by_one.score(0, 0) - batched.score(0, 0)) < 1e-9);
}

void test_insert_only_if_better() {
  SlotTable table(1, 8, 1, SlotPolicy::kCrf, 32.0);
  const auto touch = [&](int expert) {
    std::vector<ExpertUse> uses{ExpertUse{.expert = expert, .tokens = 1}};
    table.begin_publish(0, uses, 1);
    table.admit(0, uses[0]);
    table.end_publish(0, uses);
    return uses[0];
  };
  CHECK(touch(0).destination == 0);
  for (int i = 0; i < 10; ++i) CHECK(touch(0).slot == 0);
  CHECK(touch(1).destination == -1);  // one use does not beat eleven
  CHECK(touch(0).slot == 0);
  int tries = 1;
  while (touch(2).destination < 0) ++tries;  // but a ghost that keeps coming gets in
  CHECK(tries > 2 && tries < 12);
  CHECK(table.evicted_total() == 1);
}

void test_refusals() {
  const auto refuses = [](auto&& function) {
    try {
      function();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refuses([] { SlotTable(0, 4, 4, SlotPolicy::kCrf, 32.0); }));
  CHECK(refuses([] { SlotTable(1, 4, -1, SlotPolicy::kCrf, 32.0); }));
  CHECK(refuses([] { SlotTable(1, 4, 4, SlotPolicy::kCrf, 0.0); }));
  CHECK(refuses([] { ft::parse_slot_policy("fifo"); }));
  SlotTable table(1, 4, 4, SlotPolicy::kLru, 32.0);
  table.acquire_owner();
  bool refused = false;
  try {
    table.acquire_owner();
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  unsigned seed = 1;
  for (const SlotPolicy policy : {SlotPolicy::kCrf, SlotPolicy::kLru}) {
    test_against_model(policy, 3, 6, 5, 4.0, seed++);
    test_against_model(policy, 4, 8, 30, 32.0, seed++);
    test_against_model(policy, 1, 16, 3, 2.0, seed++);
    test_against_model(policy, 2, 4, 8, 32.0, seed++);  // room for everything
    test_against_model(policy, 2, 4, 0, 32.0, seed++);
  }
  test_score_definition();
  test_score_of_batches();
  test_insert_only_if_better();
  test_refusals();
  return 0;
}
