#include "slot_table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace ft {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kInfinityF = std::numeric_limits<float>::infinity();
constexpr float kNegligible = 1e-20f;
constexpr double kFirstTrust = 0.5;
constexpr double kLeastTrust = 0.05;
constexpr double kTrustRate = 0.05;  // a layer's trust follows its last 20 publishes or so

// Of 2^(-age / half_life) over all tokens seen: by this, decayed sums of uses become uses per token.
double total_weight(double tokens_seen, double half_life) {
  return (1.0 - std::exp2(-tokens_seen / half_life)) / (1.0 - std::exp2(-1.0 / half_life));
}

// Of 2^(-age / half_life) over ages 0..tokens - 1.
float mean_decay(int tokens, double half_life) {
  if (tokens <= 1) return 1.0f;
  return static_cast<float>((1.0 - std::exp2(-tokens / half_life)) / (tokens * (1.0 - std::exp2(-1.0 / half_life))));
}

void check_number(const char* name, double value, double low) {
  if (!(value >= low) || !std::isfinite(value)) {
    throw std::invalid_argument("slot table: " + std::string(name) + " " + std::to_string(value) +
                                " is not a number of " +
                                (low < 1e-9 ? "more than 0" : std::to_string(low) + " or more"));
  }
}

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

SlotTable::SlotTable(int num_layers, int num_experts, int num_slots, const SlotPolicyOptions& options)
    : num_layers_(num_layers), num_experts_(num_experts), options_(options) {
  check_range("num_layers", num_layers, 1, 1 << 12);
  check_range("num_experts", num_experts, 1, 1 << 16);
  check_range("num_slots", num_slots, 0, 1 << 28);
  check_number("half_life_tokens", options.half_life_tokens, std::numeric_limits<double>::min());
  check_number("long_half_life_tokens", options.long_half_life_tokens, options.half_life_tokens);
  check_number("margin", options.margin, 1.0);
  check_number("floor", options.floor, 0.0);
  const std::size_t num_keys = static_cast<std::size_t>(num_layers) * num_experts;
  slot_of_key_.assign(num_keys, -1);
  if (options.policy == SlotPolicy::kLru) {
    last_use_.assign(num_keys, 0);
  } else {
    recent_.assign(num_keys, 0.0f);
    lasting_.assign(num_keys, 0.0f);
    trust_.assign(num_layers, kFirstTrust);
    tokens_seen_.assign(num_layers, 0.0);
    recent_factor_.assign(num_layers, 0.0f);
    lasting_factor_.assign(num_layers, 0.0f);
  }
  barrier_.assign(num_keys, kInfinityF);
  key_of_slot_.assign(num_slots, -1);
  limit_ = num_slots;
  state_.assign(num_slots, State::kFree);
  filled_by_.assign(num_slots, 0);
  free_.reserve(num_slots);
  for (int slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);  // slot 0 is taken first
  in_flight_.reserve(std::min(num_slots, num_experts));
  worst_.assign(num_layers, -1);
  worst_score_.assign(num_layers, kInfinity);
}

int SlotTable::lookup(int layer, int expert) const {
  const std::int32_t slot = slot_of_key_[key(layer, expert)];
  return slot >= 0 && state_[slot] == State::kResident ? slot : -1;
}

double SlotTable::score_of(std::int32_t k) const {
  if (options_.policy == SlotPolicy::kLru) return static_cast<double>(last_use_[k]);
  const int layer = k / num_experts_;
  return recent_factor_[layer] * recent_[k] + lasting_factor_[layer] * lasting_[k];
}

// Before a publish is scored. Either average foretold each expert that it names with some probability; the share that
// is the lasting one's of the probability of both together is the evidence for it (one step of expectation maximisation
// for the weights of a mixture).
void SlotTable::learn_trust(int layer, std::span<const ExpertUse> uses) {
  const double trust = trust_[layer];
  const double by_recent = (1.0 - trust) / total_weight(tokens_seen_[layer], options_.half_life_tokens);
  const double by_lasting = trust / total_weight(tokens_seen_[layer], options_.long_half_life_tokens);
  const double unforeseen = 0.1 / num_experts_;
  double evidence = 0.0;
  int count = 0;
  for (const ExpertUse& use : uses) {
    if (use.tokens <= 0 && use.run_tokens <= 0) continue;
    const std::int32_t k = key(layer, use.expert);
    const double recent = by_recent * recent_[k] + (1.0 - trust) * unforeseen;
    const double lasting = by_lasting * lasting_[k] + trust * unforeseen;
    evidence += lasting / (recent + lasting);
    ++count;
  }
  if (count == 0) return;
  trust_[layer] = std::clamp(trust + kTrustRate * (evidence / count - trust), kLeastTrust, 1.0 - kLeastTrust);
}

// Decayed sums of records that nobody uses any more end at 0, not in denormal numbers, which are slow.
void SlotTable::age(int layer, int tokens) {
  const auto recent_decay = static_cast<float>(std::exp2(-tokens / options_.half_life_tokens));
  const auto lasting_decay = static_cast<float>(std::exp2(-tokens / options_.long_half_life_tokens));
  float* recent = recent_.data() + first_key(layer);
  float* lasting = lasting_.data() + first_key(layer);
  for (int e = 0; e < num_experts_; ++e) {
    const float r = recent[e] * recent_decay;
    const float l = lasting[e] * lasting_decay;
    recent[e] = r < kNegligible ? 0.0f : r;
    lasting[e] = l < kNegligible ? 0.0f : l;
  }
  tokens_seen_[layer] += tokens;
  recent_factor_[layer] =
      static_cast<float>((1.0 - trust_[layer]) / total_weight(tokens_seen_[layer], options_.half_life_tokens));
  lasting_factor_[layer] =
      static_cast<float>(trust_[layer] / total_weight(tokens_seen_[layer], options_.long_half_life_tokens));
}

void SlotTable::begin_publish(int layer, std::span<ExpertUse> uses, int num_tokens, int num_run_tokens) {
  find_publish(layer, uses);
  score_publish(layer, uses, num_tokens, num_run_tokens);
}

void SlotTable::find_publish(int layer, std::span<ExpertUse> uses) {
  ++num_publishes_;
  for (const std::int32_t slot : in_flight_) {
    const std::int32_t k = key_of_slot_[slot];
    state_[slot] = State::kResident;
    mirror(k, slot);
    ++num_resident_;
    offer(k);
  }
  in_flight_.clear();
  for (ExpertUse& use : uses) {
    use.slot = slot_of_key_[key(layer, use.expert)];
    use.destination = -1;
  }
}

void SlotTable::score_publish(int layer, std::span<const ExpertUse> uses, int num_tokens, int num_run_tokens) {
  const bool is_crf = options_.policy == SlotPolicy::kCrf;
  float run_recent = 1.0f;
  float run_lasting = 1.0f;
  if (is_crf && (num_tokens > 0 || num_run_tokens > 0)) {
    if (tokens_seen_[layer] > 0.0) learn_trust(layer, uses);
    age(layer, num_tokens > 0 ? 1 : num_run_tokens);
    // Which tokens of a run chose the expert is not looked at: every use weighs the mean of the decays at its end.
    run_recent = mean_decay(num_run_tokens, options_.half_life_tokens);
    run_lasting = mean_decay(num_run_tokens, options_.long_half_life_tokens);
  }
  for (const ExpertUse& use : uses) {
    const std::int32_t k = key(layer, use.expert);
    if (use.slot >= 0) barrier_[k] = kInfinityF;  // no victim until end_publish
    if (use.tokens <= 0 && use.run_tokens <= 0) continue;
    if (is_crf) {
      recent_[k] += static_cast<float>(use.tokens) + static_cast<float>(use.run_tokens) * run_recent;
      lasting_[k] += static_cast<float>(use.tokens) + static_cast<float>(use.run_tokens) * run_lasting;
    } else {
      last_use_[k] = num_publishes_;
    }
  }
  find_worst(layer);
}

bool SlotTable::deserves_slot(int layer, double score, double worst_score) const {
  if (options_.policy == SlotPolicy::kLru) return true;
  const double of_one_use = static_cast<double>(recent_factor_[layer]) + lasting_factor_[layer];
  return score >= options_.floor * of_one_use && score > options_.margin * worst_score;
}

void SlotTable::admit(int layer, ExpertUse& use) {
  if ((use.tokens <= 0 && use.run_tokens <= 0) || use.slot >= 0 || use.destination >= 0) return;
  const std::int32_t k = key(layer, use.expert);
  std::int32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    const int victim_layer = worst_layer();
    if (victim_layer < 0 || !deserves_slot(layer, score_of(k), worst_score_[victim_layer])) return;
    const std::int32_t victim = worst_[victim_layer];
    slot = slot_of_key_[victim];
    withdraw(victim);
    slot_of_key_[victim] = -1;
    mirror(victim, -1);
    --num_resident_;
    ++evicted_total_;
  }
  state_[slot] = State::kInFlight;
  key_of_slot_[slot] = k;
  slot_of_key_[k] = slot;
  filled_by_[slot] = num_publishes_;
  in_flight_.push_back(slot);
  use.destination = slot;
}

void SlotTable::end_publish(int layer, std::span<const ExpertUse> uses) {
  for (const ExpertUse& use : uses) {
    if (use.slot >= 0) offer(key(layer, use.expert));
  }
}

void SlotTable::invalidate_in_flight() {
  for (const std::int32_t slot : in_flight_) release(slot);
  in_flight_.clear();
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

// The layer whose worst candidate is the worst of all, or -1 when nothing can go.
int SlotTable::worst_layer() const {
  int worst = -1;
  double worst_score = kInfinity;
  for (int layer = 0; layer < num_layers_; ++layer) {
    if (worst_score_[layer] < worst_score) {
      worst_score = worst_score_[layer];
      worst = layer;
    }
  }
  return worst;
}

// Ties go to the smaller key, so that the same history gives the same victims. Where a slot is being vacated, its
// record stays until it has moved.
void SlotTable::offer(std::int32_t k) {
  if (slot_of_key_[k] >= limit_) return;
  const int layer = k / num_experts_;
  const double score = score_of(k);
  barrier_[k] = 0.0f;
  if (score < worst_score_[layer] || (score == worst_score_[layer] && k < worst_[layer])) {
    worst_score_[layer] = score;
    worst_[layer] = k;
  }
}

void SlotTable::withdraw(std::int32_t k) {
  const int layer = k / num_experts_;
  barrier_[k] = kInfinityF;
  if (worst_[layer] == k) find_worst(layer);
}

void SlotTable::find_worst(int layer) {
  const std::size_t first = first_key(layer);
  worst_[layer] = -1;
  worst_score_[layer] = kInfinity;
  const float* barrier = barrier_.data() + first;
  if (options_.policy == SlotPolicy::kLru) {
    for (int e = 0; e < num_experts_; ++e) {
      if (barrier[e] == 0.0f && static_cast<double>(last_use_[first + e]) < worst_score_[layer]) {
        worst_[layer] = key(layer, e);
        worst_score_[layer] = static_cast<double>(last_use_[first + e]);
      }
    }
    return;
  }
  const float* recent = recent_.data() + first;
  const float* lasting = lasting_.data() + first;
  const float by_recent = recent_factor_[layer];
  const float by_lasting = lasting_factor_[layer];
  const auto mix = [=](float r, float l) { return by_recent * r + by_lasting * l; };
  constexpr int kLanes = 16;
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, kInfinityF);
  int e = 0;
  for (; e + kLanes <= num_experts_; e += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const float score = mix(recent[e + i], lasting[e + i]) + barrier[e + i];
      lanes[i] = score < lanes[i] ? score : lanes[i];
    }
  }
  float worst = *std::min_element(lanes, lanes + kLanes);
  for (; e < num_experts_; ++e) worst = std::min(worst, mix(recent[e], lasting[e]) + barrier[e]);
  if (worst == kInfinityF) return;
  e = 0;
  while (mix(recent[e], lasting[e]) + barrier[e] != worst) ++e;
  worst_[layer] = key(layer, e);
  worst_score_[layer] = worst;
}

void SlotTable::check_integrity() const {
  int resident = 0;
  int in_flight = 0;
  int free = 0;
  int closed = 0;
  for (int slot = 0; slot < num_slots(); ++slot) {
    const std::string name = "slot " + std::to_string(slot);
    const std::int32_t k = key_of_slot_[slot];
    switch (state_[slot]) {
      case State::kFree:
        ++free;
        if (k != -1) broken(name + " is free but names a record");
        if (slot >= limit_) broken(name + " is free, but it goes");
        break;
      case State::kClosed:
        ++closed;
        if (k != -1) broken(name + " is closed but names a record");
        break;
      case State::kInFlight:
      case State::kResident: {
        const bool is_resident = state_[slot] == State::kResident;
        ++(is_resident ? resident : in_flight);
        if (k < 0 || slot_of_key_[k] != slot) broken(name + " and its record disagree");
        if (!is_resident && slot >= limit_) broken(name + " is filled, but it goes");
        if ((barrier_[k] == 0.0f) != (is_resident && slot < limit_)) {
          broken(name + " may be evicted exactly when it must not be");
        }
        if (is_resident ? filled_by_[slot] >= num_publishes_ : filled_by_[slot] != num_publishes_) {
          broken(name + " became readable before its fill was complete");
        }
        break;
      }
    }
  }
  if (free != num_free() || resident != num_resident_ || in_flight != num_in_flight() ||
      free + resident + in_flight + closed != num_slots()) {
    broken("free " + std::to_string(free) + " (" + std::to_string(num_free()) + ") + resident " +
           std::to_string(resident) + " (" + std::to_string(num_resident_) + ") + in flight " +
           std::to_string(in_flight) + " (" + std::to_string(num_in_flight()) + ") + closed " + std::to_string(closed) +
           " != capacity " + std::to_string(num_slots()));
  }
  for (const SlotMove& move : moving_) {
    if (state_[move.from] != State::kResident || move.from < limit_) {
      broken("slot " + std::to_string(move.from) + " is to be vacated but holds nothing");
    }
    if (state_[move.to] != State::kClosed || move.to >= limit_) {
      broken("slot " + std::to_string(move.to) + " is not kept for what moves there");
    }
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
      if (barrier_[k] == 0.0f) broken("record " + std::to_string(k) + " may be evicted but is in no slot");
      continue;
    }
    ++mapped;
    if (key_of_slot_[slot] != static_cast<std::int32_t>(k))
      broken("record " + std::to_string(k) + " and its slot disagree");
  }
  if (mapped != resident + in_flight) broken("records in slots and occupied slots differ in number");
  for (int layer = 0; layer < num_layers_; ++layer) {
    std::int32_t worst = -1;
    for (std::int32_t k = key(layer, 0); k < key(layer + 1, 0); ++k) {
      if (barrier_[k] == 0.0f && (worst < 0 || score_of(k) < score_of(worst))) worst = k;
    }
    if (worst_[layer] != worst || worst_score_[layer] != (worst < 0 ? kInfinity : score_of(worst))) {
      broken("layer " + std::to_string(layer) + " has a stale worst candidate");
    }
  }
}

}  // namespace ft
