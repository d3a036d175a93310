#include "q4_0_linear.h"

#include <algorithm>

#include "ordered_work.h"
#include "q4_0_kernels.h"
#include "work_queue.h"

namespace ft {
namespace {

// Weight rows of an item; with many activation rows they should stay in the second-level cache while those pass.
constexpr std::int64_t kGroupBytes = 96 << 10;
constexpr std::int64_t kAheadBytes = 8192;  // of an item before it begins
constexpr std::int64_t kMinGroup = 8;
constexpr std::int64_t kMaxGroup = 64;

}  // namespace

void linear_q4_0(WorkerPool& pool, const float* x, std::int64_t rows, std::int64_t inputs, const std::uint8_t* nibbles,
                 const std::uint16_t* scales, std::int64_t outputs, const float* bias, float* out) {
  using detail::Q8Chunk;
  if (rows == 0 || outputs == 0) return;
  const detail::Q4Kernels& kernels = detail::q4_kernels(pool.isa());
  const std::int64_t chunks = detail::q8_chunks(inputs);
  const std::int64_t blocks = inputs / detail::kQ4Block;
  const std::int64_t fitting = kGroupBytes / std::max<std::int64_t>(1, blocks * 18) / kMinGroup * kMinGroup;
  const std::int64_t even = outputs / (8 * pool.num_threads()) / kMinGroup * kMinGroup;
  const std::int64_t group = std::clamp(std::min(fitting, even), kMinGroup, kMaxGroup);
  const std::int64_t num_groups = (outputs + group - 1) / group;
  detail::WorkQueue queue(rows + num_groups);
  detail::Countdown quantized;

  const auto work = [&](std::byte* memory) {
    auto* quantized_rows = reinterpret_cast<Q8Chunk*>(memory);
    for (std::int64_t item = queue.take(); item >= 0; item = queue.take()) {
      if (item < rows) {
        kernels.quantize_row(x + item * inputs, inputs, quantized_rows + item * chunks);
        quantized.done();
        continue;
      }
      const std::int64_t first = (item - rows) * group;
      const detail::Q4Rows weights{nibbles + first * blocks * detail::kQ4BlockBytes, scales + first * blocks,
                                   std::min(group, outputs - first)};
      const std::int64_t ahead = std::min(kAheadBytes, weights.count * blocks * detail::kQ4BlockBytes);
      detail::prefetch_range(weights.nibbles, ahead);
      detail::prefetch_range(weights.scales, ahead / 8);
      quantized.wait(rows);
      for (std::int64_t r = 0; r < rows; r += detail::kQ4TileRows) {
        const Q8Chunk* activations[detail::kQ4TileRows];
        const std::int64_t together = std::min(detail::kQ4TileRows, rows - r);
        for (std::int64_t i = 0; i < together; ++i) activations[i] = quantized_rows + (r + i) * chunks;
        kernels.dot_rows(weights, inputs, activations, together, bias == nullptr ? nullptr : bias + first,
                         out + r * outputs + first, outputs);
      }
    }
  };
  const auto bytes = static_cast<std::size_t>(rows * chunks) * sizeof(Q8Chunk);
  if (rows * inputs * outputs <= detail::kSoloWork) {
    pool.parallel_for(1, 1, [&](std::int64_t, std::int64_t, int worker) {
      work(static_cast<std::byte*>(pool.scratch(worker, bytes)));
    });
  } else {
    pool.run_shared(bytes, [&](int, std::byte* shared) { work(shared); });
  }
}

}  // namespace ft
