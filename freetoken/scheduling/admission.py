"""Which waiting requests may start, given the blocks that are left."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from freetoken.scheduling.limits import SchedulerLimits
from freetoken.scheduling.queue import RequestQueue
from freetoken.scheduling.request import Request, RequestState

MAX_ADMISSIONS_PER_STEP = 8
"""Each costs the allocator a walk over the whole prompt."""
WATERMARK_BLOCKS = 4
"""Blocks left for every running request to grow into, together at most a tenth of the pool: with fewer, a full engine
preempts (and computes again) much more, with many more it runs fewer requests at once."""
MAX_SCANNED = 32
"""Requests looked at behind one that does not fit."""
MAX_BYPASSED = 32
"""Smaller requests that may pass one that does not fit before all wait for it."""


class Admission(NamedTuple):
    """A request to start, with room for up to ``num_new_tokens`` tokens beyond its cached prefix."""

    request: Request
    num_new_tokens: int


def plan_admissions(
    waiting: RequestQueue,
    lingering: Collection[str],
    *,
    num_running: int,
    prefill_tokens: int,
    available_blocks: int,
    limits: SchedulerLimits,
) -> list[Admission]:
    """Admit by current need: room for the next chunk plus a small watermark, never for ``max_tokens``.

    The first request gets a chunk of up to ``prefill_tokens``, the next ones what is left of it but at least a block
    each: a long prompt may be cached almost whole, which only the allocator's answer tells. A preempted request waits
    until everything it had fits again, or it would be preempted at once. With nothing running the most important one
    starts unconditionally: there is nothing to wait for. A request that does not fit lets ``MAX_BYPASSED`` others
    pass, in all.

    Updates ``num_bypassed`` of those passed.
    """
    chosen: list[Admission] = []
    passed: list[tuple[Request, int]] = []
    most = min(limits.max_num_running - num_running, MAX_ADMISSIONS_PER_STEP)
    watermark = max(min(num_running * WATERMARK_BLOCKS, limits.num_kv_blocks // 10), 1) if num_running else 0
    for scanned, request in enumerate(waiting):
        if len(chosen) >= most or scanned == MAX_SCANNED:
            break
        if request.num_in_flight or request.id in lingering:
            continue  # a row of its former life is still out
        known = request.num_known_tokens
        chunk = min(known, max(prefill_tokens, limits.block_size))
        needed = limits.blocks_for(known if request.state is RequestState.PREEMPTED else chunk)
        unconditional = num_running == 0 and not chosen
        refused_before = available_blocks <= request.blocked_at_blocks
        if not unconditional and (refused_before or needed + watermark > available_blocks):
            if request.num_bypassed >= MAX_BYPASSED:
                break
            passed.append((request, len(chosen)))
            continue
        chosen.append(Admission(request, chunk))
        available_blocks -= limits.blocks_for(chunk)
        prefill_tokens = max(prefill_tokens - chunk, 0)
    for request, num_before in passed:
        request.num_bypassed += len(chosen) - num_before
    return chosen
