#include "route_log.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ft {
namespace {

std::size_t payload_bytes(const RouteRecord& record) {
  const std::size_t routes = std::size_t{record.num_tokens} * record.top_k;
  return routes * (sizeof(std::int32_t) + sizeof(float)) + record.num_tokens;
}

std::uint16_t to_bf16(float value) {  // to the nearest, ties to even; no NaN is ever a routing weight worth keeping
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace

void RouteLog::set_mode(Mode mode, const std::vector<int>& sampled_layers) {
  std::lock_guard lock(readers_);
  if (mode != Mode::kOff && !ring_) ring_ = std::make_unique<char[]>(capacity_);
  for (std::uint32_t layer = 0; layer < num_layers_; ++layer) {
    const bool chosen =
        std::find(sampled_layers.begin(), sampled_layers.end(), static_cast<int>(layer)) != sampled_layers.end();
    sampled_[layer].store(chosen, std::memory_order_relaxed);
  }
  mode_.store(mode, std::memory_order_release);
}

void RouteLog::push(const RouteRecord& record, const std::int32_t* ids, const float* weights,
                    const std::uint8_t* admit) {
  const std::size_t routes = std::size_t{record.num_tokens} * record.top_k;
  const std::size_t needed = sizeof(record) + payload_bytes(record);
  putting_ = head_.load(std::memory_order_relaxed);
  if (needed > capacity_ - (putting_ - tail_.load(std::memory_order_acquire))) {
    num_dropped_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  put(&record, sizeof(record));
  put(ids, routes * sizeof(*ids));
  put(weights, routes * sizeof(*weights));
  put(admit, record.num_tokens);
  head_.store(putting_, std::memory_order_release);
}

void RouteLog::put(const void* data, std::size_t size) {
  if (size == 0) return;
  const std::size_t at = putting_ % capacity_;
  const std::size_t first = std::min(size, capacity_ - at);
  std::memcpy(ring_.get() + at, data, first);
  std::memcpy(ring_.get(), static_cast<const char*>(data) + first, size - first);
  putting_ += size;
}

void RouteLog::take(void* data, std::size_t size) {
  if (size == 0) return;
  const std::size_t at = taking_ % capacity_;
  const std::size_t first = std::min(size, capacity_ - at);
  std::memcpy(data, ring_.get() + at, first);
  std::memcpy(static_cast<char*>(data) + first, ring_.get(), size - first);
  taking_ += size;
}

std::string RouteLog::drain() {
  std::lock_guard lock(readers_);
  std::string out;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::uint16_t> halves;
  const std::uint64_t end = head_.load(std::memory_order_acquire);
  taking_ = tail_.load(std::memory_order_relaxed);
  while (taking_ != end) {
    RouteRecord record;
    take(&record, sizeof(record));
    const std::size_t routes = std::size_t{record.num_tokens} * record.top_k;
    ids.resize(routes);
    weights.resize(routes);
    halves.resize(routes * 2);
    take(ids.data(), routes * sizeof(ids[0]));
    take(weights.data(), routes * sizeof(weights[0]));
    for (std::size_t i = 0; i < routes; ++i) {
      halves[i] = static_cast<std::uint16_t>(ids[i]);  // -1 becomes 0xffff
      halves[routes + i] = to_bf16(weights[i]);
    }
    out.append(reinterpret_cast<const char*>(&record), sizeof(record));
    out.append(reinterpret_cast<const char*>(halves.data()), halves.size() * sizeof(halves[0]));
    const std::size_t at = out.size();
    out.resize(at + record.num_tokens);
    take(out.data() + at, record.num_tokens);
    out.resize((out.size() + 7) / 8 * 8, '\0');
    tail_.store(taking_, std::memory_order_release);
  }
  return out;
}

}  // namespace ft
