"""Choosing experts: scores of all experts to the K chosen ones, and the norm and projection before it for decode.

Contract of ``top_k``: logits float32 [T, E] to ids int32 [T, K] and weights float32 [T, K], by descending score, of
equal scores the lower id first. NaN counts as the lowest score, so ids are always distinct and in range. Scorings:

- ``softmax``: softmax over all experts, then top-k; ``renormalize`` divides the chosen weights by their sum;
- ``softmax_of_chosen``: top-k of the logits, then softmax over the chosen;
- ``sigmoid``: weights are sigmoids; ``bias`` [E] takes part in choosing, not in weights; ``renormalize`` as above.

``scaling`` multiplies the weights. Tolerance against ``reference.py``: ids equal, weights 1e-5.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import next_power_of_2

SCORINGS = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}


@triton.jit
def choose_experts(logits, bias, EXPERTS_POW2: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
                   TOP_K_POW2: tl.constexpr, ROWS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
                   scaling):  # fmt: skip
    """logits [ROWS, EXPERTS_POW2], bias [EXPERTS_POW2] -> ids, weights [ROWS, TOP_K_POW2] (what lies beyond is 0)."""
    LOWEST: tl.constexpr = -3.0e38
    expert = tl.arange(0, EXPERTS_POW2)
    real = (expert < NUM_EXPERTS)[None, :]
    logits = tl.where(logits > LOWEST, logits, LOWEST)
    if SCORING == 2:
        score = 1.0 / (1.0 + tl.exp(-tl.maximum(logits, -80.0)))
        choice = score + bias[None, :]
        choice = tl.where(choice > LOWEST, choice, LOWEST)
    else:
        masked = tl.where(real, logits, float("-inf"))
        exponents = tl.exp(masked - tl.max(masked, axis=1)[:, None])
        if SCORING == 0:
            score = exponents / tl.sum(exponents, axis=1)[:, None]
        else:
            score = exponents
        choice = logits
    choice = tl.where(real, choice, float("-inf"))
    column = tl.arange(0, TOP_K_POW2)
    ids = tl.zeros([ROWS, TOP_K_POW2], tl.int32)
    weights = tl.zeros([ROWS, TOP_K_POW2], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=1, tie_break_left=True)
        hit = expert[None, :] == best[:, None]
        weight = tl.sum(tl.where(hit, score, 0.0), axis=1)
        choice = tl.where(hit, float("-inf"), choice)
        here = (column == k)[None, :]
        ids = tl.where(here, best[:, None], ids)
        weights = tl.where(here, weight[:, None], weights)
    if RENORMALIZE or SCORING == 1:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    return ids, weights * scaling


@triton.jit
def rank_experts(logits, bias, EXPERTS_POW2: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K_POW2: tl.constexpr,
                 TOP_K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, scaling):  # fmt: skip
    """``choose_experts`` for one row [EXPERTS_POW2]: every expert's rank at once, instead of K dependent reductions."""
    LOWEST: tl.constexpr = -3.0e38
    expert = tl.arange(0, EXPERTS_POW2)
    real = expert < NUM_EXPERTS
    logits = tl.where(logits > LOWEST, logits, LOWEST)
    if SCORING == 2:
        score = 1.0 / (1.0 + tl.exp(-tl.maximum(logits, -80.0)))
        choice = score + bias
        choice = tl.where(choice > LOWEST, choice, LOWEST)
    else:
        masked = tl.where(real, logits, float("-inf"))
        score = tl.exp(masked - tl.max(masked, axis=0))
        if SCORING == 0:
            score = score / tl.sum(score, axis=0)
        choice = logits
    choice = tl.where(real, choice, float("-inf"))
    ahead = choice[None, :] > choice[:, None]
    ahead = ahead | ((choice[None, :] == choice[:, None]) & (expert[None, :] < expert[:, None]))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    column = tl.arange(0, TOP_K_POW2)
    hit = (rank[:, None] == column[None, :]) & (column < TOP_K)[None, :]
    ids = tl.sum(tl.where(hit, expert[:, None], 0), axis=0)
    weights = tl.sum(tl.where(hit, score[:, None], 0.0), axis=0)
    if RENORMALIZE or SCORING == 1:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    return ids, weights * scaling


@triton.jit
def _top_k_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, scaling,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr,
    ROWS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS_POW2)
    mask = (row < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :]
    logits = tl.load(logits_ptr + row[:, None] * NUM_EXPERTS + expert[None, :], mask=mask, other=0.0)
    bias = tl.zeros([EXPERTS_POW2], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    ids, weights = choose_experts(
        logits, bias, EXPERTS_POW2, NUM_EXPERTS, TOP_K, TOP_K_POW2, ROWS, SCORING, RENORMALIZE, scaling
    )
    column = tl.arange(0, TOP_K_POW2)
    cell = row[:, None] * TOP_K + column[None, :]
    keep = (row < num_tokens)[:, None] & (column < TOP_K)[None, :]
    tl.store(ids_ptr + cell, ids, mask=keep)
    tl.store(weights_ptr + cell, weights, mask=keep)


def top_k(
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    scaling: float = 1.0,
    bias: Tensor | None = None,
) -> None:
    """Fill ids and weights [T, K] from contiguous float32 logits [T, E] (see the module docstring)."""
    num_tokens, num_experts = logits.shape
    k = ids.shape[1]
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"router logits are {logits.dtype}; needed: contiguous float32")
    if not 0 < k <= num_experts:
        raise ValueError(f"top-k {k} is not in 1..{num_experts} (number of experts)")
    rows = 4
    _top_k_kernel[(triton.cdiv(num_tokens, rows),)](
        logits, logits if bias is None else bias, ids, weights, num_tokens, scaling,
        NUM_EXPERTS=num_experts, EXPERTS_POW2=next_power_of_2(num_experts), TOP_K=k, TOP_K_POW2=next_power_of_2(k),
        ROWS=rows, SCORING=SCORINGS[scoring], RENORMALIZE=renormalize, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _norm_router_kernel(
    residual_ptr, norm_ptr, router_ptr, hidden_ptr, logits_ptr, ahead_norm_ptr, ahead_router_ptr, ahead_logits_ptr,
    num_tokens, eps,
    HIDDEN: tl.constexpr, HIDDEN_POW2: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    SLICE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    is_own = tl.program_id(1) == 0
    if AHEAD:
        norm_ptr = tl.where(is_own, norm_ptr, ahead_norm_ptr)
        router_ptr = tl.where(is_own, router_ptr, ahead_router_ptr)
        logits_ptr = tl.where(is_own, logits_ptr, ahead_logits_ptr)
    expert = program * EXPERTS + tl.arange(0, EXPERTS)
    h = tl.arange(0, HIDDEN_POW2)
    inside = h < HIDDEN
    weight = tl.load(
        router_ptr + expert[:, None] * HIDDEN + h[None, :],
        mask=(expert < NUM_EXPERTS)[:, None] & inside[None, :],
        other=0.0,
    )
    norm = tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
    piece = program * SLICE + tl.arange(0, SLICE)
    piece_norm = tl.load(norm_ptr + piece, mask=piece < HIDDEN, other=0.0).to(tl.float32)
    for t in range(num_tokens):
        row = residual_ptr + t * HIDDEN
        x = tl.load(row + h, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
        logits = tl.sum(weight.to(tl.float32) * (x * norm)[None, :], axis=1) * scale
        tl.store(logits_ptr + t * NUM_EXPERTS + expert, logits, mask=expert < NUM_EXPERTS)
        own = tl.load(row + piece, mask=piece < HIDDEN, other=0.0).to(tl.float32)
        normed = (own * scale * piece_norm).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + t * HIDDEN + piece, normed, mask=(piece < HIDDEN) & is_own)


def norm_router(
    residual: Tensor,
    norm: Tensor,
    router: Tensor,
    hidden: Tensor,
    logits: Tensor,
    eps: float,
    experts_per_program: int = 4,
    ahead: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """hidden[T, H] = rms_norm(residual) * norm in hidden's dtype, logits[T, E] = float32 of the same (unrounded) @
    router.T.

    ``residual`` [T, H] float32 or of hidden's dtype, ``norm`` [H], ``router`` [E, H]; all contiguous. Made for a few
    tokens: every program reads its rows of ``router`` once and passes over all tokens.

    ``ahead``, (norm, router, logits) of a later layer: its logits for the same residual too.
    """
    num_tokens, hidden_size = residual.shape
    num_experts = router.shape[0]
    programs = triton.cdiv(num_experts, experts_per_program)
    later = ahead or (norm, router, logits)
    _norm_router_kernel[(programs, 1 if ahead is None else 2)](
        residual, norm, router, hidden, logits, *later, num_tokens, eps,
        HIDDEN=hidden_size, HIDDEN_POW2=next_power_of_2(hidden_size), NUM_EXPERTS=num_experts,
        EXPERTS=experts_per_program, SLICE=next_power_of_2(triton.cdiv(hidden_size, programs)), AHEAD=ahead is not None,
        num_warps=8,
    )  # fmt: skip
