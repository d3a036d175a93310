// The per-layer hand-off between GpuExecutor (client), ExpertCache (planner) and CpuExecutor, in one shared segment.
//
// Layout of the segment; every offset is in the header and a multiple of 128, so that a GPU kernel can address the
// registered memory with the header alone. All numbers are little-endian. T, K, H, L, E, S, D: max_tokens, top_k,
// hidden, num_layers, num_experts, max_shared_tokens (<= T), max_entries = min(E, T * K).
//
//   region       type                      written by   holds
//   header       MailboxHeader             creator      geometry and the offsets below
//   req          Word                      client       number of the latest publish
//   plan         Word                      ExpertCache  number of the latest publish that has a plan
//   part         Word                      CpuExecutor  number of the latest publish whose CPU share is done
//   hint         Word                      client       number of the latest hint
//   abort        u32 on its own line       anyone       0, or an AbortReason, once and for all
//   request      RequestHeader             client       what this publish is
//   hint_request HintRequest               client       what a coming publish will probably name, see below
//   hidden       f32 [S, H]                client       hidden rows; not written with kDeviceOnly
//   ids          i32 [T, K]                client       expert ids; -1 in padded rows
//   weights      f32 [T, K]                client       routing weights
//   admit        u8  [T]                   client       AdmitFlag
//   plan_header  PlanHeader                ExpertCache  counts
//   entries      PlanEntry [D + 1]         ExpertCache  distinct experts: hits, then fetches, then CPU; one record may
//                                                       be the last fetch and the first CPU entry, see below
//   routes       i32 [T * K]               ExpertCache  route indices t * K + k, grouped by entry
//   brief        BriefPiece [32]           ExpertCache  the plan of a publish of one token, see below
//   ahead        BriefPiece                ExpertCache  the answer to the latest hint
//   slot_of      i32 [L, E]                ExpertCache  the slot in which a record can be read, or -1
//   stamps       LayerStamps [L]           all three    when each stage of the layer's latest publish was passed
//   ring         Ring<CpuShare>            ExpertCache  -> CpuExecutor
//   partial      f32 [S or S * K, H]       CpuExecutor  [T, H] sums of the CPU share, or with kDeterministic one
//                                                       weighted row per route of it (a CPU client puts its own
//                                                       rows beside them); that needs geometry.route_rows
//
// T and K in index arithmetic are those of the request header, not the maxima. One publish is outstanding at a time:
// the client publishes again only after it has seen `plan`, and `part` where the plan has a CPU share. By publishing
// again it also says that the slots named as destinations before are filled. Sequence numbers are compared for equality
// only, so they may wrap.
//
// `slot_of` is in step with the latest plan when that plan can be seen: slots that it gave away are no longer listed,
// slots that it named as destinations are listed from the next plan on. Beside that it changes as a whole before the
// epoch's first publish, and at any time where slots are vacated: records are given up or named at their new places. So
// it tells what the next plan will probably say, and no more.
//
// A GPU client publishes by a system-scope release store of the sequence number into req's value and rings no bell; it
// sets kDeviceClient, and the servers are started for it (device_client). It watches plan's and part's value with
// acquire loads, and `abort`. A publish of more than S tokens must be kDeviceOnly.
//
// After an abort the rest of a GPU's step may still write request regions and req. Nothing that is computed then
// counts.
//
// Without route_rows no publish may be kDeterministic.
//
// Of a publish with kSplittable one missed record may be split by tiles: the last fetch then has the tiles [0, t), no
// destination, and num_tiles t; the first CPU entry is the same expert with the same routes and the tiles [t, N). The
// device's result for those routes and the CPU's are to be added. D entries still hold all that the device runs.
//
// A plan of one token is also written in pieces that carry its number, so that a device, for which every look at host
// memory is a trip over the bus, polls and reads at once: piece 0 has the counts, piece 1 + i is entry i. Every publish
// of one token with K < 32 has one, and it is complete before `plan` is raised. A split record's CPU entry may be
// missing there: the pieces end with the K-th entry.
//
// Lookahead. While a step of one token is in one layer, the client may say by a hint which experts it expects in a
// later one. ExpertCache answers every hint, with one record that the client shall copy ahead of time into a place of
// its own
// (`ahead`: the hint's number, 1 in `packed`, the expert in `slot`), or with none (0 in `packed`). A record that was to
// be copied is an entry of kind kAhead, the first of the fetches, if the publish of that layer in that step names it:
// the client reads it in that place. So between the answer and that publish's plan the client makes the copy, and keeps
// the place until it has run that entry. Hints change no result: they only say when a record crosses the bus. The
// client raises `hint` as it raises `req`, and without regard to it.
//
// Stamps are measurements, never part of the protocol: a party that skips a stage (a client that waits for no CPU
// share) leaves the stamp of an earlier publish, so a difference counts only when it is positive and the stages are in
// order. By publishing again the client also says that its stamps of the publish before are written.
#pragma once

#include <memory>

#include "futex.h"
#include "ring.h"
#include "shared_segment.h"

namespace ft {

inline constexpr char kMailboxMagic[8] = {'F', 'T', 'M', 'A', 'I', 'L', 'B', 'X'};
inline constexpr std::uint32_t kMailboxVersion = 6;
inline constexpr std::uint32_t kBriefPieces = 32;
inline constexpr std::uint32_t kMaxHinted = 32;
inline constexpr std::uint32_t kRingCapacity = 16;

struct MailboxGeometry {
  std::uint32_t max_tokens = 0;
  std::uint32_t top_k = 0;
  std::uint32_t hidden = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t max_shared_tokens = 0;  // tokens of a publish in which the CPU takes part; 0: max_tokens
  std::uint32_t route_rows = 1;         // 1: publishes may be kDeterministic
};

// Byte offsets from the start of the segment.
struct MailboxOffsets {
  std::uint64_t req = 0, plan = 0, part = 0, hint = 0, abort = 0;
  std::uint64_t request = 0, hint_request = 0, hidden = 0, ids = 0, weights = 0, admit = 0;
  std::uint64_t plan_header = 0, entries = 0, routes = 0, brief = 0, ahead = 0, slot_of = 0, stamps = 0, ring = 0,
                partial = 0;
  std::uint64_t total_bytes = 0;
};

struct MailboxHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::int64_t epoch;
  MailboxGeometry geometry;
  std::uint32_t max_entries;
  MailboxOffsets offsets;
};

enum RequestFlags : std::uint32_t {
  kDeterministic = 1,  // the CPU share comes back as one row per route
  kDeviceOnly = 2,     // no CPU share: every miss is a fetch; the hidden rows are not written
  kDeviceClient = 4,   // the client rings no bells
  kSplittable = 8,     // the client can run some tiles of a fetched record; not with the two first
  kStaged = 16,        // the client has all of the layer's records at hand, also those that cannot be fetched
};

// Of a token: whether it scores its experts, which may fill slots then. Tokens of a run follow each other in one
// sequence (the tail of a prompt chunk); others are of a sequence each.
enum AdmitFlag : std::uint8_t { kAdmitNot = 0, kAdmitRow = 1, kAdmitRun = 2 };

struct RequestHeader {
  std::uint32_t seq;
  std::uint32_t layer;
  std::uint64_t step_id;
  std::uint32_t num_tokens;
  std::uint32_t top_k;
  std::uint32_t flags;
};

// The experts of one token of a later layer, most probable first.
struct HintRequest {
  std::uint64_t step_id;
  std::uint32_t layer;
  std::uint32_t num_ids;
  std::int32_t ids[kMaxHinted];
};

// kAhead: a fetch that was made before.
enum class EntryKind : std::int32_t { kHit = 0, kFetch = 1, kCpu = 2, kAhead = 3 };

struct PlanEntry {
  std::int32_t expert;
  EntryKind kind;
  std::int32_t source_slot;       // -1: read the store
  std::int32_t destination_slot;  // -1: not admitted
  std::int32_t first_route;
  std::int32_t num_routes;
  std::int32_t first_tile;
  std::int32_t num_tiles;  // 0: all of the record
};
static_assert(sizeof(PlanEntry) == 32);

struct PlanHeader {
  std::uint32_t seq;
  std::uint32_t num_hits;
  std::uint32_t num_fetches;
  std::uint32_t num_cpu;
  std::uint32_t num_routes;
  std::uint32_t num_admitted;
  std::uint32_t num_evicted;
  std::uint32_t num_split;    // 1 when a record is both the last fetch and the first CPU entry
  std::uint32_t split_tiles;  // of that record, those that are fetched

  std::uint32_t num_entries() const { return num_hits + num_fetches + num_cpu; }
  // The split record by its shares; num_tiles: of a whole record.
  double fetched_records(int num_tiles) const {
    return static_cast<double>(num_fetches - num_split) + static_cast<double>(split_tiles) / num_tiles;
  }
  double cpu_records(int num_tiles) const {
    return static_cast<double>(num_cpu) - static_cast<double>(split_tiles) / num_tiles;
  }
};

// 16 bytes in one line, the number written last: whoever reads a piece at once and finds its number has all of it.
struct alignas(16) BriefPiece {
  std::atomic<std::uint32_t> seq;
  // Counts: hits | fetches << 8 | CPU entries << 16. Entry: expert | route << 16 | kind << 24.
  std::atomic<std::uint32_t> packed;
  // Counts: admitted | evicted << 16. Entry: the source slot of a hit, the destination slot of a fetch, or -1.
  std::atomic<std::int32_t> slot;
  std::atomic<std::uint32_t> tiles;  // first | number << 16; 0: all
};
static_assert(sizeof(BriefPiece) == 16);

// The CPU share of one publish: entries [first_entry, first_entry + num_entries) of its plan.
struct CpuShare {
  std::uint64_t step_id;
  std::uint32_t seq;
  std::uint32_t layer;
  std::uint32_t num_tokens;
  std::uint32_t top_k;
  std::uint32_t flags;
  std::uint32_t first_entry;
  std::uint32_t num_entries;
  std::uint32_t reserved[7];
};
static_assert(sizeof(CpuShare) == kRingEntryBytes);

// Nanoseconds, each party's on a line of its own. The servers' are CLOCK_MONOTONIC's; the client's are of a clock of
// its own (a GPU's global timer, which may tick as rarely as once in a microsecond).
struct LayerStamps {
  struct alignas(64) OfCache {
    std::atomic<std::int64_t> seen{0};     // the publish
    std::atomic<std::int64_t> planned{0};  // the plan is out
  } cache;
  struct alignas(64) OfCpu {
    std::atomic<std::int64_t> taken{0};  // the share, from the ring
    std::atomic<std::int64_t> done{0};   // its partial sum is out
  } cpu;
  struct alignas(128) OfClient {
    std::atomic<std::int64_t> published{0};
    std::atomic<std::int64_t> planned{0};  // the plan was seen
    std::atomic<std::int64_t> own{0};      // hits and fetches are computed
    std::atomic<std::int64_t> part{0};     // the CPU share was seen, if there was one
    std::atomic<std::int64_t> seq{0};      // of the publish that these are about
  } client;
};
static_assert(sizeof(LayerStamps) == 256);

// Whether an entry names an expert of the model, tiles of its record and existing routes; false only when the segment
// was damaged.
bool is_sound(const PlanEntry& entry, const std::int32_t* routes, std::int32_t num_experts, std::int32_t num_tiles,
              std::int64_t num_routes);

enum class AbortReason : std::uint32_t {
  kNone = 0,
  kRequested = 1,
  kBadPublish = 2,
  kPlanLate = 3,
  kPartialLate = 4,
  kClientFailed = 5,
  kCacheFailed = 6,
  kCpuFailed = 7,
  kNotFetchable = 8,
  kNoBell = 9,
};
const char* abort_reason_text(AbortReason reason);

// Thread-safe as far as the protocol goes; each word and payload has the one writer named above.
class Mailbox {
 public:
  // Throws std::invalid_argument naming a geometry value out of range.
  static std::size_t required_bytes(const MailboxGeometry& geometry);
  // Formats the segment. Every word starts at first_seq. Throws std::invalid_argument when the segment is too small.
  static std::shared_ptr<Mailbox> create(std::shared_ptr<SharedSegment> segment, std::int64_t epoch,
                                         const MailboxGeometry& geometry, std::uint32_t first_seq = 0);
  // Throws std::invalid_argument when the segment holds no mailbox of this version.
  static std::shared_ptr<Mailbox> attach(std::shared_ptr<SharedSegment> segment);

  const std::shared_ptr<SharedSegment>& segment() const { return segment_; }
  std::int64_t epoch() const { return header_->epoch; }
  // max_shared_tokens is never 0 here.
  const MailboxGeometry& geometry() const { return geometry_; }
  const MailboxOffsets& offsets() const { return offsets_; }
  std::uint32_t max_entries() const { return max_entries_; }  // distinct experts
  std::uint32_t entry_room() const { return max_entries_ + 1; }

  // The first reason stays. Wakes everyone; all present and future waits fall through.
  void abort(AbortReason reason = AbortReason::kRequested);
  AbortReason abort_reason() const { return static_cast<AbortReason>(abort_->load(std::memory_order_seq_cst)); }
  bool aborted() const { return abort_reason() != AbortReason::kNone; }
  // Whose answer to the latest publish has not come: kPlanLate, kPartialLate, or kNone when all is answered. For a
  // watchdog beside a client that waits on the device.
  AbortReason overdue();

  Word& req() { return *at<Word>(offsets_.req); }
  Word& plan() { return *at<Word>(offsets_.plan); }
  Word& part() { return *at<Word>(offsets_.part); }
  Word& hint() { return *at<Word>(offsets_.hint); }
  Ring<CpuShare>& ring() { return ring_; }

  RequestHeader& request() { return *at<RequestHeader>(offsets_.request); }
  HintRequest& hint_request() { return *at<HintRequest>(offsets_.hint_request); }
  float* hidden() { return at<float>(offsets_.hidden); }
  std::int32_t* ids() { return at<std::int32_t>(offsets_.ids); }
  float* weights() { return at<float>(offsets_.weights); }
  std::uint8_t* admit() { return at<std::uint8_t>(offsets_.admit); }
  PlanHeader& plan_header() { return *at<PlanHeader>(offsets_.plan_header); }
  PlanEntry* entries() { return at<PlanEntry>(offsets_.entries); }
  std::int32_t* routes() { return at<std::int32_t>(offsets_.routes); }
  // Of a publish of one token.
  void write_brief(std::uint32_t seq, std::uint32_t top_k);
  // The answer to a hint: an expert whose record is to be copied, or -1.
  void write_ahead(std::uint32_t seq, std::int32_t expert);
  // The number of the latest hint that has an answer.
  std::uint32_t hint_answered() { return at<BriefPiece>(offsets_.ahead)->seq.load(std::memory_order_relaxed); }
  std::int32_t* slot_of() { return at<std::int32_t>(offsets_.slot_of); }
  LayerStamps& stamps(std::uint32_t layer) { return at<LayerStamps>(offsets_.stamps)[layer]; }
  float* partial() { return at<float>(offsets_.partial); }

 private:
  explicit Mailbox(std::shared_ptr<SharedSegment> segment);
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::shared_ptr<SharedSegment> segment_;
  std::byte* base_;
  const MailboxHeader* header_;
  // Copies: nothing another process does to the header later can move our pointers.
  MailboxGeometry geometry_;
  MailboxOffsets offsets_;
  std::uint32_t max_entries_;
  std::atomic<std::uint32_t>* abort_;
  Ring<CpuShare> ring_;
};

}  // namespace ft
