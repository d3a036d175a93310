"""Steps on the CUDA device. A step is *enqueued* (everything is launched, nothing awaited) and later *finished*; the
step thread enqueues step n + 1 before it finishes step n.

Between the two, tokens that only the device knows stand as -1 in their request's state. Rows whose sampling needs the
request's history or log-probabilities are sampled on the host when the step is finished; a plan that goes on with such
a request must not be enqueued before (``must_finish_first``).

Rows with a grammar stay on the device. Their masks follow from the tokens of the step before, so a step that has such
rows is enqueued without its sampling (its ``tail``); that is launched as soon as the masks are there, by whoever comes
first: ``finish`` of this step, which begins with it, or ``enqueue`` of the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from freetoken._native import Mailbox
from freetoken.execution.batch_state import BatchState, InvalidPlanError, RequestState
from freetoken.execution.constraints import Grammars
from freetoken.execution.cuda.data_plane import read_counts
from freetoken.execution.cuda.device_model import DeviceModel
from freetoken.execution.cuda.host_memory import empty_pinned
from freetoken.execution.cuda.inputs import StepInputs, StepShape
from freetoken.execution.cuda.pieces import PIECE_BUCKETS, PIECE_TOKENS, cut_pieces
from freetoken.execution.cuda.report import Report, ReportBuffers
from freetoken.execution.cuda.step_inputs import Draw, fill_decode, fill_pieces
from freetoken.execution.cuda.watchdog import Watchdog
from freetoken.execution.sampling import Sampled, sample
from freetoken.execution.step_executor import StepLimits
from freetoken.grammar import ConstraintError
from freetoken.messages import ActorName, ExpertCounters, RowResult, StepFailed, StepPlan, StepResult, StepRow

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Tail:
    """The sampling of a step that waits for masks."""

    logits: Tensor
    inputs: Mapping[str, Tensor]
    greedy: bool
    report: ReportBuffers


@dataclass(slots=True)
class Pending:
    """An enqueued step. ``failed`` is set when nothing of it runs. ``spared``: requests that a later step has failed
    since, and whose rows of this one are nevertheless good."""

    plan: StepPlan
    started_ns: int
    spared: set[str] = field(default_factory=set)
    states: list[RequestState] = field(default_factory=list)
    failures: list[str | None] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    report: Report | None = None
    passes: int = 1
    host_logits: Tensor | None = None
    event: torch.cuda.Event | None = None
    tail: Tail | None = None
    watched: bool = False
    launching: bool = False
    long: bool = False
    failed: StepFailed | None = None


class EnqueuedSteps:
    """Runs plans in order; owns the state of their requests. ``enqueue`` from one thread, ``finish`` (in the order of
    the device) from one thread; the two may differ. Belongs to one epoch."""

    depth = 2

    def __init__(
        self,
        model: DeviceModel,
        mailbox: Mailbox | None,
        limits: StepLimits,
        watchdog: Watchdog | None,
        grammars: Grammars | None = None,
    ) -> None:
        """``mailbox`` is the one attached to ``model``. Without ``grammars`` constrained requests fail."""
        self._model = model
        self._mailbox = mailbox
        self._limits = limits
        self._watchdog = watchdog
        self._lock = threading.Lock()  # over requests and pending
        self._pending: list[Pending] = []
        self._chosen: tuple[int, bool] = (-1, False)
        spec = model.weights.spec
        self.requests = BatchState(
            spec.vocab_size, limits.block_size, limits.num_blocks, limits.max_context_tokens, grammars
        )

    # ------------------------------------------------------------------------------------------ enqueue

    def must_finish_first(self, plan: StepPlan) -> bool:
        """Whether a step under way samples a request of ``plan`` on the host, or ``plan`` is prefill in a long piece or
        in several: that is enqueued at the device's pace, and the results of the step before must not wait so long."""
        with self._lock:
            if self._pending and self._is_long(plan):
                return True
            names = {draw.state.request_id for step in self._pending for draw in step.draws if draw.on_host}
        return any(row.request_id in names for row in plan.rows)

    def _is_long(self, plan: StepPlan) -> bool:
        rows = plan.rows
        if all(row.num_tokens == 1 for row in rows) and self._model.decode_batch(len(rows)) is not None:
            return False  # whatever would be cheaper for as many tokens of prefill
        num_tokens = sum(row.num_tokens for row in rows)
        return num_tokens > PIECE_TOKENS or self._long_tokens(plan.step_id, num_tokens) > 0

    def _long_tokens(self, step_id: int, num_tokens: int) -> int:
        """The size of the long piece for so many tokens of prefill; 0: short pieces. Chosen once for a step: residency
        changes meanwhile, and a long piece must not be enqueued behind another one."""
        if self._chosen[0] != step_id:
            self._chosen = (step_id, self._model.long_tokens(num_tokens) > 0)
        return self._model.background_tokens(num_tokens) if self._chosen[1] else 0

    def _begin_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.begin()

    def _end_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.end()

    def enqueue(self, plan: StepPlan) -> Pending:
        """Launch ``plan``; what goes wrong is in the result's ``failed``."""
        pending = Pending(plan, time.monotonic_ns())
        self._begin_watch()
        with self._lock:
            for earlier in self._pending:  # the stream must have their sampling first
                self._launch_tail(earlier)
            try:
                self._enqueue(plan, pending)
            except Exception as error:
                self._give_up(pending, error)
            self._pending.append(pending)
            pending.watched = pending.event is not None or pending.tail is not None
        if not pending.watched:
            self._end_watch()
        return pending

    def _give_up(self, pending: Pending, error: Exception) -> None:
        self._spare_earlier_steps(pending)
        pending.failed = self._fail(pending.plan, error)
        pending.draws = []
        pending.tail = None
        if self._abandon(pending) and not pending.failed.suspects:
            pending.failed = replace(pending.failed, suspects=(ActorName.GPU_EXECUTOR.value,))

    def _spare_earlier_steps(self, pending: Pending) -> None:
        """This step fails before the ones under way are finished: what they have computed stays true."""
        plan = pending.plan
        for earlier in self._pending:
            if earlier is pending:
                break
            sound = {state.request_id for state in earlier.states if state.failure is None}
            earlier.spared.update(sound.intersection(row.request_id for row in plan.rows))

    def _enqueue(self, plan: StepPlan, pending: Pending) -> None:
        model = self._model
        running = self._admit(plan, pending)
        if not running:
            return
        slots = self._slots(plan, running)
        pending.launching = True
        with model.on_stream():
            model.table.flush()
            batch = model.decode_batch(len(running)) if all(row.num_tokens == 1 for row, _ in running) else None
            if batch is not None:
                shape = batch.shape
                draws = fill_decode(model.inputs, shape, plan.step_id, running, slots, self._limits)
                model.inputs.upload(shape)
                batch.launch()
            else:
                shape, draws, pending.passes = self._run_pieces(plan.step_id, running, slots, pending)
            self._complete(pending, shape, draws, model.inputs, model.report)
        self._note_results(pending, running, draws)

    def _admit(self, plan: StepPlan, pending: Pending) -> list[tuple[StepRow, RequestState]]:
        """Check the plan and take it into the requests' states; the rows that can run. Raises what keeps it from
        running."""
        model = self._model
        num_tokens = sum(row.num_tokens for row in plan.rows)
        if num_tokens > self._limits.max_batch_tokens:
            raise InvalidPlanError(
                f"step {plan.step_id}: {num_tokens} tokens exceed the limit of {self._limits.max_batch_tokens}"
            )
        num_samples = sum(row.sample for row in plan.rows)
        if num_samples > model.limits.max_samples:
            raise InvalidPlanError(
                f"step {plan.step_id}: {num_samples} sampled rows exceed the limit of {model.limits.max_samples}"
            )
        for request_id in plan.retired:
            model.table.release(request_id)
        pending.states = self.requests.apply(plan)
        pending.failures = [state.failure for state in pending.states]
        running = [(row, state) for row, state in zip(plan.rows, pending.states, strict=True) if state.failure is None]
        if running and self._mailbox is not None and self._mailbox.aborted:
            raise self._aborted()
        return running

    def _end_launch(self, pending: Pending, num_samples: int, report: ReportBuffers) -> None:
        pending.report = report.download(num_samples)
        if self._model.on_gpu:
            pending.event = torch.cuda.Event(blocking=True)  # a waiter that spins takes a core from the CPU experts
            pending.event.record()

    def _launch_tail(self, pending: Pending) -> None:
        """Sample a step that waits for its masks; nothing for others. The step before it must be finished."""
        tail, pending.tail = pending.tail, None
        if tail is None:
            return
        model = self._model
        rows, masks = [], []
        for draw in pending.draws:
            grammar = draw.state.grammar
            if draw.on_host or grammar is None:
                continue
            try:
                masks.append(grammar.mask())
                rows.append(draw.row)
            except ConstraintError as error:
                draw.refused = str(error)
        try:
            with model.on_stream():
                model.masks.apply(tail.logits, rows, masks)
                model.sampler.draw(tail.logits, tail.inputs, tail.greedy, tail.report, model.table)
                self._end_launch(pending, len(tail.logits), tail.report)
        except Exception as error:
            self._give_up(pending, error)

    def _abandon(self, pending: Pending) -> bool:
        """Nothing is left of a step that could not be launched whole: no note for the next one, nothing that still uses
        buffers which nobody would wait for, and no slot that is taken for filled. Whether the epoch ends with it."""
        self._model.table.forget_notes()
        self._model.settle()
        if pending.launching and self._model.on_gpu:
            try:
                torch.cuda.synchronize(self._model.device)
            except Exception as error:  # the device is lost; the next step says so again
                logger.error("event=device_lost step=%d detail=%r", pending.plan.step_id, str(error))
        plane = self._model.plane
        if plane is None or not plane.in_layer or self._mailbox is None:
            return False
        # After the steps before, which have their answers, and before any publish that would count on these fills.
        logger.error("event=mailbox_aborted reason=client_failed step=%d", pending.plan.step_id)
        self._mailbox.abort("client_failed")
        return True

    def _slots(self, plan: StepPlan, running: list[tuple[StepRow, RequestState]]) -> list[int]:
        table = self._model.table
        slots = []
        for row, state in running:
            try:
                slot = table.slot(row.request_id)
            except IndexError:
                raise InvalidPlanError(
                    f"step {plan.step_id}: request {row.request_id!r} exceeds the limit of "
                    f"{self._model.limits.max_requests} requests"
                ) from None
            table.note_blocks(slot, len(state.blocks) - len(row.new_block_ids), row.new_block_ids)
            slots.append(slot)
        return slots

    def _run_pieces(
        self, step_id: int, running: list[tuple[StepRow, RequestState]], slots: list[int], pending: Pending
    ) -> tuple[StepShape, list[Draw], int]:
        model = self._model
        lengths = [row.num_tokens for row, _ in running]
        long = self._long_tokens(step_id, sum(lengths))
        pending.long = long > 0
        pieces = cut_pieces(lengths, (long,) if long else PIECE_BUCKETS)
        per_block = (model.long_piece if long else model.piece(pieces[0].bucket)).tokens_per_block
        staged = model.staged_step(step_id) if long else None
        filled = fill_pieces(model.inputs, step_id, running, slots, pieces, per_block, self._limits)
        model.inputs.upload(filled.shape)
        inputs = model.inputs.device_views(filled.shape)
        model.report.counts.zero_()
        if len(pieces) > 1:
            model.report.begin_sum()
        taken = 0
        for number, piece in enumerate(pieces):
            batch = model.long_piece if long else model.piece(piece.bucket)
            batch.run(
                inputs, number, piece.offset, filled.ranges[number], filled.contexts[number], piece.bucket, staged
            )
            if len(pieces) > 1:
                model.report.add_counts()
            end = piece.offset + piece.bucket
            here = int(np.searchsorted(filled.logit_tokens, end)) - taken
            if here:
                rows = inputs["logit_token"][taken : taken + here] - piece.offset
                torch.index_select(batch.buffers.residual, 0, rows, out=model.sampled_rows[taken : taken + here])
                taken += here
        if taken:
            model.program.logits(model.sampled_rows[:taken], model.normed_rows[:taken], model.logits[:taken])
        if len(pieces) > 1:
            model.report.end_sum()
        return filled.shape, filled.draws, len(pieces)

    def _complete(
        self, pending: Pending, shape: StepShape, draws: list[Draw], inputs: StepInputs, report: ReportBuffers
    ) -> None:
        """The end of a step's launches: sampling, unless it has to wait for masks, and the way back to the host."""
        model = self._model
        if draws:
            logits = model.logits[: shape.samples]
            greedy = all(draw.on_host or draw.state.sampling.temperature == 0.0 for draw in draws)
            model.sampler.check(logits, report)
            pending.host_logits = self._copy_logits(logits, draws)
            tail = Tail(logits, inputs.device_views(shape), greedy, report)
            if any(draw.state.grammar is not None and not draw.on_host for draw in draws):
                pending.tail = tail
                return
            model.sampler.draw(tail.logits, tail.inputs, greedy, report, model.table)
        self._end_launch(pending, shape.samples, report)

    def _note_results(self, pending: Pending, running: list[tuple[StepRow, RequestState]], draws: list[Draw]) -> None:
        pending.draws = draws
        for row, state in running:
            state.num_computed = row.start + row.num_tokens
        for draw in draws:
            draw.token_index = len(draw.state.tokens)
            draw.state.tokens.append(-1)

    @staticmethod
    def _copy_logits(logits: Tensor, draws: list[Draw]) -> Tensor | None:
        rows = [draw.row for draw in draws if draw.on_host]
        if not rows:
            return None
        host = empty_pinned((len(rows), logits.shape[1]), torch.float32, logits.device)
        for number, row in enumerate(rows):
            host[number].copy_(logits[row], non_blocking=True)
        return host

    # ------------------------------------------------------------------------------------------ finish

    def finish(self, pending: Pending) -> StepResult | StepFailed:
        """Wait for ``pending``, the step under way that the device ends first, and read its outcome."""
        plan = pending.plan
        error: Exception | None = None
        with self._lock:
            self._launch_tail(pending)
        if pending.event is not None:
            try:
                pending.event.synchronize()
            except Exception as found:  # the device itself failed
                error = found
        if pending.watched:
            self._end_watch()
        with self._lock:
            self._pending.remove(pending)
            if pending.failed is not None:
                return pending.failed
            outcome: StepResult | StepFailed
            try:
                if error is not None:
                    raise error
                outcome = self._finish(plan, pending)
                failed = {row.request_id for row in outcome.rows if row.failure is not None}
            except Exception as found:
                outcome = self._fail(plan, found)
                failed = {row.request_id for row in plan.rows}
            for later in self._pending:  # they went on from what this step has not computed
                later.spared -= failed
            return outcome

    def _finish(self, plan: StepPlan, pending: Pending) -> StepResult:
        outcomes: dict[str, Sampled] = {}
        experts = ExpertCounters()
        report = pending.report
        if report is not None:
            plane = self._model.plane
            if plane is not None:
                experts, answered = read_counts(
                    report.counts, plane.records.strides, plane.records.tiles, pending.passes
                )
                if not answered:
                    raise self._aborted()
            host = iter(self._sample_on_host(pending))
            for draw in pending.draws:
                if draw.on_host:
                    outcome = next(host)
                elif draw.refused is not None:
                    outcome = Sampled(None, failure=draw.refused, failure_kind="constraint")
                elif np.isfinite(report.sums[draw.row]):
                    outcome = Sampled(int(report.ids[draw.row]))
                else:
                    outcome = Sampled(None, failure="numeric: some logits are not finite")
                self._settle(draw, outcome)
                outcomes[draw.state.request_id] = outcome
        rows = []
        for state, failure in zip(pending.states, pending.failures, strict=True):
            found = outcomes.get(state.request_id)
            kind = state.failure_kind
            if failure is None and found is not None:
                failure, kind = found.failure, found.failure_kind
            if failure is None and state.request_id not in pending.spared:
                failure, kind = state.failure, state.failure_kind
            if failure is None and found is not None:
                rows.append(RowResult(state.request_id, found.token_id, found.logprob))
            else:
                rows.append(RowResult(state.request_id, failure=failure, failure_kind=kind))
        return StepResult(plan.step_id, plan.epoch, tuple(rows), pending.started_ns, time.monotonic_ns(), experts)

    def _aborted(self) -> RuntimeError:
        reason = self._mailbox.abort_reason if self._mailbox is not None else ""
        return RuntimeError("aborted" if reason in ("", "requested") else f"aborted: {reason}")

    def _sample_on_host(self, pending: Pending) -> list[Sampled]:
        draws = [draw for draw in pending.draws if draw.on_host]
        if not draws or pending.host_logits is None:
            return []
        for draw in draws:  # the placeholder is not part of the history
            assert draw.token_index == len(draw.state.tokens) - 1
            draw.state.tokens.pop()
        return sample(pending.host_logits.numpy(), [draw.state for draw in draws])

    @staticmethod
    def _settle(draw: Draw, outcome: Sampled) -> None:
        state = draw.state
        if outcome.token_id is None:
            if state.failure is None:
                state.failure, state.failure_kind = outcome.failure, outcome.failure_kind
        elif draw.on_host:
            state.append_token(outcome.token_id)
        else:
            state.tokens[draw.token_index] = outcome.token_id
            if state.grammar is not None:
                state.grammar.advance(outcome.token_id)

    def _fail(self, plan: StepPlan, error: Exception) -> StepFailed:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, InvalidPlanError):
            message = str(error)
            logger.error("event=step_invalid step=%d detail=%r", plan.step_id, message)
        elif isinstance(error, RuntimeError) and str(error) == "aborted":
            logger.info("event=step_aborted step=%d", plan.step_id)
        else:
            logger.error("event=step_failed step=%d detail=%r", plan.step_id, message, exc_info=error)
        self.requests.fail((row.request_id for row in plan.rows), f"step {plan.step_id} failed: {message}")
        suspects: tuple[str, ...] = ()
        if isinstance(error, RuntimeError):  # of the data plane: it names the party at fault
            suspects = tuple(name.value for name in ActorName if name.value in str(error))
            if not suspects and _is_lasting(error):
                suspects = (ActorName.GPU_EXECUTOR.value,)
        return StepFailed(plan.step_id, plan.epoch, message, suspects)

    def resized(self, num_slots: int, num_blocks: int, block_moves: Sequence[tuple[int, int]]) -> None:
        """The arena changed, behind the steps under way and before every later one. Block tables on the device follow
        on the steps' stream."""
        table = self._model.table
        with self._lock, self._model.on_stream():
            for state in self.requests.resized(num_blocks, block_moves):
                slot = table.known_slot(state.request_id)
                if slot is not None:
                    table.note_blocks(slot, 0, state.blocks)
            table.flush()

    def execute(self, plan: StepPlan) -> StepResult | StepFailed:
        """Both halves at once."""
        return self.finish(self.enqueue(plan))


def _is_lasting(error: RuntimeError) -> bool:
    """Whether every later step of this epoch will fail like this one: the device's context is lost, or the mailbox was
    aborted by nobody who would begin a new epoch."""
    message = str(error)
    return message.startswith("aborted: ") or any(sign in message for sign in ("CUDA error", "Triton Error [CUDA]"))
