"""KV blocks as the Scheduler sees their number change: fewer of them, and what calls for more."""

from __future__ import annotations

from typing import NamedTuple

from freetoken.messages import ShrinkKV, VacatePool


class BlockPressure(NamedTuple):
    """Requests that wait for blocks while there is a place for them, and the blocks that all of them lack."""

    num_requests: int
    num_blocks: int


class BlocksLeaving:
    """One change to fewer blocks: first the background step that writes some comes to its end, then their owner is
    asked. No other background step begins until it has answered; ordinary steps go on."""

    def __init__(self, message: ShrinkKV) -> None:
        self.resize_id = message.resize_id
        self.due_s: float | None = None
        """When the answer is late; None before the question and once that was said."""
        self.is_asked = False
        self._num_blocks = message.num_kv_blocks

    def ask(self, epoch: int, due_s: float) -> VacatePool:
        """The question."""
        self.is_asked, self.due_s = True, due_s
        return VacatePool(epoch, self.resize_id, self._num_blocks)
