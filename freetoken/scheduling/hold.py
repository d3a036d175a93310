"""The moment without steps in which the arena changes, as the Scheduler keeps it; and what calls for it."""

from __future__ import annotations

from typing import NamedTuple

from freetoken.messages import ActorName, ArenaPrepared, VacatePool


class BlockPressure(NamedTuple):
    """Requests that wait for blocks while there is a place for them, and the blocks that all of them lack."""

    num_requests: int
    num_blocks: int


class ResizeHold:
    """One change: first the steps under way come to their end, then the tables' owners are asked. ``due_s``: when
    their last word is late."""

    def __init__(self, message: ArenaPrepared) -> None:
        self.resize_id = message.resize_id
        self.waiting_for: set[str] = set()
        self.due_s: float | None = None
        self._capacities = {
            ActorName.EXPERT_CACHE: message.num_slots,
            ActorName.KV_ALLOCATOR: message.num_kv_blocks,
        }

    def ask(self, epoch: int, due_s: float) -> dict[ActorName, VacatePool]:
        """The questions; both owners owe an answer from now on."""
        self.due_s = due_s
        self.waiting_for = {name.value for name in self._capacities}
        return {name: VacatePool(epoch, self.resize_id, capacity) for name, capacity in self._capacities.items()}

    def answered(self, sender: str) -> bool:
        """``sender`` is done; whether all are."""
        self.waiting_for.discard(sender)
        return not self.waiting_for

    def is_overdue(self, now: float) -> bool:
        """Whether somebody should have answered by now."""
        return self.due_s is not None and now >= self.due_s

    def suspect(self) -> ActorName:
        """Who is late: the only one who has not answered, or GpuExecutor, for which both wait."""
        self.due_s = None
        if len(self.waiting_for) == 1:
            return ActorName(next(iter(self.waiting_for)))
        return ActorName.GPU_EXECUTOR
