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
using ft::SlotPolicyOptions;
using ft::SlotTable;
using Key = std::pair<int, int>;

// The same rules, slowly: scores in double precision from every use, victims by looking at every resident. A decision
// between scores that single precision cannot tell apart is taken from the table.
struct Model {
  Model(int layers, int experts, int slots, const SlotPolicyOptions& options)
      : options(options), num_experts(experts), now(layers, 0.0), trust(layers, 0.5) {
    for (int slot = 0; slot < slots; ++slot) free.insert(slot);
  }

  struct Use {
    double at, weight, lasting_weight;
  };

  double score(Key key) const {
    const auto found = uses.find(key);
    if (found == uses.end()) return 0.0;
    if (options.policy == SlotPolicy::kLru) return found->second.back().at;
    double recent = 0.0;
    double lasting = 0.0;
    for (const Use& use : found->second) {
      const double age = now[key.first] - use.at;
      recent += use.weight * std::exp2(-age / options.half_life_tokens);
      lasting += use.lasting_weight * std::exp2(-age / options.long_half_life_tokens);
    }
    return (1.0 - trust[key.first]) * per_token(recent, key.first, options.half_life_tokens) +
           trust[key.first] * per_token(lasting, key.first, options.long_half_life_tokens);
  }

  // The share of `weight` in that of all tokens that the layer has seen.
  double per_token(double weight, int layer, double half_life) const {
    double all = 0.0;
    for (int age = 0; age < now[layer]; ++age) all += std::exp2(-age / half_life);
    return all > 0.0 ? weight / all : 0.0;
  }

  void learn(int layer, const std::vector<ExpertUse>& named_uses) {
    double evidence = 0.0;
    int count = 0;
    const double held = trust[layer];
    for (const ExpertUse& use : named_uses) {
      if (use.tokens <= 0 && use.run_tokens <= 0) continue;
      trust[layer] = 0.0;
      const double recent = score({layer, use.expert}) + 0.1 / num_experts;
      trust[layer] = 1.0;
      const double lasting = score({layer, use.expert}) + 0.1 / num_experts;
      evidence += held * lasting / (held * lasting + (1.0 - held) * recent);
      ++count;
    }
    trust[layer] = count == 0 ? held : std::min(0.95, std::max(0.05, 0.95 * held + 0.05 * evidence / count));
  }

  static double run_weight(int tokens, double half_life) {
    double sum = 0.0;
    for (int age = 0; age < tokens; ++age) sum += std::exp2(-age / half_life);
    return tokens > 0 ? sum / tokens : 0.0;
  }

  void begin(int layer, const std::vector<ExpertUse>& named_uses, int num_tokens, int num_run_tokens) {
    ++publishes;
    for (const auto& [key, slot] : in_flight) resident[key] = slot;
    in_flight.clear();
    const bool is_lru = options.policy == SlotPolicy::kLru;
    if (!is_lru && num_tokens + num_run_tokens > 0 && now[layer] > 0.0) learn(layer, named_uses);
    now[layer] += num_tokens > 0 ? 1 : num_run_tokens;
    named.clear();
    for (const ExpertUse& use : named_uses) {
      const Key key{layer, use.expert};
      named.insert(key);
      if (use.tokens <= 0 && use.run_tokens <= 0) continue;
      uses[key].push_back(Use{is_lru ? publishes : now[layer],
                              use.tokens + use.run_tokens * run_weight(num_run_tokens, options.half_life_tokens),
                              use.tokens + use.run_tokens * run_weight(num_run_tokens, options.long_half_life_tokens)});
    }
  }

  double worst_score() const {
    double worst = std::numeric_limits<double>::infinity();
    for (const auto& [key, slot] : resident) {
      if (named.count(key) == 0) worst = std::min(worst, score(key));
    }
    return worst;
  }

  // 1: has to be admitted, 0: must not, -1: too close to tell.
  int admission(Key key) const {
    if (!free.empty()) return 1;
    const double worst = worst_score();
    if (std::isinf(worst)) return 0;
    if (options.policy == SlotPolicy::kLru) return 1;
    const double one_use = (1.0 - trust[key.first]) * per_token(1.0, key.first, options.half_life_tokens) +
                           trust[key.first] * per_token(1.0, key.first, options.long_half_life_tokens);
    const double needed = std::max(options.floor * one_use, options.margin * worst);
    const double own = score(key);
    if (std::abs(own - needed) < 1e-4 * (own + needed)) return -1;
    return own > needed;
  }

  bool may_be_victim(Key key) const {
    return named.count(key) == 0 && resident.count(key) != 0 && score(key) <= worst_score() * (1.0 + 1e-4) + 1e-15;
  }

  SlotPolicyOptions options;
  int num_experts;
  std::vector<double> now;
  std::vector<double> trust;  // of the lasting average
  double publishes = 0;
  std::map<Key, std::vector<Use>> uses;
  std::map<Key, int> resident, in_flight;
  std::set<int> free;
  std::set<Key> named;
};

struct Publish {
  int layer;
  std::vector<ExpertUse> uses;
  int num_tokens;
  int num_run_tokens;
};

Publish random_publish(std::mt19937& random, int layers, int experts) {
  Publish publish{static_cast<int>(random() % layers), {}, 0, 0};
  const int admitting = random() % 4 == 0 ? 0 : 1 + static_cast<int>(random() % 3);
  const int in_run = random() % 4 == 0 ? 1 + static_cast<int>(random() % 5) : 0;
  publish.num_tokens = admitting;
  publish.num_run_tokens = in_run;
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
      publish.uses.push_back(ExpertUse{.expert = expert,
                                       .tokens = static_cast<int>(random() % (admitting + 1)),
                                       .run_tokens = static_cast<int>(random() % (in_run + 1))});
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

void test_against_model(const SlotPolicyOptions& options, int layers, int experts, int slots, unsigned seed) {
  std::mt19937 random(seed);
  SlotTable table(layers, experts, slots, options);
  Model model(layers, experts, slots, options);
  std::int64_t evicted = 0;
  for (int step = 0; step < 1500; ++step) {
    if (random() % 200 == 0) {
      table.invalidate_in_flight();
      for (const auto& [key, slot] : model.in_flight) model.free.insert(slot);
      model.in_flight.clear();
    }
    if (random() % 500 == 0) {
      table.empty(table.num_slots());
      for (auto* map : {&model.in_flight, &model.resident}) {
        for (const auto& [key, slot] : *map) model.free.insert(slot);
        map->clear();
      }
    }
    Publish publish = random_publish(random, layers, experts);
    table.begin_publish(publish.layer, publish.uses, publish.num_tokens, publish.num_run_tokens);
    model.begin(publish.layer, publish.uses, publish.num_tokens, publish.num_run_tokens);
    for (ExpertUse& use : publish.uses) {
      const Key key{publish.layer, use.expert};
      const auto found = model.resident.find(key);
      CHECK(use.slot == (found == model.resident.end() ? -1 : found->second));
      CHECK(std::abs(table.score(publish.layer, use.expert) - model.score(key)) <= 1e-4 * model.score(key) + 1e-15);
    }
    for (ExpertUse& use : publish.uses) {
      if (use.slot >= 0 || random() % 3 == 0) continue;  // hits, and misses that go to the CPU
      const Key key{publish.layer, use.expert};
      const int expected = use.tokens + use.run_tokens > 0 ? model.admission(key) : 0;
      std::map<int, Key> key_in;
      table.for_each_resident([&](int slot, int layer, int expert) { key_in[slot] = {layer, expert}; });
      table.admit(publish.layer, use);
      const bool admitted = use.destination >= 0;
      CHECK(expected < 0 || admitted == (expected == 1));
      if (!admitted) continue;
      if (model.free.erase(use.destination) == 0) {
        const Key victim = key_in.at(use.destination);
        CHECK(model.free.empty() && model.may_be_victim(victim));
        model.resident.erase(victim);
        ++evicted;
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

double ratio(const SlotTable& table, int expert, int other) { return table.score(0, expert) / table.score(0, other); }

// One publish of n consecutive tokens ages and scores like n publishes of one, when all chose the expert.
void test_score_of_runs() {
  SlotTable one_by_one(1, 2, 0);
  SlotTable at_once(1, 2, 0);
  std::vector<ExpertUse> before{ExpertUse{.expert = 1, .tokens = 1}};
  one_by_one.begin_publish(0, before, 1, 0);
  at_once.begin_publish(0, before, 1, 0);
  std::vector<ExpertUse> single{ExpertUse{.expert = 0, .tokens = 1}};
  for (int i = 0; i < 7; ++i) one_by_one.begin_publish(0, single, 1, 0);
  std::vector<ExpertUse> all{ExpertUse{.expert = 0, .run_tokens = 7}};
  at_once.begin_publish(0, all, 0, 7);
  CHECK(std::abs(ratio(one_by_one, 0, 1) / ratio(at_once, 0, 1) - 1.0) < 0.1);  // trust was learnt in other steps
}

// Rows of a batch are sequences of their own: the batch ages a layer by one token, and what b of them use counts b.
void test_score_of_batches() {
  SlotTable table(1, 3, 0);
  std::vector<ExpertUse> uses{ExpertUse{.expert = 0, .tokens = 3}, ExpertUse{.expert = 1, .tokens = 1}};
  for (int i = 0; i < 40; ++i) table.begin_publish(0, uses, 8, 0);
  CHECK(std::abs(table.score(0, 0) - 3.0) < 1e-4 && std::abs(table.score(0, 1) - 1.0) < 1e-4);  // uses per token
  CHECK(table.score(0, 2) == 0.0);
}

// A steady mixture makes the lasting average count, a change of subject the recent one.
void test_trust_follows_what_foretells() {
  const auto score_of_the_past = [](bool changed) {
    SlotTable table(1, 64, 0);
    std::mt19937 random(5);
    const auto step = [&](int from) {
      std::vector<ExpertUse> uses{ExpertUse{.expert = from + static_cast<int>(random() % 16), .tokens = 1}};
      table.begin_publish(0, uses, 1, 0);
    };
    for (int i = 0; i < 400; ++i) step(0);
    // Then other experts, drawn from just as many; or only a few that come again at once.
    for (int i = 0; i < 60; ++i) {
      std::vector<ExpertUse> uses{
          ExpertUse{.expert = changed ? 20 + i / 20 : static_cast<int>(random() % 16), .tokens = 1}};
      table.begin_publish(0, uses, 1, 0);
    }
    return table.score(0, 3);
  };
  CHECK(score_of_the_past(false) > 3.0 * score_of_the_past(true));
}

void test_insert_only_if_better() {
  SlotTable table(1, 8, 1);
  const auto touch = [&](int expert) {
    std::vector<ExpertUse> uses{ExpertUse{.expert = expert, .tokens = 1}};
    table.begin_publish(0, uses, 1, 0);
    table.admit(0, uses[0]);
    table.end_publish(0, uses);
    return uses[0];
  };
  CHECK(touch(0).destination == 0);
  for (int i = 0; i < 10; ++i) CHECK(touch(0).slot == 0);
  CHECK(touch(1).destination == -1);  // one use does not beat eleven
  CHECK(touch(0).slot == 0);
  int tries = 1;
  while (touch(2).destination < 0) ++tries;  // but one that keeps coming gets in
  CHECK(tries > 2 && tries < 12);
  CHECK(table.evicted_total() == 1);
}

// However long ago the resident was used, a single use evicts nothing; a second one does.
void test_a_single_use_is_not_enough() {
  SlotTable table(1, 4, 1);
  const auto touch = [&](int expert) {
    std::vector<ExpertUse> uses{ExpertUse{.expert = expert, .tokens = 1}};
    table.begin_publish(0, uses, 1, 0);
    table.admit(0, uses[0]);
    table.end_publish(0, uses);
    return uses[0];
  };
  CHECK(touch(0).destination == 0);
  for (int i = 0; i < 500; ++i) table.begin_publish(0, {}, 1, 0);
  CHECK(touch(1).destination == -1 && touch(1).destination == 0);
}

// The victim is the worst of all layers, each at its own clock: a layer that the step has not reached is not aged.
void test_layers_share_the_slots() {
  SlotTable table(2, 4, 2);
  const auto touch = [&](int layer, int expert) {
    std::vector<ExpertUse> uses{ExpertUse{.expert = expert, .tokens = 1}};
    table.begin_publish(layer, uses, 1, 0);
    table.admit(layer, uses[0]);
    table.end_publish(layer, uses);
    return uses[0].destination;
  };
  CHECK(touch(0, 0) == 0 && touch(1, 0) == 1);
  for (int i = 0; i < 20; ++i) table.begin_publish(0, {}, 1, 0);
  CHECK(touch(1, 1) == -1 && touch(1, 1) == 0);  // layer 0's aged, layer 1's did not
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
  const auto refuses_options = [&](const SlotPolicyOptions& options) {
    return refuses([&] { SlotTable(1, 4, 4, options); });
  };
  CHECK(refuses([] { SlotTable(0, 4, 4); }));
  CHECK(refuses([] { SlotTable(1, 4, -1); }));
  CHECK(refuses_options({.half_life_tokens = 0.0}));
  CHECK(refuses_options({.half_life_tokens = 9.0, .long_half_life_tokens = 8.0}));
  CHECK(refuses_options({.margin = 0.5}) && refuses_options({.floor = std::nan("")}));
  CHECK(refuses([] { ft::parse_slot_policy("fifo"); }));
  SlotTable table(1, 4, 4, {.policy = SlotPolicy::kLru});
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
    for (const double margin : {1.0, 1.5}) {
      const SlotPolicyOptions quick{policy, 2.0, 16.0, margin, 0.0};
      const SlotPolicyOptions standard{.policy = policy, .margin = margin};
      test_against_model(quick, 3, 6, 5, seed++);
      test_against_model(standard, 4, 8, 20, seed++);
      test_against_model(quick, 1, 37, 3, seed++);
      test_against_model(standard, 2, 4, 8, seed++);  // room for everything
      test_against_model(standard, 2, 4, 0, seed++);
    }
  }
  test_score_of_runs();
  test_score_of_batches();
  test_trust_follows_what_foretells();
  test_insert_only_if_better();
  test_a_single_use_is_not_enough();
  test_layers_share_the_slots();
  test_refusals();
  return 0;
}
