// A tiny model for the tests of the data plane: records, what they compute (in double), and random batches.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "expert_store.h"
#include "mailbox.h"
#include "worker_pool.h"

namespace ft_test {

inline constexpr int kLayers = 3, kExperts = 8, kTopK = 2, kHidden = 32, kInner = 24, kMaxTokens = 6;
inline constexpr ft::MailboxGeometry kGeometry{kMaxTokens, kTopK, kHidden, kLayers, kExperts};

inline ft::RecordLayout make_layout() {
  constexpr int kColumns = 8;
  constexpr std::int64_t kMatrix = kColumns * kHidden * sizeof(float);
  ft::RecordLayout layout;
  layout.dtype = ft::DType::kF32;
  layout.hidden = kHidden;
  layout.intermediate = kInner;
  layout.tile_columns = kColumns;
  layout.num_tiles = kInner / kColumns;
  layout.tile_stride_bytes = 3 * kMatrix;
  layout.stride_bytes = (layout.num_tiles * layout.tile_stride_bytes + 4095) / 4096 * 4096;
  layout.up_offset = kMatrix;
  layout.down_offset = 2 * kMatrix;
  return layout;
}

// A model's records, and what they compute, in double.
struct Bank {
  Bank() : layout(make_layout()) {
    const std::size_t count = kLayers * kExperts;
    segment = ft::SharedSegment::create("store", count * layout.stride_bytes);
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0.0f, 0.2f);
    auto* values = reinterpret_cast<float*>(segment->data());
    for (std::size_t i = 0; i < segment->size_bytes() / sizeof(float); ++i) values[i] = normal(random);
    std::vector<std::int64_t> offsets;
    for (std::size_t i = 0; i < count; ++i) offsets.push_back(static_cast<std::int64_t>(i) * layout.stride_bytes);
    store = std::make_shared<ft::ExpertStore>(std::vector{segment}, std::vector{layout},
                                              std::vector<std::int32_t>(kLayers, 0),
                                              std::vector<std::int32_t>(count, 0), offsets);
  }

  void add_expert(int layer, int expert, const float* x, double weight, double* out) const {
    add_record(store->record(layer, expert), x, weight, out);
  }

  // The same from a copy of the record, wherever it lies.
  void add_record(const std::byte* record, const float* x, double weight, double* out) const {
    add_tiles(record, 0, layout.num_tiles, x, weight, out);
  }

  void add_tiles(const std::byte* record, int first, int count, const float* x, double weight, double* out) const {
    for (int tile = first; tile < first + count; ++tile) {
      const std::byte* base = record + tile * layout.tile_stride_bytes;
      for (int column = 0; column < layout.tile_columns; ++column) {
        const auto row = [&](std::int64_t offset) {
          return reinterpret_cast<const float*>(base + offset) + column * kHidden;
        };
        double gate = 0, up = 0;
        for (int h = 0; h < kHidden; ++h) {
          gate += double{row(layout.gate_offset)[h]} * x[h];
          up += double{row(layout.up_offset)[h]} * x[h];
        }
        const double inner = gate / (1.0 + std::exp(-gate)) * up;
        for (int h = 0; h < kHidden; ++h) out[h] += weight * inner * row(layout.down_offset)[h];
      }
    }
  }

  ft::RecordLayout layout;
  std::shared_ptr<ft::SharedSegment> segment;
  std::shared_ptr<ft::ExpertStore> store;
};

struct Batch {
  explicit Batch(std::mt19937& random, int max_tokens = kMaxTokens)
      : num_tokens(1 + static_cast<int>(random() % max_tokens)) {
    std::normal_distribution<float> normal;
    layer = static_cast<int>(random() % kLayers);
    for (int t = 0; t < num_tokens; ++t) {
      const bool is_padding = random() % 6 == 0;
      admit.push_back(random() % 3 != 0);
      for (int h = 0; h < kHidden; ++h) hidden.push_back(normal(random));
      const int first = static_cast<int>(random() % kExperts);
      const int second = static_cast<int>((first + 1 + random() % (kExperts - 1)) % kExperts);
      for (const int expert : {first, second}) {
        ids.push_back(is_padding ? -1 : expert);
        weights.push_back(is_padding ? 0.0f : 0.25f + 0.1f * static_cast<float>(random() % 5));
      }
    }
  }

  void check(const Bank& bank, const std::vector<float>& out) const {
    for (int t = 0; t < num_tokens; ++t) {
      double expected[kHidden] = {};
      for (int k = 0; k < kTopK; ++k) {
        const int route = t * kTopK + k;
        if (ids[route] >= 0) bank.add_expert(layer, ids[route], &hidden[t * kHidden], weights[route], expected);
      }
      for (int h = 0; h < kHidden; ++h) CHECK(std::abs(out[t * kHidden + h] - expected[h]) < 1e-4);
    }
  }

  int num_tokens;
  int layer;
  std::vector<float> hidden, weights;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> admit;
};

inline std::shared_ptr<ft::WorkerPool> make_pool(int threads) {
  return std::make_shared<ft::WorkerPool>(threads, std::vector<int>{}, 0, ft::resolve_isa("auto"));
}

inline std::shared_ptr<ft::SharedSegment> make_arena(const Bank& bank, int num_slots) {
  if (num_slots == 0) return nullptr;
  auto arena = ft::SharedSegment::create("arena", num_slots * bank.layout.stride_bytes);
  std::memset(arena->data(), 0xff, arena->size_bytes());  // NaNs: whoever reads a slot too early shows it
  return arena;
}

template <class Function>
std::string failure_of(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool begins(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

}  // namespace ft_test
