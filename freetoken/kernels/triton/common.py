"""Pieces that kernels share: addresses, Q4_0 arithmetic, the last program of a group.

Q4_0 without conversions. A float32 whose bits are those of 1.0 with a nibble q placed at mantissa bits 16-19 is exactly
``1 + q / 128``, and at bits 12-15 exactly ``1 + q / 2048``. So one shift (shared by two nibbles), one LOP3 and one FFMA
make a weight's product, with the activation scaled by 128 or 2048 beforehand; what is too much, ``sum (1 + 8 / 128) *
128 x`` and its like, does not depend on the weights and is subtracted once per block. The excess is at most 2,056 times
an activation, so float32 sums lose 11 bits at worst, about 1e-4 of a block's result and far below the rounding of
bfloat16 activations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Inline assembly does not run in the interpreter; kernels that only gain speed by it leave it out there.
from freetoken.kernels.triton.interpreter import INTERPRETED as INTERPRETED

# Passed as a run-time argument: as a literal, ptxas would spend a second LOP3 on it (an instruction has room for one).
ONE_BITS = 0x3F800000

TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    """An int64 address, known to be a multiple of 16, as a pointer."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(dtype)), 16)


@triton.jit
def prefetch_l2(address, BYTES: tl.constexpr):
    """Ask for ``BYTES`` (a power of two) from a 128-byte-aligned address to come into the L2 cache, using no registers.

    Nothing waits for it. Not for the interpreter.
    """
    lines = address + tl.arange(0, BYTES // 128).to(tl.int64) * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def is_last_arrival(counter_ptr, total):
    """Counts the calling program in; true in the last of ``total``, which also sees all that the others wrote before.

    The counter is 0 again afterwards, ready for the next launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == total - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def q4_0_operand(x, BLOCKS: tl.constexpr):
    """Float32 x [BLOCKS * 32] for ``q4_0_dot``: eight scaled planes [BLOCKS * 4], one per nibble of a 32-bit word of
    weights, and the excess [BLOCKS * 4] to subtract from each word's sum."""
    x = tl.reshape(x, [BLOCKS, 2, 4, 2, 2])
    low, high = tl.split(tl.permute(x, [0, 2, 3, 4, 1]))
    low_even, low_odd = tl.split(low)
    high_even, high_odd = tl.split(high)
    x0, x4 = tl.split(low_even)
    x2, x6 = tl.split(low_odd)
    x1, x5 = tl.split(high_even)
    x3, x7 = tl.split(high_odd)
    return q4_0_scaled(
        tl.reshape(x0, [BLOCKS * 4]),
        tl.reshape(x1, [BLOCKS * 4]),
        tl.reshape(x2, [BLOCKS * 4]),
        tl.reshape(x3, [BLOCKS * 4]),
        tl.reshape(x4, [BLOCKS * 4]),
        tl.reshape(x5, [BLOCKS * 4]),
        tl.reshape(x6, [BLOCKS * 4]),
        tl.reshape(x7, [BLOCKS * 4]),
    )


@triton.jit
def q4_0_scaled(x0, x1, x2, x3, x4, x5, x6, x7):
    """The operand of ``q4_0_dot`` from activations by nibble: even nibbles are weights j, odd ones weights j + 16."""
    excess = (x0 + x2 + x3 + x6) * 2056.0 + (x1 + x4 + x5 + x7) * 136.0
    return (
        x0 * 2048.0,
        x1 * 128.0,
        x2 * 2048.0,
        x3 * 2048.0,
        x4 * 128.0,
        x5 * 128.0,
        x6 * 2048.0,
        x7 * 128.0,
        excess,
    )


@triton.jit
def q4_0_dot(words, x, one_bits):
    """Per word of eight nibbles [M, N], the sum of (q - 8) * x with the operand's planes broadcast over rows."""
    at_16: tl.constexpr = 0x000F0000
    at_12: tl.constexpr = 0x0000F000
    up_12 = words << 12
    up_4 = words << 4
    down_4 = words >> 4
    down_12 = words >> 12
    total = ((up_12 & at_12) | one_bits).to(tl.float32, bitcast=True) * x[0][None, :] - x[8][None, :]
    total += ((up_12 & at_16) | one_bits).to(tl.float32, bitcast=True) * x[1][None, :]
    total += ((up_4 & at_12) | one_bits).to(tl.float32, bitcast=True) * x[2][None, :]
    total += ((words & at_12) | one_bits).to(tl.float32, bitcast=True) * x[3][None, :]
    total += ((words & at_16) | one_bits).to(tl.float32, bitcast=True) * x[4][None, :]
    total += ((down_4 & at_16) | one_bits).to(tl.float32, bitcast=True) * x[5][None, :]
    total += ((down_12 & at_12) | one_bits).to(tl.float32, bitcast=True) * x[6][None, :]
    total += ((down_12 & at_16) | one_bits).to(tl.float32, bitcast=True) * x[7][None, :]
    return total


@triton.jit
def silu_mul(gate, up):
    """silu(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up
