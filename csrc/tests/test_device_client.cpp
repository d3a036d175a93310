// The servers with a client that rings no bells (a simulated GPU): layers of many steps, naps, notices, aborts.
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cache_server.h"
#include "check.h"
#include "cpu_server.h"
#include "expert_bank.h"
#include "simulated_device.h"

namespace {

using namespace ft_test;

constexpr int kSharedTokens = 4;

struct Settings {
  int num_slots = 6;
  double fraction = 0.5;
  bool in_place = false;
  bool deterministic = false;
  int spin_us = 0;
  bool route_rows = true;
  std::vector<std::uint8_t> fetchable = {};  // empty: all
  bool split_records = false;
};

struct Group {
  Group(const Bank& bank, const Settings& s)
      : geometry{kMaxTokens, kTopK, kHidden, kLayers, kExperts, kSharedTokens, s.route_rows ? 1u : 0u},
        segment(ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(geometry))),
        mailbox(ft::Mailbox::create(segment, 1, geometry, 0xfffffff0u)),
        slots(std::make_shared<ft::SlotTable>(kLayers, kExperts, s.num_slots)),
        cache(mailbox, slots, s.fraction, s.in_place, s.spin_us,
              std::vector<std::int64_t>(kLayers, bank.layout.stride_bytes), true, s.fetchable,
              std::vector<std::int32_t>(s.split_records ? kLayers : 0, bank.layout.num_tiles)),
        cpu(mailbox, bank.store, make_pool(1), s.spin_us, true),
        device(bank, segment, make_arena(bank, s.num_slots)),
        flags(s.deterministic   ? static_cast<std::uint32_t>(ft::kDeterministic)
              : s.split_records ? static_cast<std::uint32_t>(ft::kSplittable)
                                : 0) {
    cache.start();
    cpu.start();
  }

  void notice() {
    cache.notice();
    cpu.notice();
  }
  void rest() {
    cache.rest();
    cpu.rest();
  }
  void stop() {
    cache.stop();
    cpu.stop();
    slots->check_integrity();
    CHECK(slots->num_in_flight() == 0);
  }

  ft::MailboxGeometry geometry;
  std::shared_ptr<ft::SharedSegment> segment;
  std::shared_ptr<ft::Mailbox> mailbox;
  std::shared_ptr<ft::SlotTable> slots;
  ft::CacheServer cache;
  ft::CpuServer cpu;
  SimulatedDevice device;
  std::uint32_t flags;
};

// Steps of all layers in order; every third is long and for the device alone, where all records can be fetched.
void run_steps(const Bank& bank, Group& group, int num_steps, bool device_only_steps, std::mt19937& random) {
  std::vector<float> out;
  for (int step = 0; step < num_steps; ++step) {
    const bool device_only = device_only_steps && step % 3 == 2;
    for (int layer = 0; layer < kLayers; ++layer) {
      Batch batch(random, device_only ? kMaxTokens : kSharedTokens);
      batch.layer = layer;
      const std::uint32_t flags = group.flags | (device_only ? static_cast<std::uint32_t>(ft::kDeviceOnly) : 0);
      CHECK(group.device.forward(batch, flags, static_cast<std::uint64_t>(step), out));
      batch.check(bank, out);
    }
  }
}

void test_steps(const Bank& bank, const Settings& settings) {
  constexpr int kSteps = 9;
  Group group(bank, settings);
  std::atomic<bool> done{false};
  // Meanwhile a Scheduler announces steps and a copier looks where records are.
  std::thread others([&] {
    for (unsigned i = 0; !done.load(); ++i) {
      if (i % 5 == 4) {
        group.rest();
      } else {
        group.notice();
      }
      CHECK(group.device.count_resident(static_cast<int>(i % kLayers)) <= settings.num_slots);
      std::this_thread::yield();
    }
  });
  std::mt19937 random(7);
  run_steps(bank, group, kSteps, settings.fetchable.empty(), random);
  done = true;
  others.join();
  group.stop();
  CHECK(!group.mailbox->aborted());
  CHECK(group.mailbox->overdue() == ft::AbortReason::kNone);
  const ft::CacheCounters c = group.cache.counters();
  CHECK(c.publishes == kSteps * kLayers && c.plan_ns > 0);
  CHECK(c.split == group.device.num_split() && (c.split > 0) == settings.split_records);
  CHECK(c.cpu + c.split == group.device.num_cpu() && c.cpu + c.split == group.cpu.counters().experts);
  CHECK(c.fetched_bytes + c.cpu_bytes == (c.fetches + c.cpu) * bank.layout.stride_bytes);
  CHECK(c.cpu_bytes == group.cpu.counters().bytes);
  CHECK(c.hits + c.fetches == group.device.num_own());
  CHECK(c.hits + c.fetches > 0 || settings.fraction == 0.0);
  if (!settings.fetchable.empty()) CHECK(c.cpu > 0);
}

// Nobody announces anything and pauses are longer than any spinning: publishes are found all the same.
void test_unannounced_publishes(const Bank& bank) {
  for (const int spin_us : {0, 200}) {
    Group group(bank, Settings{.spin_us = spin_us});
    std::mt19937 random(9);
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(i));  // not to synchronise: to let the servers nap
      if (i == 3) group.rest();
      run_steps(bank, group, 1, true, random);
    }
    group.stop();
    CHECK(!group.mailbox->aborted());
  }
}

void test_the_map_follows_a_surviving_table(const Bank& bank) {
  Group group(bank, Settings{.num_slots = 10, .fraction = 1.0});
  std::mt19937 random(13);
  run_steps(bank, group, 6, false, random);
  group.stop();
  CHECK(group.slots->num_resident() > 0);
  auto segment = ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(group.geometry));
  auto mailbox = ft::Mailbox::create(segment, 2, group.geometry);
  ft::CacheServer next(mailbox, group.slots, 1.0, false, 0, std::vector<std::int64_t>(kLayers, 1), true);
  next.start();
  std::vector<std::int32_t> seen(mailbox->slot_of(), mailbox->slot_of() + kLayers * kExperts);
  next.stop();
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int expert = 0; expert < kExperts; ++expert) {
      CHECK(seen[layer * kExperts + expert] == group.slots->lookup(layer, expert));
    }
  }
  group.slots->empty(group.slots->num_slots());  // no longer bound to the mailbox
  CHECK(std::equal(seen.begin(), seen.end(), mailbox->slot_of()));
}

void test_aborts(const Bank& bank) {
  std::mt19937 random(17);
  for (int round = 0; round < 24; ++round) {
    Group group(bank, Settings{.num_slots = 4, .deterministic = round % 2 == 1, .spin_us = round % 3 == 0 ? 5000 : 0});
    const unsigned seed = random();
    std::thread step([&] {
      std::mt19937 step_random(seed);
      std::vector<float> out;
      for (;;) {
        const Batch batch(step_random, kSharedTokens);
        if (!group.device.forward(batch, group.flags, 1, out)) return;
        batch.check(bank, out);
      }
    });
    const std::int64_t publishes = random() % 20;
    while (group.cache.counters().publishes < publishes) {
      group.notice();
      std::this_thread::yield();
    }
    for (unsigned spins = random() % 3000; spins > 0; --spins) ft::cpu_relax();
    switch (round % 4) {
      case 0:
        group.mailbox->abort();
        break;
      case 1:  // the device gives up by itself; nobody is woken
        group.device.raise_abort(ft::AbortReason::kPlanLate);
        break;
      case 2:
        group.cache.stop();
        group.mailbox->abort(ft::AbortReason::kClientFailed);
        break;
      default:
        group.cpu.stop();
        group.mailbox->abort(ft::AbortReason::kClientFailed);
    }
    step.join();
    CHECK(group.mailbox->aborted());
    group.stop();
    std::vector<float> out;
    CHECK(!group.device.forward(Batch(random, kSharedTokens), group.flags, 2, out));
  }
}

// The servers end by themselves, nap or not, when the device raises the abort word without a bell.
void test_abort_without_a_bell_ends_the_servers(const Bank& bank) {
  Group group(bank, Settings{.fraction = 0.0});
  std::mt19937 random(19);
  run_steps(bank, group, 2, false, random);
  group.device.raise_abort(ft::AbortReason::kPartialLate);
  std::vector<float> out;
  CHECK(!group.device.forward(Batch(random, kSharedTokens), 0, 1, out));
  group.stop();
  CHECK(group.mailbox->abort_reason() == ft::AbortReason::kPartialLate);
  CHECK(group.cache.counters().publishes == 2 * kLayers);
}

void test_what_a_device_must_not_do(const Bank& bank) {
  std::mt19937 random(23);
  std::vector<float> out;
  const auto refused = [&](const Settings& settings, int num_tokens, std::uint32_t flags) {
    Group group(bank, settings);
    Batch batch(random, kMaxTokens);
    while (batch.num_tokens != num_tokens || batch.ids[0] < 0) batch = Batch(random, kMaxTokens);
    const bool answered = group.device.forward(batch, flags, 1, out);
    if (answered) batch.check(bank, out);
    group.stop();
    CHECK(answered == !group.mailbox->aborted());
    return group.mailbox->abort_reason();
  };
  const std::vector<std::uint8_t> none(kLayers * kExperts, 0);
  CHECK(refused({}, kSharedTokens, 0) == ft::AbortReason::kNone);
  CHECK(refused({}, kSharedTokens + 1, 0) == ft::AbortReason::kBadPublish);
  CHECK(refused({}, kSharedTokens + 1, ft::kDeviceOnly) == ft::AbortReason::kNone);
  CHECK(refused({.fetchable = none}, 2, 0) == ft::AbortReason::kNone);
  CHECK(refused({.fetchable = none}, 2, ft::kDeviceOnly) == ft::AbortReason::kNotFetchable);
  CHECK(refused({.fraction = 0.0}, 2, ft::kDeterministic) == ft::AbortReason::kNone);
  CHECK(refused({.fraction = 0.0, .route_rows = false}, 2, 0) == ft::AbortReason::kNone);
  CHECK(refused({.fraction = 0.0, .route_rows = false}, 2, ft::kDeterministic) == ft::AbortReason::kBadPublish);
}

}  // namespace

int main() {
  const Bank bank;
  std::vector<std::uint8_t> some(kLayers * kExperts, 1);
  for (std::size_t i = 0; i < some.size(); i += 3) some[i] = 0;
  for (const bool deterministic : {false, true}) {
    for (const int spin_us : {0, 3000}) {
      for (const double fraction : {0.0, 0.5, 1.0}) {
        test_steps(bank, {.fraction = fraction, .deterministic = deterministic, .spin_us = spin_us});
      }
      test_steps(bank, {.deterministic = deterministic, .spin_us = spin_us, .fetchable = some});
      if (!deterministic) {
        test_steps(bank, {.spin_us = spin_us, .split_records = true});
        test_steps(bank, {.num_slots = 0, .fraction = 0.3, .spin_us = spin_us, .split_records = true});
        test_steps(bank, {.spin_us = spin_us, .fetchable = some, .split_records = true});
      }
      test_steps(bank, {.num_slots = 0, .deterministic = deterministic, .spin_us = spin_us});
      test_steps(bank, {.num_slots = 0, .in_place = true, .deterministic = deterministic, .spin_us = spin_us});
      test_steps(bank, {.num_slots = 0, .in_place = true, .spin_us = spin_us, .fetchable = some});
    }
  }
  test_unannounced_publishes(bank);
  test_the_map_follows_a_surviving_table(bank);
  test_aborts(bank);
  test_abort_without_a_bell_ends_the_servers(bank);
  test_what_a_device_must_not_do(bank);
  return 0;
}
