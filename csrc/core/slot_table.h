// Which expert record lies in which slot, which fetched records deserve one, and which resident goes for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ft {

enum class SlotPolicy : std::uint8_t { kCrf, kLru };

// "crf" or "lru"; std::invalid_argument otherwise.
SlotPolicy parse_slot_policy(const std::string& name);

// One distinct expert of a publish.
struct ExpertUse {
  std::int32_t expert = 0;
  std::int32_t tokens = 0;        // admitting tokens that chose it; 0: neither scored nor admitted
  std::int32_t slot = -1;         // out: where it is resident, or -1
  std::int32_t destination = -1;  // out: the slot that its fetch must fill, or -1
};

struct SlotMove {
  std::int32_t from = 0, to = 0;
};

// What a change of capacity takes: records that move down and slots whose record goes. Made by plan_resize.
struct SlotResize {
  int num_slots = 0;
  std::vector<SlotMove> moves;  // no slot is named twice
  std::vector<std::int32_t> evicted;
  std::uint64_t num_publishes = 0;  // of the table when it was planned
};

// For each capacity (ascending): the share of the sum of `scores` that the best so many records have, an estimate of the
// hit rate at that capacity. All 0 without scores.
std::vector<double> score_curve(std::vector<double> scores, std::span<const std::int64_t> capacities);

// Scores. CRF gives a record sum of 2^(-age/half_life) over its uses, age in tokens of its own layer; LRU the number
// of the publish that used it last. Scores are kept for every record, resident or not. They are stored as
// log2(score) + clock/half_life, which does not change between uses: all records of a layer keep their order while they
// decay, so each layer has a static min-heap of its residents and only the heaps' tops are compared across layers, each
// at its own layer's clock (layers that a step has not reached yet are not aged by it).
//
// Life of a slot: free -> in flight (named as a destination) -> resident (the next publish of the client has come,
// hence the fill is complete) -> in flight for another record. free + in flight + resident == capacity at all times.
//
// A publish costs O(uses * (log E + L)) and allocates nothing. Not thread-safe.
class SlotTable {
 public:
  // Throws std::invalid_argument for sizes out of range.
  SlotTable(int num_layers, int num_experts, int num_slots, SlotPolicy policy, double half_life_tokens);

  int num_layers() const { return num_layers_; }
  int num_experts() const { return num_experts_; }
  int num_slots() const { return static_cast<int>(key_of_slot_.size()); }
  int num_resident() const { return num_resident_; }
  int num_in_flight() const { return static_cast<int>(in_flight_.size()); }
  int num_free() const { return static_cast<int>(free_.size()); }
  std::int64_t evicted_total() const { return evicted_total_; }

  // The slot where the record can be read, or -1.
  int lookup(int layer, int expert) const;

  // A publish is begin_publish, any number of admit calls, end_publish.
  //
  // begin: earlier fills are complete and become resident; `uses` (distinct experts of one layer) are looked up, scored
  // and protected from eviction until end_publish. num_tokens: admitting tokens of the publish.
  void begin_publish(int layer, std::span<ExpertUse> uses, int num_tokens);
  // Score of a record at its layer's clock, comparable across layers; -infinity when it was never used.
  double score(int layer, int expert) const;
  // Gives the fetched record a slot if one is free, or if its score beats the worst resident's (CRF) or any resident
  // can go (LRU). Sets use.destination.
  void admit(int layer, ExpertUse& use);
  void end_publish(int layer, std::span<const ExpertUse> uses);

  // The fills of the last publish will never be known to be complete: their slots become free.
  void invalidate_in_flight();
  // Every slot becomes free. Scores stay: they describe the records, not the arena.
  void invalidate_all();

  // A change of capacity (slot_resize.cpp), between publishes whose fills are complete. plan_resize changes nothing; it
  // gives up the records that score worst, wherever they lie, and moves the others out of the slots that go. Between
  // the two calls the caller copies the records that move; resize throws std::logic_error when there was a publish.
  SlotResize plan_resize(int num_slots) const;
  void resize(const SlotResize& plan);
  // Positive scores of all records, at their layers' clocks, in no order; empty with LRU.
  std::vector<double> scores() const;

  template <class Visitor>  // visitor(slot, layer, expert)
  void for_each_resident(Visitor&& visitor) const {
    for (int slot = 0; slot < num_slots(); ++slot) {
      if (state_[slot] == State::kResident) {
        visitor(slot, key_of_slot_[slot] / num_experts_, key_of_slot_[slot] % num_experts_);
      }
    }
  }

  // From here on `slot_of` ([num_layers, num_experts], perhaps shared memory) says what lookup() does; readers may be
  // elsewhere. Null: no longer.
  void set_mirror(std::int32_t* slot_of);

  // Throws std::logic_error naming the first contradiction.
  void check_integrity() const;

  // A running server owns the table; everyone else keeps off while is_owned(). acquire throws std::logic_error when it
  // is owned already.
  void acquire_owner();
  void release_owner() { owned_.store(false, std::memory_order_release); }
  bool is_owned() const { return owned_.load(std::memory_order_acquire); }

 private:
  enum class State : std::uint8_t { kFree, kInFlight, kResident };

  std::int32_t key(int layer, int expert) const { return layer * num_experts_ + expert; }
  std::int32_t* heap(int layer) { return heap_.data() + static_cast<std::ptrdiff_t>(layer) * num_experts_; }
  const std::int32_t* heap(int layer) const { return heap_.data() + static_cast<std::ptrdiff_t>(layer) * num_experts_; }
  bool before(std::int32_t a, std::int32_t b) const;
  void heap_insert(int layer, std::int32_t key);
  void heap_remove(int layer, std::int32_t key);
  void sift_up(int layer, int position);
  void sift_down(int layer, int position);
  void refresh_top(int layer);
  int worst_layer() const;
  void release(std::int32_t slot);
  void rebuild_free_list();
  void mirror(std::int32_t key, std::int32_t slot) {
    if (mirror_ != nullptr) std::atomic_ref<std::int32_t>(mirror_[key]).store(slot, std::memory_order_relaxed);
  }

  int num_layers_;
  int num_experts_;
  SlotPolicy policy_;
  double half_life_;
  double decay_per_token_;

  // By key = layer * num_experts + expert.
  std::vector<std::int32_t> slot_of_key_;    // -1: in no slot
  std::vector<std::int32_t> heap_position_;  // -1: not in its layer's heap
  std::vector<double> log_score_;
  // By slot.
  std::vector<std::int32_t> key_of_slot_;
  std::vector<State> state_;
  std::vector<std::uint64_t> filled_by_;  // number of the publish that named the slot as a destination
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> in_flight_;
  // By layer.
  std::vector<std::int32_t> heap_;  // [num_layers, num_experts] keys, min-heaps by before()
  std::vector<std::int32_t> heap_size_;
  std::vector<double> top_log_score_;  // of the heap's top; +infinity when the heap is empty
  std::vector<double> clock_;          // admitting tokens so far / half_life (CRF), 0 (LRU)

  std::uint64_t num_publishes_ = 0;
  std::int64_t evicted_total_ = 0;
  int num_resident_ = 0;
  std::int32_t* mirror_ = nullptr;
  std::atomic<bool> owned_{false};
};

}  // namespace ft
