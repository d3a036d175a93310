"""A step thread for devices that run on their own: step n + 1 is enqueued while n runs. No torch here."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from freetoken.errors import FreeTokenError
from freetoken.execution.step_thread import BackgroundStep, PlanExecutor, ResumableExecutor, StepThread
from freetoken.messages import StepFailed, StepPlan, StepResult

logger = logging.getLogger(__name__)

_MAX_GROUPS = 2  # launched and not finished


class PipelinedExecutor(ResumableExecutor, Protocol):
    """Runs a plan in two halves, and a background plan in groups of layers that ``advance`` only launches. None of it
    raises."""

    depth: int
    """Steps that may be under way at once."""

    def must_finish_first(self, plan: StepPlan) -> bool:
        """Whether ``plan`` can only be enqueued, or begun, when the steps under way are finished."""
        ...

    def enqueue(self, plan: StepPlan) -> Any:
        """Start ``plan``; returns at once."""
        ...

    def finish(self, handle: Any) -> StepResult | StepFailed:
        """Wait for the oldest step under way, as ``enqueue`` returned it, or for a background step that has been
        launched to its end."""
        ...

    def mark(self) -> Any:
        """The device's work so far."""
        ...

    def await_mark(self, mark: Any) -> None:
        """Wait until that is done."""
        ...


@dataclass(slots=True)
class _UnderWay:
    """A step, or (``layers`` > 0) a group of layers of the background step that is not its last: what to wait for."""

    executor: PipelinedExecutor
    handle: Any
    started_ns: int
    plan: StepPlan | None = None
    background: BackgroundStep | None = None
    layers: int = 0


class PipelinedStepThread(StepThread):
    """Plans are enqueued by this thread and finished by a second one, both in the order in which the device runs them:
    a background step takes its place with its last group.

    ``on_outcome`` is called on the second thread. Jobs of ``call`` do not wait for steps under way.
    """

    def __init__(
        self, on_outcome: Callable[[StepPlan, StepResult | StepFailed], None], decode_share: float = 0.4
    ) -> None:
        self._under_way: deque[_UnderWay] = deque()
        self._num_steps = 0  # of _under_way
        self._flow = threading.Condition()  # over _under_way, _num_steps and _ending
        self._ending = False
        self._last_end_ns = 0
        super().__init__(on_outcome, decode_share)
        self._finisher = threading.Thread(target=self._finish_all, name="ft-results", daemon=True)
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

    # ------------------------------------------------------------------------------------------ launching

    def _run_plan(self, executor: PlanExecutor, plan: StepPlan) -> None:
        pipelined: PipelinedExecutor = executor  # type: ignore[assignment]
        with self._flow:
            self._flow.wait_for(
                lambda: (
                    not self._num_steps or (self._num_steps < pipelined.depth and not pipelined.must_finish_first(plan))
                )
            )
        if plan.background and self._background is None:
            self._begin(executor, plan)
            return
        started_ns = time.monotonic_ns()
        handle = pipelined.enqueue(plan)
        self._count_step()
        self._add(_UnderWay(pipelined, handle, started_ns, plan, self._background))

    def _add(self, entry: _UnderWay) -> None:
        with self._flow:
            self._under_way.append(entry)
            self._num_steps += entry.plan is not None
            self._flow.notify_all()

    def _run_group(self, background: BackgroundStep) -> None:
        executor: PipelinedExecutor = background.executor  # type: ignore[assignment]
        with self._flow:  # else all groups could be launched before a plan comes, which would wait for all of them
            self._flow.wait_for(lambda: len(self._under_way) - self._num_steps < _MAX_GROUPS)
            if self._num_steps >= executor.depth:  # the last group becomes a step
                self._flow.wait_for(lambda: self._num_steps < executor.depth)
        turn = self.turns.turn()
        started_ns = time.monotonic_ns()
        ended = executor.advance(background.handle, turn.layers)
        self._owed_steps = turn.steps if self._steps_since_group or self._queue else 0
        self._steps_since_group = 0
        if ended:
            self._background = None
            self._add(_UnderWay(executor, background.handle, started_ns, background.plan, background))
        else:
            self._add(_UnderWay(executor, executor.mark(), started_ns, None, background, turn.layers))

    def _expects_steps(self) -> bool:
        return self._num_steps > 0

    # ------------------------------------------------------------------------------------------ finishing

    def _finish_all(self) -> None:
        while True:
            with self._flow:
                self._flow.wait_for(lambda: bool(self._under_way) or self._ending)
                if not self._under_way:
                    return
                entry = self._under_way[0]
            outcome = self._finish(entry)
            # Before the outcome is out: whoever gets it may send the next plan, and finds room for it.
            with self._flow:
                self._under_way.popleft()
                self._num_steps -= entry.plan is not None
                self._flow.notify_all()
            if entry.plan is not None and outcome is not None:
                try:
                    self._on_outcome(entry.plan, outcome)
                except Exception:
                    logger.exception("event=outcome_lost step=%d", entry.plan.step_id)
            del entry, outcome

    def _finish(self, entry: _UnderWay) -> StepResult | StepFailed | None:
        """Wait for ``entry`` and count its time, which began when the device was done with the entry before it."""
        plan, background = entry.plan, entry.background
        outcome: StepResult | StepFailed | None = None
        try:
            if plan is None:
                entry.executor.await_mark(entry.handle)
            else:
                outcome = entry.executor.finish(entry.handle)
            end_ns = time.monotonic_ns()
            took_ns = end_ns - max(entry.started_ns, self._last_end_ns)
            self._last_end_ns = end_ns
            if background is not None and (plan is None or plan.background):
                background.busy_ns += took_ns
            if plan is None:
                self.turns.layers_done(entry.layers, took_ns / 1e9)
            elif outcome is not None and plan.background and background is not None:
                outcome = background.outcome(outcome)
                self.stats.add(plan, outcome, background.busy_ns)
            elif outcome is not None:
                self._step_ended(plan, outcome, took_ns, background is not None)
        except Exception:
            logger.exception("event=finish_failed step=%d", plan.step_id if plan is not None else -1)
            if plan is not None:
                outcome = StepFailed(plan.step_id, plan.epoch, "internal error while finishing the step")
        return outcome
