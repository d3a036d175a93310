// Fixed threads for parallel sections of native kernels.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ft {

// Instruction sets in ascending order; a pool carries the newest one its kernels may use.
enum class Isa : std::uint8_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// "auto" resolves to the best this CPU has; a name above that throws std::invalid_argument.
Isa resolve_isa(const std::string& name);
const char* isa_name(Isa isa);

// One caller at a time may run a section (an internal mutex serialises callers). The calling thread works too, as
// worker 0, so a pool of n uses n - 1 threads of its own. Idle threads spin spin_us, then park on a futex.
class WorkerPool {
 public:
  WorkerPool(int num_threads, std::vector<int> core_ids, int spin_us, Isa isa);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_threads() const;
  Isa isa() const;

  // Calls body(worker) once on each of num_threads() workers and returns when all are done.
  void run(const std::function<void(int worker)>& body);

  // Dynamic scheduling: body(begin, end, worker) over chunks of `grain` items out of [0, count).
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t begin, std::int64_t end, int worker)>& body);

  // A barrier among the workers of the current run() section.
  void barrier(int worker);

  // 64-byte aligned scratch of at least `bytes`, owned by the pool, valid until the next call by the same worker.
  void* scratch(int worker, std::size_t bytes);

  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ft
