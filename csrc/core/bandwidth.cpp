#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <vector>

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

}  // namespace ft
