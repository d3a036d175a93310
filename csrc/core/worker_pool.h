// Fixed threads for parallel sections of native kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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
// An exception in a body ends the section (barriers fall through in the other workers) and is rethrown to the caller.
// A body must not start another section (std::logic_error).
class WorkerPool {
 public:
  // core_ids is empty or names at least num_threads logical CPUs; thread i is pinned to core_ids[i]. The caller's
  // thread (worker 0) is not ours and stays as it is: see core_id(). A failed pin is a warning.
  WorkerPool(int num_threads, std::vector<int> core_ids, int spin_us, Isa isa);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_threads() const;
  Isa isa() const;
  // The CPU meant for a worker, or -1 when the pool is not pinned. A thread that does nothing but run this pool's
  // sections should pin itself to core_id(0).
  int core_id(int worker) const;
  const std::vector<std::string>& warnings() const;

  // Calls body(worker) once on each of num_threads() workers and returns when all are done.
  void run(const std::function<void(int worker)>& body);

  // The same with `shared_bytes` of 64-byte aligned memory that all workers of this section see.
  void run_shared(std::size_t shared_bytes, const std::function<void(int worker, std::byte* shared)>& body);

  // Dynamic scheduling: body(begin, end, worker) over chunks of `grain` items out of [0, count). One chunk runs on the
  // calling thread alone. No barrier inside.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t begin, std::int64_t end, int worker)>& body);

  // A barrier among the workers of the current run() section.
  void barrier(int worker);

  // 64-byte aligned scratch of at least `bytes`, owned by the pool, valid until the next call by the same worker.
  void* scratch(int worker, std::size_t bytes);

  // Joins the threads; idempotent. A later run throws std::logic_error.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ft
