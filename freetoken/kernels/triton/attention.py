"""Causal attention over paged KV: one kernel for decode (split over keys) and prefill (flash), one that joins splits.

Contract. q [T, QH, D] contiguous; keys and values of this layer in ``PagedKV`` (same dtype as q: float16 or bfloat16,
float32 for tests), which already holds the new tokens. Query t of row r attends to keys 0..positions[t] of the row (the
last ``window`` of them when > 0) at ``block_tables`` int32 [R, max_blocks]. Queries are cut into blocks of tokens of
one row (``QueryBlocks``): the query heads that share a KV head sit side by side in a block, so a key is read once for
all of them. ``sinks`` float32 [QH]: a logit per head that takes part in the softmax and carries no value. ``out`` [T,
QH * D]. Tokens at position -1 are padding and give zeros.

Lengths come from ``positions`` in device memory, so a captured graph serves any context. Grid (query blocks, KV heads,
splits); a split whose range of keys is empty ends at once. Tolerance against ``reference.py``: 1e-2 relative to the
norm for bfloat16, 2e-3 for float16, 1e-5 for float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import next_power_of_2
from freetoken.kernels.triton.rope_kv import PagedKV

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of at most ``tokens`` query tokens: ``row`` (of the batch), ``first`` token and ``count``, int32 [N]
    each."""

    row: Tensor
    first: Tensor
    count: Tensor
    tokens: int

    @classmethod
    def decode(cls, batch: int, device: torch.device | str) -> QueryBlocks:
        """Row r has the one token r."""
        index = torch.arange(batch, dtype=torch.int32, device=device)
        return cls(index, index, torch.ones_like(index), 1)

    @classmethod
    def prefill(cls, row_starts: Sequence[int], tokens: int, device: torch.device | str) -> QueryBlocks:
        """Row r owns tokens ``row_starts[r]:row_starts[r + 1]``; made on the host. Rows may be empty."""
        blocks = [
            (row, first, min(tokens, end - first))
            for row, (start, end) in enumerate(pairwise(row_starts))
            for first in range(start, end, tokens)
        ]
        # The last blocks of a row see the most keys: started first, they do not trail alone.
        table = torch.tensor(blocks[::-1], dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)
        return cls(table[0], table[1], table[2], tokens)


@triton.jit
def _dot(a, b, acc):
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _attend(
    acc, total, peak, q, position, begin, end, scale, kv_ptr, table_ptr, head, layer_offset, block_stride,
    DIM: tl.constexpr, DIM_POW2: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, DIM_POW2)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        key = start + tl.arange(0, BN)
        if MASK:
            known = key < end
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=known, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        at = kv_ptr + layer_offset + block.to(tl.int64) * block_stride
        at += ((key % BLOCK_SIZE) * KV_HEADS + head) * DIM
        k_at = at[None, :] + d[:, None]
        v_at = at[:, None] + BLOCK_SIZE * KV_HEADS * DIM + d[None, :]
        if MASK:
            k = tl.load(k_at, mask=known[None, :] & (d < DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=known[:, None] & (d < DIM)[None, :], other=0.0)
        elif DIM == DIM_POW2:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(d < DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=(d < DIM)[None, :], other=0.0)
        scores = _dot(q, k, tl.zeros([BM, BN], tl.float32))
        if MASK:
            allowed = (key[None, :] <= position[:, None]) & known[None, :]
            if WINDOW > 0:
                allowed = allowed & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(allowed, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        # A row that has seen no key yet keeps peak -inf; subtracting 0 instead avoids inf - inf.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASK else new_peak
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
    return acc, total, peak


@triton.jit
def _attention_kernel(
    q_ptr, kv_ptr, tables_ptr, positions_ptr, rows_ptr, firsts_ptr, counts_ptr, sinks_ptr, out_ptr, partial_ptr,
    stats_ptr, scale_log2e, layer_offset, block_stride, table_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_POW2: tl.constexpr, DIM: tl.constexpr,
    DIM_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(firsts_ptr + block)
    count = tl.load(counts_ptr + block)
    table_ptr = tables_ptr + tl.load(rows_ptr + block) * table_stride
    m = tl.arange(0, BM)
    token = first + m // GROUP_POW2
    query_head = head * GROUP + m % GROUP_POW2
    live = (m // GROUP_POW2 < count) & (m % GROUP_POW2 < GROUP)
    d = tl.arange(0, DIM_POW2)
    row = token.to(tl.int64) * Q_HEADS + query_head
    position = tl.load(positions_ptr + token, mask=live, other=-1)
    q = tl.load(q_ptr + row[:, None] * DIM + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)

    lowest = tl.load(positions_ptr + first)
    stop = tl.load(positions_ptr + first + count - 1) + 1
    begin = 0
    if WINDOW > 0:
        begin = (tl.maximum(lowest - WINDOW + 1, 0) // BN) * BN
    if SPLITS > 1:
        span = tl.cdiv(tl.cdiv(stop - begin, BN), SPLITS) * BN
        begin = begin + split * span
        stop = tl.minimum(stop, begin + span)

    split_begin = begin
    acc = tl.zeros([BM, DIM_POW2], tl.float32)
    total = tl.zeros([BM], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    if WINDOW == 0:
        # Keys that every query of the block sees need no mask.
        whole = tl.minimum(stop, lowest + 1)
        whole = tl.maximum(begin, begin + (whole - begin) // BN * BN)
        acc, total, peak = _attend(
            acc, total, peak, q, position, begin, whole, scale_log2e, kv_ptr, table_ptr, head, layer_offset,
            block_stride, DIM, DIM_POW2, KV_HEADS, BLOCK_SIZE, BM, BN, WINDOW, False, STAGES,
        )  # fmt: skip
        begin = whole
    acc, total, peak = _attend(
        acc, total, peak, q, position, begin, stop, scale_log2e, kv_ptr, table_ptr, head, layer_offset, block_stride,
        DIM, DIM_POW2, KV_HEADS, BLOCK_SIZE, BM, BN, WINDOW, True, STAGES,
    )  # fmt: skip

    mask = live[:, None] & (d < DIM)[None, :]
    if SPLITS > 1:
        cell = row * SPLITS + split
        tl.store(stats_ptr + cell * 2, peak, mask=live)
        tl.store(stats_ptr + cell * 2 + 1, total, mask=live)
        if split_begin < stop:
            tl.store(partial_ptr + cell[:, None] * DIM + d[None, :], acc, mask=mask)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + query_head, mask=live, other=0.0) * 1.4426950408889634
            top = tl.maximum(peak, sink)
            shrink = tl.exp2(peak - top)
            total = total * shrink + tl.exp2(sink - top)
            acc = acc * shrink[:, None]
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + row[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join_kernel(
    partial_ptr, stats_ptr, sinks_ptr, out_ptr,
    Q_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, SPLITS: tl.constexpr, SPLITS_POW2: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS_POW2)
    d = tl.arange(0, DIM_POW2)
    peak = tl.load(stats_ptr + (row * SPLITS + s) * 2, mask=s < SPLITS, other=float("-inf"))
    total = tl.load(stats_ptr + (row * SPLITS + s) * 2 + 1, mask=s < SPLITS, other=0.0)
    # Requested before the statistics are known to be empty: what an empty split left there is not used.
    acc = tl.load(
        partial_ptr + (row * SPLITS + s)[:, None] * DIM + d[None, :],
        mask=((s < SPLITS) & (total > 0.0))[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    top = tl.max(peak, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + row % Q_HEADS) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp2(peak - base)
    whole = tl.sum(total * factor, axis=0)
    if SINKS:
        whole += tl.exp2(sink - base)
    out = tl.sum(acc * factor[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + row * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class AttentionShape:
    """``keys`` per step, ``splits`` of the key range (1: no second kernel), warps and stages."""

    keys: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 2


def query_block_tokens(num_heads: int, num_kv_heads: int, rows: int = 128) -> int:
    """Tokens per query block that make about ``rows`` rows of query heads."""
    return max(1, rows // next_power_of_2(num_heads // num_kv_heads))


def workspace(
    tokens: int, num_heads: int, head_dim: int, splits: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(partial sums, statistics) for ``splits`` > 1."""
    return (
        torch.empty((tokens, num_heads, splits, head_dim), dtype=torch.float32, device=device),
        torch.empty((tokens, num_heads, splits, 2), dtype=torch.float32, device=device),
    )


def attention(
    q: Tensor,
    kv: PagedKV,
    block_tables: Tensor,
    positions: Tensor,
    blocks: QueryBlocks,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    shape: AttentionShape | None = None,
    work: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill ``out`` (see the module docstring). ``work`` is from ``workspace``, needed when the shape has splits."""
    tokens, num_heads, dim = q.shape
    if num_heads % kv.num_heads or dim != kv.head_dim or not q.is_contiguous():
        raise ValueError(
            f"attention: q {list(q.shape)} does not fit {kv.num_heads} KV heads of {kv.head_dim} (or is not contiguous)"
        )
    shape = shape or AttentionShape()
    if shape.splits > 1 and work is None:
        raise ValueError(f"attention with {shape.splits} splits needs a workspace")
    group_pow2 = next_power_of_2(num_heads // kv.num_heads)
    partial, stats = work if work is not None else (out, out)
    common = {"Q_HEADS": num_heads, "DIM": dim, "DIM_POW2": max(16, next_power_of_2(dim)), "SINKS": sinks is not None}
    sinks_or_out = out if sinks is None else sinks
    _attention_kernel[(blocks.row.shape[0], kv.num_heads, shape.splits)](
        q, kv.data, block_tables, positions, blocks.row, blocks.first, blocks.count, sinks_or_out, out, partial, stats,
        scale * _LOG2E, kv.layer_offset, kv.block_stride, block_tables.stride(0), KV_HEADS=kv.num_heads,
        GROUP=num_heads // kv.num_heads, GROUP_POW2=group_pow2, BLOCK_SIZE=kv.block_size,
        BM=max(16, group_pow2 * next_power_of_2(blocks.tokens)), BN=shape.keys, WINDOW=window, SPLITS=shape.splits,
        STAGES=shape.num_stages, num_warps=shape.num_warps, **common,
    )  # fmt: skip
    if shape.splits > 1:
        _join_kernel[(tokens * num_heads,)](
            partial, stats, sinks_or_out, out, SPLITS=shape.splits, SPLITS_POW2=next_power_of_2(shape.splits),
            num_warps=4, **common,
        )  # fmt: skip
