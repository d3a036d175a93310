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

struct SlotPolicyOptions {
  SlotPolicy policy = SlotPolicy::kCrf;
  double half_life_tokens = 8.0;
  double long_half_life_tokens = 512.0;
  double margin = 1.5;  // how many times the victim's score a newcomer's must be
  double floor = 1.2;   // and at least how many times that of a single use
};

// One distinct expert of a publish. Tokens are counted in two kinds: `tokens` of different sequences (decode rows), and
// `run_tokens`, consecutive ones of one sequence (the tail of a prompt).
struct ExpertUse {
  std::int32_t expert = 0;
  std::int32_t tokens = 0;  // admitting tokens that chose it; without any of both it is neither scored nor admitted
  std::int32_t run_tokens = 0;
  std::int32_t slot = -1;         // out: where it is resident, or -1
  std::int32_t destination = -1;  // out: the slot that its fetch must fill, or -1
};

struct SlotMove {
  std::int32_t from = 0, to = 0;
};

// What SlotTable::vacate did: records to be copied to lower slots, and how many it gave up.
struct Vacated {
  std::vector<SlotMove> moves;  // no slot is named twice
  int num_evicted = 0;
};

// For each capacity (ascending): the share of the sum of `scores` that the best so many records have, an estimate of
// the hit rate at that capacity. All 0 without scores.
std::vector<double> score_curve(std::vector<double> scores, std::span<const std::int64_t> capacities);

// Scores. CRF (combined recency and frequency) estimates how often a token will use the record, from two averages of
// how often tokens did: a recent one (half-life of 8 tokens), for what the text is about now, and a lasting one (512),
// for what the model likes in general. Each layer learns how far to trust which, from how well either has foretold the
// experts that were used next: a change of subject makes the recent one count, a steady mixture the lasting one. Age is
// that of a sequence, in tokens of the record's own layer: a publish of decode rows ages the layer by one, whatever
// their number; one of n prompt tokens by n. LRU gives a record the number of the publish that used it last. Scores are
// kept for every record, resident or not.
//
// A free slot takes whatever was used. After that a record gets one only for a score of at least `floor` times that of
// a single use just now (which is not enough, then) and more than `margin` times that of the worst resident; with LRU,
// always. Residents are compared across layers, each at its own layer's clock: layers that a step has not reached yet
// are not aged by it.
//
// Life of a slot: free -> in flight (named as a destination) -> resident (the next publish of the client has come,
// hence the fill is complete) -> in flight for another record. While slots are vacated some are closed: what goes and
// is empty, and what is kept for a record that moves. free + in flight + resident + closed == capacity at all times.
//
// A publish costs O(E) with a small constant (each layer's worst resident is found by a scan that vectorises), an
// eviction O(E + L). Nothing is allocated. Not thread-safe.
class SlotTable {
 public:
  // Throws std::invalid_argument for sizes out of range.
  SlotTable(int num_layers, int num_experts, int num_slots, const SlotPolicyOptions& options = {});

  int num_layers() const { return num_layers_; }
  int num_experts() const { return num_experts_; }
  int num_slots() const { return static_cast<int>(key_of_slot_.size()); }
  int num_resident() const { return num_resident_; }
  int num_in_flight() const { return static_cast<int>(in_flight_.size()); }
  int num_free() const { return static_cast<int>(free_.size()); }
  std::int64_t evicted_total() const { return evicted_total_; }

  // The slot where the record can be read, or -1.
  int lookup(int layer, int expert) const;
  // Whether it is in a slot, or on its way into one.
  bool holds(int layer, int expert) const { return slot_of_key_[key(layer, expert)] >= 0; }

  // A publish is begin_publish, any number of admit calls, end_publish.
  //
  // begin: earlier fills are complete and become resident; `uses` (distinct experts of one layer) are looked up, scored
  // and protected from eviction until end_publish. num_tokens, num_run_tokens: admitting tokens of the publish.
  void begin_publish(int layer, std::span<ExpertUse> uses, int num_tokens, int num_run_tokens);
  // begin_publish in two parts: looking up, and all of the rest, which nothing but `admit` needs.
  void find_publish(int layer, std::span<ExpertUse> uses);
  void score_publish(int layer, std::span<const ExpertUse> uses, int num_tokens, int num_run_tokens);
  // Score of a record at its layer's clock, comparable across layers; 0 when it was never used.
  double score(int layer, int expert) const { return score_of(key(layer, expert)); }
  // Gives the fetched record a slot if one is free, or if it deserves that of the worst resident. Sets use.destination.
  void admit(int layer, ExpertUse& use);
  void end_publish(int layer, std::span<const ExpertUse> uses);

  // The fills of the last publish will never be known to be complete: their slots become free.
  void invalidate_in_flight();
  // The arena is another one, of num_slots free slots. Scores stay: they describe the records. Ends a vacate. Throws
  // std::invalid_argument.
  void empty(int num_slots);

  // Fewer slots (slot_resize.cpp), in two steps with any number of publishes in between. vacate gives up the records
  // that score worst, wherever they lie, and fills of slots that go; from then on nothing is admitted to a slot from
  // num_slots on, and the records that stay there are found and never evicted. Once the caller has copied them, after
  // every fill and read of earlier publishes, finish_vacate names them at their new places; cancel_vacate leaves all
  // where it is. Throws std::invalid_argument for more slots than there are, std::logic_error while slots are being
  // vacated.
  Vacated vacate(int num_slots);
  void finish_vacate();  // without a vacate neither does anything
  void cancel_vacate();
  // More slots. Throws std::invalid_argument for fewer, std::logic_error while slots are being vacated.
  void grow(int num_slots);
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
  enum class State : std::uint8_t { kFree, kInFlight, kResident, kClosed };

  std::int32_t key(int layer, int expert) const { return layer * num_experts_ + expert; }
  std::size_t first_key(int layer) const { return static_cast<std::size_t>(layer) * num_experts_; }
  double score_of(std::int32_t key) const;
  void learn_trust(int layer, std::span<const ExpertUse> uses);
  void age(int layer, int tokens);
  // Candidates for eviction are the residents that were offered and not withdrawn since.
  void offer(std::int32_t key);
  void withdraw(std::int32_t key);
  void find_worst(int layer);
  bool deserves_slot(int layer, double score, double worst_score) const;
  int worst_layer() const;
  void release(std::int32_t slot);
  void drop(std::int32_t slot);
  void end_vacate();
  void rebuild_free_list();
  void mirror(std::int32_t key, std::int32_t slot) {
    if (mirror_ != nullptr) std::atomic_ref<std::int32_t>(mirror_[key]).store(slot, std::memory_order_relaxed);
  }

  int num_layers_;
  int num_experts_;
  SlotPolicyOptions options_;

  // By key = layer * num_experts + expert.
  std::vector<std::int32_t> slot_of_key_;  // -1: in no slot
  std::vector<float> recent_, lasting_;    // uses so far, each decayed by its age (CRF)
  std::vector<std::uint64_t> last_use_;    // number of the publish (LRU)
  std::vector<float> barrier_;             // 0 for candidates, +infinity for everything else
  // By slot.
  std::vector<std::int32_t> key_of_slot_;
  std::vector<State> state_;
  std::vector<std::uint64_t> filled_by_;  // number of the publish that named the slot as a destination
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> in_flight_;
  int limit_ = 0;                 // less than num_slots() while the slots from here on are vacated
  std::vector<SlotMove> moving_;  // of the vacate that is open
  // By layer.
  std::vector<double> trust_;                          // of the lasting average, 0..1
  std::vector<double> tokens_seen_;                    // its age
  std::vector<float> recent_factor_, lasting_factor_;  // what a score is of the two sums
  std::vector<std::int32_t> worst_;                    // key of the worst candidate; -1 without any
  std::vector<double> worst_score_;                    // its score; +infinity without any

  std::uint64_t num_publishes_ = 0;
  std::int64_t evicted_total_ = 0;
  int num_resident_ = 0;
  std::int32_t* mirror_ = nullptr;
  std::atomic<bool> owned_{false};
};

}  // namespace ft
