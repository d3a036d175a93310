// How much memory this process may still take.
#pragma once

#include <cstdint>

namespace ft {

// Bytes that can be allocated without swapping, by the kernel's estimate and the limits of this process's control
// groups (v2). UINT64_MAX when neither is readable.
std::uint64_t available_memory_bytes();

}  // namespace ft
