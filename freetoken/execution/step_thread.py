"""The thread that runs steps, in the order their plans came. No torch here."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from freetoken.errors import FreeTokenError
from freetoken.messages import ExpertCounters, StepFailed, StepPlan, StepResult

logger = logging.getLogger(__name__)


class PlanExecutor(Protocol):
    """What runs a plan; see ``StepExecutor``. Must not raise."""

    def execute(self, plan: StepPlan) -> StepResult | StepFailed: ...


class StepStats:
    """Cumulative figures. Written by the step thread, read anywhere: each number stands alone."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        self.tokens = 0
        self.sampled_tokens = 0
        self.busy_ns = 0
        self.experts = ExpertCounters()

    def add(self, plan: StepPlan, outcome: StepResult | StepFailed, busy_ns: int) -> None:
        """Count one step."""
        self.steps += 1
        self.busy_ns += busy_ns
        self.tokens += sum(row.num_tokens for row in plan.rows)
        if isinstance(outcome, StepFailed):
            self.failed_steps += 1
        else:
            self.sampled_tokens += sum(row.token_id is not None for row in outcome.rows)
            self.experts = self.experts + outcome.experts

    def metrics(self) -> dict[str, float]:
        """By the naming rule of ``ActorStatus.metrics``."""
        experts = self.experts
        return {
            "steps_total": self.steps,
            "failed_steps_total": self.failed_steps,
            "tokens_total": self.tokens,
            "sampled_tokens_total": self.sampled_tokens,
            "busy_seconds_total": self.busy_ns / 1e9,
            "expert_hits_total": experts.hits,
            "expert_fetches_total": experts.fetches,
            "expert_cpu_total": experts.cpu,
            "expert_admitted_total": experts.admitted,
            "expert_evicted_total": experts.evicted,
            "expert_fetched_bytes_total": experts.fetched_bytes,
            "expert_cpu_bytes_total": experts.cpu_bytes,
            "expert_layer_steps_total": experts.layer_steps,
        }


class StepThread:
    """Queues plans and runs them one by one. ``on_outcome`` is called on the step thread, after each."""

    def __init__(self, on_outcome: Callable[[StepPlan, StepResult | StepFailed], None]) -> None:
        self.stats = StepStats()
        self._on_outcome = on_outcome
        self._condition = threading.Condition()
        self._queue: deque[tuple[PlanExecutor, StepPlan]] = deque()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ft-steps", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Plans that wait."""
        return len(self._queue)

    def submit(self, executor: PlanExecutor, plan: StepPlan) -> None:
        """Run ``plan`` after all earlier ones. Any thread."""
        with self._condition:
            if self._closed:
                return
            self._queue.append((executor, plan))
            self._condition.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Forget what waits and return once nothing runs. ``FreeTokenError`` when the running step does not end."""
        with self._condition:
            self._queue.clear()
            if not self._condition.wait_for(lambda: not self._busy, timeout_s):
                raise FreeTokenError(f"the running step did not end within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """End the thread after the step it is running; idempotent."""
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                executor, plan = self._queue.popleft()
                self._busy = True
            try:
                started_ns = time.monotonic_ns()
                outcome = executor.execute(plan)
                self.stats.add(plan, outcome, time.monotonic_ns() - started_ns)
                self._on_outcome(plan, outcome)
            except Exception:
                logger.exception("step_thread step=%d", plan.step_id)
            finally:
                del executor
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()
