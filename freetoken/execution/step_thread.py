"""The thread that runs steps, in the order their plans came, and a background step between them. No torch here."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from freetoken.errors import FreeTokenError
from freetoken.execution.turns import TurnClock
from freetoken.messages import ExpertCounters, StepFailed, StepPlan, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE_S = 0.003  # how long the device may idle for a plan that is expected next


class PlanExecutor(Protocol):
    """What runs a plan; see ``StepExecutor``. Must not raise."""

    def execute(self, plan: StepPlan) -> StepResult | StepFailed: ...


class ResumableExecutor(PlanExecutor, Protocol):
    """What runs a background plan a few layers at a time, with other plans in between. None of it raises."""

    def begin(self, plan: StepPlan) -> Any:
        """Start ``plan``; nothing of it has run yet. What goes wrong shows at the end."""
        ...

    def advance(self, handle: Any, layers: int) -> bool:
        """Run the next ``layers`` layers; True when the step has come to its end, well or not."""
        ...

    def finish(self, handle: Any) -> StepResult | StepFailed:
        """The outcome, once ``advance`` has returned True."""
        ...

    def cancel(self, handle: Any) -> None:
        """The epoch is over: forget a step that has not come to its end."""
        ...


@dataclasses.dataclass(slots=True)
class BackgroundStep:
    """Begun and not ended. ``busy_ns``: the device's time for it so far."""

    executor: ResumableExecutor
    plan: StepPlan
    handle: Any
    busy_ns: int = 0

    def outcome(self, outcome: StepResult | StepFailed) -> StepResult | StepFailed:
        """With the time that the device spent on it."""
        if isinstance(outcome, StepFailed):
            return outcome
        return dataclasses.replace(outcome, busy_ns=max(self.busy_ns, 1))


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
    """Runs jobs one by one, in order; most are plans. ``on_outcome`` is called on this thread after each plan.

    A background plan is begun in its turn. From then on groups of its layers alternate with the jobs that come, such
    that decoding keeps ``decode_share`` of the time, until it ends.
    """

    def __init__(
        self, on_outcome: Callable[[StepPlan, StepResult | StepFailed], None], decode_share: float = 0.4
    ) -> None:
        self.stats = StepStats()
        self.turns = TurnClock(decode_share)
        self._on_outcome = on_outcome
        self._condition = threading.Condition()
        self._queue: deque[tuple[Callable[[], object], Future[object] | None]] = deque()
        self._busy = False
        self._closed = False
        self._background: BackgroundStep | None = None  # set and cleared by this thread
        self._dropping = False  # the background step is to be forgotten
        self._owed_steps = 0  # ordinary steps that may run before the next group
        self._steps_since_group = 0
        self._thread = threading.Thread(target=self._run, name="ft-steps", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    def submit(self, executor: PlanExecutor, plan: StepPlan) -> None:
        """Run ``plan`` after everything queued before it. Any thread; ignored once closed."""
        self._append(lambda: self._run_plan(executor, plan), None)

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on this thread, after everything queued before it; what becomes of it. Cancelled when the
        queue is dropped first; whoever cancels it before it begins keeps it from running."""
        future: Future[T] = Future()
        self._append(function, cast("Future[object]", future))
        return future

    def call(self, function: Callable[[], T]) -> T:
        """``post``, and wait: returns or raises what ``function`` does, or ``CancelledError``."""
        return self.post(function).result()

    def drain(self, timeout_s: float) -> None:
        """Forget what waits and the background step, and return once nothing runs. ``FreeTokenError`` when the running
        job does not end."""
        with self._condition:
            self._drop()
            self._dropping = True
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: not (self._busy or self._dropping) or self._closed, timeout_s):
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

    # ------------------------------------------------------------------------------------------ plans

    def _run_plan(self, executor: PlanExecutor, plan: StepPlan) -> None:
        if plan.background and self._background is None:
            self._begin(executor, plan)
            return
        started_ns = time.monotonic_ns()
        outcome = executor.execute(plan)
        self._count_step()
        self._step_ended(plan, outcome, time.monotonic_ns() - started_ns, self._background is not None)
        self._on_outcome(plan, outcome)

    def _count_step(self) -> None:
        """An ordinary step has had its turn."""
        self._steps_since_group += 1
        self._owed_steps = max(self._owed_steps - 1, 0)

    def _step_ended(self, plan: StepPlan, outcome: StepResult | StepFailed, busy_ns: int, beside: bool) -> None:
        self.stats.add(plan, outcome, busy_ns)
        if plan.rows and all(row.use_last_sampled for row in plan.rows):
            self.turns.step_done(busy_ns / 1e9, beside)

    def _begin(self, executor: PlanExecutor, plan: StepPlan) -> None:
        resumable = cast(ResumableExecutor, executor)
        self._background = BackgroundStep(resumable, plan, resumable.begin(plan))
        self._owed_steps, self._steps_since_group = 0, 1

    def _run_group(self, background: BackgroundStep) -> None:
        turn = self.turns.turn()
        started_ns = time.monotonic_ns()
        ended = background.executor.advance(background.handle, turn.layers)
        took_ns = time.monotonic_ns() - started_ns
        background.busy_ns += took_ns
        self._owed_steps = turn.steps if self._steps_since_group or self._queue else 0
        self._steps_since_group = 0
        if not ended:
            self.turns.layers_done(turn.layers, took_ns / 1e9)
            return
        self._background = None
        outcome = background.outcome(background.executor.finish(background.handle))
        self.stats.add(background.plan, outcome, background.busy_ns)
        self._on_outcome(background.plan, outcome)

    def _expects_steps(self) -> bool:
        """Whether ordinary steps are under way that others may follow. Under the condition."""
        return False

    def _lose_background(self, background: BackgroundStep) -> None:
        """A group broke the rule that executors do not raise."""
        self._background = None
        outcome = StepFailed(background.plan.step_id, background.plan.epoch, "internal error in the background step")
        self._on_outcome(background.plan, outcome)

    # ------------------------------------------------------------------------------------------ the loop

    def _await_turn(self) -> bool:
        """Under the condition: wait until there is something to do. True when the background step's turn has come."""
        if self._background is None:
            self._condition.wait_for(lambda: self._queue or self._closed or self._dropping)
            return False
        patience_until = None
        while self._owed_steps and not (self._queue or self._closed or self._dropping):
            # The plan that follows the step just done may be on its way.
            if self._expects_steps():
                patience_until = None
                self._condition.wait(_PATIENCE_S)
                continue
            now = time.monotonic()
            if patience_until is None:
                patience_until = now + _PATIENCE_S
            if now >= patience_until:
                self._owed_steps = 0
            else:
                self._condition.wait(patience_until - now)
        return not (self._closed or self._dropping or (self._owed_steps and self._queue))

    def _run(self) -> None:
        while True:
            group: BackgroundStep | None = None
            job: Callable[[], object] | None = None
            future: Future[object] | None = None
            with self._condition:
                if self._await_turn():
                    group = self._background
                elif self._closed or self._dropping:
                    dropped, self._background = self._background, None
                    if dropped is not None:
                        dropped.executor.cancel(dropped.handle)
                    self._dropping = False
                    self._condition.notify_all()
                    if self._closed:
                        return
                    continue
                else:
                    job, future = self._queue.popleft()
                    if future is not None and not future.set_running_or_notify_cancel():
                        continue  # nobody wants it any more
                self._busy = True
            try:
                if group is not None:
                    self._run_group(group)
                elif job is not None:
                    result = job()
                    if future is not None:
                        future.set_result(result)
            except Exception as error:
                if future is not None:
                    future.set_exception(error)
                else:
                    logger.exception("event=step_thread_failed")
                    if group is not None and self._background is group:
                        self._lose_background(group)
            finally:
                # A job holds on to its executor, and that to the mailbox and the store.
                del job, future, group
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()
