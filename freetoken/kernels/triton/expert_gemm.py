"""Routed experts for many tokens: two grouped GEMMs over records by address, with in-kernel decoding of Q4_0.

Contract. A ``DevicePlan`` (from ``group_routes`` or the mailbox) and a ``BlockTable`` that cuts each entry's routes
into row blocks. ``gate_up`` makes ``act`` [T * K, I] (hidden's dtype, rows in the plan's route order): silu(gate x) *
(up x). ``down`` makes ``out`` [T * K, H] (float32 or hidden's dtype, rows by route): down @ act, without the route's
weight, which ``combine`` applies. Rows of routes that the GPU does not run stay unwritten.

Records lie in slots or staging: with ``fetched=True`` an entry of kind *fetch* is read at its destination, where
``fetch_records`` put it. Host memory works too but weights are then read once per row block.

Grid: row blocks * column blocks, fixed for graphs; programs beyond the number of blocks in use return at once. Sizes:
the hidden and intermediate sizes are multiples of 32 (Q4_0); any otherwise, those that are no multiples of 16 with
masked loads. Tolerance against ``reference.py``: 1e-2 relative to the norm for bfloat16 (both operands and ``act`` are
rounded), 2e-3 for float16, 1e-5 for float32 records and activations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import ONE_BITS, cdiv, pointer_to, silu_mul
from freetoken.kernels.triton.gemm_core import dense_dot, q4_0_multiply, q4_0_multiply_pair
from freetoken.kernels.triton.plan import ENTRY_COLUMNS, KIND_FETCH, BlockTable, DevicePlan
from freetoken.quant.record import RecordLayout

_DTYPES = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16}
# ``tl.dot`` refuses a shorter inner dimension on every NVIDIA card (the interpreter does not).
_SHORTEST_STEP = 16


@dataclass(frozen=True)
class GemmShape:
    """Block sizes: ``columns`` weight rows (gate/up columns or hidden rows) by the block table's routes, ``k`` per
    step."""

    columns: int = 64
    k: int = 64
    num_warps: int = 4
    num_stages: int = 3


def largest_step(size: int, limit: int) -> int:
    """The largest power of two up to ``limit`` that divides ``size``, but at least the shortest step of a product on
    the device: the last step of other sizes reaches beyond the end, which float kernels mask."""
    return max(_SHORTEST_STEP, min(limit, size & -size))


def gemm_shape(layout_format: str, block_routes: int) -> GemmShape:
    """The default blocks for a format and a number of routes per row block."""
    if layout_format == "q4_0":
        # Few routes: long steps, since a row's bytes per step are what one memory transaction gets.
        return GemmShape(k=128 if block_routes <= 32 else 64)
    if layout_format == "f32":
        return GemmShape(columns=32, k=32, num_stages=2)
    return GemmShape(k=64, num_stages=3 if block_routes <= 64 else 2)


def block_routes_for(num_routes: int, num_entries: int) -> int:
    """Routes per row block for evenly spread routes: a power of two near their mean number per entry, 16 to 128."""
    mean = max(1, num_routes // max(1, num_entries))
    size = 16
    while size < mean and size < 128:
        size *= 2
    return size


@triton.jit
def _block(entries_ptr, addresses_ptr, block_entry_ptr, block_first_ptr, block, ENTRY_COLUMNS: tl.constexpr,
           FETCHED: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    # The record's address, the positions [BM] in the plan's routes and which of them exist.
    entry = tl.load(block_entry_ptr + block)
    first = tl.load(block_first_ptr + block)
    row = entries_ptr + entry * ENTRY_COLUMNS
    source = tl.load(addresses_ptr + entry * 2)
    if FETCHED and tl.load(row + 1) == 1:
        source = tl.load(addresses_ptr + entry * 2 + 1)
    position = tl.load(row + 4) + first + tl.arange(0, BM)
    live = first + tl.arange(0, BM) < tl.load(row + 5)
    return source, position, live


@triton.jit
def _gate_up_kernel(
    counts_ptr, entries_ptr, addresses_ptr, routes_ptr, block_entry_ptr, block_first_ptr, hidden_ptr, act_ptr, one,
    Q4_0: tl.constexpr, DTYPE: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_STRIDE: tl.constexpr, UP: tl.constexpr, GATE_D: tl.constexpr, UP_D: tl.constexpr,
    ENTRY_COLUMNS: tl.constexpr, FETCHED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    column_blocks: tl.constexpr = (INTERMEDIATE + BN - 1) // BN
    block = tl.program_id(0) // column_blocks
    if block < tl.load(counts_ptr + 7):
        source, position, live = _block(
            entries_ptr, addresses_ptr, block_entry_ptr, block_first_ptr, block, ENTRY_COLUMNS, FETCHED, BM
        )
        route = tl.load(routes_ptr + position, mask=live, other=0)
        x_rows = hidden_ptr + (route // TOP_K).to(tl.int64) * HIDDEN
        column = (tl.program_id(0) % column_blocks) * BN + tl.arange(0, BN)
        # Rows beyond the last are computed as the last one and not stored.
        clamped = tl.minimum(column, INTERMEDIATE - 1)
        tile = (clamped // TILE_COLUMNS) * TILE_STRIDE
        inner = clamped % TILE_COLUMNS
        if Q4_0:
            q = pointer_to(source, tl.uint8) + (tile + inner * (HIDDEN // 2))[:, None]
            d = pointer_to(source + GATE_D, tl.float16) + (tile // 2 + inner * (HIDDEN // 32))[:, None]
            q2 = pointer_to(source + UP, tl.uint8) + (tile + inner * (HIDDEN // 2))[:, None]
            d2 = pointer_to(source + UP_D, tl.float16) + (tile // 2 + inner * (HIDDEN // 32))[:, None]
            gate, up = q4_0_multiply_pair(q, d, q2, d2, inner, x_rows, one.to(tl.uint32), HIDDEN, BN, BM, BK, STAGES)
        else:
            gate = tl.zeros([BN, BM], tl.float32)
            up = tl.zeros([BN, BM], tl.float32)
            size: tl.constexpr = DTYPE.primitive_bitwidth // 8
            cell = (tile // size + inner * HIDDEN)[:, None]
            k = tl.arange(0, BK)
            for start in tl.range(0, HIDDEN, BK, num_stages=STAGES):
                if HIDDEN % BK == 0:
                    gate_w = tl.load(pointer_to(source, DTYPE) + cell + (start + k)[None, :])
                    up_w = tl.load(pointer_to(source + UP, DTYPE) + cell + (start + k)[None, :])
                    x = tl.load(x_rows[None, :] + (start + k)[:, None])
                else:
                    inside = start + k < HIDDEN
                    at = cell + (start + k)[None, :]
                    gate_w = tl.load(pointer_to(source, DTYPE) + at, mask=inside[None, :], other=0.0)
                    up_w = tl.load(pointer_to(source + UP, DTYPE) + at, mask=inside[None, :], other=0.0)
                    x = tl.load(x_rows[None, :] + (start + k)[:, None], mask=inside[:, None], other=0.0)
                gate = dense_dot(gate_w, x, gate)
                up = dense_dot(up_w, x, up)
        act = silu_mul(gate, up).to(act_ptr.dtype.element_ty)
        out = act_ptr + position.to(tl.int64)[None, :] * INTERMEDIATE + column[:, None]
        tl.store(out, act, mask=live[None, :] & (column < INTERMEDIATE)[:, None])


@triton.jit
def _down_kernel(
    counts_ptr, entries_ptr, addresses_ptr, routes_ptr, block_entry_ptr, block_first_ptr, act_ptr, out_ptr, one,
    Q4_0: tl.constexpr, DTYPE: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_STRIDE: tl.constexpr, DOWN: tl.constexpr, DOWN_D: tl.constexpr,
    ENTRY_COLUMNS: tl.constexpr, FETCHED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row_blocks: tl.constexpr = (HIDDEN + BN - 1) // BN
    block = tl.program_id(0) // row_blocks
    if block < tl.load(counts_ptr + 7):
        source, position, live = _block(
            entries_ptr, addresses_ptr, block_entry_ptr, block_first_ptr, block, ENTRY_COLUMNS, FETCHED, BM
        )
        route = tl.load(routes_ptr + position, mask=live, other=0)
        x_rows = act_ptr + tl.where(live, position, 0).to(tl.int64) * INTERMEDIATE
        h = (tl.program_id(0) % row_blocks) * BN + tl.arange(0, BN)
        clamped = h if HIDDEN % BN == 0 else tl.minimum(h, HIDDEN - 1)
        if Q4_0:
            y = q4_0_multiply(
                pointer_to(source + DOWN, tl.uint8), pointer_to(source + DOWN_D, tl.float16), clamped, x_rows,
                one.to(tl.uint32), INTERMEDIATE, BN, BM, BK, TILE_COLUMNS // 32, TILE_STRIDE, STAGES,
            )  # fmt: skip
        else:
            y = tl.zeros([BN, BM], tl.float32)
            size: tl.constexpr = DTYPE.primitive_bitwidth // 8
            for start in tl.range(0, INTERMEDIATE, BK, num_stages=STAGES):
                column = start + tl.arange(0, BK)
                at = (column // TILE_COLUMNS) * (TILE_STRIDE // size) + (column % TILE_COLUMNS) * HIDDEN
                if INTERMEDIATE % BK == 0:
                    weight = tl.load(pointer_to(source + DOWN, DTYPE) + at[None, :] + clamped[:, None])
                    x = tl.load(x_rows[None, :] + column[:, None])
                else:
                    inside = column < INTERMEDIATE
                    cell = pointer_to(source + DOWN, DTYPE) + at[None, :] + clamped[:, None]
                    weight = tl.load(cell, mask=inside[None, :], other=0.0)
                    x = tl.load(x_rows[None, :] + column[:, None], mask=inside[:, None], other=0.0)
                y = dense_dot(weight, x, y)
        out = out_ptr + route.to(tl.int64)[None, :] * HIDDEN + h[:, None]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=live[None, :] & (h < HIDDEN)[:, None])


def expert_gemm(
    layout: RecordLayout,
    plan: DevicePlan,
    table: BlockTable,
    hidden: Tensor,
    top_k: int,
    act: Tensor,
    out: Tensor,
    *,
    fetched: bool = False,
    shape: GemmShape | None = None,
    down_shape: GemmShape | None = None,
) -> None:
    """Both GEMMs for the GPU entries of ``plan`` (see the module docstring). ``act`` [T * K, I], ``out`` [T * K, H]."""
    tokens, hidden_size = hidden.shape
    routes = tokens * top_k
    if hidden_size != layout.hidden or not hidden.is_contiguous():
        raise ValueError(f"hidden is {list(hidden.shape)}; needed: contiguous [T, {layout.hidden}]")
    if tuple(act.shape) != (routes, layout.intermediate) or tuple(out.shape) != (routes, layout.hidden):
        raise ValueError(
            f"act {list(act.shape)} and out {list(out.shape)} do not fit {routes} routes of {layout.intermediate} and "
            f"{layout.hidden} columns"
        )
    shape = shape or gemm_shape(layout.format, table.block_routes)
    down_shape = down_shape or shape
    q4_0 = layout.format == "q4_0"
    dtype = _DTYPES.get(layout.format, tl.uint32)
    names = ("up_q", "gate_d", "up_d", "down_q", "down_d") if q4_0 else ("up", "up", "up", "down", "down")
    up, gate_d, up_d, down, down_d = (layout.field(name).offset_bytes for name in names)
    common = {
        "Q4_0": q4_0, "DTYPE": dtype, "HIDDEN": layout.hidden, "INTERMEDIATE": layout.intermediate,
        "TILE_COLUMNS": layout.tile_columns, "TILE_STRIDE": layout.tile_stride_bytes, "ENTRY_COLUMNS": ENTRY_COLUMNS,
        "FETCHED": fetched, "BM": table.block_routes,
    }  # fmt: skip
    where = (plan.counts, plan.entries, plan.addresses, plan.routes, table.entry, table.first)
    _gate_up_kernel[(table.max_blocks * cdiv(layout.intermediate, shape.columns),)](
        *where, hidden, act, ONE_BITS, TOP_K=top_k, UP=up, GATE_D=gate_d, UP_D=up_d, BN=shape.columns,
        BK=largest_step(layout.hidden, shape.k), STAGES=shape.num_stages, num_warps=shape.num_warps, **common,
    )  # fmt: skip
    _down_kernel[(table.max_blocks * cdiv(layout.hidden, down_shape.columns),)](
        *where, act, out, ONE_BITS, DOWN=down, DOWN_D=down_d, BN=down_shape.columns,
        BK=largest_step(layout.intermediate, down_shape.k), STAGES=down_shape.num_stages,
        num_warps=down_shape.num_warps, **common,
    )  # fmt: skip


@triton.jit
def _fetch_kernel(counts_ptr, entries_ptr, addresses_ptr, words, ENTRY_COLUMNS: tl.constexpr, KIND: tl.constexpr,
                  BLOCK: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    chunks = tl.cdiv(words, BLOCK * STEPS)
    total = tl.load(counts_ptr) * chunks
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = work // chunks
        destination = tl.load(addresses_ptr + entry * 2 + 1)
        if (tl.load(entries_ptr + entry * ENTRY_COLUMNS + 1) == KIND) & (destination != 0):
            source = tl.load(addresses_ptr + entry * 2)
            start = (work % chunks) * (BLOCK * STEPS)
            word = start + tl.arange(0, BLOCK * STEPS)
            data = tl.load(pointer_to(source, tl.int32) + word, mask=word < words)
            tl.store(pointer_to(destination, tl.int32) + word, data, mask=word < words)


def fetch_records(layout: RecordLayout, plan: DevicePlan, grid: int) -> None:
    """Copy the record of every *fetch* entry to its destination, reading host memory through PCIe, with ``grid``
    programs.

    For batches where an entry has several row blocks or copying should overlap the hits: run it on a branch of its own,
    then ``expert_gemm(..., fetched=True)``. Entries without a destination are skipped.
    """
    _fetch_kernel[(grid,)](
        plan.counts, plan.entries, plan.addresses, layout.payload_bytes // 4, ENTRY_COLUMNS=ENTRY_COLUMNS,
        KIND=KIND_FETCH, BLOCK=1024, STEPS=4, num_warps=8,
    )  # fmt: skip
