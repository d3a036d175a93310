"""The end of an expert layer: routed outputs, the CPU's share and the residual stream become one sum.

Contract. ``residual`` float32 [T, H] is updated in place:

    residual[t] += sum over k of weights[t, k] * (sum over p of partials[t * K + k, p])   for routes with on_gpu = 1
                 + cpu_partial[t]                                                         if the plan has a CPU share

``partials`` [T * K, P, H] (float32, float16 or bfloat16; P = 1 for the grouped GEMM). Or, for atomics, ``routed``
float32 [T, H], which is added as it is and set to zero for the next layer. Sums run in a fixed order, k outermost, so
the result repeats bitwise. ``weights`` float32 [T, K]; ``on_gpu`` as in ``DevicePlan``; the CPU's partial is float32
[T, H] in host memory. With ``wait`` the first program waits for the ``part`` word and the others for the first, which
saves a launch; all programs must be resident at once, so this is for one or two tokens.

Grid (T, H / 64). Tolerance against ``reference.py``: 1e-6 of the largest term.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import INTERPRETED, cdiv, next_power_of_2, pointer_to
from freetoken.kernels.triton.mailbox import MailboxAddresses
from freetoken.kernels.triton.plan import DevicePlan
from freetoken.kernels.triton.words import (
    ABORT_PARTIAL_LATE,
    await_gate,
    open_gate,
    stamp,
    store_release_system,
    wait_word,
)


@triton.jit
def _combine_kernel(
    residual_ptr, partials_ptr, weights_ptr, on_gpu_ptr, counts_ptr, cpu_partial, seq_ptr, gate_ptr, word, abort,
    stamps, limit_ns, late_reason,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK: tl.constexpr,
    ATOMIC: tl.constexpr, HAS_CPU: tl.constexpr, WAIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    first = (token == 0) & (tl.program_id(1) == 0)
    if WAIT and first:
        stamp(stamps, 2, INTERPRET)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < HIDDEN
    total = tl.load(residual_ptr + token.to(tl.int64) * HIDDEN + h, mask=inside, other=0.0)
    if ATOMIC:
        cell = partials_ptr + token.to(tl.int64) * HIDDEN + h
        total += tl.load(cell, mask=inside, other=0.0)
        tl.store(cell, tl.zeros([BLOCK], tl.float32), mask=inside)
    else:
        part = tl.arange(0, PARTS_POW2)
        for k in tl.static_range(TOP_K):
            route = token * TOP_K + k
            mine = tl.load(on_gpu_ptr + route) != 0
            weight = tl.load(weights_ptr + route)
            cell = (route.to(tl.int64) * PARTS + part)[:, None] * HIDDEN + h[None, :]
            mask = (part < PARTS)[:, None] & inside[None, :] & mine
            sums = tl.sum(tl.load(partials_ptr + cell, mask=mask, other=0.0).to(tl.float32), axis=0)
            # Not added at all for a route of the CPU: a stale weight times 0 could be NaN.
            total = tl.where(mine, total + sums * weight, total)
    if HAS_CPU and tl.load(counts_ptr + 3) > 0:
        status = 0
        if WAIT:
            seq = tl.load(seq_ptr)
            if first:
                status = wait_word(word, abort, seq, limit_ns, INTERPRET)
                stamp(stamps, 3, INTERPRET)
                if status == 2:
                    store_release_system(abort, late_reason, INTERPRET)
                tl.store(counts_ptr + 6, status, mask=status != 0)
                open_gate(gate_ptr, seq, INTERPRET)
            else:
                await_gate(gate_ptr, seq, INTERPRET)
                status = tl.load(counts_ptr + 6)
        good = status == 0
        total += tl.load(pointer_to(cpu_partial, tl.float32) + token * HIDDEN + h, mask=inside & good, other=0.0)
    tl.store(residual_ptr + token.to(tl.int64) * HIDDEN + h, total, mask=inside)


@dataclass(frozen=True)
class PartWait:
    """How ``combine`` waits for the CPU share of the last plan.

    ``seq`` int32 [1]: the counter of publishes; ``gate`` int32 [1]: equal to ``seq`` at the start, the kernel's own
    afterwards; ``stamps``: of ``MailboxAddresses.layer_stamps``.
    """

    box: MailboxAddresses
    seq: Tensor
    gate: Tensor
    limit_ns: int
    stamps: int = 0


def combine(
    residual: Tensor,
    weights: Tensor,
    plan: DevicePlan,
    *,
    partials: Tensor | None = None,
    routed: Tensor | None = None,
    cpu_partial_address: int = 0,
    wait: PartWait | None = None,
    block: int = 64,
) -> None:
    """Add an expert layer to the residual stream (see the module docstring).

    One of ``partials`` and ``routed`` is given. ``cpu_partial_address`` 0: there is never a CPU share.
    """
    tokens, hidden = residual.shape
    if (partials is None) == (routed is None):
        raise ValueError("combine needs either partials or routed")
    source = partials if partials is not None else routed
    assert source is not None
    parts = source.numel() // (tokens * weights.shape[1] * hidden) if partials is not None else 1
    box = wait.box if wait is not None else None
    seq = gate = plan.counts
    if wait is not None:
        seq, gate = wait.seq, wait.gate
    _combine_kernel[(tokens, cdiv(hidden, block))](
        residual, source, weights, plan.on_gpu, plan.counts, cpu_partial_address, seq, gate, box.part if box else 0,
        box.abort if box else 0, wait.stamps if wait else 0, wait.limit_ns if wait else 0, ABORT_PARTIAL_LATE,
        TOP_K=weights.shape[1], HIDDEN=hidden, PARTS=parts,
        PARTS_POW2=next_power_of_2(parts), BLOCK=block, ATOMIC=partials is None, HAS_CPU=cpu_partial_address != 0,
        WAIT=box is not None, INTERPRET=INTERPRETED, num_warps=4,
    )  # fmt: skip
