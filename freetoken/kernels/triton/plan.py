"""What the expert kernels are told: which experts, where each one's bytes lie, and which routes it serves.

A *route* ``t * K + k`` is token t's k-th expert. A *plan* groups routes by expert and lies in device memory, so that a
captured graph reads a new plan at every replay: kernels have fixed grids over ``max_entries``, and programs beyond the
counts return at once. In decode the plan comes from the mailbox (``mailbox.py``), in prefill ``group_routes`` makes it
on the device from the router's ids.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import next_power_of_2

# Columns of ``DevicePlan.counts``.
ENTRIES, HITS, FETCHES, CPU, ROUTES, CHANGES, STATUS, BLOCKS = range(8)
# Columns of a row of ``DevicePlan.entries``: the first six are a PlanEntry of csrc/core/mailbox.h, word for word.
EXPERT, KIND, SOURCE_SLOT, DESTINATION_SLOT, FIRST_ROUTE, NUM_ROUTES, FIRST_TILE, NUM_TILES = range(8)
ENTRY_COLUMNS = 8
# Kinds, as csrc/core/mailbox.h numbers them.
KIND_HIT, KIND_FETCH, KIND_CPU = range(3)


@dataclass(frozen=True)
class PlanEntry:
    """One expert of a plan, for ``DevicePlan.fill``. ``source`` and ``destination`` are device-visible addresses,
    multiples of 16; ``destination`` 0 fills no slot. ``num_tiles`` 0 means all tiles of the record."""

    kind: int
    expert: int
    source: int
    routes: Sequence[int]
    destination: int = 0
    first_tile: int = 0
    num_tiles: int = 0


@dataclass(frozen=True)
class DevicePlan:
    """A plan for up to D entries and T * K routes, on one device.

    ``counts`` int32 [8]: entries that the GPU runs, then hits, fetches and CPU entries among all (low 16 bits; high: of
    a record split by tiles, those fetched, with the fetches, and that there is one, with the CPU entries), routes of
    GPU entries, admissions (low 16 bits) and evictions (high), a status (0 good) and row blocks. A split record's CPU
    entry has no row: D rows hold what the GPU runs. ``entries`` int32 [D, 8]
    and ``addresses`` int64 [D, 2] (source, destination) hold one row an entry, those of the GPU first. ``routes`` int32
    [T * K] has the routes grouped by entry. ``on_gpu`` int32 [T * K] is 1 for each route of a GPU entry, by route.
    """

    counts: Tensor
    entries: Tensor
    addresses: Tensor
    routes: Tensor
    on_gpu: Tensor

    @classmethod
    def empty(cls, max_entries: int, max_routes: int, device: torch.device | str) -> DevicePlan:
        """A plan with no entries."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            counts=zeros(8),
            entries=zeros(max_entries, ENTRY_COLUMNS),
            addresses=zeros(max_entries, 2, dtype=torch.int64),
            routes=zeros(max_routes),
            on_gpu=zeros(max_routes),
        )

    @property
    def max_entries(self) -> int:
        """D: what fixed grids are made for."""
        return self.entries.shape[0]

    @property
    def max_routes(self) -> int:
        """T * K at most."""
        return self.routes.shape[0]

    def fill(self, entries: Sequence[PlanEntry]) -> None:
        """Write a plan from the host. Raises ``ValueError`` when it does not fit or an address is not a multiple of
        16."""
        if len(entries) > self.max_entries:
            raise ValueError(f"{len(entries)} plan entries exceed the {self.max_entries} that the plan holds")
        ordered = sorted(entries, key=lambda entry: entry.kind)
        rows = torch.zeros(self.entries.shape, dtype=torch.int32)
        addresses = torch.zeros(self.addresses.shape, dtype=torch.int64)
        routes: list[int] = []
        on_gpu = torch.zeros(self.max_routes, dtype=torch.int32)
        kinds = [0, 0, 0]
        for i, entry in enumerate(ordered):
            for name, address in (("source", entry.source), ("destination", entry.destination)):
                if address % 16:
                    raise ValueError(f"{name} address {address:#x} of expert {entry.expert} is not a multiple of 16")
            values = (
                entry.expert,
                entry.kind,
                -1,
                -1,
                len(routes),
                len(entry.routes),
                entry.first_tile,
                entry.num_tiles,
            )
            rows[i] = torch.tensor(values, dtype=torch.int32)
            addresses[i] = torch.tensor((entry.source, entry.destination))
            kinds[entry.kind] += 1
            if entry.kind != KIND_CPU:
                on_gpu[list(entry.routes)] = 1
            routes.extend(entry.routes)
        if len(routes) > self.max_routes:
            raise ValueError(f"{len(routes)} routes exceed the {self.max_routes} that the plan holds")
        gpu_routes = int(on_gpu.sum())
        counts = (kinds[0] + kinds[1], *kinds, gpu_routes, 0, 0, kinds[0] + kinds[1])
        self.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        self.entries.copy_(rows)
        self.addresses.copy_(addresses)
        self.routes[: len(routes)].copy_(torch.tensor(routes, dtype=torch.int32))
        self.on_gpu.copy_(on_gpu)


@triton.jit
def _group_routes_kernel(
    ids_ptr,  # int32 [N], -1: no route
    addresses_ptr,  # int64 [E]
    counts_ptr,
    entries_ptr,
    out_addresses_ptr,
    routes_ptr,
    on_gpu_ptr,
    num_routes,
    NUM_EXPERTS: tl.constexpr,
    ENTRY_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    source = tl.load(addresses_ptr + expert)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_routes, BLOCK):
        ids = tl.load(ids_ptr + start + lanes, mask=start + lanes < num_routes, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
        mine += (ids == expert).to(tl.int32)
    first = tl.sum(before, axis=0)
    count = tl.sum(mine, axis=0)
    row = entries_ptr + expert * ENTRY_COLUMNS
    tl.store(row + 0, expert)
    tl.store(row + 1, 0)
    tl.store(row + 2, -1)
    tl.store(row + 3, -1)
    tl.store(row + 4, first)
    tl.store(row + 5, count)
    tl.store(row + 6, 0)
    tl.store(row + 7, 0)
    tl.store(out_addresses_ptr + expert * 2, source)
    tl.store(out_addresses_ptr + expert * 2 + 1, tl.zeros([], tl.int64))
    if expert == NUM_EXPERTS - 1:
        tl.store(counts_ptr, NUM_EXPERTS)
        tl.store(counts_ptr + 1, NUM_EXPERTS)
        tl.store(counts_ptr + 2, 0)
        tl.store(counts_ptr + 3, 0)
        tl.store(counts_ptr + 4, first + count)
    position = first
    for start in range(0, num_routes, BLOCK):
        inside = start + lanes < num_routes
        ids = tl.load(ids_ptr + start + lanes, mask=inside, other=-1)
        match = ids == expert
        rank = tl.cumsum(match.to(tl.int32), axis=0)
        tl.store(routes_ptr + position + rank - 1, start + lanes, mask=match)
        if expert == 0:
            tl.store(on_gpu_ptr + start + lanes, (ids >= 0).to(tl.int32), mask=inside)
        position += tl.sum(match.to(tl.int32), axis=0)


def group_routes(ids: Tensor, addresses: Tensor, plan: DevicePlan) -> None:
    """Fill ``plan`` on the device: entry e is expert e with its routes in ascending order (possibly none).

    ``ids`` int32 [T, K], -1 for no route; ``addresses`` int64 [E], where each expert's record lies. No host
    synchronisation.
    """
    num_experts = addresses.shape[0]
    if plan.max_entries < num_experts or plan.max_routes < ids.numel():
        raise ValueError(
            f"a plan for {plan.max_entries} entries and {plan.max_routes} routes is too small for {num_experts} "
            f"experts and {ids.numel()} routes"
        )
    _group_routes_kernel[(num_experts,)](
        ids, addresses, plan.counts, plan.entries, plan.addresses, plan.routes, plan.on_gpu, ids.numel(),
        NUM_EXPERTS=num_experts, ENTRY_COLUMNS=ENTRY_COLUMNS,
        BLOCK=min(4096, max(128, next_power_of_2(ids.numel()))), num_warps=8,
    )  # fmt: skip


@triton.jit
def _block_table_kernel(
    entries_ptr,
    counts_ptr,
    block_entry_ptr,
    block_first_ptr,
    NUM_ENTRIES: tl.constexpr,
    ENTRIES_POW2: tl.constexpr,
    ENTRY_COLUMNS: tl.constexpr,
    BLOCK_ROUTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    entries = tl.arange(0, ENTRIES_POW2)
    count = tl.load(entries_ptr + entries * ENTRY_COLUMNS + 5, mask=entries < NUM_ENTRIES, other=0)
    live = tl.load(counts_ptr)
    blocks = tl.where(entries < live, (count + BLOCK_ROUTES - 1) // BLOCK_ROUTES, 0)
    end = tl.cumsum(blocks, axis=0)
    start = end - blocks
    tl.store(counts_ptr + 7, tl.sum(blocks, axis=0))
    longest = tl.max(blocks, axis=0)
    for i in range(longest):
        keep = i < blocks
        tl.store(block_entry_ptr + start + i, entries, mask=keep & (start + i < MAX_BLOCKS))
        tl.store(
            block_first_ptr + start + i, tl.zeros_like(entries) + i * BLOCK_ROUTES, mask=keep & (start + i < MAX_BLOCKS)
        )


@dataclass(frozen=True)
class BlockTable:
    """Row blocks of a grouped GEMM: block i covers up to ``block_routes`` routes of entry ``entry[i]`` from
    ``first[i]`` on (relative to the entry's own). The number in use is ``plan.counts[BLOCKS]``."""

    entry: Tensor
    first: Tensor
    block_routes: int

    @classmethod
    def one_per_entry(cls, plan: DevicePlan, block_routes: int) -> BlockTable:
        """For plans whose entries have at most ``block_routes`` routes (decode batches): block i is entry i, always."""
        device = plan.counts.device
        blocks = torch.arange(plan.max_entries, dtype=torch.int32, device=device)
        return cls(blocks, torch.zeros_like(blocks), block_routes)

    @property
    def max_blocks(self) -> int:
        """What fixed grids are made for."""
        return self.entry.shape[0]


def max_row_blocks(num_routes: int, num_entries: int, block_routes: int) -> int:
    """The most row blocks that ``num_routes`` can need when spread over ``num_entries`` in the worst way."""
    return min(num_routes, num_routes // block_routes + min(num_entries, num_routes))


def build_block_table(plan: DevicePlan, num_routes: int, block_routes: int) -> BlockTable:
    """Row blocks of at most ``block_routes`` for a plan whose routes number at most ``num_routes``; no
    synchronisation."""
    blocks = max_row_blocks(num_routes, plan.max_entries, block_routes)
    device = plan.counts.device
    table = BlockTable(
        torch.empty(blocks, dtype=torch.int32, device=device),
        torch.empty(blocks, dtype=torch.int32, device=device),
        block_routes,
    )
    fill_block_table(plan, table)
    return table


def fill_block_table(plan: DevicePlan, table: BlockTable) -> None:
    """Like ``build_block_table`` into tensors that exist (for graphs)."""
    _block_table_kernel[(1,)](
        plan.entries, plan.counts, table.entry, table.first,
        NUM_ENTRIES=plan.max_entries, ENTRIES_POW2=next_power_of_2(plan.max_entries), ENTRY_COLUMNS=ENTRY_COLUMNS,
        BLOCK_ROUTES=table.block_routes, MAX_BLOCKS=table.max_blocks, num_warps=4,
    )  # fmt: skip
