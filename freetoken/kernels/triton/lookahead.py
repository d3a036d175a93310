"""Lookahead on the device: tell ExpertCache which experts a later layer will probably choose, and learn which record to
copy ahead of time. See csrc/core/mailbox.h for the protocol. All kernels but the copy are one program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import INTERPRETED, next_power_of_2, pointer_to
from freetoken.kernels.triton.mailbox import MailboxAddresses
from freetoken.kernels.triton.placed_plan import copy_listed
from freetoken.kernels.triton.router import SCORINGS, rank_experts
from freetoken.kernels.triton.words import ABORT_PLAN_LATE, store_release_system, wait_word

MAX_HINTED = 32
"""Experts of a hint."""


@triton.jit(do_not_specialize=["layer"])
def _hint_kernel(
    seq_ptr, step_id_ptr, logits_ptr, bias_ptr, hint, request, layer, scaling,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    seq = tl.load(seq_ptr) + 1
    expert = tl.arange(0, EXPERTS_POW2)
    logits = tl.load(logits_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    bias = tl.zeros([EXPERTS_POW2], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    ids, _ = rank_experts(
        logits, bias, EXPERTS_POW2, NUM_EXPERTS, TOP_K_POW2, TOP_K, SCORING, RENORMALIZE, scaling
    )  # fmt: skip
    column = tl.arange(0, TOP_K_POW2)
    header = pointer_to(request, tl.int32)
    tl.store(pointer_to(request, tl.int64), tl.load(step_id_ptr))
    tl.store(header + 2, layer)
    tl.store(header + 3, TOP_K)
    tl.store(header + 4 + column, ids, mask=column < TOP_K)
    tl.store(seq_ptr, seq)
    store_release_system(hint, seq, INTERPRET)


def publish_hint(
    box: MailboxAddresses,
    seq: Tensor,
    step_id: Tensor,
    logits: Tensor,
    top_k: int,
    layer: int,
    *,
    scoring: str,
    renormalize: bool,
    scaling: float,
    bias: Tensor | None = None,
) -> None:
    """Say that expert layer ``layer`` will probably choose the ``top_k`` (at most ``MAX_HINTED``) best by ``logits``
    float32 [1, E]; ``seq`` int32 [1] counts hints."""
    num_experts = logits.shape[1]
    _hint_kernel[(1,)](
        seq, step_id, logits, logits if bias is None else bias, box.hint, box.hint_request, layer, scaling,
        NUM_EXPERTS=num_experts, EXPERTS_POW2=next_power_of_2(num_experts), TOP_K=top_k,
        TOP_K_POW2=next_power_of_2(top_k), SCORING=SCORINGS[scoring], RENORMALIZE=renormalize,
        HAS_BIAS=bias is not None, INTERPRET=INTERPRETED, num_warps=4,
    )  # fmt: skip


@triton.jit
def _take_kernel(
    seq_ptr, store_ptr, count_ptr, copies_ptr, ahead, abort, place, limit_ns, late_reason,
    NUM_EXPERTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    status = wait_word(ahead, abort, tl.load(seq_ptr), limit_ns, INTERPRET)
    if status == 2:
        store_release_system(abort, late_reason, INTERPRET)
    good = status == 0
    expert = tl.load(pointer_to(ahead, tl.int32) + 2, mask=good, other=-1)
    known = good & (expert >= 0) & (expert < NUM_EXPERTS)
    source = tl.load(store_ptr + expert, mask=known, other=0)
    tl.store(copies_ptr, source)
    tl.store(copies_ptr + 1, place)
    tl.store(count_ptr, (source != 0).to(tl.int32))


def take_answer(
    box: MailboxAddresses, seq: Tensor, store: Tensor, place: int, count: Tensor, copies: Tensor, limit_ns: int
) -> None:
    """Wait for the answer to the last hint. ``copies`` int64 [1, 2] becomes (address of the record, ``place``) and
    ``count`` int32 [1] 1 if there is one to copy, else 0. ``store`` int64 [E]: addresses of the hinted layer's
    records."""
    _take_kernel[(1,)](
        seq, store, count, copies, box.ahead, box.abort, place, limit_ns, ABORT_PLAN_LATE, NUM_EXPERTS=store.shape[0],
        INTERPRET=INTERPRETED, num_warps=1,
    )  # fmt: skip


def copy_ahead(count: Tensor, copies: Tensor, size_bytes: int, grid: int) -> None:
    """Make the copy that ``take_answer`` asks for, of ``size_bytes`` (a multiple of 4)."""
    copy_listed(count, copies, size_bytes, grid)
