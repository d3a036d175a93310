// Geometry of one kind of expert record, as kernels see it. Mirrors freetoken.quant.record.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ft {

enum class DType : std::uint8_t { kF32 = 0, kBF16 = 1, kQ4_0 = 2 };

// Not for kQ4_0, which has half a byte and a share of a scale per element.
inline std::size_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// A record is num_tiles tiles at tile_stride bytes; in a tile, gate, up and down are each
// [tile_columns, hidden] row-major at their offsets (down is stored transposed).
//
// With kQ4_0 the offsets are those of nibbles, and float16 scales have offsets of their own: gate and up are
// [tile_columns, hidden] in blocks of 32 along hidden, down is [hidden, tile_columns] in blocks along the columns. See
// freetoken/quant/q4_0_record.py.
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
  std::int64_t gate_scales_offset = 0;
  std::int64_t up_scales_offset = 0;
  std::int64_t down_scales_offset = 0;
};

}  // namespace ft
