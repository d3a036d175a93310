"""Ruling out tokens: some rows of logits get minus infinity where their bit mask has a zero.

Contract. ``logits`` [S, V] (float32, float16, bfloat16), contiguous, changed in place; ``rows`` int32 [C], distinct;
``masks`` int32 [C, ceil(V / 32)], token 32 * w + b in bit b of word w, contiguous. Other rows are not touched, not even
read. Exact. One launch over (C, V / 4096) programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import cdiv

_BLOCK = 4096


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, masks_ptr, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    row = tl.load(rows_ptr + number).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(masks_ptr + number.to(tl.int64) * WORDS + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    gone = tl.full([BLOCK], float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * VOCAB + token, gone, mask=inside & forbidden)


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """logits[rows[c], t] = -inf for every t that is not in masks[c]."""
    vocab, count = logits.shape[1], len(rows)
    words = cdiv(vocab, 32)
    if masks.shape != (count, words) or not (logits.is_contiguous() and masks.is_contiguous()):
        raise ValueError(
            f"masks {list(masks.shape)} of {count} rows do not fit contiguous logits {list(logits.shape)}: needed are "
            f"{[count, words]}"
        )
    if count:
        _mask_kernel[(count, cdiv(vocab, _BLOCK))](
            logits, rows, masks, VOCAB=vocab, WORDS=words, BLOCK=_BLOCK, num_warps=8
        )
