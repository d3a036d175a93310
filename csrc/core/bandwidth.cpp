#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "expert_kernels.h"
#include "futex.h"
#include "row_kernels.h"

namespace ft {

double stream_read_gbps(WorkerPool& pool, const std::byte* data, std::size_t bytes, int repetitions) {
  const detail::RowKernels& kernels = detail::row_kernels(pool.isa());
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const std::size_t pieces = (bytes + kPiece - 1) / kPiece;
  const auto workers = static_cast<std::size_t>(pool.num_threads());
  std::vector<float> sums(workers * 16);  // one cache line each; keeps the reads from being optimised away
  double best = 0.0;
  for (int i = 0; i < 2 * repetitions; ++i) {
    const bool prefetch = i % 2 == 1;
    const auto start = std::chrono::steady_clock::now();
    pool.run([&](int worker) {
      const std::size_t begin = pieces * static_cast<std::size_t>(worker) / workers;
      const std::size_t end = pieces * (static_cast<std::size_t>(worker) + 1) / workers;
      for (std::size_t p = begin; p < end; ++p) {
        const std::size_t offset = p * kPiece;
        sums[static_cast<std::size_t>(worker) * 16] +=
            kernels.read_sum(data + offset, std::min(kPiece, bytes - offset), prefetch);
      }
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / elapsed.count() / 1e9);
  }
  return best;
}

std::vector<std::int64_t> time_experts(WorkerPool& pool, const ExpertStore& store, int layer, int num_experts,
                                       int num_tokens, std::int64_t window_ns, SharedSegment* slots) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most) {
      throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + ".." +
                                  std::to_string(most) + ", got " + std::to_string(value));
    }
  };
  check("layer", layer, 0, store.num_layers() - 1);
  check("num_experts", num_experts, 1, store.num_experts());
  check("num_tokens", num_tokens, 1, 1024);
  const RecordLayout& layout = store.layout(layer);
  const std::int64_t bytes = layout.stride_bytes;
  if (slots != nullptr)
    check("slots' bytes", static_cast<std::int64_t>(slots->size_bytes()), num_experts * bytes, INT64_MAX);

  const std::int64_t num_routes = static_cast<std::int64_t>(num_tokens) * num_experts;
  std::vector<float> hidden(static_cast<std::size_t>(num_tokens) * layout.hidden), out(hidden.size());
  for (std::size_t i = 0; i < hidden.size(); ++i)
    hidden[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) / 50;
  const std::vector<float> weights(num_routes, 1.0f);
  std::vector<float> rows(num_routes * layout.hidden);
  std::vector<std::int32_t> routes(num_routes);
  for (int e = 0; e < num_experts; ++e) {
    for (int t = 0; t < num_tokens; ++t) routes[e * num_tokens + t] = t * num_experts + e;
  }
  ExpertBatch batch;
  batch.hidden = hidden.data();
  batch.weights = weights.data();
  batch.route_out = rows.data();
  batch.num_tokens = num_tokens;
  batch.top_k = num_experts;
  batch.hidden_size = layout.hidden;

  constexpr std::int64_t kGrain = 128 * 1024;
  std::vector<ExpertJob> jobs(num_experts);
  std::vector<std::int64_t> times;
  int next = 0;
  std::int64_t next_slot = 0;
  const std::int64_t num_slots = slots != nullptr ? static_cast<std::int64_t>(slots->size_bytes()) / bytes : 0;
  const std::int64_t end = monotonic_ns() + window_ns;
  for (std::int64_t now = 0; now < end || times.size() < 2;) {
    const std::int64_t start = monotonic_ns();
    const auto record = [&](int i) { return store.record(layer, (next + i) % store.num_experts()); };
    const auto slot = [&](int i) { return slots->data() + (next_slot + i) % num_slots * bytes; };
    if (slots != nullptr) {
      pool.parallel_for(num_experts * bytes, kGrain, [&](std::int64_t from, std::int64_t to, int) {
        while (from < to) {
          const std::int64_t size = std::min(to - from, bytes - from % bytes);
          const auto i = static_cast<int>(from / bytes);
          std::memcpy(slot(i) + from % bytes, record(i) + from % bytes, size);
          from += size;
        }
      });
    }
    for (int i = 0; i < num_experts; ++i) {
      const std::byte* data = slots != nullptr ? slot(i) : record(i);
      jobs[i] = ExpertJob{data, &layout, routes.data() + i * num_tokens, num_tokens};
    }
    run_expert_jobs(pool, jobs, batch, false);
    combine_routes(pool, batch, nullptr, false, out.data());
    now = monotonic_ns();
    times.push_back(now - start);
    next = (next + num_experts) % store.num_experts();
    next_slot = (next_slot + num_experts) % std::max<std::int64_t>(num_slots, 1);
  }
  return times;
}

}  // namespace ft
