// How fast a pool's threads can read memory.
#pragma once

#include <cstddef>

#include "worker_pool.h"

namespace ft {

// Reads all of [data, data + bytes) `repetitions` times with and as often without software prefetching, every worker
// one contiguous part, and returns the best rate in 10^9 bytes per second. bytes should exceed the caches several times
// over.
double stream_read_gbps(WorkerPool& pool, const std::byte* data, std::size_t bytes, int repetitions);

}  // namespace ft
