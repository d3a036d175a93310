#include "cpu_server.h"

#include <pthread.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_info.h"

namespace ft {
namespace {

void add(std::atomic<std::int64_t>& counter, std::int64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }

}  // namespace

void check_store_matches(const char* who, const ExpertStore& store, const MailboxGeometry& g) {
  const auto fail = [who](const std::string& what, std::int64_t of_store, std::int64_t of_mailbox) {
    throw std::invalid_argument(std::string(who) + ": " + what + " is " + std::to_string(of_store) +
                                " in the store and " + std::to_string(of_mailbox) + " in the mailbox");
  };
  if (store.num_layers() != static_cast<int>(g.num_layers)) fail("num_layers", store.num_layers(), g.num_layers);
  if (store.num_experts() != static_cast<int>(g.num_experts)) fail("num_experts", store.num_experts(), g.num_experts);
  for (int layer = 0; layer < store.num_layers(); ++layer) {
    if (store.layout(layer).hidden != static_cast<int>(g.hidden)) {
      fail("hidden of layer " + std::to_string(layer), store.layout(layer).hidden, g.hidden);
    }
  }
}

CpuServer::CpuServer(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<ExpertStore> store,
                     std::shared_ptr<WorkerPool> pool, int spin_us, bool device_client)
    : mailbox_(std::move(mailbox)), store_(std::move(store)), pool_(std::move(pool)), wait_(device_client, spin_us) {
  const MailboxGeometry& g = mailbox_->geometry();
  check_store_matches("cpu server", *store_, g);
  if (spin_us < 0) throw std::invalid_argument("cpu server: spin_us " + std::to_string(spin_us) + " is negative");
  const std::size_t max_routes = static_cast<std::size_t>(g.max_shared_tokens) * g.top_k;
  jobs_.reserve(mailbox_->entry_room());
  route_rows_.reset(new float[max_routes * g.hidden]);
  selected_.assign(max_routes, 0);
}

CpuServer::~CpuServer() { stop(); }

void CpuServer::start() {
  std::lock_guard lock(lifecycle_);
  if (started_) throw std::logic_error("cpu server: started before");
  started_ = true;
  thread_ = std::thread([this] { serve(); });
}

void CpuServer::stop() {
  std::lock_guard lock(lifecycle_);
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  mailbox_->ring().bell().ring();
  thread_.join();
  if (!mailbox_->ring().empty()) mailbox_->abort();
}

CpuCounters CpuServer::counters() const {
  return CpuCounters{experts_.load(std::memory_order_relaxed), routes_.load(std::memory_order_relaxed),
                     layers_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed),
                     busy_ns_.load(std::memory_order_relaxed)};
}

void CpuServer::serve() {
  pthread_setname_np(pthread_self(), "ft-cpu");
  // This thread is worker 0 of the pool's sections. Left to wander it can land on the core of a pinned worker that
  // spins, and then both wait for a time slice in the middle of a layer.
  if (pool_->core_id(0) >= 0) pin_current_thread(pool_->core_id(0));
  Ring<CpuShare>& ring = mailbox_->ring();
  const auto ready = [&] { return !ring.empty() || mailbox_->aborted() || stopping_.load(std::memory_order_seq_cst); };
  for (;;) {
    wait_.wait(ring.bell(), ready);
    if (mailbox_->aborted() || stopping_.load(std::memory_order_seq_cst)) return;
    CpuShare share;
    if (!ring.try_pop(share)) continue;
    stamp(share.layer, &LayerStamps::OfCpu::taken);
    bool done = false;
    try {
      done = run(share);
    } catch (...) {  // the pool was closed, or memory is short: the client must not wait for this share
    }
    if (!done) {
      mailbox_->abort(AbortReason::kCpuFailed);
      return;
    }
    mailbox_->part().publish(share.seq);
    stamp(share.layer, &LayerStamps::OfCpu::done);
    wait_.worked();
  }
}

void CpuServer::stamp(std::uint32_t layer, std::atomic<std::int64_t> LayerStamps::OfCpu::* stage) {
  if (layer >= mailbox_->geometry().num_layers) return;
  (mailbox_->stamps(layer).cpu.*stage).store(monotonic_ns(), std::memory_order_relaxed);
}

// False when the share contradicts the mailbox's geometry.
bool CpuServer::run(const CpuShare& share) {
  const MailboxGeometry& g = mailbox_->geometry();
  const std::int64_t start = monotonic_ns();
  if (share.layer >= g.num_layers || share.num_tokens > g.max_shared_tokens || share.top_k > g.top_k ||
      share.first_entry > mailbox_->entry_room() || share.num_entries > mailbox_->entry_room() - share.first_entry) {
    return false;
  }
  const int layer = static_cast<int>(share.layer);
  const std::size_t num_routes = static_cast<std::size_t>(share.num_tokens) * share.top_k;
  const bool deterministic = (share.flags & kDeterministic) != 0;
  if (deterministic && g.route_rows == 0) return false;
  const PlanEntry* entries = mailbox_->entries() + share.first_entry;
  const std::int32_t* routes = mailbox_->routes();
  const RecordLayout& layout = store_->layout(layer);
  jobs_.clear();
  std::int64_t routes_run = 0, tiles_run = 0;
  if (!deterministic) std::memset(selected_.data(), 0, num_routes);
  for (std::uint32_t i = 0; i < share.num_entries; ++i) {
    const PlanEntry& e = entries[i];
    if (!is_sound(e, routes, store_->num_experts(), layout.num_tiles, static_cast<std::int64_t>(num_routes))) {
      return false;
    }
    if (!deterministic) {
      for (std::int32_t r = e.first_route; r < e.first_route + e.num_routes; ++r) selected_[routes[r]] = 1;
    }
    jobs_.push_back(ExpertJob{store_->record(layer, e.expert), &layout, routes + e.first_route, e.num_routes,
                              e.first_tile, e.num_tiles});
    tiles_run += jobs_.back().tiles();
    routes_run += e.num_routes;
  }
  ExpertBatch batch;
  batch.hidden = mailbox_->hidden();
  batch.weights = mailbox_->weights();
  batch.route_out = deterministic ? mailbox_->partial() : route_rows_.get();
  batch.num_tokens = static_cast<std::int32_t>(share.num_tokens);
  batch.top_k = static_cast<std::int32_t>(share.top_k);
  batch.hidden_size = static_cast<std::int32_t>(g.hidden);
  run_expert_jobs(*pool_, jobs_, batch, deterministic);
  if (!deterministic) combine_routes(*pool_, batch, selected_.data(), false, mailbox_->partial());
  add(experts_, share.num_entries);
  add(routes_, routes_run);
  add(layers_, 1);
  add(bytes_, tiles_run * layout.stride_bytes / layout.num_tiles);
  add(busy_ns_, monotonic_ns() - start);
  return true;
}

}  // namespace ft
