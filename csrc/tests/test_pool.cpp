#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu_info.h"
#include "worker_pool.h"

namespace {

using ft::Isa;
using ft::WorkerPool;

template <typename Error, typename F>
bool throws(F f, const std::string& part) {
  try {
    f();
  } catch (const Error& error) {
    return std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

void every_worker_runs_once() {
  for (const int threads : {1, 2, 5}) {
    for (const int spin_us : {0, 30}) {
      WorkerPool pool(threads, {}, spin_us, Isa::kScalar);
      for (int round = 0; round < 200; ++round) {
        std::vector<int> count(threads, 0);
        pool.run([&](int worker) { count[worker] += 1; });
        CHECK(std::count(count.begin(), count.end(), 1) == threads);
      }
    }
  }
}

void chunks_cover_the_range() {
  WorkerPool pool(3, {}, 0, Isa::kScalar);
  for (const std::int64_t count : {0, 1, 7, 100, 1001}) {
    for (const std::int64_t grain : {1, 8, 2000}) {
      std::vector<int> seen(count, 0);
      pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int worker) {
        CHECK(worker >= 0 && worker < 3 && begin < end && end - begin <= grain);
        for (std::int64_t i = begin; i < end; ++i) seen[i] += 1;
      });
      CHECK(std::count(seen.begin(), seen.end(), 1) == count);
    }
  }
}

void sections_of_many_callers_do_not_mix() {
  WorkerPool pool(3, {}, 0, Isa::kScalar);
  std::vector<std::thread> callers;
  std::atomic<long> total{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, &total, caller] {
      for (int round = 0; round < 300; ++round) {
        // Plain memory: only right if sections are ordered with respect to each other and to their caller.
        std::vector<long> part(3, 0);
        pool.run([&](int worker) {
          auto* scratch = static_cast<long*>(pool.scratch(worker, sizeof(long) * (1 + round % 7)));
          scratch[0] = caller + round;
          part[worker] = scratch[0];
        });
        CHECK(std::accumulate(part.begin(), part.end(), 0L) == 3L * (caller + round));
        pool.parallel_for(10, 1, [&](std::int64_t begin, std::int64_t, int) { total += begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 4L * 300 * 45);
}

void barriers_order_phases() {
  for (const int spin_us : {0, 50}) {
    WorkerPool pool(4, {}, spin_us, Isa::kScalar);
    for (int round = 0; round < 100; ++round) {
      std::vector<int> value(4, -1);
      pool.run([&](int worker) {
        for (int phase = 0; phase < 5; ++phase) {
          value[worker] = phase;
          pool.barrier(worker);
          for (const int other : value) CHECK(other == phase);
          pool.barrier(worker);
        }
      });
    }
  }
}

void shared_memory_is_seen_by_all() {
  WorkerPool pool(3, {}, 0, Isa::kScalar);
  for (const std::size_t bytes : {std::size_t{12}, std::size_t{100000}}) {
    pool.run_shared(bytes, [&](int worker, std::byte* shared) {
      CHECK(reinterpret_cast<std::uintptr_t>(shared) % 64 == 0);
      auto* values = reinterpret_cast<int*>(shared);
      values[worker] = worker;
      pool.barrier(worker);
      CHECK(values[0] == 0 && values[1] == 1 && values[2] == 2);
    });
  }
}

void scratch_is_aligned_and_private() {
  WorkerPool pool(3, {}, 0, Isa::kScalar);
  std::vector<void*> place(3);
  pool.run([&](int worker) { place[worker] = pool.scratch(worker, 100000); });
  for (void* p : place) CHECK(reinterpret_cast<std::uintptr_t>(p) % 64 == 0);
  CHECK(place[0] != place[1] && place[1] != place[2] && place[0] != place[2]);
}

void errors_reach_the_caller() {
  WorkerPool pool(3, {}, 0, Isa::kScalar);
  for (int round = 0; round < 50; ++round) {
    for (int failing = 0; failing < 3; ++failing) {
      CHECK(throws<std::runtime_error>(
          [&] {
            pool.run([&](int worker) {
              if (worker == failing) throw std::runtime_error("worker " + std::to_string(worker));
              pool.barrier(worker);  // must not wait for the one that failed
              CHECK(false);
            });
          },
          "worker " + std::to_string(failing)));
    }
    CHECK(throws<std::runtime_error>(
        [&] {
          pool.parallel_for(100, 1, [](std::int64_t begin, std::int64_t, int) {
            if (begin == 41) throw std::runtime_error("item 41");
          });
        },
        "item 41"));
    CHECK(throws<std::runtime_error>(
        [&] { pool.parallel_for(1, 1, [](std::int64_t, std::int64_t, int) { throw std::runtime_error("solo"); }); },
        "solo"));
    std::atomic<int> count{0};
    pool.run([&](int worker) {
      pool.barrier(worker);
      count += 1;
    });
    CHECK(count == 3);
  }
}

void nested_sections_are_refused() {
  WorkerPool pool(2, {}, 0, Isa::kScalar);
  WorkerPool other(2, {}, 0, Isa::kScalar);
  CHECK(throws<std::logic_error>([&] { pool.run([&](int) { pool.run([](int) {}); }); }, "section"));
  CHECK(throws<std::logic_error>([&] { pool.run([&](int) { other.run([](int) {}); }); }, "section"));
  CHECK(throws<std::logic_error>(
      [&] {
        pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int) {
          pool.parallel_for(1, 1, [](std::int64_t, std::int64_t, int) {});
        });
      },
      "section"));
  CHECK(throws<std::logic_error>([&] { pool.run([&](int) { pool.close(); }); }, "section"));
  pool.run([](int) {});
}

void closing_is_final_and_idempotent() {
  WorkerPool pool(3, {}, 20, Isa::kScalar);
  pool.run([](int) {});
  std::vector<std::thread> closers;
  for (int i = 0; i < 3; ++i) closers.emplace_back([&pool] { pool.close(); });
  for (std::thread& closer : closers) closer.join();
  pool.close();
  CHECK(throws<std::logic_error>([&] { pool.run([](int) {}); }, "closed"));
  CHECK(throws<std::logic_error>([&] { pool.parallel_for(1, 1, [](std::int64_t, std::int64_t, int) {}); }, "closed"));
}

void bad_arguments_are_named() {
  CHECK(throws<std::invalid_argument>([] { WorkerPool(0, {}, 0, Isa::kScalar); }, "num_threads"));
  CHECK(throws<std::invalid_argument>([] { WorkerPool(2, {0}, 0, Isa::kScalar); }, "core_ids"));
  CHECK(throws<std::invalid_argument>([] { WorkerPool(1, {}, -1, Isa::kScalar); }, "spin_us"));
  CHECK(throws<std::invalid_argument>([] { ft::resolve_isa("sse9"); }, "sse9"));
  CHECK(ft::resolve_isa("scalar") == Isa::kScalar);
  CHECK(std::string(ft::isa_name(ft::resolve_isa("auto"))) != "?");
}

void pinning() {
  const std::vector<int> cores = ft::physical_cores();
  CHECK(!cores.empty());
  WorkerPool pinned(2, {cores.front(), cores.back()}, 0, Isa::kScalar);
  CHECK(pinned.warnings().empty());
  CHECK(pinned.core_id(0) == cores.front() && pinned.core_id(1) == cores.back());
  WorkerPool unpinnable(2, {cores.front(), 200000}, 0, Isa::kScalar);
  CHECK(unpinnable.warnings().size() == 1);
  unpinnable.run([](int) {});
}

}  // namespace

int main() {
  every_worker_runs_once();
  chunks_cover_the_range();
  sections_of_many_callers_do_not_mix();
  barriers_order_phases();
  shared_memory_is_seen_by_all();
  scratch_is_aligned_and_private();
  errors_reach_the_caller();
  nested_sections_are_refused();
  closing_is_final_and_idempotent();
  bad_arguments_are_named();
  pinning();
  return 0;
}
