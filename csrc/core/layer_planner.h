// From one publish to one plan: group routes by expert, look up, split the misses, choose slots.
#pragma once

#include <cstdint>
#include <vector>

#include "mailbox.h"
#include "slot_table.h"
#include "split_planner.h"

namespace ft {

// How many of `misses` the device fetches: fraction * misses, rounded half away from zero.
int plan_num_fetches(double fraction, int misses);

// The payload of one publish. ids holds num_tokens * top_k entries of -1 (padding) or 0..num_experts - 1. device_only:
// no expert may go to the CPU. staged: every record can be fetched.
struct PublishView {
  int layer = 0;
  int num_tokens = 0;
  int top_k = 0;
  const std::int32_t* ids = nullptr;
  const std::uint8_t* admit = nullptr;
  bool device_only = false;
  double record_bytes = 0.0;  // for the split
  int num_tiles = 1;          // tiles of a record, where one may be split; 1: none is
  std::int32_t ahead = -1;    // an expert whose record the device has copied ahead of time; not in place
  bool staged = false;
};

// Not thread-safe; allocates in its constructor only.
class LayerPlanner {
 public:
  // fetchable: [num_layers, num_experts], 0 for records that the device cannot read where they lie; empty: it can read
  // all. Throws std::invalid_argument for another size.
  LayerPlanner(const MailboxGeometry& geometry, std::uint32_t max_entries, std::vector<std::uint8_t> fetchable = {});

  // Fills header (but for seq), entries and routes. in_place: experts are hits in the store and `slots` is not touched.
  // Records that are not fetchable go to the CPU unless a slot holds them. The misses are split by `fetch_fraction`, or
  // by `split` when it is not null; one record by its tiles where that may be (see mailbox.h). One that has earned a
  // slot is not split where it would be fetched otherwise: a part cannot fill a slot.
  //
  // kNone, or else why there is no plan: kBadPublish (a value is out of range; nothing has changed) or kNotFetchable
  // (the publish is device_only, but not staged, and names such a record).
  AbortReason plan(const PublishView& publish, SlotTable& slots, double fetch_fraction, bool in_place,
                   PlanHeader& header, PlanEntry* entries, std::int32_t* routes, SplitPlanner* split = nullptr);

  // A publish of nothing but hits needs no scores, so `plan` leaves it unscored and this is done when the plan is out.
  // To be called before the table is used for anything else; `plan` does so itself.
  void settle(SlotTable& slots);

  bool is_fetchable(int layer, int expert) const {
    return fetchable_.empty() || fetchable_[static_cast<std::size_t>(layer) * geometry_.num_experts + expert] != 0;
  }

  // Of the last plan; empty when it was refused or in place.
  const LayerShares& shares() const { return shares_; }

 private:
  bool collect(const PublishView& publish, const std::int32_t* routes);
  void forget_counts();
  void order_misses(const PublishView& publish, const SlotTable& slots);
  void order_admissions(int num_fetches);
  // Of the misses: whole records to fetch, or those and the tiles of the next one that are fetched.
  struct Fetches {
    int whole = 0;
    int before = 0, tiles = 0;  // tiles 0: no record is split
  };
  Fetches choose_fetches(const PublishView& publish, const SlotTable& slots, int num_fetchable, double fetch_fraction,
                         SplitPlanner* split);
  void admit_fetches(const PublishView& publish, SlotTable& slots, Fetches& fetches, PlanHeader& header);
  void admit_ahead(const PublishView& publish, SlotTable& slots, PlanHeader& header);
  void note_shares(const PublishView& publish, const Fetches& fetches);
  void write_entries(const PublishView& publish, bool in_place, const Fetches& fetches, PlanEntry* entries,
                     std::int32_t* routes);

  MailboxGeometry geometry_;
  std::vector<std::uint8_t> fetchable_;
  std::vector<ExpertUse> uses_;          // distinct experts in order of appearance
  std::vector<std::int32_t> misses_;     // indices into uses_
  std::vector<double> scores_;           // by use; of misses only
  std::vector<std::uint8_t> can_fetch_;  // by use
  std::vector<std::int32_t> miss_routes_;
  LayerShares shares_;
  // By expert; the first three are 0 between publishes.
  std::vector<std::int32_t> routes_of_;
  std::vector<std::int32_t> admitting_of_;      // routes of admitting tokens of different sequences
  std::vector<std::int32_t> admitting_run_of_;  // and of those in a run
  std::vector<std::int32_t> next_route_of_;     // where its next route goes
  std::int32_t num_admitting_tokens_ = 0;
  std::int32_t num_run_tokens_ = 0;
  std::int32_t total_routes_ = 0;
  std::int32_t ahead_ = -1;  // index into uses_: a fetch that was made before
  int unsettled_layer_ = -1;
};

}  // namespace ft
