#include "slot_table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace ft {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_range(const char* name, int value, int low, int high) {
  if (value < low || value > high) {
    throw std::invalid_argument("slot table: " + std::string(name) + " " + std::to_string(value) + " is not in " +
                                std::to_string(low) + ".." + std::to_string(high));
  }
}

[[noreturn]] void broken(const std::string& what) { throw std::logic_error("slot table: " + what); }

}  // namespace

SlotPolicy parse_slot_policy(const std::string& name) {
  if (name == "crf") return SlotPolicy::kCrf;
  if (name == "lru") return SlotPolicy::kLru;
  throw std::invalid_argument("slot table: policy '" + name + "' is not 'crf' or 'lru'");
}

SlotTable::SlotTable(int num_layers, int num_experts, int num_slots, SlotPolicy policy, double half_life_tokens)
    : num_layers_(num_layers), num_experts_(num_experts), policy_(policy), half_life_(half_life_tokens) {
  check_range("num_layers", num_layers, 1, 1 << 12);
  check_range("num_experts", num_experts, 1, 1 << 16);
  check_range("num_slots", num_slots, 0, 1 << 28);
  if (!(half_life_tokens > 0.0) || !std::isfinite(half_life_tokens)) {
    throw std::invalid_argument("slot table: half_life_tokens " + std::to_string(half_life_tokens) +
                                " is not a positive number");
  }
  decay_per_token_ = std::exp2(-1.0 / half_life_);
  const std::size_t num_keys = static_cast<std::size_t>(num_layers) * num_experts;
  slot_of_key_.assign(num_keys, -1);
  heap_position_.assign(num_keys, -1);
  log_score_.assign(num_keys, -kInfinity);
  key_of_slot_.assign(num_slots, -1);
  state_.assign(num_slots, State::kFree);
  filled_by_.assign(num_slots, 0);
  free_.reserve(num_slots);
  for (int slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);  // slot 0 is taken first
  in_flight_.reserve(std::min(num_slots, num_experts));
  heap_.assign(num_keys, -1);
  heap_size_.assign(num_layers, 0);
  top_log_score_.assign(num_layers, kInfinity);
  clock_.assign(num_layers, 0.0);
}

int SlotTable::lookup(int layer, int expert) const {
  const std::int32_t slot = slot_of_key_[key(layer, expert)];
  return slot >= 0 && state_[slot] == State::kResident ? slot : -1;
}

double SlotTable::score(int layer, int expert) const { return log_score_[key(layer, expert)] - clock_[layer]; }

void SlotTable::begin_publish(int layer, std::span<ExpertUse> uses, int num_tokens) {
  ++num_publishes_;
  for (const std::int32_t slot : in_flight_) {
    state_[slot] = State::kResident;
    mirror(key_of_slot_[slot], slot);
    ++num_resident_;
    heap_insert(key_of_slot_[slot] / num_experts_, key_of_slot_[slot]);
  }
  in_flight_.clear();

  double average_decay = 1.0;
  if (policy_ == SlotPolicy::kCrf && num_tokens > 0) {
    clock_[layer] += num_tokens / half_life_;
    // The tokens of one publish come in sequence; which of them chose the expert is not looked at, so every use weighs
    // the mean of the decays at its end.
    if (num_tokens > 1) {
      average_decay = (1.0 - std::exp2(-num_tokens / half_life_)) / (num_tokens * (1.0 - decay_per_token_));
    }
  }
  for (ExpertUse& use : uses) {
    const std::int32_t k = key(layer, use.expert);
    use.slot = slot_of_key_[k];
    use.destination = -1;
    if (use.slot >= 0) heap_remove(layer, k);  // out of the heap: no victim until end_publish
    if (use.tokens <= 0) continue;
    if (policy_ == SlotPolicy::kLru) {
      log_score_[k] = static_cast<double>(num_publishes_);
    } else {
      const double decayed = std::exp2(log_score_[k] - clock_[layer]);
      log_score_[k] = std::log2(decayed + use.tokens * average_decay) + clock_[layer];
    }
  }
}

void SlotTable::admit(int layer, ExpertUse& use) {
  if (use.tokens <= 0 || use.slot >= 0 || use.destination >= 0) return;
  std::int32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    const int victim_layer = worst_layer();
    if (victim_layer < 0) return;
    if (policy_ == SlotPolicy::kCrf &&
        score(layer, use.expert) <= top_log_score_[victim_layer] - clock_[victim_layer]) {
      return;
    }
    const std::int32_t victim = heap(victim_layer)[0];
    slot = slot_of_key_[victim];
    heap_remove(victim_layer, victim);
    slot_of_key_[victim] = -1;
    mirror(victim, -1);
    --num_resident_;
    ++evicted_total_;
  }
  const std::int32_t k = key(layer, use.expert);
  state_[slot] = State::kInFlight;
  key_of_slot_[slot] = k;
  slot_of_key_[k] = slot;
  filled_by_[slot] = num_publishes_;
  in_flight_.push_back(slot);
  use.destination = slot;
}

void SlotTable::end_publish(int layer, std::span<const ExpertUse> uses) {
  for (const ExpertUse& use : uses) {
    if (use.slot >= 0) heap_insert(layer, key(layer, use.expert));
  }
}

void SlotTable::invalidate_in_flight() {
  for (const std::int32_t slot : in_flight_) release(slot);
  in_flight_.clear();
}

void SlotTable::invalidate_all() {
  invalidate_in_flight();
  for (int layer = 0; layer < num_layers_; ++layer) {
    for (int i = 0; i < heap_size_[layer]; ++i) heap_position_[heap(layer)[i]] = -1;
    heap_size_[layer] = 0;
    top_log_score_[layer] = kInfinity;
  }
  num_resident_ = 0;
  free_.clear();
  for (int slot = num_slots() - 1; slot >= 0; --slot) {
    if (state_[slot] == State::kResident) {
      slot_of_key_[key_of_slot_[slot]] = -1;
      mirror(key_of_slot_[slot], -1);
    }
    state_[slot] = State::kFree;
    key_of_slot_[slot] = -1;
    free_.push_back(slot);
  }
}

void SlotTable::set_mirror(std::int32_t* slot_of) {
  mirror_ = slot_of;
  for (std::size_t k = 0; k < slot_of_key_.size(); ++k) {
    const std::int32_t slot = slot_of_key_[k];
    mirror(static_cast<std::int32_t>(k), slot >= 0 && state_[slot] == State::kResident ? slot : -1);
  }
}

void SlotTable::acquire_owner() {
  if (owned_.exchange(true, std::memory_order_acq_rel)) {
    throw std::logic_error("slot table: a running cache server owns it");
  }
}

void SlotTable::release(std::int32_t slot) {
  slot_of_key_[key_of_slot_[slot]] = -1;
  key_of_slot_[slot] = -1;
  state_[slot] = State::kFree;
  free_.push_back(slot);
}

// The layer whose worst resident is the worst of all, or -1 when nothing can go.
int SlotTable::worst_layer() const {
  int worst = -1;
  double worst_score = kInfinity;
  for (int layer = 0; layer < num_layers_; ++layer) {
    const double top = top_log_score_[layer] - clock_[layer];
    if (top < worst_score) {
      worst_score = top;
      worst = layer;
    }
  }
  return worst;
}

// A total order, so that the same history gives the same victims.
bool SlotTable::before(std::int32_t a, std::int32_t b) const {
  return log_score_[a] < log_score_[b] || (log_score_[a] == log_score_[b] && a < b);
}

void SlotTable::heap_insert(int layer, std::int32_t key) {
  const int position = heap_size_[layer]++;
  heap(layer)[position] = key;
  heap_position_[key] = position;
  sift_up(layer, position);
  refresh_top(layer);
}

void SlotTable::heap_remove(int layer, std::int32_t key) {
  const int position = heap_position_[key];
  const int last = --heap_size_[layer];
  heap_position_[key] = -1;
  if (position != last) {
    const std::int32_t moved = heap(layer)[last];
    heap(layer)[position] = moved;
    heap_position_[moved] = position;
    sift_up(layer, position);
    sift_down(layer, heap_position_[moved]);
  }
  refresh_top(layer);
}

void SlotTable::sift_up(int layer, int position) {
  std::int32_t* keys = heap(layer);
  const std::int32_t moving = keys[position];
  while (position > 0) {
    const int parent = (position - 1) / 2;
    if (!before(moving, keys[parent])) break;
    keys[position] = keys[parent];
    heap_position_[keys[position]] = position;
    position = parent;
  }
  keys[position] = moving;
  heap_position_[moving] = position;
}

void SlotTable::sift_down(int layer, int position) {
  std::int32_t* keys = heap(layer);
  const int size = heap_size_[layer];
  const std::int32_t moving = keys[position];
  for (;;) {
    int child = 2 * position + 1;
    if (child >= size) break;
    if (child + 1 < size && before(keys[child + 1], keys[child])) ++child;
    if (!before(keys[child], moving)) break;
    keys[position] = keys[child];
    heap_position_[keys[position]] = position;
    position = child;
  }
  keys[position] = moving;
  heap_position_[moving] = position;
}

void SlotTable::refresh_top(int layer) {
  top_log_score_[layer] = heap_size_[layer] > 0 ? log_score_[heap(layer)[0]] : kInfinity;
}

void SlotTable::check_integrity() const {
  int resident = 0;
  int in_flight = 0;
  int free = 0;
  for (int slot = 0; slot < num_slots(); ++slot) {
    const std::string name = "slot " + std::to_string(slot);
    const std::int32_t k = key_of_slot_[slot];
    switch (state_[slot]) {
      case State::kFree:
        ++free;
        if (k != -1) broken(name + " is free but names a record");
        break;
      case State::kInFlight:
      case State::kResident: {
        const bool is_resident = state_[slot] == State::kResident;
        ++(is_resident ? resident : in_flight);
        if (k < 0 || slot_of_key_[k] != slot) broken(name + " and its record disagree");
        if ((heap_position_[k] >= 0) != is_resident) broken(name + " is in a heap exactly when it is not resident");
        if (is_resident ? filled_by_[slot] >= num_publishes_ : filled_by_[slot] != num_publishes_) {
          broken(name + " became readable before its fill was complete");
        }
        break;
      }
    }
  }
  if (free != num_free() || resident != num_resident_ || in_flight != num_in_flight() ||
      free + resident + in_flight != num_slots()) {
    broken("free " + std::to_string(free) + " (" + std::to_string(num_free()) + ") + resident " +
           std::to_string(resident) + " (" + std::to_string(num_resident_) + ") + in flight " +
           std::to_string(in_flight) + " (" + std::to_string(num_in_flight()) + ") != capacity " +
           std::to_string(num_slots()));
  }
  std::vector<std::uint8_t> is_free(num_slots(), 0);
  for (const std::int32_t slot : free_) {
    if (state_[slot] != State::kFree || is_free[slot]++) broken("the free list is wrong at " + std::to_string(slot));
  }
  int mapped = 0;
  for (std::size_t k = 0; k < slot_of_key_.size(); ++k) {
    const std::int32_t slot = slot_of_key_[k];
    const std::int32_t readable = slot >= 0 && state_[slot] == State::kResident ? slot : -1;
    if (mirror_ != nullptr && mirror_[k] != readable) {
      broken("record " + std::to_string(k) + " is mirrored in slot " + std::to_string(mirror_[k]) + ", not " +
             std::to_string(readable));
    }
    if (slot < 0) {
      if (heap_position_[k] >= 0) broken("record " + std::to_string(k) + " is in a heap but in no slot");
      continue;
    }
    ++mapped;
    if (key_of_slot_[slot] != static_cast<std::int32_t>(k))
      broken("record " + std::to_string(k) + " and its slot disagree");
  }
  if (mapped != resident + in_flight) broken("records in slots and occupied slots differ in number");
  int in_heaps = 0;
  for (int layer = 0; layer < num_layers_; ++layer) {
    const std::string name = "heap of layer " + std::to_string(layer);
    in_heaps += heap_size_[layer];
    for (int i = 0; i < heap_size_[layer]; ++i) {
      const std::int32_t k = heap(layer)[i];
      if (k / num_experts_ != layer || heap_position_[k] != i) broken(name + " has a stranger");
      if (i > 0 && before(k, heap(layer)[(i - 1) / 2])) broken(name + " is out of order");
    }
    if (top_log_score_[layer] != (heap_size_[layer] > 0 ? log_score_[heap(layer)[0]] : kInfinity)) {
      broken(name + " has a stale top");
    }
  }
  if (in_heaps != resident) broken("residents and heap entries differ in number");
}

}  // namespace ft
