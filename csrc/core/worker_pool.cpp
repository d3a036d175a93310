#include "worker_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cpu_info.h"

namespace ft {
namespace {

constexpr std::size_t kCacheLine = 64;
// Workers of a section reach a barrier or its end close together, so it is worth a short spin even in a pool that
// otherwise parks at once.
constexpr int kSectionSpinUs = 20;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// A word that some threads wait on. Wakers pay for a system call only when somebody is parked: the waiter counts itself
// before the kernel re-checks the word, the waker changes the word before it looks at the count.
struct alignas(kCacheLine) WaitWord {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> parked{0};

  void wake() {
    if (parked.load(std::memory_order_seq_cst) != 0) futex_wake_all(value);
  }

  template <typename Done>
  void wait(const Done& done, int spin_us) {
    if (spin_us > 0) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
      do {
        for (int i = 0; i < 32; ++i) {
          if (done(value.load(std::memory_order_acquire))) return;
          cpu_relax();
        }
      } while (std::chrono::steady_clock::now() < deadline);
    }
    for (;;) {
      parked.fetch_add(1, std::memory_order_seq_cst);
      const std::uint32_t seen = value.load(std::memory_order_seq_cst);
      const bool finished = done(seen);
      if (!finished) futex_wait(value, seen);
      parked.fetch_sub(1, std::memory_order_relaxed);
      if (finished || done(value.load(std::memory_order_acquire))) return;
    }
  }
};

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  ~AlignedBuffer() { std::free(data_); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  std::byte* reserve(std::size_t bytes) {
    if (bytes > capacity_) {
      const std::size_t rounded = (std::max<std::size_t>(bytes, 4096) + 4095) / 4096 * 4096;
      std::free(data_);
      capacity_ = 0;
      data_ = static_cast<std::byte*>(std::aligned_alloc(4096, rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = rounded;
    }
    return data_;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
};

struct alignas(kCacheLine) Scratch {
  AlignedBuffer buffer;
};

// Thrown out of a barrier when another worker of the section has failed; never leaves the pool.
struct SectionAborted {};

thread_local bool in_section = false;

}  // namespace

Isa resolve_isa(const std::string& name) {
  const CpuFeatures& cpu = cpu_features();
  Isa best = Isa::kScalar;
  if (cpu.avx2 && cpu.fma && cpu.f16c) best = Isa::kAvx2;
  if (best == Isa::kAvx2 && cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq) best = Isa::kAvx512;
  if (best == Isa::kAvx512 && cpu.avx512_bf16) best = Isa::kAvx512Bf16;
  if (name == "auto") return best;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (name != isa_name(isa)) continue;
    if (isa > best) {
      throw std::invalid_argument("isa '" + name + "' is not available on this CPU; the best is '" + isa_name(best) +
                                  "'");
    }
    return isa;
  }
  throw std::invalid_argument("isa '" + name + "' is not one of auto, scalar, avx2, avx512, avx512_bf16");
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "?";
}

struct WorkerPool::Impl {
  Impl(int threads, std::vector<int> cores, int spin, Isa instruction_set)
      : num_threads(threads), core_ids(std::move(cores)), spin_us(spin), isa(instruction_set), scratch(threads) {}

  const int num_threads;
  const std::vector<int> core_ids;
  const int spin_us;
  const Isa isa;
  std::vector<std::string> warnings;

  std::mutex section_mutex;  // held for a whole section
  bool closed = false;       // guarded by section_mutex
  const std::function<void(int)>* body = nullptr;
  WaitWord section;      // counts sections; threads wait for the next one
  WaitWord outstanding;  // threads still inside the current section
  WaitWord barrier_generation;
  std::atomic<std::uint32_t> barrier_arrived{0};
  std::atomic<bool> failed{false};
  std::atomic<bool> stopping{false};
  std::mutex error_mutex;
  std::exception_ptr error;  // guarded by error_mutex

  AlignedBuffer shared;
  std::vector<Scratch> scratch;
  std::vector<std::thread> threads;

  void fail(std::exception_ptr cause) {
    {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::move(cause);
    }
    failed.store(true, std::memory_order_seq_cst);
    barrier_generation.value.fetch_add(1, std::memory_order_seq_cst);
    barrier_generation.wake();
  }

  void work(const std::function<void(int)>& section_body, int worker) {
    in_section = true;
    try {
      section_body(worker);
    } catch (const SectionAborted&) {
    } catch (...) {
      fail(std::current_exception());
    }
    in_section = false;
  }

  void thread_main(int worker) {
    std::uint32_t seen = 0;
    for (;;) {
      section.wait([&](std::uint32_t value) { return value != seen; }, spin_us);
      seen += 1;
      if (stopping.load(std::memory_order_acquire)) return;
      work(*body, worker);
      if (outstanding.value.fetch_sub(1, std::memory_order_seq_cst) == 1) outstanding.wake();
    }
  }

  // Both with section_mutex held.
  void check_open() const {
    if (closed) throw std::logic_error("worker pool is closed");
  }

  void run_section(const std::function<void(int)>& section_body) {
    failed.store(false, std::memory_order_relaxed);
    barrier_arrived.store(0, std::memory_order_relaxed);
    error = nullptr;
    if (num_threads > 1) {
      body = &section_body;
      outstanding.value.store(static_cast<std::uint32_t>(num_threads - 1), std::memory_order_relaxed);
      section.value.fetch_add(1, std::memory_order_seq_cst);
      section.wake();
    }
    work(section_body, 0);
    if (num_threads > 1) {
      outstanding.wait([](std::uint32_t value) { return value == 0; }, std::max(spin_us, kSectionSpinUs));
      body = nullptr;
    }
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
};

WorkerPool::WorkerPool(int num_threads, std::vector<int> core_ids, int spin_us, Isa isa) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("num_threads must be 1..1024, got " + std::to_string(num_threads));
  }
  if (spin_us < 0) throw std::invalid_argument("spin_us must not be negative, got " + std::to_string(spin_us));
  if (!core_ids.empty() && core_ids.size() < static_cast<std::size_t>(num_threads)) {
    throw std::invalid_argument("core_ids names " + std::to_string(core_ids.size()) + " cores for " +
                                std::to_string(num_threads) + " threads");
  }
  impl_ = std::make_unique<Impl>(num_threads, std::move(core_ids), spin_us, isa);
  std::vector<std::string> pin_errors(num_threads);
  try {
    for (int worker = 1; worker < num_threads; ++worker) {
      impl_->threads.emplace_back([impl = impl_.get(), worker, &pin_errors] {
        // The section below is the first one, so pin_errors outlives this write.
        if (!impl->core_ids.empty()) pin_errors[worker] = pin_current_thread(impl->core_ids[worker]);
        impl->thread_main(worker);
      });
    }
    run([](int) {});
  } catch (...) {
    close();
    throw;
  }
  for (std::string& message : pin_errors) {
    if (!message.empty()) impl_->warnings.push_back(std::move(message));
  }
}

WorkerPool::~WorkerPool() { close(); }

int WorkerPool::num_threads() const { return impl_->num_threads; }

Isa WorkerPool::isa() const { return impl_->isa; }

int WorkerPool::core_id(int worker) const { return impl_->core_ids.empty() ? -1 : impl_->core_ids.at(worker); }

const std::vector<std::string>& WorkerPool::warnings() const { return impl_->warnings; }

void WorkerPool::run(const std::function<void(int worker)>& body) {
  if (in_section) throw std::logic_error("a parallel section must not start another one");
  const std::lock_guard lock(impl_->section_mutex);
  impl_->check_open();
  impl_->run_section(body);
}

void WorkerPool::run_shared(std::size_t shared_bytes, const std::function<void(int worker, std::byte* shared)>& body) {
  if (in_section) throw std::logic_error("a parallel section must not start another one");
  const std::lock_guard lock(impl_->section_mutex);
  impl_->check_open();
  std::byte* shared = impl_->shared.reserve(shared_bytes);
  impl_->run_section([&](int worker) { body(worker, shared); });
}

void WorkerPool::parallel_for(std::int64_t count, std::int64_t grain,
                              const std::function<void(std::int64_t begin, std::int64_t end, int worker)>& body) {
  if (in_section) throw std::logic_error("a parallel section must not start another one");
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  const std::lock_guard lock(impl_->section_mutex);
  impl_->check_open();
  std::atomic<std::int64_t> next{0};
  const auto take_chunks = [&](int worker) {
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count || impl_->failed.load(std::memory_order_relaxed)) return;
      body(begin, std::min(begin + grain, count), worker);
    }
  };
  if (count <= grain) {
    in_section = true;
    struct Leave {
      ~Leave() { in_section = false; }
    } leave;
    impl_->failed.store(false, std::memory_order_relaxed);
    take_chunks(0);
    return;
  }
  impl_->run_section(take_chunks);
}

void WorkerPool::barrier(int) {
  Impl& impl = *impl_;
  if (impl.num_threads == 1) return;
  const std::uint32_t generation = impl.barrier_generation.value.load(std::memory_order_seq_cst);
  if (impl.failed.load(std::memory_order_seq_cst)) throw SectionAborted();
  if (impl.barrier_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<std::uint32_t>(impl.num_threads)) {
    impl.barrier_arrived.store(0, std::memory_order_relaxed);
    impl.barrier_generation.value.fetch_add(1, std::memory_order_seq_cst);
    impl.barrier_generation.wake();
  } else {
    impl.barrier_generation.wait([&](std::uint32_t value) { return value != generation; },
                                 std::max(impl.spin_us, kSectionSpinUs));
  }
  if (impl.failed.load(std::memory_order_seq_cst)) throw SectionAborted();
}

void* WorkerPool::scratch(int worker, std::size_t bytes) { return impl_->scratch.at(worker).buffer.reserve(bytes); }

void WorkerPool::close() {
  if (!impl_) return;
  if (in_section) throw std::logic_error("a worker pool cannot be closed from inside its section");
  const std::lock_guard lock(impl_->section_mutex);
  if (impl_->closed) return;
  impl_->closed = true;
  impl_->stopping.store(true, std::memory_order_release);
  impl_->section.value.fetch_add(1, std::memory_order_seq_cst);
  impl_->section.wake();
  for (std::thread& thread : impl_->threads) thread.join();
}

}  // namespace ft
