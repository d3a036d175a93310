"""Scheduler, KVAllocator and a step thread in one process, without actors and messages: the engine's own decisions over
any executor, for tests and benchmarks."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from freetoken.execution.pipelined_thread import PipelinedStepThread
from freetoken.execution.step_thread import PlanExecutor, StepThread
from freetoken.kv import KVAllocator
from freetoken.messages import (
    ReserveBlocks,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepResult,
    SubmitRequest,
    TokenDelta,
)
from freetoken.scheduling import Scheduler, SchedulerLimits
from freetoken.scheduling.scheduler import PlannedStep

_LIMIT_S = 60.0


class StepEngine:
    """Runs requests on ``executor``; everything happens in ``run_until``, on the caller's thread, but the steps.

    By request: its tokens, ``times`` (``time.perf_counter()`` at which each arrived) and its last delta. ``order`` has
    the ids of the steps as they were answered. ``before_step`` is called before each plan is sent.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        executor: PlanExecutor,
        *,
        pipelined: bool,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = Scheduler(limits, epoch=1)
        self.allocator = KVAllocator(limits.num_kv_blocks, limits.block_size, limits.prefix_cache)
        self._executor = executor
        self._outcomes: queue.Queue[StepResult | StepFailed] = queue.Queue()
        kind = PipelinedStepThread if pipelined else StepThread
        self.thread = kind(lambda plan, outcome: self._outcomes.put(outcome), limits.decode_share)
        self._before_step = before_step
        self.plans: list[StepPlan] = []
        self.order: list[int] = []
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}
        self.endings: dict[str, TokenDelta] = {}

    def __enter__(self) -> StepEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.close(_LIMIT_S)

    def submit(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, priority: int = 0) -> None:
        """A request arrives."""
        self.tokens[request_id], self.times[request_id] = [], []
        message = SubmitRequest(request_id, tuple(prompt), sampling, priority)
        self.scheduler.submit(message, time.monotonic())
        self._send()

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        self.scheduler.abort(request_id, time.monotonic())
        self._send()

    def run_until(self, done: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
        """Take outcomes until ``done``. ``TimeoutError`` when none comes for ``limit_s``."""
        while not done():
            try:
                outcome = self._outcomes.get(timeout=limit_s)
            except queue.Empty:
                raise TimeoutError(f"no step ended within {limit_s:g} s") from None
            now = time.monotonic()
            self.order.append(outcome.step_id)
            if isinstance(outcome, StepFailed):
                self.scheduler.step_failed(outcome, now)
            else:
                self.scheduler.step_done(outcome, now)
            self._send()

    def run_to_end(self, limit_s: float = _LIMIT_S) -> None:
        """Until nothing is left to do."""
        self.run_until(lambda: not self.scheduler.book.live and not self.scheduler.num_outstanding_steps, limit_s)

    def _send(self) -> None:
        while (action := self.scheduler.advance(time.monotonic())) is not None:
            if isinstance(action, ReserveBlocks):
                self.scheduler.reserved(self.allocator.apply(action), time.monotonic())
            elif isinstance(action, PlannedStep):
                self._before_step()
                self.plans.append(action.plan)
                self.thread.submit(self._executor, action.plan)
        batch = self.scheduler.take_batch()
        now = time.perf_counter()
        for delta in batch.deltas if batch else ():
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.times.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
            if delta.finish_reason is not None:
                self.endings[delta.request_id] = delta
