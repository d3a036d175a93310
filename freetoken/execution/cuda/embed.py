"""From token ids to the residual stream, with the tokens that only the device knows yet.

Contract. ``token`` int32 [T] (-1: the last one sampled for ``request_slot`` [T], in ``last_token``), ``embedding`` [V,
H] float or Q4_0. ``residual`` float32 [T, H] gets the rows. A token outside the vocabulary reads row 0. Exact.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import cdiv, next_power_of_2
from freetoken.kernels.triton.linear import Q4_0Weight


@triton.jit
def _embed_kernel(
    token_ptr, slot_ptr, last_ptr, table_ptr, scales_ptr, residual_ptr, vocab,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, Q4_0: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.load(token_ptr + row)
    if token < 0:
        token = tl.load(last_ptr + tl.load(slot_ptr + row))
    token = tl.where((token >= 0) & (token < vocab), token, 0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < HIDDEN
    if Q4_0:
        byte = tl.load(table_ptr + token * (HIDDEN // 2) + (h // 32) * 16 + h % 16, mask=inside, other=0).to(tl.int32)
        q = tl.where(h % 32 < 16, byte & 15, byte >> 4)
        scale = tl.load(scales_ptr + token * (HIDDEN // 32) + h // 32, mask=inside, other=0.0).to(tl.float32)
        x = (q - 8).to(tl.float32) * scale
    else:
        x = tl.load(table_ptr + token * HIDDEN + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + row.to(tl.int64) * HIDDEN + h, x, mask=inside)


def embed(
    token: Tensor, request_slot: Tensor, last_token: Tensor, embedding: Tensor | Q4_0Weight, residual: Tensor
) -> None:
    """Fill ``residual`` (see the module docstring)."""
    tokens, hidden = residual.shape
    vocab = embedding.shape[0]
    is_q4_0 = isinstance(embedding, Q4_0Weight)
    table, scales = (
        (embedding.nibbles, embedding.scales) if isinstance(embedding, Q4_0Weight) else (embedding, embedding)
    )
    block = min(1024, next_power_of_2(hidden))
    _embed_kernel[(tokens, cdiv(hidden, block))](
        token, request_slot, last_token, table, scales, residual, vocab, HIDDEN=hidden, BLOCK=block, Q4_0=is_q4_0,
        num_warps=4
    )  # fmt: skip
