"""What more or fewer slots would be worth: estimated hit rates around the present capacity."""

from __future__ import annotations

import time
from typing import Protocol

from freetoken.elastic.arena_shape import plan_arena
from freetoken.elastic.rebalance import ElasticPolicy
from freetoken.launch_spec import LaunchSpec

_KEPT_S = 2.0


class ScoredTable(Protocol):
    """A ``SlotTable``, or the server that owns one."""

    def score_curve(self, capacities: list[int]) -> list[float]: ...


class SlotWorth:
    """Figures, once there are any, are kept for two seconds: the table is locked for as long as it takes to read every
    record's score."""

    def __init__(self, spec: LaunchSpec) -> None:
        arena = plan_arena(spec)
        self._shape = arena[0] if arena is not None else None
        self._figures: dict[str, float] = {}
        self._due_s = 0.0

    def figures(self, table: ScoredTable | None, num_slots: int) -> dict[str, float]:
        """Estimated hit rates now, and with a step of granules less and more; nothing where the arena is not
        elastic."""
        shape, now_s = self._shape, time.monotonic()
        if shape is None or table is None:
            return {}
        if now_s >= self._due_s:
            step = ElasticPolicy().step_granules(shape)
            granules = shape.granules_for_slots(num_slots)
            less = shape.slots_in(max(granules - step, 0))
            more = shape.slots_in(granules + step)
            curve = table.score_curve([less, num_slots, max(more, num_slots)])
            self._due_s = now_s + _KEPT_S if any(curve) else 0.0
            self._figures = dict(zip(("hit_estimate_less", "hit_estimate", "hit_estimate_more"), curve, strict=True))
        return self._figures
