// The three parties of the data plane together: results against a plain reference, aborts, late and dead parties.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache_server.h"
#include "check.h"
#include "cpu_server.h"
#include "device_client.h"
#include "expert_bank.h"

namespace {

using namespace ft_test;

std::vector<float> run(const Batch& batch, ft::DeviceClient& client) {
  std::vector<float> out(batch.num_tokens * kHidden, std::numeric_limits<float>::quiet_NaN());
  client.forward(batch.layer, batch.num_tokens, kTopK, batch.hidden.data(), batch.ids.data(), batch.weights.data(),
                 batch.admit.data(), out.data());
  return out;
}

struct Settings {
  int num_slots = 6;
  double fraction = 0.5;
  bool in_place = false;
  bool deterministic = false;
  int spin_us = 0;
  double timeout_s = 60.0;
  ft::SlotPolicy policy = ft::SlotPolicy::kCrf;
};

struct Group {
  Group(const Bank& bank, const Settings& s)
      : segment(ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(kGeometry))),
        mailbox(ft::Mailbox::create(segment, 1, kGeometry, 0xffffffe0u)),
        slots(
            std::make_shared<ft::SlotTable>(kLayers, kExperts, s.num_slots, ft::SlotPolicyOptions{.policy = s.policy})),
        cache(mailbox, slots, s.fraction, s.in_place, s.spin_us,
              std::vector<std::int64_t>(kLayers, bank.layout.stride_bytes)),
        cpu(mailbox, bank.store, make_pool(1), s.spin_us),
        arena(make_arena(bank, s.num_slots)),
        client(mailbox, bank.store, arena, bank.layout.stride_bytes, make_pool(2), s.spin_us, s.timeout_s,
               s.deterministic) {}

  void start() {
    cache.start();
    cpu.start();
  }
  void stop() {
    cache.stop();
    cpu.stop();
  }

  std::shared_ptr<ft::SharedSegment> segment;
  std::shared_ptr<ft::Mailbox> mailbox;
  std::shared_ptr<ft::SlotTable> slots;
  ft::CacheServer cache;
  ft::CpuServer cpu;
  std::shared_ptr<ft::SharedSegment> arena;
  ft::DeviceClient client;
};

void test_results(const Bank& bank, const Settings& settings, int count) {
  Group group(bank, settings);
  group.start();
  group.client.begin_step(1);
  std::mt19937 random(11);
  for (int i = 0; i < count; ++i) {
    const Batch batch(random);
    batch.check(bank, run(batch, group.client));
  }
  const ft::StepCounters step = group.client.step_counters();
  group.stop();
  group.slots->check_integrity();
  CHECK(group.slots->num_in_flight() == 0);
  CHECK(!group.mailbox->aborted());  // every publish was answered
  const ft::CacheCounters c = group.cache.counters();
  CHECK(c.publishes == count && step.layer_steps == count);
  CHECK(step.hits == c.hits && step.fetches == c.fetches && step.cpu == c.cpu);
  CHECK(step.admitted == c.admitted && step.evicted == c.evicted);
  CHECK(step.fetched_bytes == c.fetches * bank.layout.stride_bytes && step.cpu_bytes == c.cpu_bytes);
  CHECK(group.cpu.counters().experts == c.cpu);
  std::int64_t sums[3] = {};
  const std::vector<std::int64_t> by_layer = group.cache.layer_counters();
  for (std::size_t i = 0; i < by_layer.size(); ++i) sums[i % 3] += by_layer[i];
  CHECK(sums[0] == c.hits && sums[1] == c.fetches && sums[2] == c.cpu);
  const bool has_slots = settings.num_slots > 0 && settings.fraction > 0.0;
  CHECK((c.hits > 0) == (settings.in_place || has_slots));
  CHECK((c.fetches > 0) == (!settings.in_place && settings.fraction > 0.0));
  CHECK((c.cpu > 0) == (!settings.in_place && settings.fraction < 1.0));
  CHECK((c.admitted > 0) == (!settings.in_place && has_slots));
}

// Another thread has slots vacated and added at any moment of a publish; the device copies between two.
void test_capacity_changes_while_serving(const Bank& bank, ft::SlotPolicy policy) {
  constexpr int kMost = 20;
  Group group(bank, Settings{.num_slots = kMost, .fraction = 0.7, .policy = policy});
  group.start();
  std::atomic<int> turn{0};  // 0: the table's owner, 1: the device, 2: the end
  ft::Vacated vacated;
  int capacity = kMost;
  bool finish = true;
  std::thread owner([&] {
    std::mt19937 random(71);
    for (int round = 0; round < 60; ++round) {
      const bool shrink = round % 2 == 0;
      const int before = capacity;
      capacity = shrink ? static_cast<int>(random() % (capacity + 1)) : kMost;
      finish = random() % 4 != 0;
      if (shrink) vacated = group.cache.vacate(capacity);
      turn.store(1);
      while (turn.load() == 1) std::this_thread::yield();
      if (!shrink) {
        group.cache.grow(capacity);
      } else if (finish) {
        group.cache.finish_vacate();
      } else {
        group.cache.cancel_vacate();
        capacity = before;
      }
    }
    turn.store(2);
  });
  std::mt19937 random(73);
  while (turn.load() != 2) {
    const Batch batch(random);
    batch.check(bank, run(batch, group.client));
    if (turn.load() != 1) continue;
    std::byte* records = group.arena->data();
    for (const ft::SlotMove& move : vacated.moves) {
      std::memcpy(records + move.to * bank.layout.stride_bytes, records + move.from * bank.layout.stride_bytes,
                  bank.layout.stride_bytes);
    }
    vacated.moves.clear();
    turn.store(0);
  }
  owner.join();
  group.stop();
  group.slots->check_integrity();
  const ft::CacheCounters c = group.cache.counters();
  CHECK(!group.mailbox->aborted() && c.hits > 0 && c.admitted > 0 && c.resident <= c.admitted);
}

// The same batches under different cache states, splits and spinning: the same bits.
void test_deterministic(const Bank& bank) {
  std::vector<std::vector<float>> first;
  for (const int num_slots : {0, 3, 24}) {
    for (const double fraction : {0.0, 0.5, 1.0}) {
      Group group(bank, Settings{.num_slots = num_slots, .fraction = fraction, .deterministic = true});
      group.start();
      std::mt19937 random(21);
      for (std::size_t i = 0; i < 40; ++i) {
        const Batch batch(random);
        const std::vector<float> out = run(batch, group.client);
        if (first.size() <= i) {
          batch.check(bank, out);
          first.push_back(out);
        }
        CHECK(std::memcmp(out.data(), first[i].data(), out.size() * sizeof(float)) == 0);
      }
      group.stop();
    }
  }
}

void test_abort_at_any_moment(const Bank& bank) {
  std::mt19937 random(31);
  for (int round = 0; round < 40; ++round) {
    Settings settings{.num_slots = 4, .deterministic = round % 2 == 1, .spin_us = round % 3 == 0 ? 20 : 0};
    Group group(bank, settings);
    group.start();
    std::string failure;
    const unsigned seed = random();
    std::thread step([&] {
      std::mt19937 step_random(seed);
      failure = failure_of([&] {
        for (;;) run(Batch(step_random), group.client);
      });
    });
    // Some work first, then an abort wherever the parties happen to be.
    const std::int64_t publishes = random() % 30;
    while (group.cache.counters().publishes < publishes) std::this_thread::yield();
    for (unsigned spins = random() % 3000; spins > 0; --spins) ft::cpu_relax();
    switch (round % 4) {
      case 0:
        group.mailbox->abort();
        break;
      case 1:
        ft::Mailbox::attach(group.segment)->abort();
        break;
      case 2:  // a server goes: it aborts what it leaves undone; a later publish would only run into the time limit
        group.cache.stop();
        group.mailbox->abort();
        break;
      default:
        group.cpu.stop();
        group.mailbox->abort();
    }
    step.join();
    CHECK(begins(failure, "aborted"));
    CHECK(begins(failure_of([&] { run(Batch(random), group.client); }), "aborted"));  // dead for good
    group.stop();
    group.stop();
    group.slots->check_integrity();
    CHECK(group.slots->num_in_flight() == 0);
  }
}

void test_late_parties(const Bank& bank) {
  std::mt19937 random(41);
  const Settings settings{.fraction = 0.0, .timeout_s = 0.02};
  {
    Group group(bank, settings);
    group.cpu.start();
    const Batch batch(random);
    const std::string failure = failure_of([&] { run(batch, group.client); });
    CHECK(begins(failure, "ExpertCache did not answer expert layer"));
    CHECK(failure.find("0.02 s") != std::string::npos);
    CHECK(begins(failure_of([&] { run(batch, group.client); }), "aborted: ExpertCache was late"));
    group.stop();
  }
  {
    Group group(bank, settings);
    group.cache.start();
    Batch batch(random);
    while (batch.ids[0] < 0) batch = Batch(random);
    CHECK(begins(failure_of([&] { run(batch, group.client); }), "CpuExecutor did not answer expert layer"));
    group.stop();
  }
}

void test_bad_input(const Bank& bank) {
  std::mt19937 random(51);
  Group group(bank, Settings{});
  group.start();
  Batch batch(random);
  const std::int32_t good = batch.ids[1];
  for (const std::int32_t bad : {kExperts, -2, std::numeric_limits<std::int32_t>::max()}) {
    batch.ids[1] = bad;
    const std::string failure = failure_of([&] { run(batch, group.client); });
    CHECK(failure.find("ids[0, 1] is " + std::to_string(bad)) != std::string::npos);
    CHECK(failure.find("0..7") != std::string::npos);
  }
  batch.ids[1] = good;
  batch.layer = kLayers;
  CHECK(begins(failure_of([&] { run(batch, group.client); }), "layer 3 is not in 0..2"));
  batch.layer = 0;
  batch.check(bank, run(batch, group.client));  // refused input left nothing behind

  // A client that does not check its ids (a GPU kernel) is stopped by the server.
  group.mailbox->request() = ft::RequestHeader{group.mailbox->req().load() + 1, 0, 0, 1, kTopK, 0};
  group.mailbox->ids()[0] = 1000;
  group.mailbox->req().publish(group.mailbox->req().load() + 1);
  group.mailbox->plan().bell.wait([&] { return group.mailbox->aborted(); }, 0, -1);
  CHECK(group.mailbox->abort_reason() == ft::AbortReason::kBadPublish);
  group.stop();
}

void test_mismatches(const Bank& bank) {
  auto segment = ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(kGeometry));
  ft::MailboxGeometry other = kGeometry;
  other.num_experts = kExperts - 1;
  auto mailbox = ft::Mailbox::create(segment, 1, other);
  CHECK(failure_of([&] { ft::CpuServer(mailbox, bank.store, make_pool(1), 0); }).find("num_experts is 8") !=
        std::string::npos);
  auto slots =
      std::make_shared<ft::SlotTable>(kLayers, kExperts, 4, ft::SlotPolicyOptions{.policy = ft::SlotPolicy::kLru});
  const std::vector<std::int64_t> bytes(kLayers, 4096);
  CHECK(failure_of([&] { ft::CacheServer(mailbox, slots, 0.5, false, 0, bytes); }).find("7") != std::string::npos);
  mailbox = ft::Mailbox::create(segment, 1, kGeometry);
  CHECK(failure_of([&] { ft::CacheServer(mailbox, slots, 1.5, false, 0, bytes); }).find("1.5") != std::string::npos);
  ft::CacheServer first(mailbox, slots, 0.5, false, 0, bytes);
  ft::CacheServer second(mailbox, slots, 0.5, false, 0, bytes);
  first.start();
  CHECK(failure_of([&] { second.start(); }).find("owns it") != std::string::npos);
  first.stop();
  second.start();
  second.stop();
}

// A server in a process of its own; it ends when the mailbox is aborted.
template <class Serve>
pid_t fork_server(int mailbox_fd, const Serve& serve) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child != 0) return child;
  auto segment = ft::SharedSegment::attach(mailbox_fd, ft::Mailbox::required_bytes(kGeometry), "mailbox");
  auto mailbox = ft::Mailbox::attach(segment);
  serve(mailbox);
  _exit(0);
}

void test_processes(const Bank& bank, bool deterministic) {
  auto segment = ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(kGeometry));
  auto mailbox = ft::Mailbox::create(segment, 1, kGeometry);
  const auto wait_for_abort = [](const std::shared_ptr<ft::Mailbox>& box) {
    box->part().bell.wait([&] { return box->aborted(); }, 0, -1);
  };
  const pid_t cache_process = fork_server(segment->fd(), [&](const std::shared_ptr<ft::Mailbox>& box) {
    auto slots = std::make_shared<ft::SlotTable>(kLayers, kExperts, 6);
    ft::CacheServer server(box, slots, 0.5, false, 0, std::vector<std::int64_t>(kLayers, 1));
    server.start();
    wait_for_abort(box);
    server.stop();
  });
  const pid_t cpu_process = fork_server(segment->fd(), [&](const std::shared_ptr<ft::Mailbox>& box) {
    ft::CpuServer server(box, bank.store, make_pool(1), 0);
    server.start();
    wait_for_abort(box);
    server.stop();
  });
  {
    ft::DeviceClient client(mailbox, bank.store, make_arena(bank, 6), bank.layout.stride_bytes, make_pool(1), 0, 1.0,
                            deterministic);
    client.begin_step(1);
    std::mt19937 random(61);
    for (int i = 0; i < 150; ++i) {
      const Batch batch(random);
      batch.check(bank, run(batch, client));
    }
    const ft::StepCounters counters = client.step_counters();
    CHECK(counters.hits > 0 && counters.fetches > 0 && counters.cpu > 0);
    CHECK(kill(cpu_process, SIGKILL) == 0);
    CHECK(waitpid(cpu_process, nullptr, 0) == cpu_process);
    const std::string failure = failure_of([&] {
      for (;;) run(Batch(random), client);
    });
    CHECK(begins(failure, "CpuExecutor did not answer"));
  }
  int status = 0;  // the abort that followed the time-out ends the other process too
  CHECK(waitpid(cache_process, &status, 0) == cache_process && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main() {
  const Bank bank;
  for (const bool deterministic : {false, true})
    test_processes(bank, deterministic);  // first: no thread may run at a fork
  for (const bool deterministic : {false, true}) {
    for (const int num_slots : {0, 6, 24}) {
      for (const double fraction : {0.0, 0.5, 1.0}) {
        test_results(bank, {.num_slots = num_slots, .fraction = fraction, .deterministic = deterministic}, 60);
      }
    }
    test_results(bank, {.num_slots = 0, .in_place = true, .deterministic = deterministic}, 60);
    test_results(bank, {.deterministic = deterministic, .spin_us = 20, .policy = ft::SlotPolicy::kLru}, 60);
  }
  for (const ft::SlotPolicy policy : {ft::SlotPolicy::kCrf, ft::SlotPolicy::kLru}) {
    test_capacity_changes_while_serving(bank, policy);
  }
  test_deterministic(bank);
  test_abort_at_any_moment(bank);
  test_late_parties(bank);
  test_bad_input(bank);
  test_mismatches(bank);
  return 0;
}
