"""A step thread for devices that run on their own: step n + 1 is enqueued while n runs. No torch here."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from freetoken.errors import FreeTokenError
from freetoken.execution.step_thread import PlanExecutor, StepThread
from freetoken.messages import StepFailed, StepPlan, StepResult

logger = logging.getLogger(__name__)


class PipelinedExecutor(Protocol):
    """Runs a plan in two halves. None of them raises."""

    depth: int
    """Steps that may be under way at once."""

    def must_finish_first(self, plan: StepPlan) -> bool:
        """Whether ``plan`` can only be enqueued when the steps under way are finished."""
        ...

    def enqueue(self, plan: StepPlan) -> Any:
        """Start ``plan``; returns at once."""
        ...

    def finish(self, pending: Any) -> StepResult | StepFailed:
        """Wait for the oldest step under way, as ``enqueue`` returned it."""
        ...


class PipelinedStepThread(StepThread):
    """Plans are enqueued by this thread and finished by a second one, both in the order in which they came.

    ``on_outcome`` is called on the second thread. Jobs of ``call`` do not wait for steps under way.
    """

    def __init__(self, on_outcome: Callable[[StepPlan, StepResult | StepFailed], None]) -> None:
        self._under_way: deque[tuple[PipelinedExecutor, StepPlan, Any, int]] = deque()
        self._flow = threading.Condition()  # over _under_way and _ending
        self._ending = False
        self._last_end_ns = 0
        super().__init__(on_outcome)
        self._finisher = threading.Thread(target=self._finish_steps, name="ft-results", daemon=True)
        self._finisher.start()

    def drain(self, timeout_s: float) -> None:
        """Forget what waits and return once no step is under way. ``FreeTokenError`` when one does not end."""
        deadline = time.monotonic() + timeout_s
        super().drain(timeout_s)
        with self._flow:
            if not self._flow.wait_for(lambda: not self._under_way, max(0.0, deadline - time.monotonic())):
                raise FreeTokenError(f"the running step did not end within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """End both threads after the steps under way; idempotent."""
        super().close(timeout_s)
        with self._flow:
            self._ending = True
            self._flow.notify_all()
        self._finisher.join(timeout_s)

    def _run_plan(self, executor: PlanExecutor, plan: StepPlan) -> None:
        pipelined: PipelinedExecutor = executor  # type: ignore[assignment]
        with self._flow:
            self._flow.wait_for(
                lambda: (
                    not self._under_way
                    or (len(self._under_way) < pipelined.depth and not pipelined.must_finish_first(plan))
                )
            )
        started_ns = time.monotonic_ns()
        pending = pipelined.enqueue(plan)
        with self._flow:
            self._under_way.append((pipelined, plan, pending, started_ns))
            self._flow.notify_all()

    def _finish_steps(self) -> None:
        while True:
            with self._flow:
                self._flow.wait_for(lambda: bool(self._under_way) or self._ending)
                if not self._under_way:
                    return
                executor, plan, pending, started_ns = self._under_way[0]
            try:
                outcome = executor.finish(pending)
                end_ns = time.monotonic_ns()
                self.stats.add(plan, outcome, end_ns - max(started_ns, self._last_end_ns))
                self._last_end_ns = end_ns
            except Exception:
                logger.exception("event=finish_failed step=%d", plan.step_id)
                outcome = StepFailed(plan.step_id, plan.epoch, "internal error while finishing the step")
            # Before the outcome is out: whoever gets it may send the next plan, and finds room for it.
            with self._flow:
                self._under_way.popleft()
                self._flow.notify_all()
            try:
                self._on_outcome(plan, outcome)
            except Exception:
                logger.exception("event=outcome_lost step=%d", plan.step_id)
            del executor, plan, pending, outcome
