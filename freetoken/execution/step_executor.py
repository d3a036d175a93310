"""One step: from a StepPlan to a StepResult."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from freetoken.execution.batch_state import BatchState, InvalidPlanError, RequestState
from freetoken.execution.constraints import Grammars
from freetoken.execution.experts import ExpertRunner
from freetoken.execution.sampling import Sampled, sample
from freetoken.messages import ActorName, ExpertCounters, RowResult, StepFailed, StepPlan, StepResult, StepRow
from freetoken.models.decoder import ADMIT_ROW, ADMIT_RUN, Decoder, DecoderBatch, DecoderOps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a plan must stay within. ``seed_tail_tokens``: last tokens of a prefill row whose experts may fill slots."""

    block_size: int
    num_blocks: int
    max_context_tokens: int
    max_batch_tokens: int
    seed_tail_tokens: int


@dataclass(slots=True)
class StepUnderWay:
    """A step between its first and its last layer. ``layers`` is None when none is left."""

    plan: StepPlan
    started_ns: int = 0
    states: list[RequestState] = field(default_factory=list)
    running: list[tuple[StepRow, RequestState]] = field(default_factory=list)
    layers: Iterator[Any] | None = None
    sampled: dict[str, Sampled] = field(default_factory=dict)
    experts: ExpertCounters = field(default_factory=ExpertCounters)
    outcome: StepResult | StepFailed | None = None


class StepExecutor:
    """Runs plans in order, and a background plan between them; owns the state of their requests. Used by one thread at
    a time."""

    def __init__(
        self,
        decoder: Decoder,
        ops: DecoderOps,
        experts: ExpertRunner,
        limits: StepLimits,
        abort: threading.Event | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """``experts`` is the runner behind ``ops.experts``: its counters become the result's. ``abort`` is what ``ops``
        watches. Without ``grammars`` constrained requests fail."""
        self._abort = abort or threading.Event()
        self._decoder = decoder
        self._ops = ops
        self._experts = experts
        self._limits = limits
        self.requests = BatchState(
            decoder.spec.vocab_size, limits.block_size, limits.num_blocks, limits.max_context_tokens, grammars
        )

    def abort(self) -> None:
        """End the running step soon, and every later one: the epoch is over. Any thread."""
        self._abort.set()

    def resized(self, num_slots: int, num_blocks: int, block_moves: Sequence[tuple[int, int]]) -> None:
        """The arena changed between two steps; blocks that moved are copied."""
        self._experts.resized(num_slots)
        self.requests.resized(num_blocks, block_moves)

    def execute(self, plan: StepPlan) -> StepResult | StepFailed:
        """Run ``plan``; what goes wrong becomes a StepFailed, and its requests answer with a failure from then on."""
        try:
            return self.run(plan)
        except Exception as error:
            return self._fail(plan, error)

    def run(self, plan: StepPlan) -> StepResult:
        """Run ``plan``. Raises ``InvalidPlanError`` before anything ran, or what the operations raise."""
        step = self._start(plan)
        self._experts.begin_step(plan.step_id)
        if step.layers is not None:
            self._take_logits(step, next(found for found in step.layers if found is not None))
        step.experts = self._experts.step_counters()
        return self._result(step)

    # ------------------------------------------------------------------------------------------ background steps

    def begin(self, plan: StepPlan) -> StepUnderWay:
        """Start a background plan, see ``ResumableExecutor``."""
        try:
            return self._start(plan)
        except Exception as error:
            return StepUnderWay(plan, outcome=self._fail(plan, error))

    def advance(self, step: StepUnderWay, layers: int) -> bool:
        """Run the next ``layers`` layers; True when the step has ended."""
        if step.outcome is not None:
            return True
        try:
            logits = None
            self._experts.begin_step(step.plan.step_id)
            while step.layers is not None and layers > 0 and logits is None:
                logits = next(step.layers)
                layers -= 1
            step.experts = step.experts + self._experts.step_counters()
            if logits is not None:
                self._take_logits(step, logits)
            if step.layers is None:
                step.outcome = self._result(step)
        except Exception as error:
            step.outcome = self._fail(step.plan, error)
        return step.outcome is not None

    def finish(self, step: StepUnderWay) -> StepResult | StepFailed:
        """The outcome of a step that has ended."""
        assert step.outcome is not None
        return step.outcome

    def cancel(self, step: StepUnderWay) -> None:
        """Forget a step; this executor is at its end."""
        step.layers = None

    # ------------------------------------------------------------------------------------------ parts of a step

    def _start(self, plan: StepPlan) -> StepUnderWay:
        step = StepUnderWay(plan, time.monotonic_ns())
        num_tokens = sum(row.num_tokens for row in plan.rows)
        if num_tokens > self._limits.max_batch_tokens:
            raise InvalidPlanError(
                f"step {plan.step_id}: {num_tokens} tokens exceed the limit of {self._limits.max_batch_tokens}"
            )
        step.states = self.requests.apply(plan)
        step.running = [(r, state) for r, state in zip(plan.rows, step.states, strict=True) if state.failure is None]
        if step.running:
            step.layers = self._decoder.layers(self._build_batch(step.running), self._ops)
        return step

    def _take_logits(self, step: StepUnderWay, logits: Any) -> None:
        step.layers = None
        for row, state in step.running:
            state.num_computed = row.start + row.num_tokens
        sampling = [state for row, state in step.running if row.sample]
        for state, outcome in zip(sampling, sample(np.asarray(logits), sampling), strict=True):
            step.sampled[state.request_id] = outcome
            if outcome.token_id is None:
                state.failure, state.failure_kind = outcome.failure, outcome.failure_kind
            else:
                state.append_token(outcome.token_id)

    @staticmethod
    def _result(step: StepUnderWay) -> StepResult:
        return StepResult(
            step_id=step.plan.step_id,
            epoch=step.plan.epoch,
            rows=tuple(_row_result(state, step.sampled.get(state.request_id)) for state in step.states),
            started_ns=step.started_ns,
            finished_ns=time.monotonic_ns(),
            experts=step.experts,
        )

    def _fail(self, plan: StepPlan, error: Exception) -> StepFailed:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, InvalidPlanError):
            message = str(error)
            logger.error("event=step_invalid step=%d detail=%r", plan.step_id, message)
        elif isinstance(error, RuntimeError) and str(error) == "aborted":  # somebody asked for it
            message = "it was interrupted, the engine is recovering"
            logger.info("event=step_aborted step=%d", plan.step_id)
        else:
            logger.error("event=step_failed step=%d", plan.step_id, exc_info=error)
        self.requests.fail((row.request_id for row in plan.rows), f"step {plan.step_id} failed: {message}")
        suspects: tuple[str, ...] = ()
        if isinstance(error, (TimeoutError, RuntimeError)):  # of the data plane: they name the party at fault
            suspects = tuple(name.value for name in ActorName if name.value in str(error))
        return StepFailed(plan.step_id, plan.epoch, message, suspects)

    def _build_batch(self, running: list[tuple[StepRow, RequestState]]) -> DecoderBatch:
        block_size = self._limits.block_size
        lengths = [row.num_tokens for row, _ in running]
        starts = np.zeros(len(running) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        total = int(starts[-1])
        token_ids = np.fromiter(
            chain.from_iterable(state.tokens[row.start : row.start + row.num_tokens] for row, state in running),
            dtype=np.int64,
            count=total,
        )
        positions = np.empty(total, dtype=np.int32)
        slots = np.empty(total, dtype=np.int64)
        admit = np.zeros(total, dtype=np.uint8)
        used = [-(-(row.start + row.num_tokens) // block_size) for row, _ in running]
        tables = np.full((len(running), max(used)), -1, dtype=np.int32)
        wanted = []
        for index, (row, state) in enumerate(running):
            begin, end = int(starts[index]), int(starts[index + 1])
            span = np.arange(row.start, row.start + row.num_tokens, dtype=np.int32)
            positions[begin:end] = span
            tables[index, : used[index]] = state.blocks[: used[index]]
            slots[begin:end] = state.blocks[span // block_size].astype(np.int64) * block_size + span % block_size
            decoding = row.num_tokens == 1 and row.sample
            if decoding:
                admit[end - 1] = ADMIT_ROW
            else:
                admit[max(begin, end - self._limits.seed_tail_tokens) : end] = ADMIT_RUN
            if row.sample:
                wanted.append(end - 1)
        return DecoderBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            row_starts=starts,
            block_tables=tables,
            admit=admit,
            logit_tokens=np.array(wanted, dtype=np.int64),
        )


def _row_result(state: RequestState, outcome: Sampled | None) -> RowResult:
    if outcome is None:
        return RowResult(state.request_id, failure=state.failure, failure_kind=state.failure_kind)
    return RowResult(state.request_id, outcome.token_id, outcome.logprob, outcome.failure, outcome.failure_kind)
