"""Plans that were sent and not answered yet."""

from __future__ import annotations

import logging
from typing import NamedTuple

from freetoken.scheduling.request import Request

logger = logging.getLogger(__name__)

MAX_OUTSTANDING_STEPS = 2


class PlannedRow(NamedTuple):
    """A row of a plan: which tokens (up to ``end``) of which admission of a request, and whether it samples one."""

    request: Request
    admission: int
    end: int
    sample: bool


class OutstandingStep:
    """``since_s`` is when it was sent or became the oldest. A ``stalled`` step was given up, but it still occupies the
    device and its requests' blocks until it is answered or the epoch ends."""

    __slots__ = ("rows", "since_s", "stalled", "step_id")

    def __init__(self, step_id: int, rows: list[PlannedRow], now: float) -> None:
        self.step_id = step_id
        self.rows = rows
        self.since_s = now
        self.stalled = False


class OutstandingSteps:
    """In the order in which the device runs them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._steps: list[OutstandingStep] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether no further plan may be sent."""
        return len(self._steps) >= MAX_OUTSTANDING_STEPS

    def add(self, step_id: int, rows: list[PlannedRow], now: float) -> None:
        """A plan was sent."""
        self._steps.append(OutstandingStep(step_id, rows, now))

    def take(self, step_id: int, now: float) -> list[OutstandingStep]:
        """The step that was answered, last, after older ones whose answers must have been lost (steps run in order).
        None of them is outstanding any more. Empty for an unknown id."""
        index = next((i for i, step in enumerate(self._steps) if step.step_id == step_id), None)
        if index is None:
            logger.warning("event=unexpected_result step=%d", step_id)
            return []
        taken = self._steps[: index + 1]
        del self._steps[: index + 1]
        if self._steps:
            self._steps[0].since_s = now
        return taken

    def deadline_s(self) -> float | None:
        """When the oldest step that was not given up is overdue."""
        return next((step.since_s + self._timeout_s for step in self._steps if not step.stalled), None)

    def give_up(self, now: float) -> OutstandingStep | None:
        """The oldest step, now marked as stalled, if its deadline has passed."""
        deadline = self.deadline_s()
        if deadline is None or now < deadline:
            return None
        stalled = next(step for step in self._steps if not step.stalled)
        stalled.stalled = True
        logger.error("event=step_stalled step=%d waited_s=%.1f", stalled.step_id, now - stalled.since_s)
        for step in self._steps:
            step.since_s = now
        return stalled

    def clear(self) -> None:
        """Forget all (the epoch ended)."""
        self._steps.clear()
