"""Dense projections: GEMV for a few tokens (float or Q4_0 weights, norm before, bias and residual after), Q4_0 GEMM.

Contract of ``linear``: x [T, I] contiguous, weight [O, I] contiguous (float32, float16, bfloat16) or ``Q4_0Weight``,

    out[t] (+)= (rms_norm(x[t]) * norm or x[t]) @ weight.T + bias

in float32 with one rounding to out's dtype; ``accumulate`` adds to what is in out (float32: the residual stream). With
``norm`` the projection runs on x * norm and is scaled afterwards, so that weights do not wait for the sum of squares,
and the normed activations are not rounded. Each program reads its weight rows once and passes over the tokens, up to
some eight of them; ``q4_0_gemm`` is for more (float weights: use torch). I up to 32,768; a multiple of 32 for Q4_0.
Tolerance against ``reference.py``: 1e-3 relative to the norm for Q4_0, 1e-5 for float weights; the GEMM rounds decoded
weights to x's dtype: 1e-2 for bfloat16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.kernels.triton.common import ONE_BITS, cdiv, next_power_of_2, q4_0_dot, q4_0_operand
from freetoken.kernels.triton.expert_gemm import GemmShape, largest_step
from freetoken.kernels.triton.gemm_core import q4_0_multiply


@triton.jit
def _input_row(x_ptr, norm_ptr, t, i, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    # The row times the norm's weight, and the factor that remains to be applied.
    x = tl.load(x_ptr + t * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        return x * tl.load(norm_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32), scale
    else:
        return x, 1.0


@triton.jit
def _finish(out_ptr, bias_ptr, t, row, y, OUT: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr):
    cell = out_ptr + t * OUT + row
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < OUT, other=0.0).to(tl.float32)
    if ACCUMULATE:
        y += tl.load(cell, mask=row < OUT, other=0.0).to(tl.float32)
    tl.store(cell, y.to(out_ptr.dtype.element_ty), mask=row < OUT)


@triton.jit
def _float_gemv_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, out_ptr, num_tokens, eps,
    SIZE: tl.constexpr, SIZE_POW2: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, SIZE_POW2)
    mask = (row < OUT)[:, None] & (i < SIZE)[None, :]
    weight = tl.load(weight_ptr + row.to(tl.int64)[:, None] * SIZE + i[None, :], mask=mask, other=0.0)
    for t in range(num_tokens):
        x, scale = _input_row(x_ptr, norm_ptr, t, i, eps, SIZE, NORM)
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1) * scale
        _finish(out_ptr, bias_ptr, t, row, y, OUT, BIAS, ACCUMULATE)


@triton.jit
def _q4_0_gemv_kernel(
    x_ptr, nibbles_ptr, scales_ptr, norm_ptr, bias_ptr, out_ptr, num_tokens, eps, one,
    SIZE: tl.constexpr, SIZE_POW2: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = SIZE_POW2 // 32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, SIZE_POW2 // 8)
    block = tl.arange(0, blocks)
    i = tl.arange(0, SIZE_POW2)
    words_ptr = nibbles_ptr.to(tl.pointer_type(tl.uint32))
    # Offsets of whole rows from the first: an int64 product, so that a vocabulary's rows fit.
    at = row.to(tl.int64)[:, None] * (SIZE // 8) + word[None, :]
    words = tl.load(words_ptr + at, mask=(row < OUT)[:, None] & (word < SIZE // 8)[None, :], other=0)
    at = row.to(tl.int64)[:, None] * (SIZE // 32) + block[None, :]
    scales = tl.load(scales_ptr + at, mask=(row < OUT)[:, None] & (block < SIZE // 32)[None, :], other=0.0)
    for t in range(num_tokens):
        x, scale = _input_row(x_ptr, norm_ptr, t, i, eps, SIZE, NORM)
        # 0, but not to the compiler, which would decode all weights ahead of the loop and spill them.
        zero = (t * (one - 0x3F800000)).to(tl.uint32)
        dots = q4_0_dot(words ^ zero, q4_0_operand(x, blocks), one.to(tl.uint32) | zero)
        sums = tl.sum(tl.reshape(dots, [ROWS, blocks, 4]), axis=2)
        y = tl.sum(sums * scales, axis=1) * scale
        _finish(out_ptr, bias_ptr, t, row, y, OUT, BIAS, ACCUMULATE)


def linear(
    x: Tensor,
    weight: Tensor | Q4_0Weight,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    accumulate: bool = False,
    rows: int | None = None,
    num_warps: int = 8,
) -> None:
    """out [T, O] from x [T, I] (see the module docstring). ``rows`` is the number of weight rows per program."""
    tokens, size = x.shape
    outputs, inputs = weight.shape
    if inputs != size or tuple(out.shape) != (tokens, outputs) or not x.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"linear: x {list(x.shape)}, weight {[outputs, inputs]} and out {list(out.shape)} do not fit")
    size_pow2 = next_power_of_2(size)
    norm_or_x, bias_or_x = x if norm is None else norm, x if bias is None else bias
    common = {
        "SIZE": size, "SIZE_POW2": size_pow2, "OUT": outputs, "NORM": norm is not None, "BIAS": bias is not None,
        "ACCUMULATE": accumulate, "num_warps": num_warps,
    }  # fmt: skip
    if isinstance(weight, Q4_0Weight):
        rows = rows or max(1, min(16, 32768 // size_pow2))
        _q4_0_gemv_kernel[(cdiv(outputs, rows),)](
            x, weight.nibbles, weight.scales, norm_or_x, bias_or_x, out, tokens, eps, ONE_BITS, ROWS=rows, **common
        )
    else:
        rows = rows or max(1, min(8, 8192 // size_pow2))
        _float_gemv_kernel[(cdiv(outputs, rows),)](
            x, weight, norm_or_x, bias_or_x, out, tokens, eps, ROWS=rows, **common
        )  # fmt: skip


@triton.jit
def _q4_0_gemm_kernel(
    x_ptr, nibbles_ptr, scales_ptr, bias_ptr, out_ptr, num_tokens, one,
    SIZE: tl.constexpr, OUT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    # Token blocks innermost: programs that run together share weight rows.
    token_blocks = tl.cdiv(num_tokens, BM)
    token = (tl.program_id(0) % token_blocks) * BM + tl.arange(0, BM)
    row = (tl.program_id(0) // token_blocks) * BN + tl.arange(0, BN)
    x_rows = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64) * SIZE
    clamped = row if OUT % BN == 0 else tl.minimum(row, OUT - 1)
    y = q4_0_multiply(
        nibbles_ptr, scales_ptr, clamped, x_rows, one.to(tl.uint32), SIZE, BN, BM, BK, SIZE // 32, 0, STAGES
    )
    keep = (row < OUT)[:, None] & (token < num_tokens)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < OUT, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + token.to(tl.int64)[None, :] * OUT + row[:, None]
    if ACCUMULATE:
        y += tl.load(out, mask=keep, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=keep)


def q4_0_gemm(
    x: Tensor,
    weight: Q4_0Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    block_tokens: int | None = None,
    shape: GemmShape | None = None,
) -> None:
    """out [T, O] (+)= x @ weight.T (+ bias) for any number of tokens; float16 or bfloat16 x runs on tensor cores."""
    tokens, size = x.shape
    outputs, inputs = weight.shape
    if inputs != size or tuple(out.shape) != (tokens, outputs) or not x.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"q4_0_gemm: x {list(x.shape)}, weight {[outputs, inputs]}, out {list(out.shape)} do not fit")
    block_tokens = block_tokens or min(128, max(16, next_power_of_2(tokens)))
    if shape is None:
        shape = GemmShape(columns=64 if block_tokens <= 64 else 128, k=128 if block_tokens <= 32 else 64,
                          num_warps=4 if block_tokens <= 64 else 8)  # fmt: skip
    _q4_0_gemm_kernel[(cdiv(tokens, block_tokens) * cdiv(outputs, shape.columns),)](
        x, weight.nibbles, weight.scales, x if bias is None else bias, out, tokens, ONE_BITS, SIZE=size, OUT=outputs,
        BN=shape.columns, BM=block_tokens, BK=largest_step(size, shape.k), STAGES=shape.num_stages,
        BIAS=bias is not None, ACCUMULATE=accumulate, num_warps=shape.num_warps,
    )  # fmt: skip
