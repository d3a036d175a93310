// The split by live rates, with injected costs and a virtual clock.
#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "split_planner.h"

namespace {

using ft::LayerShares;
using ft::LayerWork;
using ft::SideCost;
using ft::SplitCosts;
using ft::SplitPlanner;
using ft::SplitTiming;

constexpr double kBytes = 2.0e6;

// Rates in bytes per ns: 2 MB over PCIe in 40 us, on the CPU in 25 us.
SplitCosts usual_costs() {
  SplitCosts costs;
  costs.fetch = SideCost{10e3, 1.0 / 55, 0.0};
  costs.fetch_beside = SideCost{10e3, 1.0 / 50, 0.0};
  costs.cpu = SideCost{20e3, 1.0 / 90, 1.0 / 900};
  costs.cpu_beside = SideCost{20e3, 1.0 / 80, 1.0 / 800};
  costs.hit_byte_ns = 1.0 / 3000;
  return costs;
}

struct World {
  double fetch = 1.0, cpu = 1.0;  // factors of the truth
  double handoff_ns = 0.0;
  double hits = 1.0;     // and of resident records
  double look_ns = 0.0;  // what a look at an answer costs that is there already

  SplitPlanner::Factors factors() const { return {fetch, fetch, cpu, cpu, handoff_ns, look_ns, hits}; }
  // late_ns: of the CPU, this once.
  SplitTiming time(const SplitPlanner& planner, const LayerShares& shares, double late_ns = 0.0) const {
    const double device_ns = planner.device_ns(shares, factors());
    if (!shares.any_on_cpu()) return SplitTiming{shares, device_ns};
    const double answer_ns = planner.cpu_ns(shares, factors()) + late_ns;
    const double end_ns = std::max(device_ns + look_ns, answer_ns);
    // What can be seen: when the device went on.
    return SplitTiming{.shares = shares,
                       .device_ns = device_ns,
                       .wait_ns = end_ns - device_ns,
                       .cpu_ns = answer_ns - late_ns - handoff_ns,
                       .start_ns = late_ns};
  }
};

LayerWork work_of(const std::vector<std::int32_t>& routes, int num_hits = 3) {
  return LayerWork{.num_hits = num_hits,
                   .record_bytes = kBytes,
                   .miss_routes = routes,
                   .num_fetchable = static_cast<int>(routes.size())};
}

LayerShares shares_of(const LayerWork& work, int q) {
  const auto misses = static_cast<int>(work.miss_routes.size());
  LayerShares shares{work.num_hits, q, misses - q, work.hit_extra, 0, 0, work.record_bytes};
  for (int i = 0; i < misses; ++i) (i < q ? shares.fetch_extra : shares.cpu_extra) += work.miss_routes[i] - 1;
  return shares;
}

int layer(SplitPlanner& planner, const World& world, const std::vector<std::int32_t>& routes) {
  const LayerWork work = work_of(routes);
  const int q = planner.choose(work).whole;
  CHECK(q >= 0 && q <= work.num_fetchable);
  planner.observe(world.time(planner, shares_of(work, q)));
  return q;
}

void test_equals_brute_force() {
  std::mt19937 random(1);
  const auto uniform = [&](double low, double high) {
    return low * std::pow(high / low, std::uniform_real_distribution<double>(0, 1)(random));
  };
  for (int round = 0; round < 3000; ++round) {
    SplitCosts costs;
    for (SideCost* side : {&costs.fetch, &costs.fetch_beside, &costs.cpu, &costs.cpu_beside}) {
      *side = SideCost{uniform(1e2, 1e5), uniform(1e-3, 1.0), uniform(1e-5, 0.1)};
    }
    costs.hit_byte_ns = uniform(1e-4, 1e-1);
    costs.hits_load_memory = round % 2 == 0;
    SplitPlanner planner(costs);
    SplitPlanner::Factors factors;
    for (double& factor : factors) factor = uniform(0.1, 10.0);
    std::vector<std::int32_t> routes(random() % 12);
    for (std::int32_t& r : routes) r = 1 + static_cast<std::int32_t>(random() % 8);
    LayerWork work = work_of(routes, static_cast<int>(random() % 4));
    work.hit_extra = work.num_hits > 0 ? static_cast<int>(random() % 5) : 0;
    work.num_fetchable = static_cast<int>(random() % (routes.size() + 1));
    int wanted = 0;
    double least = 1e300;
    for (int q = 0; q <= work.num_fetchable; ++q) {
      const LayerShares shares = shares_of(work, q);
      const double device = planner.device_ns(shares, factors), cpu = planner.cpu_ns(shares, factors);
      if (std::max(device, cpu) <= least) {
        least = std::max(device, cpu);
        wanted = q;
      }
    }
    CHECK(planner.best(work, factors) == wanted);
    const int chosen = planner.choose(work).whole;
    CHECK(chosen >= 0 && chosen <= work.num_fetchable);
  }
}

// Of all numbers of tiles none has the later party earlier; whole records where that is hardly worse.
void test_tiles_equal_brute_force() {
  constexpr int kTiles = 12;
  std::mt19937 random(4);
  const auto uniform = [&](double low, double high) {
    return low * std::pow(high / low, std::uniform_real_distribution<double>(0, 1)(random));
  };
  int splits = 0, wholes = 0;
  for (int round = 0; round < 3000; ++round) {
    SplitCosts costs;
    costs.fetch = SideCost{uniform(1e2, 2e4), uniform(1e-3, 1.0), uniform(1e-5, 0.01)};
    costs.cpu = SideCost{uniform(1e2, 2e4), uniform(1e-3, 1.0), uniform(1e-5, 0.01)};
    costs.fetch_beside = SideCost{costs.fetch.fixed_ns, costs.fetch.byte_ns * uniform(1.0, 1.5), 0.001};
    costs.cpu_beside = SideCost{costs.cpu.fixed_ns, costs.cpu.byte_ns * uniform(1.0, 1.5), 0.001};
    costs.hit_byte_ns = uniform(1e-4, 1e-2);
    costs.hits_load_memory = round % 2 == 0;
    SplitPlanner planner(costs);
    std::vector<std::int32_t> routes(1 + random() % 7);
    for (std::int32_t& r : routes) r = 1 + static_cast<std::int32_t>(random() % 3);
    LayerWork work = work_of(routes, static_cast<int>(random() % 4));
    work.num_fetchable = static_cast<int>(random() % (routes.size() + 1));
    work.num_tiles = kTiles;
    std::int64_t probes = 0;
    SplitPlanner::Choice choice;
    for (int i = 0; i < 64; ++i) {  // the first layers are tries
      probes = planner.status().probes;
      choice = planner.choose(work);
      if (planner.status().probes == probes) break;
      CHECK(choice.tiles == choice.whole * kTiles);
    }
    const auto [q, tiles] = choice;
    CHECK(tiles >= 0 && tiles <= work.num_fetchable * kTiles);
    if (planner.status().probes != probes) {
      CHECK(tiles == q * kTiles);
      continue;
    }
    const auto later = [&](int count) {
      const int whole = count / kTiles, part = count % kTiles;
      LayerShares shares = shares_of(work, whole);
      if (part > 0) {
        shares.num_cpu -= 1;
        shares.split_extra = routes[whole] - 1;
        shares.cpu_extra -= shares.split_extra;
        shares.split_part = static_cast<double>(part) / kTiles;
      }
      return planner.layer_ns(shares, planner.status().live);
    };
    double least = later(q * kTiles);
    for (int count = 1; count < work.num_fetchable * kTiles; ++count) least = std::min(least, later(count));
    CHECK(later(tiles) <= least / 0.979 + 501.0 && later(tiles) <= later(q * kTiles));
    ++(tiles % kTiles == 0 ? wholes : splits);
    work.num_free_slots = 3;
    const SplitPlanner::Choice filling = planner.choose(work);
    CHECK(filling.tiles == filling.whole * kTiles);
  }
  CHECK(splits > 300 && wholes > 100);
}

void test_routes_count() {
  SplitCosts costs = usual_costs();
  costs.cpu_beside.route_byte_ns = costs.cpu_beside.byte_ns;
  SplitPlanner planner(costs);
  const SplitPlanner::Factors same{1, 1, 1, 1, 0, 0, 1};
  const std::vector<std::int32_t> single(8, 1), many(8, 8);
  CHECK(planner.best(work_of(many), same) > planner.best(work_of(single), same));
}

// A CPU that delivers a tenth of its profile loses its share within 32 steps, and gets it back.
void test_demotion_and_return() {
  SplitPlanner planner(usual_costs());
  World world;
  const std::vector<std::int32_t> routes(6, 1);
  int usual = 0;
  for (int i = 0; i < 300; ++i) usual = layer(planner, world, routes);
  usual = planner.best(work_of(routes), planner.status().applied);
  CHECK(usual > 0 && usual < 6 && planner.status().changes == 0);
  world.cpu = 10.0;
  int demoted_at = -1;
  for (int i = 0; i < 32 && demoted_at < 0; ++i) {
    if (layer(planner, world, routes) == 6) demoted_at = i;
  }
  CHECK(demoted_at >= 0);
  const std::int64_t changes = planner.status().changes;
  CHECK(changes >= 1);
  int on_cpu = 0;
  for (int i = 0; i < 3000; ++i) on_cpu += 6 - layer(planner, world, routes);
  CHECK(on_cpu > 0 && on_cpu < 150);  // probes
  world.cpu = 1.0;
  int last = 6;
  for (int i = 0; i < 20000; ++i) last = layer(planner, world, routes);
  CHECK(planner.best(work_of(routes), planner.status().applied) == usual);
  CHECK(last <= 6);
}

// The same for a bus that falls to a twentieth: everything goes to the CPU but for probes.
void test_collapse_to_cpu() {
  SplitPlanner planner(usual_costs());
  World world;
  const std::vector<std::int32_t> routes(4, 1);
  for (int i = 0; i < 200; ++i) layer(planner, world, routes);
  world.fetch = 20.0;
  for (int i = 0; i < 64; ++i) layer(planner, world, routes);
  int fetched = 0;
  for (int i = 0; i < 2000; ++i) fetched += layer(planner, world, routes);
  CHECK(planner.best(work_of(routes), planner.status().applied) == 0);
  CHECK(fetched > 0 && fetched < 200);
}

// Rates that flicker around the point where the best choice changes cause at most two changes in 1,000 steps of 48
// layers.
void test_hysteresis(unsigned seed, double amplitude, int period) {
  std::mt19937 random(seed);
  const std::vector<std::int32_t> routes(5, 1);
  SplitPlanner reference(usual_costs());
  // The factor of the CPU at which fetching all and leaving one to the CPU cost the same.
  double low = 1.0, high = 64.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = std::sqrt(low * high);
    const SplitPlanner::Factors factors{1, 1, middle, middle, 0, 0, 1};
    (reference.best(work_of(routes), factors) == 5 ? high : low) = middle;
  }
  SplitPlanner planner(usual_costs());
  World world;
  world.cpu = high;
  for (int i = 0; i < 600; ++i) layer(planner, world, routes);
  const std::int64_t before = planner.status().changes;
  std::uniform_real_distribution<double> noise(-1.0, 1.0);
  for (int i = 0; i < 48 * 1000; ++i) {
    const double phase = period == 0 ? noise(random) : (i / period % 2 == 0 ? 1.0 : -1.0);
    world.cpu = high * std::exp(amplitude * phase);
    world.fetch = std::exp(0.3 * amplitude * noise(random));
    layer(planner, world, routes);
  }
  CHECK(planner.status().changes - before <= 2);
}

// Nothing is known but wrong beliefs: the choice becomes that of the truth.
void test_wrong_beliefs() {
  for (const double error : {0.1, 0.3, 3.0, 8.0}) {
    SplitPlanner planner(usual_costs());
    World world;
    world.fetch = error;
    const std::vector<std::int32_t> routes(6, 1);
    for (int i = 0; i < 2000; ++i) layer(planner, world, routes);
    const SplitPlanner::Factors truth = world.factors();
    const LayerWork work = work_of(routes);
    const int chosen = planner.best(work, planner.status().applied);
    const int right = planner.best(work, truth);
    CHECK(planner.layer_ns(shares_of(work, chosen), truth) <= 1.05 * planner.layer_ns(shares_of(work, right), truth));
  }
}

// A CPU whose answers come late for another reason than its speed: few records are not worth it, many are.
void test_handoff() {
  SplitPlanner planner(usual_costs());
  World world;
  world.handoff_ns = 90e3;
  const std::vector<std::int32_t> one(1, 1), many(12, 1);
  for (int i = 0; i < 600; ++i) layer(planner, world, i % 2 == 0 ? one : many);
  const SplitPlanner::Factors live = planner.status().live, applied = planner.status().applied;
  // No closer than the records' size lets the device see it.
  CHECK(std::abs(live[SplitPlanner::kHandoff] - 90e3) < 30e3);
  CHECK(std::abs(live[SplitPlanner::kCpuBeside] - 1.0) < 0.1);
  CHECK(planner.best(work_of(one), applied) == 1);
  const int fetched = planner.best(work_of(many), applied);
  CHECK(fetched > 4 && fetched < 12);
}

// A thread that was late now and then leaves nothing behind, although a device whose split is good hardly ever waits;
// nor does it matter that looking at an answer takes longer than handing over.
void test_late_answers_are_forgotten() {
  for (const double look_ns : {0.0, 5e3}) {
    SplitPlanner planner(usual_costs());
    World world;
    world.handoff_ns = 2e3;
    world.look_ns = look_ns;
    std::mt19937 random(3);
    std::normal_distribution<double> noise(0.0, 0.05);
    const std::vector<std::int32_t> routes(5, 1);
    LayerWork work = work_of(routes);
    work.num_tiles = 24;
    const auto layer = [&](double late_ns) {
      const int tiles = planner.choose(work).tiles;
      LayerShares shares = shares_of(work, tiles / 24);
      if (tiles % 24 != 0) {
        shares.split_part = tiles % 24 / 24.0;
        --shares.num_cpu;
      }
      world.cpu = std::exp(noise(random));
      world.fetch = std::exp(noise(random));
      planner.observe(world.time(planner, shares, late_ns));
    };
    for (int i = 0; i < 300; ++i) layer(0.0);
    for (int i = 0; i < 8; ++i) layer(300e3);
    CHECK(planner.status().live[SplitPlanner::kHandoff] > 15e3);
    for (int i = 0; i < 400; ++i) layer(0.0);
    CHECK(planner.status().live[SplitPlanner::kHandoff] < 8e3);
    CHECK(std::abs(planner.status().live[SplitPlanner::kLook] - look_ns) < 2e3);
  }
}

// A bus that is slower than believed, or resident records that are faster, say nothing of each other.
void test_hits_have_a_rate_of_their_own() {
  SplitCosts costs = usual_costs();
  costs.hit_byte_ns = 1.0 / 400;
  SplitPlanner planner(costs);
  World world;
  world.fetch = 16.0;
  world.hits = 0.25;
  for (int i = 0; i < 3000; ++i) layer(planner, world, std::vector<std::int32_t>(1 + i % 4, 1));
  const SplitPlanner::Factors live = planner.status().live;
  CHECK(live[SplitPlanner::kFetchBeside] > 10.0 && live[SplitPlanner::kFetchBeside] < 20.0);
  CHECK(std::abs(live[SplitPlanner::kHits] - 0.25) < 0.05);
  CHECK(planner.status().predicted_ns < 1.1 * planner.status().measured_ns);
  // So what is spent on tries is a hundredth of what layers really take.
  CHECK(planner.status().mean_fetches < 0.02 * planner.status().mean_misses);
}

// Rates come from timings alone, whoever decides.
void test_follows_the_decisions_of_others() {
  SplitPlanner planner(usual_costs());
  World world;
  world.fetch = 4.0;
  world.cpu = 0.5;
  const LayerShares shares{.num_fetches = 2, .num_cpu = 4, .record_bytes = 1e6};
  for (int i = 0; i < 2000; ++i) {
    planner.follow(shares);
    planner.follow(LayerShares{.num_hits = 8, .record_bytes = 1e6});  // nothing was missing
    planner.observe(world.time(planner, shares));
  }
  const SplitPlanner::Status& status = planner.status();
  CHECK(status.layers == 2000 && status.changes == 0 && status.probes == 0);
  CHECK(std::abs(status.live[SplitPlanner::kFetchBeside] - 4.0) < 0.2);
  CHECK(std::abs(status.live[SplitPlanner::kCpuBeside] - 0.5) < 0.05);
  CHECK(std::abs(status.mean_misses - 6.0) < 0.01 && std::abs(status.mean_fetches - 2.0) < 0.01);
  CHECK(std::abs(status.predicted_ns / status.measured_ns - 1.0) < 0.05);
  CHECK(status.applied[SplitPlanner::kFetchBeside] == 1.0);
}

void test_free_slots_are_filled() {
  SplitPlanner planner(usual_costs());
  const std::vector<std::int32_t> routes(6, 1);
  LayerWork work = work_of(routes);
  work.num_free_slots = 100;
  CHECK(planner.choose(work).whole == 6);
  work.num_fetchable = 2;
  CHECK(planner.choose(work).whole == 2);
}

// The device comes when the answer is there, but its look takes long because something else fills the bus.
void test_a_long_look_over_a_busy_bus_is_no_handoff() {
  for (const bool busy : {false, true}) {
    SplitPlanner planner(usual_costs());
    const std::vector<std::int32_t> routes(6, 1);
    const LayerWork work = work_of(routes);
    const World world;
    for (int i = 0; i < 500; ++i) {
      SplitTiming timing = world.time(planner, shares_of(work, 4));
      CHECK(timing.device_ns > timing.cpu_ns);
      timing.wait_ns = i % 2 == 0 ? 30e3 : 4e3;
      timing.bus_busy = busy;
      planner.observe(timing);
    }
    CHECK((planner.status().live[SplitPlanner::kHandoff] < 1e3) == busy);
    // One that the CPU makes it wait for counts all the same.
    for (int i = 0; i < 500; ++i) {
      SplitTiming timing = world.time(planner, shares_of(work, 1));
      timing.wait_ns += 40e3;
      timing.bus_busy = busy;
      planner.observe(timing);
    }
    CHECK(planner.status().live[SplitPlanner::kHandoff] > 20e3);
  }
}

void test_refusals() {
  const auto refused = [](const SplitCosts& costs) {
    try {
      SplitPlanner planner(costs);
      return false;
    } catch (const std::invalid_argument&) {
      return true;
    }
  };
  SplitCosts costs = usual_costs();
  costs.cpu.byte_ns = 0.0;
  CHECK(refused(costs));
  costs = usual_costs();
  costs.fetch.fixed_ns = std::nan("");
  CHECK(refused(costs));
  CHECK(!refused(usual_costs()));
}

}  // namespace

int main() {
  test_equals_brute_force();
  test_tiles_equal_brute_force();
  test_routes_count();
  test_demotion_and_return();
  test_collapse_to_cpu();
  for (unsigned seed = 0; seed < 20; ++seed) test_hysteresis(seed, 0.3, 0);
  for (const int period : {1, 2, 5, 16, 50, 200}) test_hysteresis(1, 0.3, period);
  test_wrong_beliefs();
  test_handoff();
  test_a_long_look_over_a_busy_bus_is_no_handoff();
  test_late_answers_are_forgotten();
  test_hits_have_a_rate_of_their_own();
  test_follows_the_decisions_of_others();
  test_free_slots_are_filled();
  test_refusals();
}
