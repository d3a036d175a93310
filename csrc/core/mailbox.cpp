#include "mailbox.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace ft {
namespace {

constexpr std::uint64_t kPartialAlignment = 4096;

std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

void check_range(const char* name, std::uint32_t value, std::uint32_t limit) {
  if (value < 1 || value > limit) {
    throw std::invalid_argument("mailbox: " + std::string(name) + " " + std::to_string(value) + " is not in 1.." +
                                std::to_string(limit));
  }
}

void check_geometry(const MailboxGeometry& g) {
  check_range("max_tokens", g.max_tokens, 1u << 16);
  check_range("top_k", g.top_k, 1u << 8);
  check_range("hidden", g.hidden, 1u << 17);
  check_range("num_layers", g.num_layers, 1u << 12);
  check_range("num_experts", g.num_experts, 1u << 16);
  check_range("max_shared_tokens", g.max_shared_tokens, g.max_tokens);
  if (g.route_rows > 1) {
    throw std::invalid_argument("mailbox: route_rows " + std::to_string(g.route_rows) + " is not 0 or 1");
  }
}

// With the default filled in, and checked.
MailboxGeometry resolve(MailboxGeometry g) {
  if (g.max_shared_tokens == 0) g.max_shared_tokens = g.max_tokens;
  check_geometry(g);
  return g;
}

std::uint32_t max_entries_of(const MailboxGeometry& g) { return std::min(g.num_experts, g.max_tokens * g.top_k); }

MailboxOffsets plan_offsets(const MailboxGeometry& g) {
  const std::uint64_t tokens = g.max_tokens;
  const std::uint64_t routes = tokens * g.top_k;
  const std::uint64_t shared_tokens = g.max_shared_tokens;
  std::uint64_t end = 0;
  const auto place = [&end](std::uint64_t bytes, std::uint64_t alignment = kLineBytes) {
    const std::uint64_t offset = align_up(end, alignment);
    end = offset + bytes;
    return offset;
  };
  MailboxOffsets o;
  place(sizeof(MailboxHeader));
  o.req = place(sizeof(Word));
  o.plan = place(sizeof(Word));
  o.part = place(sizeof(Word));
  o.hint = place(sizeof(Word));
  o.abort = place(kLineBytes);
  o.request = place(sizeof(RequestHeader));
  o.hint_request = place(sizeof(HintRequest));
  o.hidden = place(shared_tokens * g.hidden * sizeof(float));
  o.ids = place(routes * sizeof(std::int32_t));
  o.weights = place(routes * sizeof(float));
  o.admit = place(tokens);
  o.plan_header = place(sizeof(PlanHeader));
  o.entries = place((std::uint64_t{max_entries_of(g)} + 1) * sizeof(PlanEntry));
  o.routes = place(routes * sizeof(std::int32_t));
  o.brief = place(kBriefPieces * sizeof(BriefPiece));
  o.ahead = place(sizeof(BriefPiece));
  o.slot_of = place(std::uint64_t{g.num_layers} * g.num_experts * sizeof(std::int32_t));
  o.stamps = place(std::uint64_t{g.num_layers} * sizeof(LayerStamps));
  o.ring = place(Ring<CpuShare>::required_bytes(kRingCapacity));
  o.partial = place(shared_tokens * (g.route_rows != 0 ? g.top_k : 1) * g.hidden * sizeof(float), kPartialAlignment);
  o.total_bytes = align_up(end, kPartialAlignment);
  return o;
}

}  // namespace

bool is_sound(const PlanEntry& e, const std::int32_t* routes, std::int32_t num_experts, std::int32_t num_tiles,
              std::int64_t num_routes) {
  if (e.expert < 0 || e.expert >= num_experts || e.first_route < 0 || e.num_routes < 0 ||
      std::int64_t{e.first_route} + e.num_routes > num_routes) {
    return false;
  }
  if (e.first_tile < 0 || e.num_tiles < 0 || std::int64_t{e.first_tile} + e.num_tiles > num_tiles) return false;
  for (std::int32_t r = e.first_route; r < e.first_route + e.num_routes; ++r) {
    if (routes[r] < 0 || routes[r] >= num_routes) return false;
  }
  return true;
}

const char* abort_reason_text(AbortReason reason) {
  switch (reason) {
    case AbortReason::kNone:
      return "not aborted";
    case AbortReason::kRequested:
      return "requested";
    case AbortReason::kBadPublish:
      return "ExpertCache refused a publish with values out of range";
    case AbortReason::kPlanLate:
      return "ExpertCache was late";
    case AbortReason::kPartialLate:
      return "CpuExecutor was late";
    case AbortReason::kClientFailed:
      return "GpuExecutor failed within a layer";
    case AbortReason::kCacheFailed:
      return "ExpertCache failed";
    case AbortReason::kCpuFailed:
      return "CpuExecutor failed";
    case AbortReason::kNotFetchable:
      return "a publish for the device alone named an expert that the device cannot read";
    case AbortReason::kNoBell:
      return "the client cannot ring, but the servers were started for one that can";
  }
  return "unknown reason";
}

std::size_t Mailbox::required_bytes(const MailboxGeometry& geometry) {
  return plan_offsets(resolve(geometry)).total_bytes;
}

std::shared_ptr<Mailbox> Mailbox::create(std::shared_ptr<SharedSegment> segment, std::int64_t epoch,
                                         const MailboxGeometry& requested, std::uint32_t first_seq) {
  const MailboxGeometry geometry = resolve(requested);
  const std::size_t needed = required_bytes(geometry);
  if (segment->size_bytes() < needed) {
    throw std::invalid_argument("mailbox: segment of " + std::to_string(segment->size_bytes()) +
                                " bytes is smaller than the " + std::to_string(needed) + " needed");
  }
  std::byte* base = segment->data();
  const MailboxOffsets offsets = plan_offsets(geometry);
  std::memset(base, 0, offsets.hidden);
  for (const std::uint64_t offset : {offsets.req, offsets.plan, offsets.part, offsets.hint}) {
    (new (base + offset) Word)->value.store(first_seq, std::memory_order_seq_cst);
  }
  new (base + offsets.abort) std::atomic<std::uint32_t>(0);
  // No piece may seem to be of a coming publish; numbers near the first one are not given again for a long time.
  for (std::uint32_t i = 0; i < kBriefPieces; ++i) {
    auto* piece = new (base + offsets.brief + i * sizeof(BriefPiece)) BriefPiece{};
    piece->seq.store(first_seq, std::memory_order_relaxed);
  }
  (new (base + offsets.ahead) BriefPiece{})->seq.store(first_seq, std::memory_order_relaxed);
  std::memset(base + offsets.slot_of, 0xff,
              std::size_t{geometry.num_layers} * geometry.num_experts * sizeof(std::int32_t));
  for (std::uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    new (base + offsets.stamps + layer * sizeof(LayerStamps)) LayerStamps;
  }
  new (base + offsets.ring) RingControl;
  auto* header = new (base) MailboxHeader;
  std::memcpy(header->magic, kMailboxMagic, sizeof(kMailboxMagic));
  header->version = kMailboxVersion;
  header->header_bytes = sizeof(MailboxHeader);
  header->epoch = epoch;
  header->geometry = geometry;
  header->max_entries = max_entries_of(geometry);
  header->offsets = offsets;
  return std::shared_ptr<Mailbox>(new Mailbox(std::move(segment)));
}

std::shared_ptr<Mailbox> Mailbox::attach(std::shared_ptr<SharedSegment> segment) {
  if (segment->size_bytes() < sizeof(MailboxHeader)) {
    throw std::invalid_argument("mailbox: segment of " + std::to_string(segment->size_bytes()) +
                                " bytes is too small to hold a mailbox");
  }
  const auto* header = reinterpret_cast<const MailboxHeader*>(segment->data());
  if (std::memcmp(header->magic, kMailboxMagic, sizeof(kMailboxMagic)) != 0) {
    throw std::invalid_argument("mailbox: the segment holds no mailbox");
  }
  if (header->version != kMailboxVersion || header->header_bytes != sizeof(MailboxHeader)) {
    throw std::invalid_argument("mailbox: version " + std::to_string(header->version) + " is not version " +
                                std::to_string(kMailboxVersion));
  }
  check_geometry(header->geometry);
  const MailboxOffsets expected = plan_offsets(header->geometry);
  if (std::memcmp(&expected, &header->offsets, sizeof(expected)) != 0 || segment->size_bytes() < expected.total_bytes) {
    throw std::invalid_argument("mailbox: header and size of the segment contradict each other");
  }
  return std::shared_ptr<Mailbox>(new Mailbox(std::move(segment)));
}

Mailbox::Mailbox(std::shared_ptr<SharedSegment> segment)
    : segment_(std::move(segment)),
      base_(segment_->data()),
      header_(reinterpret_cast<const MailboxHeader*>(base_)),
      geometry_(header_->geometry),
      offsets_(plan_offsets(geometry_)),
      max_entries_(max_entries_of(geometry_)),
      abort_(at<std::atomic<std::uint32_t>>(offsets_.abort)),
      ring_(base_ + offsets_.ring, kRingCapacity) {}

namespace {

void put(BriefPiece& piece, std::uint32_t seq, std::uint32_t packed, std::int32_t slot, std::uint32_t tiles = 0) {
  piece.packed.store(packed, std::memory_order_relaxed);
  piece.slot.store(slot, std::memory_order_relaxed);
  piece.tiles.store(tiles, std::memory_order_relaxed);
  piece.seq.store(seq, std::memory_order_release);
}

}  // namespace

void Mailbox::write_ahead(std::uint32_t seq, std::int32_t expert) {
  put(*at<BriefPiece>(offsets_.ahead), seq, expert >= 0 ? 1 : 0, expert);
}

void Mailbox::write_brief(std::uint32_t seq, std::uint32_t top_k) {
  const PlanHeader& plan = plan_header();
  auto* pieces = at<BriefPiece>(offsets_.brief);
  put(pieces[0], seq, plan.num_hits | plan.num_fetches << 8 | plan.num_cpu << 16,
      static_cast<std::int32_t>(plan.num_admitted | plan.num_evicted << 16));
  const std::uint32_t count = plan.num_entries();
  for (std::uint32_t i = 0; i < top_k; ++i) {
    if (i >= count) {
      put(pieces[1 + i], seq, 0, -1);
      continue;
    }
    const PlanEntry& entry = entries()[i];
    const auto route = static_cast<std::uint32_t>(routes()[entry.first_route]);
    put(pieces[1 + i], seq,
        static_cast<std::uint32_t>(entry.expert) | route << 16 | static_cast<std::uint32_t>(entry.kind) << 24,
        entry.kind == EntryKind::kHit ? entry.source_slot : entry.destination_slot,
        static_cast<std::uint32_t>(entry.first_tile) | static_cast<std::uint32_t>(entry.num_tiles) << 16);
  }
}

AbortReason Mailbox::overdue() {
  const std::uint32_t seq = req().load();
  if (plan().load() != seq) return AbortReason::kPlanLate;
  return plan_header().num_cpu > 0 && part().load() != seq ? AbortReason::kPartialLate : AbortReason::kNone;
}

void Mailbox::abort(AbortReason reason) {
  std::uint32_t none = 0;
  abort_->compare_exchange_strong(none, static_cast<std::uint32_t>(reason), std::memory_order_seq_cst);
  req().bell.ring();
  plan().bell.ring();
  part().bell.ring();
  ring_.bell().ring();
}

}  // namespace ft
