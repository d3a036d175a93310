"""Between the q/k/v projections and attention, in one kernel: q/k norm, rotary embedding, storing keys and values.

Contract. q [T, QH * D], k and v [T, KVH * D] with any row stride (so also parts of one fused projection), float32,
float16 or bfloat16. Per head: RMS norm over D with ``q_norm`` / ``k_norm`` [D] (optional), then the pairs (i, i + R /
2) of the first R dimensions are rotated by the angles of ``cos`` and ``sin`` float32 [max_position, R / 2] at
``positions`` int32 [T]. Queries go to ``q_out`` [T, QH, D]; keys and values go to token slots ``slot_mapping`` int64
[T] (block * block_size + offset; -1: nowhere) of block-major KV records, where one layer occupies [2 (k, v),
block_size, KVH, D] elements from ``layer_offset`` on. A token at position -1 is padding: its query row is zero. Grid
(T, groups of 8 heads). Tolerance against ``reference.py``: 1e-6 of the largest value before rounding to the output's
dtype.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import cdiv, next_power_of_2


@dataclass(frozen=True)
class PagedKV:
    """One layer of the paged KV. ``data`` is a flat tensor over all block records; offsets and strides count
    elements."""

    data: Tensor
    layer_offset: int
    block_stride: int
    block_size: int
    num_heads: int
    head_dim: int


@triton.jit
def _normed(row, head, d, HEADS: tl.constexpr, DIM: tl.constexpr, scale, norm_ptr, NORM: tl.constexpr):
    x = tl.load(row + head[:, None] * DIM + d[None, :], mask=(head < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
    x = x.to(tl.float32)
    if NORM:
        x = x * scale[:, None] * tl.load(norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _rotated(row, head, position, norm_ptr, cos_ptr, sin_ptr, eps, HEADS: tl.constexpr, DIM: tl.constexpr,
             DIM_POW2: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    d = tl.arange(0, DIM_POW2)
    half: tl.constexpr = ROTARY // 2
    scale = tl.zeros([head.shape[0]], tl.float32)
    if NORM:
        whole = _normed(row, head, d, HEADS, DIM, scale, norm_ptr, False)
        scale = 1.0 / tl.sqrt(tl.sum(whole * whole, axis=1) / DIM + eps)
    x = _normed(row, head, d, HEADS, DIM, scale, norm_ptr, NORM)
    # The other member of each dimension's pair is read again, from the cache, instead of being exchanged.
    partner = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    y = _normed(row, head, partner, HEADS, DIM, scale, norm_ptr, NORM)
    angle = tl.where(d < half, d, d - half)
    turns = (d < ROTARY) & (position >= 0)
    cos = tl.load(cos_ptr + position * half + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + position * half + angle, mask=turns, other=0.0)
    return x * cos[None, :] + y * tl.where(d < half, -sin, sin)[None, :]


@triton.jit
def _rope_kv_kernel(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_out_ptr, kv_ptr, eps,
    q_stride, k_stride, v_stride, layer_offset, block_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_POW2: tl.constexpr, DIM: tl.constexpr,
    DIM_POW2: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    query_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    d = tl.arange(0, DIM_POW2)
    if tl.program_id(1) < query_groups:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        row = q_ptr + token * q_stride
        q = _rotated(row, head, position, q_norm_ptr, cos_ptr, sin_ptr, eps, Q_HEADS, DIM, DIM_POW2, ROTARY, NORM)
        q = tl.where(position >= 0, q, 0.0)
        cell = q_out_ptr + (token * Q_HEADS + head)[:, None] * DIM + d[None, :]
        tl.store(cell, q.to(q_out_ptr.dtype.element_ty), mask=(head < Q_HEADS)[:, None] & (d < DIM)[None, :])
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            head = tl.arange(0, KV_HEADS_POW2)
            is_value = tl.program_id(1) - query_groups
            at = layer_offset + (slot // BLOCK_SIZE) * block_stride
            at += (is_value * BLOCK_SIZE + slot % BLOCK_SIZE) * (KV_HEADS * DIM)
            cell = kv_ptr + at + head[:, None] * DIM + d[None, :]
            mask = (head < KV_HEADS)[:, None] & (d < DIM)[None, :]
            if is_value == 0:
                row = k_ptr + token * k_stride
                k = _rotated(
                    row, head, position, k_norm_ptr, cos_ptr, sin_ptr, eps, KV_HEADS, DIM, DIM_POW2, ROTARY, NORM
                )
                tl.store(cell, k.to(kv_ptr.dtype.element_ty), mask=mask)
            else:
                v = tl.load(v_ptr + token * v_stride + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
                tl.store(cell, v.to(kv_ptr.dtype.element_ty), mask=mask)


def rope_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    kv: PagedKV,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Fill ``q_out`` and the KV slots of the batch's tokens (see the module docstring)."""
    tokens, num_heads, dim = q_out.shape
    if dim != kv.head_dim or q.shape != (tokens, num_heads * dim) or k.shape != (tokens, kv.num_heads * dim):
        raise ValueError(f"rope_kv: q {list(q.shape)}, k {list(k.shape)} and q_out {list(q_out.shape)} do not fit")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope_kv: q_norm and k_norm come together")
    heads = min(8, next_power_of_2(num_heads))
    _rope_kv_kernel[(tokens, cdiv(num_heads, heads) + 2)](
        q, k, v, q if q_norm is None else q_norm, q if k_norm is None else k_norm, cos, sin, positions, slot_mapping,
        q_out, kv.data, eps, q.stride(0), k.stride(0), v.stride(0), kv.layer_offset, kv.block_stride,
        Q_HEADS=num_heads, KV_HEADS=kv.num_heads, KV_HEADS_POW2=next_power_of_2(kv.num_heads), DIM=dim,
        DIM_POW2=next_power_of_2(dim), ROTARY=2 * cos.shape[1], BLOCK_SIZE=kv.block_size, HEADS=heads,
        NORM=q_norm is not None, num_warps=4,
    )  # fmt: skip
