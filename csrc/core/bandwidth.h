// How fast a pool's threads can read memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "expert_store.h"
#include "shared_segment.h"
#include "worker_pool.h"

namespace ft {

// Reads all of [data, data + bytes) `repetitions` times with and as often without software prefetching, every worker
// one contiguous part, and returns the best rate in 10^9 bytes per second. bytes should exceed the caches several times
// over.
double stream_read_gbps(WorkerPool& pool, const std::byte* data, std::size_t bytes, int repetitions);

// Nanoseconds of layers that run `num_experts` records of `layer`, each for all of `num_tokens` tokens, one after the
// other for window_ns (two layers at least): the kernel and the sum of its rows, as CpuExecutor does it. Records follow
// one another, so that a store larger than the caches is read from memory. With `slots` every record is first copied to
// the next slot there, as the CPU device fetches one. Throws std::invalid_argument for sizes out of range.
std::vector<std::int64_t> time_experts(WorkerPool& pool, const ExpertStore& store, int layer, int num_experts,
                                       int num_tokens, std::int64_t window_ns, SharedSegment* slots);

}  // namespace ft
