"""Changes of the arena as the Scheduler sees them: what they ask of its planning, and what calls for them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from freetoken.messages import ActorName, ArenaVacated, PoolEmptied, PoolVacated, ShrinkKV, VacateArena, VacatePool
from freetoken.scheduling.lifecycle import RequestBook
from freetoken.scheduling.standstill import Standstill


class BlockPressure(NamedTuple):
    """Requests that wait for blocks while there is a place for them, and the blocks that all of them lack; or those
    that all blocks are too few for, and what the longest may come to lack."""

    num_requests: int
    num_blocks: int


def block_pressure(book: RequestBook) -> BlockPressure:
    """What waits for lack of blocks."""
    limits = book.limits
    if book.oversized:
        wishes = [len(message.prompt_token_ids) + message.sampling.max_tokens for message, _ in book.oversized.values()]
        longest = min(max(wishes), limits.max_context_tokens)
        return BlockPressure(len(wishes), limits.blocks_for(longest + 1) - limits.num_kv_blocks)
    places = limits.max_num_running - len(book.running)
    if not len(book.waiting) or places <= 0 or not len(book.running):
        return BlockPressure(0, 0)
    wanted = [limits.blocks_for(request.num_known_tokens) + 1 for request in itertools.islice(book.waiting, places)]
    missing = sum(wanted) - book.ledger.num_available_blocks
    return BlockPressure(len(wanted), missing) if missing > 0 else BlockPressure(0, 0)


class ArenaChanges:
    """At most one change. Fewer blocks: first the background step that writes some comes to its end, then their owner
    is asked, and no other begins until it has answered; ordinary steps go on. A new arena: a ``Standstill``."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._shrink: ShrinkKV | None = None
        self._due_s: float | None = None  # when the owner's answer is late; None before the question, or once told
        self._is_asked = False
        self._standstill: Standstill | None = None

    def clear(self) -> None:
        """The epoch is over."""
        self._shrink = self._due_s = self._standstill = None
        self._is_asked = False

    @property
    def allows_background(self) -> bool:
        """Whether a background step may begin."""
        return not self._is_asked

    @property
    def stops_planning(self) -> bool:
        """Whether no step may be planned. Beside a background step decoding goes on: that may take long, and no other
        begins before it ends."""
        return self._standstill is not None

    # ------------------------------------------------------------------------------------------ fewer blocks

    def shrink_kv(self, message: ShrinkKV) -> None:
        """KV is to have fewer blocks."""
        self._shrink = message

    def take_question(self, now: float) -> VacatePool | None:
        """What to ask KVAllocator, once. No reservation and no background step is under way."""
        shrink = self._shrink
        if shrink is None or self._is_asked:
            return None
        self._is_asked, self._due_s = True, now + self._book.limits.step_timeout_s
        return VacatePool(shrink.epoch, shrink.resize_id, shrink.num_kv_blocks)

    def blocks_vacated(self, message: PoolVacated) -> bool:
        """The answer: from here on every block has its new name, also those that were granted and not sent. Whether it
        was waited for, and is to be passed on to the device before any other plan."""
        if self._shrink is None or message.resize_id != self._shrink.resize_id:
            return False
        self._shrink = self._due_s = None
        self._is_asked = False
        moved = dict(zip(message.moved_from, message.moved_to, strict=True))
        for request in self._book.running:
            request.new_block_ids = [moved.get(block_id, block_id) for block_id in request.new_block_ids]
        return True

    # ------------------------------------------------------------------------------------------ a new arena

    def vacate(self, message: VacateArena) -> None:
        """Plan no further step until the arena was allocated anew."""
        self._standstill = Standstill(message)

    def take_vacated(self, now: float) -> ArenaVacated | None:
        """What to tell GpuExecutor, once. No step and no reservation is under way: all requests are preempted, or (a
        refusal) planning goes on."""
        standstill = self._standstill
        if standstill is None or standstill.has_begun:
            return None
        vacated = standstill.begin(self._book, now + self._book.limits.step_timeout_s)
        if vacated.refusal:
            self._standstill = None
        return vacated

    def emptied(self, message: PoolEmptied) -> bool:
        """A table is true to the new arena. Whether both are: planning goes on."""
        standstill = self._standstill
        if standstill is None or not standstill.has_begun:
            return False
        if message.stats is not None:
            self._book.kv_replaced(message.stats)
        if not standstill.emptied(message):
            return False
        self._standstill = None
        return True

    # ------------------------------------------------------------------------------------------ late answers

    def due_s(self) -> float | None:
        """When ``take_late`` is due, if an answer is."""
        standstill_due_s = self._standstill.due_s if self._standstill is not None else None
        return min((due_s for due_s in (self._due_s, standstill_due_s) if due_s is not None), default=None)

    def take_late(self, now: float) -> ActorName | None:
        """Who should have answered by now; told once."""
        if self._due_s is not None and now >= self._due_s:
            self._due_s = None
            return ActorName.KV_ALLOCATOR
        if self._standstill is not None and self._standstill.is_overdue(now):
            return self._standstill.suspect()
        return None
