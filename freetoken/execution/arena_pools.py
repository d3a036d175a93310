"""Expert slots and KV blocks as two pools of one budget; capacities follow what is mapped. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit
from freetoken.execution.granules import GranuleDriver, Granules

Moves = Sequence[tuple[int, int]]
"""(from, to) places of records; no place is named twice."""

SLOTS, KV = "slots", "kv"


class ArenaPools:
    """The division of an elastic arena. One thread at a time. Steps may run meanwhile: ``prepare`` and ``abort`` touch
    only places that nothing uses yet, ``commit`` takes its turn among what is launched, and ``release`` comes after all
    that was launched before."""

    def __init__(
        self, shape: ArenaShape, split: ArenaSplit, driver: GranuleDriver, num_slots: int, num_blocks: int
    ) -> None:
        """Begins with at most ``num_slots`` and ``num_blocks``. Raises ``CapacityError`` when memory is short."""
        self.shape = shape
        self.split = split
        most_slots = min(shape.granules_for_slots(shape.max_slots), shape.num_granules)
        self.granules = Granules(
            driver,
            shape.granule_bytes,
            shape.num_granules,
            {SLOTS: (split.slot_granules, most_slots), KV: (split.kv_granules, shape.num_granules)},
        )
        self.num_slots = min(num_slots, shape.slots_in(split.slot_granules))
        self.num_blocks = min(num_blocks, shape.blocks_in(split.kv_granules))
        self.resize_id = 0
        self._prepared: tuple[int, ArenaSplit] | None = None

    def where(self, pool: str) -> Any:
        """The driver's range of a pool."""
        return self.granules.pools[pool].where

    def capacity_bytes(self, pool: str) -> int:
        """Bytes of addresses of a pool; most are not mapped."""
        return self.granules.pools[pool].max_granules * self.shape.granule_bytes

    def prepare(self, resize_id: int, split: ArenaSplit) -> tuple[int, int]:
        """Map what the change needs; (slots, blocks) after it. Raises ``FreeTokenError`` or ``ValueError``; then
        nothing has changed."""
        self.granules.prepare({SLOTS: split.slot_granules, KV: split.kv_granules})
        self._prepared = (resize_id, split)
        return self.shape.slots_in(split.slot_granules), self.shape.blocks_in(split.kv_granules)

    def commit(self) -> None:
        """The prepared division holds. Everything that moves has been copied, or will be before it is read."""
        assert self._prepared is not None
        self.granules.commit()
        self.resize_id, self.split = self._prepared
        self._prepared = None
        self.num_slots = self.shape.slots_in(self.split.slot_granules)
        self.num_blocks = self.shape.blocks_in(self.split.kv_granules)

    def abort(self) -> None:
        """Forget a prepared change, if there is one."""
        self._prepared = None
        self.granules.abort()

    def release(self) -> None:
        """Unmap the places that went; nothing reads them any more."""
        self.granules.release()

    def check_moves(self, pool: str, moves: Moves) -> None:
        """Raises ``ValueError`` for a move out of or into nowhere, or to where nothing will be."""
        now = self.num_slots if pool == SLOTS else self.num_blocks
        then = self._then(now, int(pool == KV))
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        if len({*sources, *targets}) != 2 * len(moves):
            raise ValueError(f"a record of {pool} is moved twice")
        if moves and (min(sources) < then or max(sources) >= now or min(targets) < 0 or max(targets) >= then):
            raise ValueError(f"{pool} move from outside {then}..{now - 1} or to outside 0..{then - 1}")

    def _then(self, now: int, pool: int) -> int:
        if self._prepared is None:
            return now
        split = self._prepared[1]
        then = (self.shape.slots_in(split.slot_granules), self.shape.blocks_in(split.kv_granules))[pool]
        return min(now, then)

    def figures(self) -> dict[str, float]:
        """By the naming rule of ``ActorStatus.metrics``."""
        return self.shape.figures(self.split)
