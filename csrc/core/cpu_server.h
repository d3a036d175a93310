// CpuExecutor's dispatcher: takes the CPU share of each layer from the ring and runs it on the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "client_wait.h"
#include "expert_kernels.h"
#include "expert_store.h"
#include "mailbox.h"
#include "worker_pool.h"

namespace ft {

// A record of which some tiles are run counts as an expert, and in bytes by its share.
struct CpuCounters {
  std::int64_t experts = 0, routes = 0, layers = 0, bytes = 0, busy_ns = 0;
};

class CpuServer {
 public:
  // device_client: the client rings no bells; then the thread spins while steps run, like ExpertCache's. Throws
  // std::invalid_argument when store and mailbox are of different models.
  CpuServer(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<ExpertStore> store, std::shared_ptr<WorkerPool> pool,
            int spin_us, bool device_client = false);
  ~CpuServer();
  CpuServer(const CpuServer&) = delete;
  CpuServer& operator=(const CpuServer&) = delete;

  // Once; throws std::logic_error afterwards.
  void start();
  // Idempotent, from any thread; a share being computed is finished first. Aborts the mailbox when one is left undone.
  void stop();

  // For a device client, any thread: shares may come soon; none will before the next notice.
  void notice() { wait_.notice(mailbox_->ring().bell()); }
  void rest() { wait_.rest(); }

  // Any thread, any time; cumulative.
  CpuCounters counters() const;

 private:
  void serve();
  bool run(const CpuShare& share);
  void stamp(std::uint32_t layer, std::atomic<std::int64_t> LayerStamps::OfCpu::* stage);

  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<ExpertStore> store_;
  std::shared_ptr<WorkerPool> pool_;
  ClientWait wait_;

  // Of the server thread; sized once. Route rows are only touched as far as publishes need them.
  std::vector<ExpertJob> jobs_;
  std::unique_ptr<float[]> route_rows_;  // [max_shared_tokens * top_k, hidden]
  std::vector<std::uint8_t> selected_;   // [max_shared_tokens * top_k]

  std::atomic<std::int64_t> experts_{0}, routes_{0}, layers_{0}, bytes_{0}, busy_ns_{0};

  std::mutex lifecycle_;
  bool started_ = false;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Throws std::invalid_argument naming the difference (`who` begins the message) unless store and mailbox agree on
// layers, experts and hidden size.
void check_store_matches(const char* who, const ExpertStore& store, const MailboxGeometry& geometry);

}  // namespace ft
