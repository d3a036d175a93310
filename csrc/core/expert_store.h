// Where every expert record lies.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "record_layout.h"
#include "shared_segment.h"

namespace ft {

// Immutable after construction; keeps its segments mapped.
class ExpertStore {
 public:
  // record_segment and record_offset are [num_layers * num_experts]. Throws std::invalid_argument when a record would
  // leave its segment or a layout index is out of range.
  ExpertStore(std::vector<std::shared_ptr<SharedSegment>> segments, std::vector<RecordLayout> layouts,
              std::vector<std::int32_t> layer_layout, std::vector<std::int32_t> record_segment,
              std::vector<std::int64_t> record_offset);

  int num_layers() const { return static_cast<int>(layer_layout_.size()); }
  int num_experts() const { return num_experts_; }
  const RecordLayout& layout(int layer) const { return layouts_[layer_layout_[layer]]; }
  const std::byte* record(int layer, int expert) const {
    return records_[static_cast<std::size_t>(layer) * num_experts_ + expert];
  }

 private:
  std::vector<std::shared_ptr<SharedSegment>> segments_;
  std::vector<RecordLayout> layouts_;
  std::vector<std::int32_t> layer_layout_;
  std::vector<const std::byte*> records_;
  int num_experts_ = 0;
};

}  // namespace ft
