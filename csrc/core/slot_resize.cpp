// Changes of a slot table's capacity, and what capacity is worth.
#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>

#include "slot_table.h"

namespace ft {

SlotResize SlotTable::plan_resize(int num_slots) const {
  if (num_slots < 0 || num_slots > 1 << 28) {
    throw std::invalid_argument("slot table: num_slots " + std::to_string(num_slots) + " is not in 0.." +
                                std::to_string(1 << 28));
  }
  SlotResize plan{.num_slots = num_slots, .num_publishes = num_publishes_};
  if (num_slots >= this->num_slots()) return plan;
  int staying = 0;  // in flight in a slot that stays: they stay there
  for (const std::int32_t slot : in_flight_) {
    if (slot < num_slots) {
      ++staying;
    } else {
      plan.evicted.push_back(slot);
    }
  }
  std::vector<std::int32_t> residents;
  residents.reserve(num_resident_);
  for (int slot = 0; slot < this->num_slots(); ++slot) {
    if (state_[slot] == State::kResident) residents.push_back(slot);
  }
  const int room = std::max(num_slots - staying, 0);
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
  plan.evicted.insert(plan.evicted.end(), residents.begin(), residents.begin() + excess);
  std::vector<std::uint8_t> taken(num_slots, 0);
  for (const std::int32_t slot : in_flight_) {
    if (slot < num_slots) taken[slot] = 1;
  }
  std::vector<std::int32_t> leaving;
  for (auto it = residents.begin() + excess; it != residents.end(); ++it) {
    if (*it < num_slots) {
      taken[*it] = 1;
    } else {
      leaving.push_back(*it);
    }
  }
  std::sort(leaving.begin(), leaving.end());
  std::int32_t to = 0;
  for (const std::int32_t from : leaving) {
    while (taken[to]) ++to;
    plan.moves.push_back(SlotMove{from, to++});
  }
  return plan;
}

void SlotTable::resize(const SlotResize& plan) {
  if (plan.num_publishes != num_publishes_)
    throw std::logic_error("slot table: a publish came between plan and resize");
  for (const std::int32_t slot : plan.evicted) {
    const std::int32_t k = key_of_slot_[slot];
    if (state_[slot] == State::kFree) continue;  // it was in flight, and the server has stopped since
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
  for (const SlotMove& move : plan.moves) {
    const std::int32_t k = key_of_slot_[move.from];
    key_of_slot_[move.to] = k;
    state_[move.to] = State::kResident;
    filled_by_[move.to] = filled_by_[move.from];
    slot_of_key_[k] = move.to;
    mirror(k, move.to);
    key_of_slot_[move.from] = -1;
    state_[move.from] = State::kFree;
  }
  key_of_slot_.resize(plan.num_slots, -1);
  state_.resize(plan.num_slots, State::kFree);
  filled_by_.resize(plan.num_slots, 0);
  in_flight_.reserve(std::min(plan.num_slots, num_experts_));
  rebuild_free_list();
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
