"""The executor of the CUDA device: enqueued steps, and between them a background step, a long prefill chunk that is
launched a few layers at a time (see ``freetoken.execution.turns``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from freetoken.execution.batch_state import RequestState
from freetoken.execution.cuda.enqueued import EnqueuedSteps, Pending
from freetoken.execution.cuda.pieces import cut_pieces
from freetoken.execution.cuda.step_inputs import PieceInputs, fill_pieces
from freetoken.messages import StepPlan, StepRow


@dataclass(slots=True)
class Walk:
    """A background step on its way through the layers: ``layers`` launches the next one."""

    layers: Iterator[None]
    running: list[tuple[StepRow, RequestState]]
    filled: PieceInputs
    layers_left: int


@dataclass(slots=True)
class Background(Pending):
    """A step that is launched by and by; ``walk`` until it is launched to its end."""

    walk: Walk | None = None


class CudaStepExecutor(EnqueuedSteps):
    """Runs plans in order, and a background plan between them. ``begin`` and ``advance`` from ``enqueue``'s thread."""

    _walking = False  # a background step has begun and is not launched to its end

    def must_finish_first(self, plan: StepPlan) -> bool:
        """A background plan holds nothing up, but must not meet a long one."""
        if plan.background and self._model.background_tokens(sum(row.num_tokens for row in plan.rows)):
            with self._lock:
                return any(step.long for step in self._pending)
        return super().must_finish_first(plan)

    def _long_tokens(self, step_id: int, num_tokens: int) -> int:
        """None while a background step has the buffers for that."""
        return 0 if self._walking else super()._long_tokens(step_id, num_tokens)

    def begin(self, plan: StepPlan) -> Pending:
        """Start a background plan, see ``ResumableExecutor``. Where there is no room for one, it is enqueued whole."""
        num_tokens = sum(row.num_tokens for row in plan.rows)
        if self._walking or not plan.rows or not self._model.background_tokens(num_tokens):
            return self.enqueue(plan)
        pending = Background(plan, time.monotonic_ns())
        self._begin_watch()
        with self._lock:
            try:
                self._start_walk(plan, pending)
            except Exception as error:
                self._break_off(pending, error)
        return pending

    def _start_walk(self, plan: StepPlan, pending: Background) -> None:
        model = self._model
        running = self._admit(plan, pending)
        if not running:
            return
        slots = self._slots(plan, running)
        lengths = [row.num_tokens for row, _ in running]
        size = model.background_tokens(sum(lengths))
        pieces = cut_pieces(lengths, (size,))
        with model.on_stream():
            pending.launching = pending.long = True
            model.table.flush()
            inputs, report = model.background_inputs, model.background_report
            batch = model.long_piece
            filled = fill_pieces(inputs, plan.step_id, running, slots, pieces, batch.tokens_per_block, self._limits)
            inputs.upload(filled.shape)
            report.counts.zero_()
            staged = model.staged_step(plan.step_id) if model.stages_background(sum(lengths)) else None
            layers = batch.layers(
                inputs.device_views(filled.shape),
                0,
                0,
                filled.ranges[0],
                filled.contexts[0],
                size,
                staged,
                report.counts,
            )
        if staged is not None:
            model.program.reserved = staged.stager
        pending.walk = Walk(layers, running, filled, len(model.weights.layers))
        self._walking = True

    def advance(self, pending: Pending, layers: int) -> bool:
        """Launch the next ``layers`` layers of a background step; True when it is launched to its end."""
        if not isinstance(pending, Background):  # it was enqueued whole
            return True
        walk = pending.walk
        if walk is not None:
            try:
                if self._mailbox is not None and self._mailbox.aborted:
                    raise self._aborted()
                with self._lock:
                    for earlier in self._pending:  # before the device has other work, and before the logits are others
                        self._launch_tail(earlier)
                with self._model.on_stream():
                    for _ in range(min(layers, walk.layers_left)):
                        next(walk.layers)
                        walk.layers_left -= 1
                    if walk.layers_left:
                        return False
                    self._end_walk(pending, walk)
            except Exception as error:
                with self._lock:
                    self._break_off(pending, error)
        with self._lock:
            self._launch_tail(pending)  # nothing else samples its requests
            self._pending.append(pending)
            pending.watched = pending.event is not None
        if not pending.watched:
            self._end_watch()
        return True

    def cancel(self, pending: Pending) -> None:
        """Forget a background step; the epoch is over."""
        if not isinstance(pending, Background):
            self.finish(pending)
            return
        if pending.walk is not None:
            self._stop_walking(pending)
        self._end_watch()

    def mark(self) -> torch.cuda.Event | None:
        """The device's work so far."""
        if not self._model.on_gpu:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(self._model.stream)
        return event

    def await_mark(self, mark: torch.cuda.Event | None) -> None:
        """Wait until that is done."""
        if mark is not None:
            mark.synchronize()

    def _end_walk(self, pending: Background, walk: Walk) -> None:
        model, filled = self._model, walk.filled
        next(walk.layers, None)  # what follows the last layer
        count = len(filled.draws)
        if count:
            rows = model.background_inputs.device_views(filled.shape)["logit_token"]
            torch.index_select(model.long_piece.buffers.residual, 0, rows, out=model.sampled_rows[:count])
            model.program.logits(model.sampled_rows[:count], model.normed_rows[:count], model.logits[:count])
        self._complete(pending, filled.shape, filled.draws, model.background_inputs, model.background_report)
        with self._lock:
            self._note_results(pending, walk.running, filled.draws)
        self._stop_walking(pending)

    def _stop_walking(self, pending: Background) -> None:
        pending.walk = None
        self._walking = False
        self._model.program.reserved = None

    def _break_off(self, pending: Background, error: Exception) -> None:
        """A background step cannot go on. Under the lock."""
        if pending.walk is not None:
            self._stop_walking(pending)
        pending.event = None
        self._give_up(pending, error)
