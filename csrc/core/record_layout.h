// Geometry of one kind of expert record, as kernels see it. Mirrors freetoken.quant.record.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ft {

enum class DType : std::uint8_t { kF32 = 0, kBF16 = 1 };

inline std::size_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// A record is num_tiles tiles at tile_stride bytes; in a tile, gate, up and down are each
// [tile_columns, hidden] row-major at their offsets (down is stored transposed).
struct RecordLayout {
  DType dtype = DType::kF32;
  std::int32_t hidden = 0;
  std::int32_t intermediate = 0;
  std::int32_t tile_columns = 0;
  std::int32_t num_tiles = 0;
  std::int64_t tile_stride_bytes = 0;
  std::int64_t stride_bytes = 0;
  std::int64_t gate_offset = 0;
  std::int64_t up_offset = 0;
  std::int64_t down_offset = 0;
};

}  // namespace ft
