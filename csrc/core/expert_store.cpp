#include "expert_store.h"

#include <string>
#include <utility>

namespace ft {

ExpertStore::ExpertStore(std::vector<std::shared_ptr<SharedSegment>> segments, std::vector<RecordLayout> layouts,
                         std::vector<std::int32_t> layer_layout, std::vector<std::int32_t> record_segment,
                         std::vector<std::int64_t> record_offset)
    : segments_(std::move(segments)), layouts_(std::move(layouts)), layer_layout_(std::move(layer_layout)) {
  const std::size_t num_layers = layer_layout_.size();
  if (record_segment.size() != record_offset.size()) {
    throw std::invalid_argument("record_segment has " + std::to_string(record_segment.size()) +
                                " entries, record_offset " + std::to_string(record_offset.size()));
  }
  if (num_layers == 0 ? !record_segment.empty() : record_segment.size() % num_layers != 0) {
    throw std::invalid_argument("record_segment has " + std::to_string(record_segment.size()) +
                                " entries, not a multiple of " + std::to_string(num_layers) + " layers");
  }
  num_experts_ = num_layers == 0 ? 0 : static_cast<int>(record_segment.size() / num_layers);
  records_.reserve(record_segment.size());
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    const std::int32_t index = layer_layout_[layer];
    if (index < 0 || static_cast<std::size_t>(index) >= layouts_.size()) {
      throw std::invalid_argument("layer_layout of layer " + std::to_string(layer) + " is " + std::to_string(index) +
                                  ", but there are " + std::to_string(layouts_.size()) + " layouts");
    }
    const auto stride = static_cast<std::uint64_t>(layouts_[index].stride_bytes);
    for (int expert = 0; expert < num_experts_; ++expert) {
      const std::size_t i = layer * num_experts_ + expert;
      const std::string which = "layer " + std::to_string(layer) + " expert " + std::to_string(expert);
      const std::int32_t segment = record_segment[i];
      if (segment < 0 || static_cast<std::size_t>(segment) >= segments_.size()) {
        throw std::invalid_argument("record_segment of " + which + " is " + std::to_string(segment) +
                                    ", but there are " + std::to_string(segments_.size()) + " segments");
      }
      const std::size_t size = segments_[segment]->size_bytes();
      const std::int64_t offset = record_offset[i];
      if (offset < 0 || stride > size || static_cast<std::uint64_t>(offset) > size - stride) {
        throw std::invalid_argument("record_offset of " + which + " is " + std::to_string(offset) + ": a record of " +
                                    std::to_string(stride) + " bytes leaves its segment of " + std::to_string(size) +
                                    " bytes");
      }
      if (offset % 64 != 0) {
        throw std::invalid_argument("record_offset of " + which + " is " + std::to_string(offset) +
                                    ", not a multiple of 64");
      }
      records_.push_back(segments_[segment]->data() + offset);
    }
  }
}

}  // namespace ft
