"""The mailbox for more tokens than one program carries, and plans whose records are put in place before they are used.

Contract. ``publish_routes`` publishes T rows, T a run-time value: ids, weights and admission, and hidden rows unless
they are for the device alone (csrc/core/mailbox.h, kDeviceOnly). ``await_placed_plan`` waits like
``mailbox.await_plan`` (the same statuses and counts) and decides for every GPU entry where its record is read:

- a hit: its slot;
- staged (``staged`` int64 [E], 0: not): the staged copy; an admitted one is to be copied from there to its slot;
- else, admitted: its slot, after a copy from the store;
- else one of ``num_spares`` spare places, after a copy from the store; when all are taken, the store itself.

``plan.addresses[e, 0]`` is where to read (so ``expert_gemm`` runs with ``fetched=False``), ``copies`` int64 [D, 2] the
(source, destination) of the copy that must come first, destination 0 for none. ``copy_records`` makes those copies,
from the store through PCIe, with any grid. Exact.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import INTERPRETED, cdiv, next_power_of_2, pointer_to
from freetoken.kernels.triton.mailbox import MailboxAddresses
from freetoken.kernels.triton.plan import DevicePlan
from freetoken.kernels.triton.words import ABORT_PLAN_LATE, store_release_system, wait_word

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _write_routes_kernel(
    num_real_ptr, ids_ptr, weights_ptr, admit_ptr, ids_out, weights_out, admit_out, num_tokens,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_real = tl.load(num_real_ptr)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < num_tokens * TOP_K
    real = cell // TOP_K < num_real
    ids = tl.where(real, tl.load(ids_ptr + cell, mask=inside, other=-1), -1)
    weights = tl.where(real, tl.load(weights_ptr + cell, mask=inside, other=0.0), 0.0)
    tl.store(pointer_to(ids_out, tl.int32) + cell, ids, mask=inside)
    tl.store(pointer_to(weights_out, tl.float32) + cell, weights, mask=inside)
    token = cell < num_tokens
    admit = tl.load(admit_ptr + cell, mask=token & (cell < num_real), other=0)
    tl.store(pointer_to(admit_out, tl.uint8) + cell, admit, mask=token)


@triton.jit
def _write_rows_kernel(hidden_ptr, hidden_out, size, BLOCK: tl.constexpr):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(hidden_ptr + cell, mask=cell < size, other=0.0)
    tl.store(pointer_to(hidden_out, tl.float32) + cell, x.to(tl.float32), mask=cell < size)


@triton.jit(do_not_specialize=["num_tokens", "layer", "flags"])
def _raise_request_kernel(
    seq_ptr, step_id_ptr, req, request, num_tokens, layer, flags, TOP_K: tl.constexpr, INTERPRET: tl.constexpr
):
    # A launch of its own: all that the programs before have written is seen by whoever sees the number.
    seq = tl.load(seq_ptr) + 1
    step_id = tl.load(step_id_ptr)
    header = pointer_to(request, tl.int32)
    tl.store(header, seq)
    tl.store(header + 1, layer)
    tl.store(pointer_to(request, tl.int64) + 1, step_id)
    tl.store(header + 4, num_tokens)
    tl.store(header + 5, TOP_K)
    tl.store(header + 6, flags)
    tl.store(seq_ptr, seq)
    store_release_system(req, seq, INTERPRET)


def publish_routes(
    box: MailboxAddresses,
    seq: Tensor,
    step_id: Tensor,
    num_real: Tensor,
    ids: Tensor,
    weights: Tensor,
    admit: Tensor,
    layer: int,
    *,
    flags: int,
    hidden: Tensor | None = None,
) -> None:
    """Publish T rows of expert layer ``layer``; without ``hidden`` [T, H] ``flags`` must have kDeviceOnly.

    ``seq`` int32 [1] (incremented), ``step_id`` int64 [1], ``num_real`` int32 [1] (rows from there on are padding: id
    -1, weight 0), ``ids`` int32 and ``weights`` float32 [T, K], ``admit`` uint8 [T]; contiguous.
    """
    tokens, top_k = ids.shape
    if hidden is not None:
        _write_rows_kernel[(cdiv(hidden.numel(), 4096),)](
            hidden, box.hidden, hidden.numel(), BLOCK=4096, num_warps=8
        )  # fmt: skip
    _write_routes_kernel[(cdiv(tokens * top_k, _BLOCK),)](
        num_real, ids, weights, admit, box.ids, box.weights, box.admit, tokens, TOP_K=top_k, BLOCK=_BLOCK, num_warps=4
    )
    _raise_request_kernel[(1,)](
        seq, step_id, box.req, box.request, tokens, layer, flags, TOP_K=top_k, INTERPRET=INTERPRETED, num_warps=1
    )


@triton.jit(do_not_specialize=["max_routes", "num_spares"])
def _place_kernel(
    seq_ptr, store_ptr, staged_ptr, counts_ptr, entries_ptr, addresses_ptr, copies_ptr, on_gpu_ptr, plan, abort, header,
    entries, slots, slot_stride, spares, spare_stride, num_spares, max_routes, limit_ns, late_reason,
    ENTRIES_POW2: tl.constexpr, MAX_ENTRIES: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    seq = tl.load(seq_ptr)
    for start in range(0, max_routes, BLOCK):
        route = start + tl.arange(0, BLOCK)
        tl.store(on_gpu_ptr + route, tl.zeros([BLOCK], tl.int32), mask=route < max_routes)
    status = wait_word(plan, abort, seq, limit_ns, INTERPRET)
    good = status == 0
    if status == 2:
        store_release_system(abort, late_reason, INTERPRET)
    # Masks depend on the outcome, so no read can move ahead of the wait.
    head = pointer_to(header, tl.int32)
    num_hits = tl.load(head + 1, mask=good, other=0)
    num_fetches = tl.load(head + 2, mask=good, other=0)
    num_cpu = tl.load(head + 3, mask=good, other=0)
    num_admitted = tl.load(head + 5, mask=good, other=0)
    num_evicted = tl.load(head + 6, mask=good, other=0)
    entry = tl.arange(0, ENTRIES_POW2)
    column = tl.arange(0, 8)
    cell = entry[:, None] * 8 + column[None, :]
    room = (entry < MAX_ENTRIES) & good
    row = tl.load(pointer_to(entries, tl.int32) + cell, mask=room[:, None] & (column >= 0)[None, :], other=0)
    num_gpu = tl.minimum(num_hits + num_fetches, MAX_ENTRIES)
    live = entry < num_gpu
    expert = tl.sum(tl.where((column == 0)[None, :], row, 0), axis=1)
    source_slot = tl.sum(tl.where((column == 2)[None, :], row, 0), axis=1)
    destination_slot = tl.sum(tl.where((column == 3)[None, :], row, 0), axis=1)
    count = tl.sum(tl.where((column == 5)[None, :], row, 0), axis=1)
    missing = live & (source_slot < 0) & (expert >= 0) & (expert < NUM_EXPERTS)
    stored = tl.load(store_ptr + expert, mask=missing, other=0)
    staged = tl.load(staged_ptr + expert, mask=missing, other=0)
    slot = slots + source_slot.to(tl.int64) * slot_stride
    destination = tl.where(missing & (destination_slot >= 0), slots + destination_slot.to(tl.int64) * slot_stride, 0)
    homeless = missing & (staged == 0) & (destination == 0)
    rank = tl.cumsum(homeless.to(tl.int32), axis=0) - 1
    spare = tl.where(homeless & (rank < num_spares), spares + rank.to(tl.int64) * spare_stride, 0)
    place = tl.where(staged != 0, staged, tl.where(destination != 0, destination, spare))
    source = tl.where(missing, tl.where(place != 0, place, stored), slot)
    copy_from = tl.where(staged != 0, staged, stored)
    copy_to = tl.where(staged != 0, destination, place)
    tl.store(entries_ptr + cell, row, mask=(entry < MAX_ENTRIES)[:, None] & (column >= 0)[None, :])
    tl.store(addresses_ptr + entry * 2, source, mask=live)
    tl.store(addresses_ptr + entry * 2 + 1, tl.zeros([ENTRIES_POW2], tl.int64), mask=live)
    tl.store(copies_ptr + entry * 2, copy_from, mask=live)
    tl.store(copies_ptr + entry * 2 + 1, copy_to, mask=live)
    tl.store(counts_ptr, num_gpu)
    tl.store(counts_ptr + 1, num_hits)
    tl.store(counts_ptr + 2, num_fetches)
    tl.store(counts_ptr + 3, num_cpu)
    tl.store(counts_ptr + 4, tl.sum(tl.where(live, count, 0), axis=0))
    tl.store(counts_ptr + 5, num_admitted | (num_evicted << 16))
    tl.store(counts_ptr + 6, status, mask=status != 0)
    tl.store(counts_ptr + 7, num_gpu)


@triton.jit(do_not_specialize=["max_routes"])
def _read_routes_kernel(counts_ptr, routes_ptr, on_gpu_ptr, routes, max_routes, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (position < tl.load(counts_ptr + 4)) & (position < max_routes)
    route = tl.load(pointer_to(routes, tl.int32) + position, mask=inside, other=0)
    sound = inside & (route >= 0) & (route < max_routes)
    tl.store(routes_ptr + position, tl.where(sound, route, 0), mask=inside)
    tl.store(on_gpu_ptr + route, tl.full([BLOCK], 1, tl.int32), mask=sound)


def await_placed_plan(
    box: MailboxAddresses,
    seq: Tensor,
    store: Tensor,
    staged: Tensor,
    slots_address: int,
    slot_stride_bytes: int,
    spares: tuple[int, int, int],
    plan: DevicePlan,
    copies: Tensor,
    num_routes: int,
    limit_ns: int,
) -> None:
    """Wait for the plan of the last publish, of ``num_routes`` routes, and fill ``plan`` and ``copies``.

    ``store`` and ``staged`` int64 [E], device addresses; ``spares`` is (address, stride in bytes, number). Nothing of
    ``staged`` is read before it must be in place: the caller orders the copies of staging before ``copy_records``.
    """
    _place_kernel[(1,)](
        seq, store, staged, plan.counts, plan.entries, plan.addresses, copies, plan.on_gpu, box.plan, box.abort,
        box.plan_header, box.entries, slots_address, slot_stride_bytes, spares[0], spares[1], spares[2], num_routes,
        limit_ns, ABORT_PLAN_LATE, ENTRIES_POW2=next_power_of_2(plan.max_entries), MAX_ENTRIES=plan.max_entries,
        NUM_EXPERTS=store.shape[0], BLOCK=_BLOCK, INTERPRET=INTERPRETED, num_warps=4,
    )  # fmt: skip
    _read_routes_kernel[(cdiv(num_routes, _BLOCK),)](
        plan.counts, plan.routes, plan.on_gpu, box.routes, num_routes, BLOCK=_BLOCK, num_warps=4
    )


@triton.jit
def _copy_kernel(counts_ptr, copies_ptr, words, BLOCK: tl.constexpr):
    chunks = tl.cdiv(words, BLOCK)
    total = tl.load(counts_ptr) * chunks
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = work // chunks
        destination = tl.load(copies_ptr + entry * 2 + 1)
        if destination != 0:
            word = (work % chunks) * BLOCK + tl.arange(0, BLOCK)
            source = tl.load(copies_ptr + entry * 2)
            data = tl.load(pointer_to(source, tl.int32) + word, mask=word < words)
            tl.store(pointer_to(destination, tl.int32) + word, data, mask=word < words)


def copy_records(plan: DevicePlan, copies: Tensor, size_bytes: int, grid: int) -> None:
    """Make the copies that ``await_placed_plan`` asks for. Records have ``size_bytes`` bytes: a multiple of 4, for wide
    loads of 64."""
    copy_listed(plan.counts, copies, size_bytes, grid)


def copy_listed(count: Tensor, copies: Tensor, size_bytes: int, grid: int) -> None:
    """The first ``count`` (int32, one or more numbers) of ``copies`` int64 [N, 2], from and to; to 0: none."""
    _copy_kernel[(grid,)](count, copies, size_bytes // 4, BLOCK=4096, num_warps=8)


def move_records(copies: Tensor, size_bytes: int, grid: int) -> None:
    """``copies`` int64 [N, 2]: addresses to copy ``size_bytes`` (a multiple of 4) from and to, none of them twice."""
    count = torch.full((1,), len(copies), dtype=torch.int32, device=copies.device)
    copy_listed(count, copies, size_bytes, grid)
