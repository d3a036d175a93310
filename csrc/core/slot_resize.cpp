// Changes of a slot table's capacity, and what capacity is worth.
#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>

#include "slot_table.h"

namespace ft {

namespace {

void check_capacity(int num_slots, int low, int high) {
  if (num_slots < low || num_slots > high) {
    throw std::invalid_argument("slot table: num_slots " + std::to_string(num_slots) + " is not in " +
                                std::to_string(low) + ".." + std::to_string(high));
  }
}

}  // namespace

Vacated SlotTable::vacate(int num_slots) {
  if (limit_ != this->num_slots()) throw std::logic_error("slot table: slots are being vacated");
  check_capacity(num_slots, 0, this->num_slots());
  Vacated result;
  if (num_slots == this->num_slots()) return result;
  const std::int64_t evicted_before = evicted_total_;
  const std::vector<std::int32_t> filling(in_flight_);
  for (const std::int32_t slot : filling) {
    if (slot >= num_slots) drop(slot);
  }
  std::vector<std::int32_t> residents;
  residents.reserve(num_resident_);
  for (int slot = 0; slot < this->num_slots(); ++slot) {
    if (state_[slot] == State::kResident) residents.push_back(slot);
  }
  const int room = std::max(num_slots - num_in_flight(), 0);
  const int excess = std::max(static_cast<int>(residents.size()) - room, 0);
  // The same total order as that of eviction: by score, then by key.
  const auto worse = [this](std::int32_t a, std::int32_t b) {
    const std::int32_t ka = key_of_slot_[a];
    const std::int32_t kb = key_of_slot_[b];
    const double sa = score_of(ka);
    const double sb = score_of(kb);
    return sa < sb || (sa == sb && ka < kb);
  };
  std::nth_element(residents.begin(), residents.begin() + excess, residents.end(), worse);
  std::sort(residents.begin(), residents.begin() + excess);
  std::for_each(residents.begin(), residents.begin() + excess, [this](std::int32_t slot) { drop(slot); });
  limit_ = num_slots;
  std::int32_t to = 0;
  for (int from = num_slots; from < this->num_slots(); ++from) {
    if (state_[from] == State::kFree) {
      state_[from] = State::kClosed;
      continue;
    }
    while (state_[to] != State::kFree) ++to;
    state_[to] = State::kClosed;
    withdraw(key_of_slot_[from]);
    moving_.push_back(SlotMove{from, to});
  }
  rebuild_free_list();
  result.moves = moving_;
  result.num_evicted = static_cast<int>(evicted_total_ - evicted_before);
  return result;
}

void SlotTable::finish_vacate() {
  const int num_slots = limit_;
  if (num_slots == this->num_slots()) return;
  for (const SlotMove& move : moving_) {
    const std::int32_t k = key_of_slot_[move.from];
    key_of_slot_[move.to] = k;
    state_[move.to] = State::kResident;
    filled_by_[move.to] = filled_by_[move.from];
    slot_of_key_[k] = move.to;
    mirror(k, move.to);
    offer(k);
  }
  key_of_slot_.resize(num_slots);
  state_.resize(num_slots);
  filled_by_.resize(num_slots);
  end_vacate();
}

void SlotTable::cancel_vacate() {
  if (limit_ == num_slots()) return;
  for (const SlotMove& move : moving_) state_[move.to] = State::kFree;
  for (int slot = limit_; slot < num_slots(); ++slot) {
    if (state_[slot] == State::kClosed) state_[slot] = State::kFree;
  }
  const std::vector<SlotMove> stayed(moving_);
  end_vacate();
  for (const SlotMove& move : stayed) offer(key_of_slot_[move.from]);
}

void SlotTable::end_vacate() {
  limit_ = num_slots();
  moving_.clear();
  rebuild_free_list();
}

void SlotTable::grow(int num_slots) {
  if (limit_ != this->num_slots()) throw std::logic_error("slot table: slots are being vacated");
  check_capacity(num_slots, this->num_slots(), 1 << 28);
  key_of_slot_.resize(num_slots, -1);
  state_.resize(num_slots, State::kFree);
  filled_by_.resize(num_slots, 0);
  in_flight_.reserve(std::min(num_slots, num_experts_));
  limit_ = num_slots;
  rebuild_free_list();
}

void SlotTable::empty(int num_slots) {
  check_capacity(num_slots, 0, 1 << 28);
  const std::int64_t evicted = evicted_total_;
  cancel_vacate();
  vacate(0);
  finish_vacate();
  grow(num_slots);
  evicted_total_ = evicted;  // nobody chose to give the records up
}

// The slot's record is given up, read or not.
void SlotTable::drop(std::int32_t slot) {
  const std::int32_t k = key_of_slot_[slot];
  if (state_[slot] == State::kResident) {
    withdraw(k);
    mirror(k, -1);
    --num_resident_;
  } else {
    std::erase(in_flight_, slot);
  }
  slot_of_key_[k] = -1;
  key_of_slot_[slot] = -1;
  state_[slot] = State::kFree;
  ++evicted_total_;
}

void SlotTable::rebuild_free_list() {
  free_.clear();
  free_.reserve(num_slots());
  for (int slot = num_slots() - 1; slot >= 0; --slot) {
    if (state_[slot] == State::kFree) free_.push_back(slot);
  }
}

std::vector<double> SlotTable::scores() const {
  std::vector<double> result;
  if (options_.policy != SlotPolicy::kCrf) return result;
  result.reserve(slot_of_key_.size());
  for (std::size_t k = 0; k < slot_of_key_.size(); ++k) {
    const double score = score_of(static_cast<std::int32_t>(k));
    if (score > 0.0) result.push_back(score);
  }
  return result;
}

std::vector<double> score_curve(std::vector<double> scores, std::span<const std::int64_t> capacities) {
  std::vector<double> result(capacities.size(), 0.0);
  std::sort(scores.begin(), scores.end(), std::greater<>());
  double total = 0.0;
  for (const double score : scores) total += score;
  if (!(total > 0.0)) return result;
  double sum = 0.0;
  std::size_t taken = 0;
  for (std::size_t i = 0; i < capacities.size(); ++i) {
    const std::size_t end = std::min<std::size_t>(std::max<std::int64_t>(capacities[i], 0), scores.size());
    for (; taken < end; ++taken) sum += scores[taken];
    result[i] = sum / total;
  }
  return result;
}

}  // namespace ft
