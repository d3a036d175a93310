"""The device's side of the mailbox: publish a layer, wait for a word, turn an answer into a DevicePlan.

Layout and protocol are csrc/core/mailbox.h's; this module knows the structs of a request header, a plan header and a
plan entry, and takes every offset as an argument. All kernels are one program. Host memory is registered with CUDA and
given by its device address.

- ``publish`` writes the request and raises ``req`` with a system-scope release. The sequence number is a device
  counter, so a captured graph counts on by itself.
- ``await_plan`` polls ``plan`` until it equals the counter, then copies counts, entries and routes into device memory
  and resolves slots and store records into addresses.
  The plan of one token comes in pieces that carry its number themselves, so that polling and reading are one trip.
- ``await_word`` only polls (for ``part``).

A wait ends with status 0 (seen), 1 (the abort word is not 0) or 2 (the time limit passed; the abort word is then
raised, so that the waits after it fall through at once). After 1 or 2 the plan has no entries, so the rest of the graph
runs without touching experts, and the status stays in ``plan.counts[STATUS]`` until ``clear_status``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import INTERPRETED, next_power_of_2, pointer_to
from freetoken.kernels.triton.plan import DevicePlan
from freetoken.kernels.triton.router import SCORINGS, choose_experts, rank_experts
from freetoken.kernels.triton.words import (
    ABORT_PARTIAL_LATE,
    ABORT_PLAN_LATE,
    stamp,
    store_release_system,
    wait_pieces,
    wait_word,
)

# Pieces of a brief plan: one for the counts and one for each entry that there can be.
BRIEF_PIECES = 32
# The most tokens for which publishing can choose the experts too.
MAX_CHOOSING_TOKENS = 32


@dataclass(frozen=True)
class MailboxAddresses:
    """Device addresses (int) of the regions of one mailbox, as its header's offsets give them."""

    req: int
    plan: int
    part: int
    abort: int
    request: int
    hidden: int
    ids: int
    weights: int
    admit: int
    plan_header: int
    entries: int
    routes: int
    partial: int
    stamps: int = 0
    """Where the client's stamps of layer 0 lie; 0: stages are not stamped."""
    stamps_stride_bytes: int = 0
    brief: int = 0
    """Where the plan of one token lies in pieces; 0: it is read like any other."""
    hint: int = 0
    hint_request: int = 0
    ahead: int = 0
    """Of hints and their answers, see ``lookahead``."""

    def layer_stamps(self, layer: int) -> int:
        """Address of the client's stamps of an expert layer (see ``STAMP_PUBLISHED``), or 0."""
        return self.stamps + layer * self.stamps_stride_bytes if self.stamps else 0


@triton.jit(do_not_specialize=["layer", "flags"])
def _publish_kernel(
    seq_ptr, step_id_ptr, num_real_ptr, logits_ptr, bias_ptr, ids_ptr, weights_ptr, hidden_ptr, admit_ptr, req, request,
    hidden_out, ids_out, weights_out, admit_out, stamps, layer, flags, scaling,
    TOKENS: tl.constexpr, TOKENS_POW2: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    CHOOSE: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    seq = tl.load(seq_ptr) + 1
    step_id = tl.load(step_id_ptr)
    num_real = tl.load(num_real_ptr)
    # Hidden rows first: they are most of the bytes and travel while the experts are chosen. Only the CPU reads them, so
    # they stay here when it takes no part (kDeviceOnly).
    if (flags & 2) == 0:
        for start in range(0, TOKENS * HIDDEN, HIDDEN_BLOCK):
            cell = start + tl.arange(0, HIDDEN_BLOCK)
            x = tl.load(hidden_ptr + cell, mask=cell < TOKENS * HIDDEN, other=0.0)
            tl.store(pointer_to(hidden_out, tl.float32) + cell, x.to(tl.float32), mask=cell < TOKENS * HIDDEN)
    row = tl.arange(0, TOKENS_POW2)
    column = tl.arange(0, TOP_K_POW2)
    cell = row[:, None] * TOP_K + column[None, :]
    keep = (row < TOKENS)[:, None] & (column < TOP_K)[None, :]
    if CHOOSE:
        expert = tl.arange(0, EXPERTS_POW2)
        mask = (row < TOKENS)[:, None] & (expert < NUM_EXPERTS)[None, :]
        logits = tl.load(logits_ptr + row[:, None] * NUM_EXPERTS + expert[None, :], mask=mask, other=0.0)
        bias = tl.zeros([EXPERTS_POW2], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
        if TOKENS == 1:
            ids, weights = rank_experts(
                tl.reshape(logits, [EXPERTS_POW2]), bias, EXPERTS_POW2, NUM_EXPERTS, TOP_K_POW2, TOP_K, SCORING,
                RENORMALIZE, scaling,
            )  # fmt: skip
            ids = ids[None, :]
            weights = weights[None, :]
        else:
            ids, weights = choose_experts(
                logits, bias, EXPERTS_POW2, NUM_EXPERTS, TOP_K, TOP_K_POW2, TOKENS_POW2, SCORING, RENORMALIZE, scaling
            )
    else:
        ids = tl.load(ids_ptr + cell, mask=keep, other=-1)
        weights = tl.load(weights_ptr + cell, mask=keep, other=0.0)
    real = (row < num_real)[:, None]
    ids = tl.where(real, ids, -1)
    weights = tl.where(real, weights, 0.0)
    if CHOOSE:
        tl.store(ids_ptr + cell, ids, mask=keep)
        tl.store(weights_ptr + cell, weights, mask=keep)
    tl.store(pointer_to(ids_out, tl.int32) + cell, ids, mask=keep)
    tl.store(pointer_to(weights_out, tl.float32) + cell, weights, mask=keep)
    admit = tl.load(admit_ptr + row, mask=row < TOKENS, other=0)
    tl.store(pointer_to(admit_out, tl.uint8) + row, admit, mask=row < TOKENS)
    header = pointer_to(request, tl.int32)
    tl.store(header, seq)
    tl.store(header + 1, layer)
    tl.store(pointer_to(request, tl.int64) + 1, step_id)
    tl.store(header + 4, TOKENS)
    tl.store(header + 5, TOP_K)
    tl.store(header + 6, flags)
    tl.store(seq_ptr, seq)
    stamp(stamps, 0, INTERPRET)
    if stamps != 0:
        tl.store(pointer_to(stamps, tl.int64) + 4, seq.to(tl.int64))
    store_release_system(req, seq, INTERPRET)


def publish(
    box: MailboxAddresses,
    seq: Tensor,
    step_id: Tensor,
    num_real: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    admit: Tensor,
    layer: int,
    *,
    flags: int = 0,
    logits: Tensor | None = None,
    scoring: str = "softmax",
    renormalize: bool = True,
    scaling: float = 1.0,
    bias: Tensor | None = None,
) -> None:
    """Publish T rows of expert layer ``layer``.

    ``seq`` int32 [1] (incremented), ``step_id`` int64 [1], ``num_real`` int32 [1] (rows from there on are padding: id
    -1, weight 0), ``hidden`` [T, H], ``ids`` int32 and ``weights`` float32 [T, K], ``admit`` uint8 [T]; contiguous.
    With ``logits`` float32 [T, E] the experts are chosen here as by ``router.top_k`` and ids and weights are written
    too.
    """
    tokens, hidden_size = hidden.shape
    k = ids.shape[1]
    num_experts = logits.shape[1] if logits is not None else 1
    if logits is not None and tokens > MAX_CHOOSING_TOKENS:
        raise ValueError(
            f"publish chooses experts for at most {MAX_CHOOSING_TOKENS} tokens, not {tokens}: use top_k before"
        )
    _publish_kernel[(1,)](
        seq, step_id, num_real, hidden if logits is None else logits, hidden if bias is None else bias, ids, weights,
        hidden, admit, box.req, box.request, box.hidden, box.ids, box.weights, box.admit,
        box.layer_stamps(layer), layer, flags, scaling,
        TOKENS=tokens, TOKENS_POW2=next_power_of_2(tokens), HIDDEN=hidden_size,
        HIDDEN_BLOCK=min(4096, next_power_of_2(tokens * hidden_size)), TOP_K=k, TOP_K_POW2=next_power_of_2(k),
        NUM_EXPERTS=num_experts, EXPERTS_POW2=next_power_of_2(num_experts), CHOOSE=logits is not None,
        SCORING=SCORINGS[scoring], RENORMALIZE=renormalize, HAS_BIAS=bias is not None, INTERPRET=INTERPRETED,
        num_warps=4 if tokens <= 4 else 8,
    )  # fmt: skip


@triton.jit
def _await_plan_kernel(
    seq_ptr, store_ptr, counts_ptr, entries_ptr, addresses_ptr, routes_ptr, on_gpu_ptr, plan, abort, header, entries,
    routes, stamps, slots, slot_stride, limit_ns, late_reason,
    ENTRIES_POW2: tl.constexpr, MAX_ENTRIES: tl.constexpr, ROUTES_POW2: tl.constexpr, MAX_ROUTES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    seq = tl.load(seq_ptr)
    route = tl.arange(0, ROUTES_POW2)
    tl.store(on_gpu_ptr + route, tl.zeros([ROUTES_POW2], tl.int32), mask=route < MAX_ROUTES)
    status = wait_word(plan, abort, seq, limit_ns, INTERPRET)
    stamp(stamps, 1, INTERPRET)
    good = status == 0
    if status == 2:
        store_release_system(abort, late_reason, INTERPRET)
    # Masks depend on the outcome, so no read can move ahead of the wait.
    head = pointer_to(header, tl.int32)
    num_hits = tl.load(head + 1, mask=good, other=0)
    num_fetches = tl.load(head + 2, mask=good, other=0)
    num_cpu = tl.load(head + 3, mask=good, other=0)
    num_routes = tl.minimum(tl.load(head + 4, mask=good, other=0), MAX_ROUTES)
    num_admitted = tl.load(head + 5, mask=good, other=0)
    num_evicted = tl.load(head + 6, mask=good, other=0)
    entry = tl.arange(0, ENTRIES_POW2)
    column = tl.arange(0, 8)
    cell = entry[:, None] * 8 + column[None, :]
    # All entries that there may be: their number is on its way at the same time.
    room = (entry < MAX_ENTRIES) & good
    row = tl.load(pointer_to(entries, tl.int32) + cell, mask=room[:, None] & (column >= 0)[None, :], other=0)
    chosen = tl.load(pointer_to(routes, tl.int32) + route, mask=(route < MAX_ROUTES) & good, other=0)
    num_gpu = tl.minimum(num_hits + num_fetches, MAX_ENTRIES)
    live = entry < num_gpu
    expert = tl.sum(tl.where((column == 0)[None, :], row, 0), axis=1)
    source_slot = tl.sum(tl.where((column == 2)[None, :], row, 0), axis=1)
    destination_slot = tl.sum(tl.where((column == 3)[None, :], row, 0), axis=1)
    count = tl.sum(tl.where((column == 5)[None, :], row, 0), axis=1)
    known = live & (expert >= 0) & (expert < NUM_EXPERTS)
    stored = tl.load(store_ptr + expert, mask=known & (source_slot < 0), other=0)
    source = tl.where(source_slot < 0, stored, slots + source_slot.to(tl.int64) * slot_stride)
    destination = tl.where(destination_slot < 0, 0, slots + destination_slot.to(tl.int64) * slot_stride)
    gpu_routes = tl.sum(tl.where(live, count, 0), axis=0)
    tiles = tl.where(live[:, None] & (column == 7)[None, :], row, 0)
    split_tiles = tl.sum(tl.sum(tiles, axis=1), axis=0)
    num_split = tl.sum(tl.sum((tiles > 0).to(tl.int32), axis=1), axis=0)
    tl.store(entries_ptr + cell, row, mask=(entry < MAX_ENTRIES)[:, None] & (column >= 0)[None, :])
    tl.store(addresses_ptr + entry * 2, source, mask=live)
    tl.store(addresses_ptr + entry * 2 + 1, destination, mask=live)
    inside = (route < num_routes) & (chosen >= 0) & (chosen < MAX_ROUTES)
    tl.store(routes_ptr + route, chosen, mask=route < num_routes)
    tl.store(counts_ptr, num_gpu)
    tl.store(counts_ptr + 1, num_hits)
    tl.store(counts_ptr + 2, num_fetches | (split_tiles << 16))
    tl.store(counts_ptr + 3, num_cpu | (num_split << 16))
    tl.store(counts_ptr + 4, gpu_routes)
    tl.store(counts_ptr + 5, num_admitted | (num_evicted << 16))
    tl.store(counts_ptr + 6, status, mask=status != 0)
    tl.store(counts_ptr + 7, num_gpu)  # one row block per entry
    tl.debug_barrier()
    tl.store(on_gpu_ptr + chosen, (route < gpu_routes).to(tl.int32), mask=inside)


@triton.jit
def _await_brief_kernel(
    seq_ptr, store_ptr, counts_ptr, entries_ptr, addresses_ptr, routes_ptr, on_gpu_ptr, brief, abort, stamps, slots,
    slot_stride, ahead_place, limit_ns, late_reason,
    PIECES: tl.constexpr, MAX_ENTRIES: tl.constexpr, NUM_EXPERTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    seq = tl.load(seq_ptr)
    piece = tl.arange(0, PIECES)
    entry = piece - 1
    inside = (entry >= 0) & (entry < MAX_ENTRIES)
    tl.store(on_gpu_ptr + entry, tl.zeros([PIECES], tl.int32), mask=inside)
    state, packed, slot, tiles = wait_pieces(brief, abort, seq, limit_ns, MAX_ENTRIES + 1, PIECES, INTERPRET)
    stamp(stamps, 1, INTERPRET)
    status = tl.max(state, axis=0)
    if status == 2:
        store_release_system(abort, late_reason, INTERPRET)
    packed = tl.where(status == 0, packed, 0)
    kinds = tl.sum(tl.where(piece == 0, packed, 0), axis=0)
    changes = tl.sum(tl.where((piece == 0) & (status == 0), slot, 0), axis=0)
    num_hits = kinds & 255
    num_fetches = (kinds >> 8) & 255
    num_cpu = (kinds >> 16) & 255
    num_gpu = tl.minimum(num_hits + num_fetches, MAX_ENTRIES)
    live = inside & (entry < num_gpu)
    kind = (packed >> 24) & 255
    route = (packed >> 16) & 255
    expert = packed & 0xFFFF
    is_ahead = kind == 3
    source_slot = tl.where(kind == 0, slot, -1)
    destination_slot = tl.where(kind == 0, -1, slot)
    stored = tl.load(store_ptr + expert, mask=live & (source_slot < 0) & (expert < NUM_EXPERTS), other=0)
    stored = tl.where(is_ahead, ahead_place, stored)
    source = tl.where(source_slot < 0, stored, slots + source_slot.to(tl.int64) * slot_stride)
    destination = tl.where(destination_slot < 0, 0, slots + destination_slot.to(tl.int64) * slot_stride)
    own_tiles = tl.where(live, (tiles >> 16) & 0xFFFF, 0)
    split_tiles = tl.sum(own_tiles, axis=0)
    num_split = tl.sum((own_tiles > 0).to(tl.int32), axis=0)
    cell = entries_ptr + entry * 8
    tl.store(cell, expert, mask=inside)
    tl.store(cell + 1, tl.where(is_ahead, 0, kind), mask=inside)  # it is near by now
    tl.store(cell + 2, source_slot, mask=inside)
    tl.store(cell + 3, destination_slot, mask=inside)
    tl.store(cell + 4, entry, mask=inside)
    tl.store(cell + 5, tl.where(inside, 1, 0), mask=inside)
    tl.store(cell + 6, tiles & 0xFFFF, mask=inside)
    tl.store(cell + 7, (tiles >> 16) & 0xFFFF, mask=inside)
    tl.store(addresses_ptr + entry * 2, source, mask=live)
    tl.store(addresses_ptr + entry * 2 + 1, destination, mask=live)
    tl.store(routes_ptr + entry, route, mask=inside)
    tl.store(counts_ptr, num_gpu)
    tl.store(counts_ptr + 1, num_hits)
    tl.store(counts_ptr + 2, num_fetches | (split_tiles << 16))
    tl.store(counts_ptr + 3, num_cpu | (num_split << 16))
    tl.store(counts_ptr + 4, num_gpu)
    tl.store(counts_ptr + 5, changes)
    tl.store(counts_ptr + 6, status, mask=status != 0)
    tl.store(counts_ptr + 7, num_gpu)  # one row block per entry
    tl.debug_barrier()
    tl.store(on_gpu_ptr + route, live.to(tl.int32), mask=live & (route < MAX_ENTRIES))


def await_plan(
    box: MailboxAddresses,
    seq: Tensor,
    store: Tensor,
    slots_address: int,
    slot_stride_bytes: int,
    plan: DevicePlan,
    limit_ns: int,
    *,
    stamps: int = 0,
    one_token: bool = False,
    ahead_place: int = 0,
) -> None:
    """Wait for the plan of the last publish and fill ``plan``; ``one_token``: the publish was of one.

    ``store`` int64 [E]: device addresses of this layer's records in host memory (0 where it cannot be read: such an
    expert must never be planned as a fetch). A slot s lies at ``slots_address + s * slot_stride_bytes``. ``stamps``: as
    ``MailboxAddresses.layer_stamps`` gives it. ``ahead_place``: where a record copied ahead of time lies.
    """
    if one_token and box.brief and plan.max_routes < BRIEF_PIECES:
        _await_brief_kernel[(1,)](
            seq, store, plan.counts, plan.entries, plan.addresses, plan.routes, plan.on_gpu, box.brief, box.abort,
            stamps, slots_address, slot_stride_bytes, ahead_place, limit_ns, ABORT_PLAN_LATE, PIECES=BRIEF_PIECES,
            MAX_ENTRIES=plan.max_routes, NUM_EXPERTS=store.shape[0], INTERPRET=INTERPRETED, num_warps=1,
        )  # fmt: skip
        return
    warps = 1 if plan.max_routes <= 512 else 8
    _await_plan_kernel[(1,)](
        seq, store, plan.counts, plan.entries, plan.addresses, plan.routes, plan.on_gpu, box.plan, box.abort,
        box.plan_header, box.entries, box.routes, stamps, slots_address, slot_stride_bytes, limit_ns, ABORT_PLAN_LATE,
        ENTRIES_POW2=next_power_of_2(plan.max_entries), MAX_ENTRIES=plan.max_entries,
        ROUTES_POW2=next_power_of_2(plan.max_routes), MAX_ROUTES=plan.max_routes, NUM_EXPERTS=store.shape[0],
        INTERPRET=INTERPRETED, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _await_word_kernel(seq_ptr, counts_ptr, word, abort, stamps, limit_ns, late_reason, ALWAYS: tl.constexpr,
                       INTERPRET: tl.constexpr):  # fmt: skip
    stamp(stamps, 2, INTERPRET)
    if ALWAYS or tl.load(counts_ptr + 3) > 0:
        status = wait_word(word, abort, tl.load(seq_ptr), limit_ns, INTERPRET)
        stamp(stamps, 3, INTERPRET)
        if status == 2:
            store_release_system(abort, late_reason, INTERPRET)
        tl.store(counts_ptr + 6, status, mask=status != 0)


def await_part(
    box: MailboxAddresses, seq: Tensor, plan: DevicePlan, limit_ns: int, *, always: bool = False, stamps: int = 0
) -> None:
    """Wait for the CPU share of the last plan, if it has one (or ``always``)."""
    _await_word_kernel[(1,)](
        seq, plan.counts, box.part, box.abort, stamps, limit_ns, ABORT_PARTIAL_LATE, ALWAYS=always,
        INTERPRET=INTERPRETED, num_warps=1,
    )  # fmt: skip


def clear_status(plan: DevicePlan) -> None:
    """Forget a failed wait, before the next step."""
    plan.counts[6:7].zero_()
