"""How an arena of ordinary memory is divided. Another division takes another allocation. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Division:
    """``split`` in granules, which are only the unit of dividing here, and the records that it has room for."""

    split: ArenaSplit
    num_slots: int
    num_blocks: int

    @classmethod
    def of(cls, shape: ArenaShape, split: ArenaSplit) -> Division:
        """All that fits."""
        return cls(split, shape.slots_in(split.slot_granules), shape.blocks_in(split.kv_granules))


class DivisibleArena(Protocol):
    """``Arena`` and ``CudaArena`` without pools."""

    @property
    def division(self) -> Division: ...

    def reallocate(self, division: Division) -> None:
        """Give all slots and KV up, and allocate them anew under another ``arena_id``. Raises ``CapacityError`` when
        memory is short; then the arena has none until the next call."""
        ...


class ArenaUser(Protocol):
    """``ModelRuntime`` and ``CudaRuntime``."""

    def release_arena(self) -> None:
        """Let go of everything that holds the arena's memory or addresses. No step is under way."""
        ...

    def follow_arena(self) -> None:
        """The arena was allocated: make that anew."""
        ...


def divide_anew(arena: DivisibleArena, user: ArenaUser, division: Division) -> str:
    """Allocate the arena by ``division``, or as it was if that fails; why it failed, or "". Blocks for as long as it
    takes. No executor uses the arena any more.

    Raises what the second failure raises; then there is no arena.
    """
    old = arena.division
    user.release_arena()
    try:
        arena.reallocate(division)
        user.follow_arena()
        return ""
    except Exception as error:  # of either device; whatever it is, the old division was good before
        logger.exception("event=reallocation_failed slots=%d kv_blocks=%d", division.num_slots, division.num_blocks)
        why = f"{type(error).__name__}: {error}"
    # Beyond the handler, which keeps what was built halfway alive.
    user.release_arena()
    arena.reallocate(old)
    user.follow_arena()
    return why
