// What a cache server was asked for, kept for whoever replays it: a bounded ring of bytes that its thread fills and
// anybody empties.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ft {

// A record of a route trace as it lies in the file (docs/route-trace.md), little-endian; followed by ids u16 [T, K]
// (0xffff: none), weights bf16 [T, K], admit u8 [T], and zeros up to a multiple of 8 bytes.
struct RouteRecord {
  std::uint64_t step_id;
  std::uint32_t layer;
  std::uint32_t num_tokens;
  std::uint16_t top_k;
  std::uint16_t flags;  // RequestFlags
  std::uint32_t reserved;
};
static_assert(sizeof(RouteRecord) == 24);

class RouteLog {
 public:
  enum class Mode : int { kOff, kSample, kAll };
  static constexpr std::uint32_t kMaxSampledTokens = 64;

  // capacity_bytes: of the ring, which is allocated when logging begins.
  RouteLog(std::uint32_t num_layers, std::size_t capacity_bytes)
      : capacity_(capacity_bytes),
        sampled_(std::make_unique<std::atomic<bool>[]>(num_layers)),
        num_layers_(num_layers) {}

  // Any thread. kSample: publishes of up to kMaxSampledTokens tokens of the sampled layers; kAll: all. Layers that do
  // not exist are ignored.
  void set_mode(Mode mode, const std::vector<int>& sampled_layers);
  // The records since the last call, in the file's form. Any thread.
  std::string drain();
  // Publishes that found the ring full, since the server was made.
  std::int64_t num_dropped() const { return num_dropped_.load(std::memory_order_relaxed); }

  // The server's thread: one load when there is nothing to log.
  bool wants(std::uint32_t layer, std::uint32_t num_tokens) const {
    const Mode mode = mode_.load(std::memory_order_acquire);
    if (mode == Mode::kOff) return false;
    return mode == Mode::kAll || (num_tokens <= kMaxSampledTokens && sampled_[layer].load(std::memory_order_relaxed));
  }
  void push(const RouteRecord& record, const std::int32_t* ids, const float* weights, const std::uint8_t* admit);

 private:
  void put(const void* data, std::size_t size);
  void take(void* data, std::size_t size);

  const std::size_t capacity_;
  std::unique_ptr<char[]> ring_;  // made before the mode is first anything but kOff, and kept
  std::unique_ptr<std::atomic<bool>[]> sampled_;
  const std::uint32_t num_layers_;
  std::atomic<Mode> mode_{Mode::kOff};
  std::atomic<std::int64_t> num_dropped_{0};
  alignas(64) std::atomic<std::uint64_t> head_{0};  // bytes put so far
  std::uint64_t putting_ = 0;
  alignas(64) std::atomic<std::uint64_t> tail_{0};  // bytes taken so far
  std::uint64_t taking_ = 0;
  std::mutex readers_;
};

}  // namespace ft
