"""The thread that runs steps, in the order their plans came. No torch here."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar, cast

from freetoken.errors import FreeTokenError
from freetoken.messages import ExpertCounters, StepFailed, StepPlan, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
            "steps_total": float(self.steps),
            "failed_steps_total": float(self.failed_steps),
            "tokens_total": float(self.tokens),
            "sampled_tokens_total": float(self.sampled_tokens),
            "busy_seconds_total": self.busy_ns / 1e9,
            "expert_hits_total": float(experts.hits),
            "expert_fetches_total": float(experts.fetches),
            "expert_cpu_total": float(experts.cpu),
            "expert_admitted_total": float(experts.admitted),
            "expert_evicted_total": float(experts.evicted),
            "expert_fetched_bytes_total": float(experts.fetched_bytes),
            "expert_cpu_bytes_total": float(experts.cpu_bytes),
            "expert_layer_steps_total": float(experts.layer_steps),
        }


class StepThread:
    """Runs jobs one by one, in order; most are plans. ``on_outcome`` is called on this thread after each plan."""

    def __init__(self, on_outcome: Callable[[StepPlan, StepResult | StepFailed], None]) -> None:
        self.stats = StepStats()
        self._on_outcome = on_outcome
        self._condition = threading.Condition()
        self._queue: deque[tuple[Callable[[], object], Future[object] | None]] = deque()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ft-steps", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    def submit(self, executor: PlanExecutor, plan: StepPlan) -> None:
        """Run ``plan`` after everything queued before it. Any thread; ignored once closed."""
        self._append(lambda: self._run_plan(executor, plan), None)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on this thread, in turn; blocks, and returns or raises what it does. ``CancelledError`` when
        the queue is dropped first."""
        future: Future[object] = Future()
        self._append(function, future)
        return cast(T, future.result())

    def drain(self, timeout_s: float) -> None:
        """Forget what waits and return once nothing runs. ``FreeTokenError`` when the running job does not end."""
        with self._condition:
            self._drop()
            if not self._condition.wait_for(lambda: not self._busy, timeout_s):
                raise FreeTokenError(f"the running step did not end within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """End the thread after the job it is running; idempotent."""
        with self._condition:
            self._closed = True
            self._drop()
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def _append(self, job: Callable[[], object], future: Future[object] | None) -> None:
        with self._condition:
            if not self._closed:
                self._queue.append((job, future))
                self._condition.notify_all()
            elif future is not None:
                future.cancel()

    def _drop(self) -> None:
        for _, future in self._queue:
            if future is not None:
                future.cancel()
        self._queue.clear()

    def _run_plan(self, executor: PlanExecutor, plan: StepPlan) -> None:
        started_ns = time.monotonic_ns()
        outcome = executor.execute(plan)
        self.stats.add(plan, outcome, time.monotonic_ns() - started_ns)
        self._on_outcome(plan, outcome)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                job, future = self._queue.popleft()
                self._busy = True
            try:
                result = job()
                if future is not None:
                    future.set_result(result)
            except Exception as error:
                if future is not None:
                    future.set_exception(error)
                else:
                    logger.exception("event=step_thread_failed")
            finally:
                # A job holds on to its executor, and that to the mailbox and the store.
                del job, future
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()
