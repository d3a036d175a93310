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
    device and its requests' blocks until it is answered or the epoch ends. ``prefill_tokens``: its tokens, if none of
    its rows decodes."""

    __slots__ = ("background", "prefill_tokens", "rows", "since_s", "stalled", "step_id")

    def __init__(
        self, step_id: int, rows: list[PlannedRow], now: float, prefill_tokens: int = 0, background: bool = False
    ) -> None:
        self.step_id = step_id
        self.rows = rows
        self.since_s = now
        self.stalled = False
        self.prefill_tokens = prefill_tokens
        self.background = background


class OutstandingSteps:
    """Steps in the order in which the device runs them, and at most one background step beside them."""

    def __init__(self, timeout_s: float, background_timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._background_timeout_s = timeout_s if background_timeout_s is None else background_timeout_s
        self._steps: list[OutstandingStep] = []
        self.background: OutstandingStep | None = None

    def __len__(self) -> int:
        return len(self._steps) + (self.background is not None)

    @property
    def is_full(self) -> bool:
        """Whether no further plan may be sent."""
        return len(self._steps) >= MAX_OUTSTANDING_STEPS

    def add(self, step: OutstandingStep) -> None:
        """A plan was sent."""
        if step.background:
            assert self.background is None
            self.background = step
        else:
            self._steps.append(step)

    def take(self, step_id: int, now: float) -> list[OutstandingStep]:
        """The step that was answered, last, after older ones whose answers must have been lost (steps run in order; the
        background step may be answered at any time). None of them is outstanding any more. Empty for an unknown id."""
        if self.background is not None and self.background.step_id == step_id:
            taken, self.background = [self.background], None
            return taken
        index = next((i for i, step in enumerate(self._steps) if step.step_id == step_id), None)
        if index is None:
            logger.warning("event=unexpected_result step=%d", step_id)
            return []
        taken = self._steps[: index + 1]
        del self._steps[: index + 1]
        if self._steps:
            self._steps[0].since_s = now
        return taken

    def _due(self) -> list[tuple[float, OutstandingStep]]:
        due = [(step.since_s + self._timeout_s, step) for step in self._steps if not step.stalled][:1]
        if self.background is not None and not self.background.stalled:
            due.append((self.background.since_s + self._background_timeout_s, self.background))
        return due

    def deadline_s(self) -> float | None:
        """When the first of the oldest step and the background step that was not given up is overdue."""
        return min((moment for moment, _ in self._due()), default=None)

    def give_up(self, now: float) -> OutstandingStep | None:
        """An overdue step, now marked as stalled, if there is one. The others get their time anew: it was in their
        way."""
        overdue = [(moment, step) for moment, step in self._due() if moment <= now]
        if not overdue:
            return None
        _, stalled = min(overdue, key=lambda pair: pair[0])
        stalled.stalled = True
        logger.error("event=step_stalled step=%d waited_s=%.1f", stalled.step_id, now - stalled.since_s)
        for step in self._steps:
            step.since_s = now
        if self.background is not None:
            self.background.since_s = now
        return stalled

    def clear(self) -> None:
        """Forget all (the epoch ended)."""
        self._steps.clear()
        self.background = None
