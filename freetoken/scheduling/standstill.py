"""The time in which the arena is allocated anew, as the Scheduler keeps it: no step, and no request with blocks."""

from __future__ import annotations

from freetoken.messages import ActorName, ArenaVacated, PoolEmptied, VacateArena
from freetoken.scheduling.lifecycle import RequestBook


class Standstill:
    """One change: the steps under way come to their end, all requests give up their blocks, both tables are emptied.
    ``due_s``: when that is late."""

    def __init__(self, message: VacateArena) -> None:
        self._message = message
        self._waiting_for: set[str] = set()
        self.due_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the requests have given up their blocks."""
        return bool(self._waiting_for)

    def begin(self, book: RequestBook, due_s: float) -> ArenaVacated:
        """No step and no reservation is under way: take all blocks back, unless a request would not fit any more."""
        message = self._message
        longest = max((request.num_known_tokens for request in book.live.values()), default=0)
        capacity = message.num_kv_blocks * book.limits.block_size
        if longest > capacity:
            refusal = f"KV of {capacity} tokens is too little for a request that has {longest} tokens"
            return ArenaVacated(message.epoch, message.resize_id, refusal)
        for request in list(book.running):
            book.preempt(request)
        self.due_s = due_s
        self._waiting_for = {ActorName.EXPERT_CACHE.value, ActorName.KV_ALLOCATOR.value}
        return ArenaVacated(message.epoch, message.resize_id)

    def emptied(self, message: PoolEmptied) -> bool:
        """A table is empty; whether both are."""
        if message.resize_id == self._message.resize_id:
            self._waiting_for.discard(message.sender)
        return not self._waiting_for

    def is_overdue(self, now: float) -> bool:
        """Whether somebody should have answered by now."""
        return self.due_s is not None and now >= self.due_s

    def suspect(self) -> ActorName:
        """Who is late: the only table that is not empty, or GpuExecutor, for which both wait."""
        self.due_s = None
        if len(self._waiting_for) == 1:
            return ActorName(next(iter(self._waiting_for)))
        return ActorName.GPU_EXECUTOR
