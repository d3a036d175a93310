"""RMSNorm, add + RMSNorm and SiLU * up over rows.

Contract. x [T, D] contiguous (float32, float16, bfloat16), weight [D] of any of them, arithmetic in float32, one
rounding at the end to the output's dtype: out = x / sqrt(mean(x^2) + eps) * weight. ``add_rms_norm`` first does
residual += delta (rounded to residual's dtype, and normed as rounded). One program a row, D up to 16,384. Tolerance
against ``reference.py``: 1e-6 relative in float32, one unit in the last place otherwise.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import cdiv, next_power_of_2, silu_mul


@triton.jit
def _rms_norm_kernel(x_ptr, delta_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                     ADD: tl.constexpr):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * SIZE
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    x = tl.load(x_ptr + start + d, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta_ptr + start + d, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + start + d, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = rms_norm(x) * weight; out may be x."""
    size = x.shape[-1]
    block = next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x, x, weight, out, eps, SIZE=size, BLOCK=block, ADD=False, num_warps=_warps(block)
    )  # fmt: skip


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta, then out = rms_norm(residual) * weight."""
    size = residual.shape[-1]
    block = next_power_of_2(size)
    _rms_norm_kernel[(residual.numel() // size,)](
        residual, delta, weight, out, eps, SIZE=size, BLOCK=block, ADD=True, num_warps=_warps(block)
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + d, silu_mul(gate, up).to(out_ptr.dtype.element_ty), mask=d < SIZE)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out [T, I] = silu(x[:, :I]) * x[:, I:] for contiguous x [T, 2 I] (gate and up from one projection)."""
    size = out.shape[-1]
    block = min(1024, next_power_of_2(size))
    _silu_mul_kernel[(out.numel() // size, cdiv(size, block))](x, out, SIZE=size, BLOCK=block, num_warps=4)
