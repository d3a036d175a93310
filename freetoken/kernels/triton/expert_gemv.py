"""Routed experts for a few tokens: one program streams one slice of one expert's record and finishes it.

Contract. ``hidden`` [T, H] (float32, float16 or bfloat16, rows contiguous), a ``DevicePlan``, records of one layout at
the plan's addresses: VRAM, or host memory registered with CUDA, which is then read through PCIe, each byte once. When
an entry has a destination, the same program stores the bytes it reads there. The work unit is a *part*: a few
intermediate columns of one entry (gate, up and down), for all routes of the entry. Part p of route r yields ``down[:,
p] @ (silu(gate[p] @ x) * (up[p] @ x))`` in float32,

- ``partials=True``: stored to ``out`` [T * K, parts, H], to be summed by ``combine`` in a fixed order (bitwise
  repeatable);
- ``partials=False``: times the route's weight, added to ``out`` [T, H] with atomics (``combine`` clears it again).

Grid: parts * max_entries programs, or fewer, which then loop (``grid`` argument). Tolerance against ``reference.py``:
1e-3 relative to the norm for Q4_0 (see ``common.py``), 1e-5 for float32 and bfloat16 records.

Plans whose entries have one route each (a batch of one token) take a path without loops, in which all of a part's bytes
are requested before the first is used. With several routes gate and up sums go through ``scratch``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import (
    INTERPRETED,
    ONE_BITS,
    next_power_of_2,
    pointer_to,
    prefetch_l2,
    q4_0_dot,
    q4_0_operand,
    q4_0_scaled,
    silu_mul,
)
from freetoken.kernels.triton.plan import ENTRY_COLUMNS, DevicePlan
from freetoken.quant.record import RecordLayout

Q4_0_COLUMNS = 32
_DTYPES = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16}


@triton.jit
def _emit(out_ptr, weights_ptr, route, part, y, rows, mask, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
          TOP_K: tl.constexpr, PARTIALS: tl.constexpr):  # fmt: skip
    if PARTIALS:
        tl.store(out_ptr + (route * PARTS + part).to(tl.int64) * HIDDEN + rows, y, mask=mask)
    else:
        weight = tl.load(weights_ptr + route)
        tl.atomic_add(out_ptr + (route // TOP_K).to(tl.int64) * HIDDEN + rows, y * weight, mask=mask, sem="relaxed")


@triton.jit
def _emit_nothing(out_ptr, routes_ptr, first_route, num_routes, part, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
                  CHUNK: tl.constexpr, PARTIALS: tl.constexpr):  # fmt: skip
    # A part outside the entry's tiles: the sum over parts must find zeros there.
    if PARTIALS:
        for r in range(num_routes):
            route = tl.load(routes_ptr + first_route + r)
            for start in range(0, HIDDEN, CHUNK):
                rows = start + tl.arange(0, CHUNK)
                zeros = tl.zeros([CHUNK], tl.float32)
                tl.store(out_ptr + (route * PARTS + part).to(tl.int64) * HIDDEN + rows, zeros, mask=rows < HIDDEN)


@triton.jit
def _q4_0_part(
    source, destination, near, first_route, num_routes, part, routes_ptr, hidden_ptr, weights_ptr, scratch_ptr,
    out_ptr, one, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_STRIDE: tl.constexpr, UP_Q: tl.constexpr, GATE_D: tl.constexpr, UP_D: tl.constexpr, DOWN_Q: tl.constexpr,
    DOWN_D: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, SINGLE: tl.constexpr, PARTIALS: tl.constexpr,
    FILL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 32
    WORDS: tl.constexpr = HIDDEN // 8
    BLOCKS: tl.constexpr = HIDDEN // 32
    CHUNK_WORDS: tl.constexpr = CHUNK // 8
    CHUNK_BLOCKS: tl.constexpr = CHUNK // 32
    TILE_BLOCKS: tl.constexpr = TILE_COLUMNS // COLUMNS
    tile = part // TILE_BLOCKS
    inner = part % TILE_BLOCKS
    base = source + tile * TILE_STRIDE
    fill = destination + tile * TILE_STRIDE
    column = inner * COLUMNS + tl.arange(0, COLUMNS)
    one = one.to(tl.uint32)
    if PREFETCH and near:
        # ``down`` is wanted only after gate and up are reduced; from HBM it should be on its way by then. Not so from
        # the host, whose lines may be dropped and would cross the bus twice.
        prefetch_l2(base + DOWN_Q + inner * (HIDDEN * 16 // TILE_BLOCKS), PREFETCH)

    gate = tl.zeros([COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS], tl.float32)
    for start in tl.static_range(0, HIDDEN, CHUNK):
        word = start // 8 + tl.arange(0, CHUNK_WORDS)
        block = start // 32 + tl.arange(0, CHUNK_BLOCKS)
        words = column[:, None] * WORDS + word[None, :]
        scales = column[:, None] * BLOCKS + block[None, :]
        wmask = (word < WORDS)[None, :] & (column >= 0)[:, None]
        smask = (block < BLOCKS)[None, :] & (column >= 0)[:, None]
        gate_q = tl.load(pointer_to(base, tl.uint32) + words, mask=wmask, other=0)
        up_q = tl.load(pointer_to(base + UP_Q, tl.uint32) + words, mask=wmask, other=0)
        gate_d = tl.load(pointer_to(base + GATE_D, tl.float16) + scales, mask=smask, other=0.0)
        up_d = tl.load(pointer_to(base + UP_D, tl.float16) + scales, mask=smask, other=0.0)
        if FILL and destination != 0:
            tl.store(pointer_to(fill, tl.uint32) + words, gate_q, mask=wmask)
            tl.store(pointer_to(fill + UP_Q, tl.uint32) + words, up_q, mask=wmask)
            tl.store(pointer_to(fill + GATE_D, tl.float16) + scales, gate_d, mask=smask)
            tl.store(pointer_to(fill + UP_D, tl.float16) + scales, up_d, mask=smask)
        h = start + tl.arange(0, CHUNK)
        if SINGLE:
            route = tl.load(routes_ptr + first_route)
            x = tl.load(hidden_ptr + (route // TOP_K).to(tl.int64) * HIDDEN + h, mask=h < HIDDEN, other=0.0)
            operand = q4_0_operand(x.to(tl.float32), CHUNK_BLOCKS)
            one_here = one | _unknown_zero(route)
            gate += _q4_0_rows(gate_q, gate_d, operand, one_here, COLUMNS, CHUNK_BLOCKS)
            up += _q4_0_rows(up_q, up_d, operand, one_here, COLUMNS, CHUNK_BLOCKS)
        else:
            for r in range(num_routes):
                route = tl.load(routes_ptr + first_route + r)
                x = tl.load(hidden_ptr + (route // TOP_K).to(tl.int64) * HIDDEN + h, mask=h < HIDDEN, other=0.0)
                operand = q4_0_operand(x.to(tl.float32), CHUNK_BLOCKS)
                zero = _unknown_zero(route)
                gate = _q4_0_rows(gate_q ^ zero, gate_d, operand, one | zero, COLUMNS, CHUNK_BLOCKS)
                up = _q4_0_rows(up_q ^ zero, up_d, operand, one | zero, COLUMNS, CHUNK_BLOCKS)
                cell = scratch_ptr + route.to(tl.int64) * (2 * INTERMEDIATE) + part * COLUMNS + tl.arange(0, COLUMNS)
                if start > 0:
                    gate += tl.load(cell)
                    up += tl.load(cell + INTERMEDIATE)
                tl.store(cell, gate)
                tl.store(cell + INTERMEDIATE, up)
            tl.debug_barrier()

    word = inner * 4 + tl.arange(0, 4)
    for start in tl.static_range(0, HIDDEN, CHUNK):
        h = start + tl.arange(0, CHUNK)
        words = h[:, None] * (TILE_BLOCKS * 4) + word[None, :]
        wmask = (h < HIDDEN)[:, None] & (word >= 0)[None, :]
        down_q = tl.load(pointer_to(base + DOWN_Q, tl.uint32) + words, mask=wmask, other=0)
        down_d = tl.load(pointer_to(base + DOWN_D, tl.float16) + h * TILE_BLOCKS + inner, mask=h < HIDDEN, other=0.0)
        if FILL and destination != 0:
            tl.store(pointer_to(fill + DOWN_Q, tl.uint32) + words, down_q, mask=wmask)
            tl.store(pointer_to(fill + DOWN_D, tl.float16) + h * TILE_BLOCKS + inner, down_d, mask=h < HIDDEN)
        if SINGLE:
            route = tl.load(routes_ptr + first_route)
            operand = q4_0_operand(silu_mul(gate, up), 1)
            y = tl.sum(q4_0_dot(down_q, operand, one | _unknown_zero(route)), axis=1) * down_d
            _emit(out_ptr, weights_ptr, route, part, y, h, h < HIDDEN, HIDDEN, PARTS, TOP_K, PARTIALS)
        else:
            for r in range(num_routes):
                route = tl.load(routes_ptr + first_route + r)
                cell = scratch_ptr + route.to(tl.int64) * (2 * INTERMEDIATE) + part * COLUMNS + tl.arange(0, 4) * 4
                operand = _q4_0_scratch_operand(cell, INTERMEDIATE)
                zero = _unknown_zero(route)
                y = tl.sum(q4_0_dot(down_q ^ zero, operand, one | zero), axis=1) * down_d
                _emit(out_ptr, weights_ptr, route, part, y, h, h < HIDDEN, HIDDEN, PARTS, TOP_K, PARTIALS)


@triton.jit
def _unknown_zero(route):
    # Routes are not negative, so this is 0, but the compiler does not know. It keeps ``one`` in a register, and keeps
    # the decoding of weights inside the loop over routes: hoisted out, all decoded weights would be spilled.
    return (route >> 31).to(tl.uint32)


@triton.jit
def _q4_0_rows(q, d, operand, one, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    sums = tl.sum(tl.reshape(q4_0_dot(q, operand, one), [COLUMNS, BLOCKS, 4]), axis=2)
    return tl.sum(sums * d, axis=1)


@triton.jit
def _q4_0_scratch_operand(cell, INTERMEDIATE: tl.constexpr):
    return q4_0_scaled(
        silu_mul(tl.load(cell), tl.load(cell + INTERMEDIATE)),
        silu_mul(tl.load(cell + 16), tl.load(cell + 16 + INTERMEDIATE)),
        silu_mul(tl.load(cell + 1), tl.load(cell + 1 + INTERMEDIATE)),
        silu_mul(tl.load(cell + 17), tl.load(cell + 17 + INTERMEDIATE)),
        silu_mul(tl.load(cell + 2), tl.load(cell + 2 + INTERMEDIATE)),
        silu_mul(tl.load(cell + 18), tl.load(cell + 18 + INTERMEDIATE)),
        silu_mul(tl.load(cell + 3), tl.load(cell + 3 + INTERMEDIATE)),
        silu_mul(tl.load(cell + 19), tl.load(cell + 19 + INTERMEDIATE)),
    )


@triton.jit
def _dense_part(
    source, destination, near, first_route, num_routes, part, routes_ptr, hidden_ptr, weights_ptr, scratch_ptr, out_ptr,
    DTYPE: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_STRIDE: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, SINGLE: tl.constexpr, PARTIALS: tl.constexpr, FILL: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    # COLUMNS divides TILE_COLUMNS, or is the power of two above it (then a part is a tile).
    tile_parts: tl.constexpr = (TILE_COLUMNS + COLUMNS - 1) // COLUMNS
    tile = part // tile_parts
    base = source + tile * TILE_STRIDE
    fill = destination + tile * TILE_STRIDE
    column = (part % tile_parts) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < TILE_COLUMNS
    if PREFETCH and near:
        prefetch_l2(base + DOWN + (part % tile_parts) * (COLUMNS * HIDDEN * DTYPE.primitive_bitwidth // 8), PREFETCH)

    gate = tl.zeros([COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS], tl.float32)
    for start in tl.static_range(0, HIDDEN, CHUNK):
        h = start + tl.arange(0, CHUNK)
        cells = column[:, None] * HIDDEN + h[None, :]
        mask = inside[:, None] & (h < HIDDEN)[None, :]
        gate_w = tl.load(pointer_to(base, DTYPE) + cells, mask=mask, other=0.0)
        up_w = tl.load(pointer_to(base + UP, DTYPE) + cells, mask=mask, other=0.0)
        if FILL and destination != 0:
            tl.store(pointer_to(fill, DTYPE) + cells, gate_w, mask=mask)
            tl.store(pointer_to(fill + UP, DTYPE) + cells, up_w, mask=mask)
        if SINGLE:
            route = tl.load(routes_ptr + first_route)
            x = tl.load(hidden_ptr + (route // TOP_K).to(tl.int64) * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(
                tl.float32
            )
            gate += tl.sum(gate_w.to(tl.float32) * x[None, :], axis=1)
            up += tl.sum(up_w.to(tl.float32) * x[None, :], axis=1)
        else:
            for r in range(num_routes):
                route = tl.load(routes_ptr + first_route + r)
                x = tl.load(hidden_ptr + (route // TOP_K).to(tl.int64) * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(
                    tl.float32
                )
                gate = tl.sum(gate_w.to(tl.float32) * x[None, :], axis=1)
                up = tl.sum(up_w.to(tl.float32) * x[None, :], axis=1)
                cell = scratch_ptr + route.to(tl.int64) * (2 * INTERMEDIATE) + tile * TILE_COLUMNS + column
                if start > 0:
                    gate += tl.load(cell, mask=inside, other=0.0)
                    up += tl.load(cell + INTERMEDIATE, mask=inside, other=0.0)
                tl.store(cell, gate, mask=inside)
                tl.store(cell + INTERMEDIATE, up, mask=inside)
            tl.debug_barrier()

    for start in tl.static_range(0, HIDDEN, CHUNK):
        h = start + tl.arange(0, CHUNK)
        cells = column[:, None] * HIDDEN + h[None, :]
        mask = inside[:, None] & (h < HIDDEN)[None, :]
        down_w = tl.load(pointer_to(base + DOWN, DTYPE) + cells, mask=mask, other=0.0)
        if FILL and destination != 0:
            tl.store(pointer_to(fill + DOWN, DTYPE) + cells, down_w, mask=mask)
        if SINGLE:
            route = tl.load(routes_ptr + first_route)
            y = tl.sum(down_w.to(tl.float32) * silu_mul(gate, up)[:, None], axis=0)
            _emit(out_ptr, weights_ptr, route, part, y, h, h < HIDDEN, HIDDEN, PARTS, TOP_K, PARTIALS)
        else:
            for r in range(num_routes):
                route = tl.load(routes_ptr + first_route + r)
                cell = scratch_ptr + route.to(tl.int64) * (2 * INTERMEDIATE) + tile * TILE_COLUMNS + column
                gate = tl.load(cell, mask=inside, other=0.0)
                up = tl.load(cell + INTERMEDIATE, mask=inside, other=0.0)
                y = tl.sum(down_w.to(tl.float32) * silu_mul(gate, up)[:, None], axis=0)
                _emit(out_ptr, weights_ptr, route, part, y, h, h < HIDDEN, HIDDEN, PARTS, TOP_K, PARTIALS)


@triton.jit
def _expert_gemv_kernel(
    counts_ptr, entries_ptr, addresses_ptr, routes_ptr, hidden_ptr, weights_ptr, scratch_ptr, out_ptr, one,
    Q4_0: tl.constexpr, DTYPE: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr, TILE_STRIDE: tl.constexpr, OFFSET_1: tl.constexpr,
    OFFSET_2: tl.constexpr, OFFSET_3: tl.constexpr, OFFSET_4: tl.constexpr, OFFSET_5: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, ENTRY_COLUMNS: tl.constexpr, SINGLE: tl.constexpr,
    PARTIALS: tl.constexpr, FILL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    total = tl.load(counts_ptr) * PARTS
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = work // PARTS
        part = work % PARTS
        row = entries_ptr + entry * ENTRY_COLUMNS
        kind = tl.load(row + 1)
        first_route = tl.load(row + 4)
        num_routes = tl.load(row + 5)
        first_tile = tl.load(row + 6)
        num_tiles = tl.load(row + 7)
        source = tl.load(addresses_ptr + entry * 2)
        destination = tl.load(addresses_ptr + entry * 2 + 1)
        tile = part // (PARTS // NUM_TILES)
        mine = (num_tiles == 0) | ((tile >= first_tile) & (tile < first_tile + num_tiles))
        if (kind != 2) & (num_routes > 0):
            if mine:
                if Q4_0:
                    _q4_0_part(
                        source, destination, kind == 0, first_route, num_routes, part, routes_ptr, hidden_ptr,
                        weights_ptr, scratch_ptr, out_ptr, one, TOP_K, HIDDEN, INTERMEDIATE, TILE_COLUMNS, TILE_STRIDE,
                        OFFSET_1, OFFSET_2, OFFSET_3, OFFSET_4, OFFSET_5, CHUNK, PARTS, SINGLE, PARTIALS, FILL,
                        PREFETCH, )  # fmt: skip
                else:
                    _dense_part(
                        source, destination, kind == 0, first_route, num_routes, part, routes_ptr, hidden_ptr,
                        weights_ptr, scratch_ptr, out_ptr, DTYPE, TOP_K, HIDDEN, INTERMEDIATE, TILE_COLUMNS,
                        TILE_STRIDE, OFFSET_1, OFFSET_2, COLUMNS, CHUNK, PARTS, SINGLE, PARTIALS, FILL, PREFETCH,
                    )  # fmt: skip
            else:
                _emit_nothing(out_ptr, routes_ptr, first_route, num_routes, part, HIDDEN, PARTS, CHUNK, PARTIALS)


@dataclass(frozen=True)
class GemvShape:
    """How a record layout is cut into parts. ``columns`` per part, ``chunk`` hidden elements per step, ``parts`` per
    record."""

    columns: int
    chunk: int
    parts: int
    num_warps: int = 8
    # 128 lets two programs of 256 threads share a multiprocessor.
    max_registers: int = 128
    # Bytes of ``down`` asked into L2 at the start; 0 asks for none.
    prefetch_bytes: int = 0

    @classmethod
    def of(
        cls,
        layout: RecordLayout,
        *,
        single_route: bool = False,
        columns: int | None = None,
        chunk: int | None = None,
        num_warps: int = 8,
        prefetch: bool = True,
    ) -> GemvShape:
        """The default cut, or one of ``columns`` (for float records: a power of two that divides ``tile_columns``)."""
        if chunk is None:
            # With several routes the weights of a chunk stay in registers while the routes pass by.
            chunk = 2048 if single_route else 1024
        chunk = min(chunk, next_power_of_2(layout.hidden))
        prefetch = prefetch and not INTERPRETED
        if layout.format == "q4_0":
            if columns not in (None, Q4_0_COLUMNS):
                raise ValueError(f"a part of a q4_0 record has {Q4_0_COLUMNS} columns, not {columns}")
            ahead = _power_of_2_below(layout.hidden * 16) if prefetch else 0
            parts = layout.intermediate // Q4_0_COLUMNS
            return cls(Q4_0_COLUMNS, chunk, parts, num_warps, prefetch_bytes=ahead)
        tile = layout.tile_columns
        if columns is None:
            # The largest power of two up to 8 that divides a tile.
            columns = next(c for c in (8, 4, 2, 1) if tile % c == 0)
        if columns & (columns - 1) or tile % columns:
            raise ValueError(f"columns per part {columns} is not a power of two that divides tile_columns {tile}")
        ahead = _power_of_2_below(layout.field("down").size_bytes * columns // tile) if prefetch else 0
        return cls(columns, chunk, layout.intermediate // columns, num_warps, prefetch_bytes=ahead)


def _power_of_2_below(count: int) -> int:
    return 1 << (count.bit_length() - 1) if count >= 128 else 0


def _offsets(layout: RecordLayout) -> tuple[int, int, int, int, int]:
    names = ("up_q", "gate_d", "up_d", "down_q", "down_d") if layout.format == "q4_0" else ("up", "down")
    values = [layout.field(name).offset_bytes for name in names]
    values += [0] * (5 - len(values))
    return values[0], values[1], values[2], values[3], values[4]


def partials_shape(layout: RecordLayout, num_routes: int, shape: GemvShape | None = None) -> tuple[int, int, int]:
    """Shape of ``out`` with ``partials=True``."""
    return num_routes, (shape or GemvShape.of(layout)).parts, layout.hidden


def scratch_shape(layout: RecordLayout, num_routes: int) -> tuple[int, int, int]:
    """Shape of ``scratch`` (float32), needed unless every entry has one route."""
    return num_routes, 2, layout.intermediate


def expert_gemv(
    layout: RecordLayout,
    plan: DevicePlan,
    hidden: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    scratch: Tensor | None,
    partials: bool,
    fill_slots: bool = True,
    single_route: bool = False,
    shape: GemvShape | None = None,
    grid: int | None = None,
) -> None:
    """Run the GPU entries of ``plan`` (see the module docstring). ``weights`` float32 [T, K], needed for atomics only.

    ``single_route`` promises that no entry has more than one route. ``grid`` fixes the number of programs (default: one
    per part of each possible entry). Raises ``ValueError`` on a shape that does not fit.
    """
    shape = shape or GemvShape.of(layout, single_route=single_route)
    tokens, hidden_size = hidden.shape
    top_k = weights.shape[1]
    if hidden_size != layout.hidden or hidden.stride(1) != 1 or hidden.stride(0) != hidden_size:
        raise ValueError(
            f"hidden is {list(hidden.shape)} with strides {hidden.stride()}; needed: contiguous [T, {layout.hidden}]"
        )
    wanted = partials_shape(layout, tokens * top_k, shape) if partials else (tokens, hidden_size)
    if tuple(out.shape) != wanted or out.dtype != torch.float32:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; needed: float32 {list(wanted)}")
    if not single_route and (scratch is None or scratch.numel() < tokens * top_k * 2 * layout.intermediate):
        raise ValueError(
            f"scratch needs {list(scratch_shape(layout, tokens * top_k))} float32 for several routes per entry"
        )
    o1, o2, o3, o4, o5 = _offsets(layout)
    _expert_gemv_kernel[(grid or plan.max_entries * shape.parts,)](
        plan.counts, plan.entries, plan.addresses, plan.routes, hidden, weights, out if scratch is None else scratch,
        out, ONE_BITS, Q4_0=layout.format == "q4_0", DTYPE=_DTYPES.get(layout.format, tl.uint32), TOP_K=top_k,
        HIDDEN=layout.hidden, INTERMEDIATE=layout.intermediate, TILE_COLUMNS=layout.tile_columns,
        NUM_TILES=layout.num_tiles, TILE_STRIDE=layout.tile_stride_bytes, OFFSET_1=o1, OFFSET_2=o2, OFFSET_3=o3,
        OFFSET_4=o4, OFFSET_5=o5, COLUMNS=shape.columns, CHUNK=shape.chunk, PARTS=shape.parts,
        ENTRY_COLUMNS=ENTRY_COLUMNS, SINGLE=single_route, PARTIALS=partials, FILL=fill_slots,
        PREFETCH=shape.prefetch_bytes, num_warps=shape.num_warps, maxnreg=shape.max_registers,
    )  # fmt: skip
