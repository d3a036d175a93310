"""Inner loops of the GEMM kernels: a block of weight rows times a block of activation rows.

Weights are the left operand of ``tl.dot`` ([BN, BK]), activations the right one ([BK, BM]): then the tensor cores' tall
side is always full of weights, however few tokens there are, and decoded Q4_0 weights go from registers into the
instruction. The bytes of Q4_0 rows are used in their order: byte j of a block gives weight j of one product and weight
j + 16 of another, so activations are read in runs of 16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def q4_0_decode(q, d, one, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Bytes [ROWS, BLOCKS * 16] and scales [ROWS, BLOCKS] to the low and the high nibbles' weights, rounded to DTYPE.

    A nibble put at mantissa bits 8-11 (12-15) of 1.0 makes 1 + q / 32768 (1 + q / 2048); one fused multiply-add by the
    scale, which has 11 bits, gives (q - 8) * d exactly (see ``common.py`` for ``one``).
    """
    d = d.to(tl.float32)
    bits = q.to(tl.uint32) << 8
    low = ((bits & 0x0F00) | one).to(tl.float32, bitcast=True)
    high = ((bits & 0xF000) | one).to(tl.float32, bitcast=True)
    low = tl.fma(low, _spread(d * 32768.0, ROWS, BLOCKS), _spread(d * -32776.0, ROWS, BLOCKS))
    high = tl.fma(high, _spread(d * 2048.0, ROWS, BLOCKS), _spread(d * -2056.0, ROWS, BLOCKS))
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _spread(d, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    return tl.reshape(tl.broadcast_to(d[:, :, None], [ROWS, BLOCKS, 16]), [ROWS, BLOCKS * 16])


@triton.jit
def q4_0_offsets(row, k, K: tl.constexpr, BK: tl.constexpr, TILE_BLOCKS: tl.constexpr, TILE_STRIDE: tl.constexpr):
    """Byte offsets [BN, BK / 2] of nibbles and [BN, BK / 32] of scales, of rows cut into tiles of TILE_BLOCKS
    blocks."""
    kb = tl.arange(0, BK // 2)
    b = tl.arange(0, BK // 32)
    if TILE_BLOCKS * 32 == K:
        q = row[:, None] * (K // 2) + k // 2 + kb[None, :]
        d = row[:, None] * (K // 16) + k // 16 + b[None, :] * 2
    else:
        block = k // 32 + kb // 16
        q = (
            row[:, None] * (TILE_BLOCKS * 16)
            + ((block // TILE_BLOCKS) * TILE_STRIDE + (block % TILE_BLOCKS) * 16 + kb % 16)[None, :]
        )
        block = k // 32 + b
        d = (
            row[:, None] * (TILE_BLOCKS * 2)
            + ((block // TILE_BLOCKS) * TILE_STRIDE + (block % TILE_BLOCKS) * 2)[None, :]
        )
    return q, d


@triton.jit
def q4_0_activations(x_rows, k, BK: tl.constexpr):
    """Activation tiles [BK / 2, BM] that belong to the low and to the high nibbles; ``x_rows`` [BM] points at rows."""
    kb = tl.arange(0, BK // 2)
    element = k + (kb // 16) * 32 + kb % 16
    low = tl.load(x_rows[None, :] + element[:, None])
    high = tl.load(x_rows[None, :] + (element + 16)[:, None])
    return low, high


@triton.jit
def q4_0_multiply(
    q_ptr, d_ptr, row, x_rows, one, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr, TILE_STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Float32 [BN, BM]: weight rows ``row`` [BN] of byte planes at ``q_ptr`` and ``d_ptr``, times activation rows."""
    acc = tl.zeros([BN, BM], tl.float32)
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    for k in tl.range(0, K, BK, num_stages=STAGES):
        q_at, d_at = q4_0_offsets(row, k, K, BK, TILE_BLOCKS, TILE_STRIDE)
        q = tl.load(q_ptr + q_at)
        d = tl.load(d_ptr + d_at // 2)
        x_low, x_high = q4_0_activations(x_rows, k, BK)
        low, high = q4_0_decode(q, d, one, DTYPE, BN, BK // 32)
        acc = tl.dot(low, x_low, acc)
        acc = tl.dot(high, x_high, acc)
    return acc


@triton.jit
def q4_0_multiply_pair(
    q_ptr, d_ptr, q2_ptr, d2_ptr, row, x_rows, one, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two weight matrices (whole rows) times the same activations."""
    first = tl.zeros([BN, BM], tl.float32)
    second = tl.zeros([BN, BM], tl.float32)
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    for k in tl.range(0, K, BK, num_stages=STAGES):
        q_at, d_at = q4_0_offsets(tl.zeros_like(row), k, K, BK, K // 32, 0)
        q = tl.load(q_ptr + q_at)
        d = tl.load(d_ptr + d_at // 2)
        q2 = tl.load(q2_ptr + q_at)
        d2 = tl.load(d2_ptr + d_at // 2)
        x_low, x_high = q4_0_activations(x_rows, k, BK)
        low, high = q4_0_decode(q, d, one, DTYPE, BN, BK // 32)
        first = tl.dot(low, x_low, first)
        first = tl.dot(high, x_high, first)
        low, high = q4_0_decode(q2, d2, one, DTYPE, BN, BK // 32)
        second = tl.dot(low, x_low, second)
        second = tl.dot(high, x_high, second)
    return first, second


@triton.jit
def dense_dot(weight, x, acc):
    """``tl.dot`` that keeps float32 operands whole (no TF32) and casts weights to the activations' type otherwise."""
    if x.dtype == tl.float32:
        return tl.dot(weight.to(tl.float32), x, acc, input_precision="ieee")
    else:
        return tl.dot(weight.to(x.dtype), x, acc)
