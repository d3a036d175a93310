"""The scheduler's core: events in, at most one message out at a time. No I/O, no clock of its own.

A step is planned in two phases, both while the step before it runs. First ``ReserveBlocks`` asks for room: for each
decode row that crosses into a new block, for each prefill chunk, and for requests to admit. The answer may start
requests, or show that blocks ran out; then the least important request is preempted and the question repeated. After
that the rows are built from whatever is true by then, within the room that there is.

Prefill of more than ``ride_along_tokens`` beside decoding requests becomes a *background step*: its rows prefill and
nothing else, it may be answered after later steps, and until it is its requests are left alone (not planned, not
preempted). One at a time; meanwhile ordinary steps carry the decode rows, and prompts short enough to ride along.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import NamedTuple

from freetoken.messages import (
    ActorName,
    ArenaVacated,
    BlockNeed,
    BlocksReserved,
    KVStats,
    PoolEmptied,
    PoolVacated,
    RequestFailure,
    ReserveBlocks,
    RowResult,
    StepFailed,
    StepNotice,
    StepPlan,
    StepResult,
    StepRow,
    SubmitRequest,
    TokenBatch,
    VacatePool,
)
from freetoken.scheduling.admission import plan_admissions
from freetoken.scheduling.arena_changes import ArenaChanges, block_pressure
from freetoken.scheduling.budget import PrefillWork, plan_prefill_chunks, plan_shares, plan_turns
from freetoken.scheduling.chunk_costs import plan_chunk_tokens
from freetoken.scheduling.clock import StepClock
from freetoken.scheduling.ledger import KVLedger
from freetoken.scheduling.lifecycle import RequestBook
from freetoken.scheduling.limits import SchedulerLimits
from freetoken.scheduling.outstanding import OutstandingStep, OutstandingSteps, PlannedRow
from freetoken.scheduling.request import Request, RequestState

logger = logging.getLogger(__name__)


class PlannedStep(NamedTuple):
    """A step ready to be sent."""

    plan: StepPlan
    notice: StepNotice


class _Phase(enum.Enum):
    IDLE = "idle"
    RESERVING = "reserving"
    RESERVED = "reserved"


class Scheduler:
    """Continuous batching over paged KV with one step of lookahead.

    Drive it like this: report every event (``submit``, ``abort``, ``reserved``, ``step_done``, ``step_failed``), then
    call ``advance`` until it returns None and send what it returns. Tokens and endings collect for ``take_batch``.
    ``now`` is any monotonic clock in seconds. Not thread-safe.
    """

    def __init__(self, limits: SchedulerLimits, epoch: int = 0) -> None:
        self.limits = limits
        self.epoch = epoch
        self.book = RequestBook(limits)
        self.clock = StepClock()
        self._phase = _Phase.IDLE
        self._wanted = False  # something happened since the last attempt to plan
        self._asked: dict[str, Request] = {}
        self._more_needs: list[BlockNeed] = []
        self._reply_due_s: float | None = None
        self._prefill_tokens = 0
        self._riding_only = False  # the step being planned may take prompts that ride along, and no others
        self._ready: PlannedStep | None = None  # built together with the one before, not sent yet
        self._outstanding = OutstandingSteps(limits.step_timeout_s, limits.background_timeout_s)
        self.changes = ArenaChanges(self.book)
        self._has_shrunk = False  # KV became smaller since the last attempt to plan
        self._next_step_id = 1
        self.last_step_id = 0
        self.steps_total = 0
        self.background_steps_total = 0
        self.failed_steps_total = 0
        self.stalled_steps_total = 0
        self.resizes_total = 0
        self.prefill_tokens_total = 0

    @property
    def ledger(self) -> KVLedger:
        """The KV side of the bookkeeping."""
        return self.book.ledger

    @property
    def num_outstanding_steps(self) -> int:
        """Plans sent and not answered."""
        return len(self._outstanding)

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, message: SubmitRequest, now: float) -> None:
        """A new request; rejections are answered through ``take_batch`` as well."""
        self.book.submit(message, now)
        self._wanted = True

    def abort(self, request_id: str, now: float) -> None:
        """Idempotent, at any time; unknown ids are ignored."""
        self._wanted |= self.book.abort(request_id, now)

    def abort_all(self, now: float) -> None:
        """Nobody is left to hear the answers."""
        for request_id in [*self.book.live, *self.book.oversized]:
            self.abort(request_id, now)

    def take_batch(self) -> TokenBatch | None:
        """All tokens and endings since the last call, or None."""
        if not self.book.deltas:
            return None
        deltas, self.book.deltas = self.book.deltas, []
        return TokenBatch(self.last_step_id, self.epoch, tuple(deltas))

    def drop_all(self, failure: RequestFailure, now: float) -> TokenBatch | None:
        """The epoch is over: every request ends with ``failure``, and all plans and blocks are forgotten."""
        deltas = self.book.drop_all(failure, now)
        self._phase = _Phase.IDLE
        self._wanted = False
        self._asked = {}
        self._more_needs = []
        self._reply_due_s = None
        self._ready = None
        self._outstanding.clear()
        self.changes.clear()
        self.clock.reset()
        return TokenBatch(self.last_step_id, self.epoch, tuple(deltas)) if deltas else None

    # ------------------------------------------------------------------------------------------ planning

    def advance(self, now: float) -> ReserveBlocks | VacatePool | PlannedStep | None:
        """The next message to send, if one is due."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        while self._phase is not _Phase.RESERVING:
            if self._phase is _Phase.RESERVED:
                if self._more_needs:
                    return self._reservation(self._more_needs, now)
            elif self._outstanding.background is None and (question := self.changes.take_question(now)) is not None:
                return question
            elif self._wanted and not self._outstanding.is_full and not self._is_held:
                self._wanted = False
                if self._has_shrunk:
                    self._has_shrunk = False
                    self.book.fail_oversized(now)
                needs = self._plan_needs()
                if needs or self.ledger.is_due:
                    return self._reservation(needs, now)
            else:
                return None
            planned = self._build(now)
            if planned is not None:
                return planned
        return None

    # ------------------------------------------------------------------------------------------ changes of the arena

    def blocks_vacated(self, message: PoolVacated) -> bool:
        """See ``ArenaChanges``, as for all below."""
        was_waited_for = self.changes.blocks_vacated(message)
        if was_waited_for:
            self._wanted = True
            if message.stats is not None:
                self.kv_resized(message.stats)
        return was_waited_for

    def kv_resized(self, stats: KVStats) -> None:
        """KV has another number of blocks."""
        self.ledger.stats = stats
        self.set_num_kv_blocks(stats.total_blocks)
        self.resizes_total += 1
        self._wanted = True

    def take_vacated(self, now: float) -> ArenaVacated | None:
        """What to tell GpuExecutor, if it is time."""
        if self._phase is not _Phase.IDLE or len(self._outstanding) or self._ready is not None:
            return None
        vacated = self.changes.take_vacated(now)
        self._wanted |= vacated is not None and bool(vacated.refusal)
        return vacated

    def emptied(self, message: PoolEmptied) -> None:
        """A table is true to the new arena."""
        if message.stats is not None and self.changes.stops_planning:
            self.set_num_kv_blocks(message.stats.total_blocks)
        if self.changes.emptied(message):
            self.resizes_total += 1
            self._wanted = True

    @property
    def _is_held(self) -> bool:
        return self.changes.stops_planning and self._outstanding.background is None

    def set_num_kv_blocks(self, num_blocks: int) -> None:
        """KV has so many blocks from now on."""
        if num_blocks != self.limits.num_kv_blocks:
            self._has_shrunk |= num_blocks < self.limits.num_kv_blocks
            self.limits = dataclasses.replace(self.limits, num_kv_blocks=num_blocks)
            self.book.set_limits(self.limits)

    def _plan_needs(self) -> list[BlockNeed]:
        """Decide what the step should hold as far as it is known, and which room that takes."""
        limits, book = self.limits, self.book
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in book.running:
            request.wanted_tokens = 0
            if request.in_background:
                continue
            if request.num_scheduled_tokens < request.init_tokens:
                prefills.append(request)
            elif request.num_planned_tokens < min(request.max_total_tokens, limits.kv_capacity_tokens + 1):
                decodes.append(request)  # else its last token is on the way

        any_prefill = bool(prefills) or len(book.waiting) > 0
        riding = limits.ride_along_tokens
        beside = riding is not None and bool(decodes or self._outstanding.background)
        self._riding_only = beside and not self._may_begin_background
        if riding is None or not beside:
            shares = plan_shares(len(decodes), any_prefill, limits.max_num_batched_tokens, limits.prefill_chunk_tokens)
            self._prefill_tokens = shares.prefill_tokens
        else:
            shares = plan_shares(len(decodes), any_prefill, limits.max_num_batched_tokens, riding)
            self._prefill_tokens = min(riding, limits.max_num_batched_tokens - min(len(decodes), shares.decode_rows))
            if self._may_begin_background and any_prefill:
                self._prefill_tokens = self._chunk_tokens()
        if len(decodes) > shares.decode_rows:
            turns = plan_turns([request.last_step_id for request in decodes], shares.decode_rows)
            decodes = [decodes[index] for index in turns]
        available = self.ledger.num_available_blocks
        for request in decodes:
            request.wanted_tokens = request.num_scheduled_tokens + 1
            available -= request.wanted_tokens > request.num_blocks * limits.block_size
        first_needs = self._plan_prefills(prefills, available)

        needs = [
            BlockNeed(request.id, request.num_scheduled_tokens, request.wanted_tokens - request.num_scheduled_tokens)
            for request in book.running
            if request.wanted_tokens > request.num_blocks * limits.block_size
        ]
        self._asked = {need.request_id: book.live[need.request_id] for need in needs}
        for request, num_new_tokens in first_needs:
            request.holds_blocks = True  # from now on a release must be sent
            self._asked[request.id] = request
            needs.append(BlockNeed(request.id, 0, num_new_tokens, request.known_tokens(), request.comes_back))
        return needs

    @property
    def _may_begin_background(self) -> bool:
        return self._outstanding.background is None and self.changes.allows_background

    def _chunk_tokens(self) -> int:
        """Of a background step."""
        costs, limits = self.clock.chunk_costs, self.limits
        return plan_chunk_tokens(
            costs.line(), costs.longest_tokens, limits.prefill_chunk_tokens, limits.max_num_batched_tokens
        )

    def _plan_prefills(self, prefills: list[Request], available_blocks: int) -> list[tuple[Request, int]]:
        """Share the prefill tokens among running and waiting requests; returns whom to admit, with how many tokens."""
        limits, book, budget = self.limits, self.book, self._prefill_tokens
        if budget == 0:
            return []
        admissions = []
        if len(book.waiting):
            # What running prompts are certain to need yet is not there for others.
            certain = [*prefills, *(request for request in book.running if request.in_background)]
            available_blocks -= sum(limits.blocks_for(r.init_tokens) - r.num_blocks for r in certain)
            admissions = plan_admissions(
                book.waiting,
                book.lingering,
                num_running=len(book.running),
                prefill_tokens=budget if not prefills else budget // 2,
                available_blocks=available_blocks,
                limits=limits,
            )
        room = {admission.request.id: admission.num_new_tokens for admission in admissions}
        candidates = sorted([*prefills, *(a.request for a in admissions)], key=lambda request: request.rank)
        work = [
            PrefillWork(
                request.priority,
                left := request.num_prefill_tokens,
                room.get(request.id, left if self._may_run(left) else 0),
            )
            for request in candidates
        ]
        first_needs = []
        for request, chunk in zip(candidates, plan_prefill_chunks(work, budget), strict=True):
            if request.state is not RequestState.RUNNING:
                # A block even without a share of the budget: once admitted it is known how much is left to compute.
                first_needs.append((request, max(chunk, min(room[request.id], limits.block_size))))
            elif chunk:
                request.wanted_tokens = request.num_scheduled_tokens + chunk
        return first_needs

    def _may_run(self, prefill_tokens: int) -> bool:
        """Whether a running request with so much prefill left may take part in the step being planned: beside a
        background step only what rides along whole may."""
        return not self._riding_only or prefill_tokens <= (self.limits.ride_along_tokens or 0)

    def _reservation(self, needs: list[BlockNeed], now: float) -> ReserveBlocks:
        entries = self.ledger.take()
        self._phase = _Phase.RESERVING
        self._reply_due_s = now + self.limits.step_timeout_s
        self._more_needs = []
        return ReserveBlocks(
            self._next_step_id, self.epoch, entries.commits, entries.releases, tuple(needs), entries.discards
        )

    def reserved(self, reply: BlocksReserved, now: float) -> None:
        """The allocator's answer to the reservation in progress; any other is ignored."""
        if self._phase is not _Phase.RESERVING or reply.step_id != self._next_step_id:
            return
        self._phase = _Phase.RESERVED
        self._reply_due_s = None
        self.ledger.stats = reply.stats
        for grant in reply.grants:
            request = self._asked.get(grant.request_id)
            if request is None or request.state is RequestState.FINISHED:
                continue  # it ended meanwhile; its release is on the way
            request.num_blocks += len(grant.new_block_ids)
            request.new_block_ids += grant.new_block_ids
            if request.state is not RequestState.RUNNING:
                self.book.admit(request, grant.num_cached_tokens, now)
        starving = []
        for request_id in reply.exhausted:
            request = self._asked.get(request_id)
            if request is None or request.state is RequestState.FINISHED:
                continue
            if request.state is RequestState.RUNNING:
                starving.append(request)
            else:
                request.holds_blocks = False
                request.blocked_at_blocks = self.ledger.num_available_blocks
        self._more_needs = self._relieve(starving)

    def _relieve(self, starving: list[Request]) -> list[BlockNeed]:
        """Blocks ran out for running requests (most important first): make do with less, else preempt the least
        important request, else wait. Returns what to ask for again."""
        limits, book = self.limits, self.book
        available = self.ledger.num_available_blocks
        needs: list[BlockNeed] = []
        for request in starving:
            if request.state is not RequestState.RUNNING:
                continue  # it was preempted for one before it
            room = request.num_blocks * limits.block_size
            start = request.num_scheduled_tokens
            if available > 0:
                request.wanted_tokens = min(request.wanted_tokens, room + available * limits.block_size)
                available -= limits.blocks_for(request.wanted_tokens) - request.num_blocks
            elif room > start:
                continue  # part of the chunk fits into the blocks it has
            elif (victim := book.running[-1]) is not request and not victim.in_background:
                book.preempt(victim)
            else:
                # All others matter more, or the background step still writes to the victim's blocks: it waits with what
                # it has.
                request.wanted_tokens = 0
                continue
            needs.append(BlockNeed(request.id, start, request.wanted_tokens - start))
        return needs

    def _build(self, now: float) -> PlannedStep | None:
        """One step, or two, of the requests that are still there, within the room they have."""
        self._phase = _Phase.IDLE
        limits, book = self.limits, self.book
        decodes: list[tuple[Request, int]] = []
        prefills: list[Request] = []
        work: list[PrefillWork] = []
        for request in book.running:
            if request.in_background:
                continue
            start = request.num_scheduled_tokens
            room = request.num_blocks * limits.block_size
            if start >= request.init_tokens:
                if start < request.wanted_tokens <= room:
                    decodes.append((request, 1))
            elif room > start:
                left = request.init_tokens - start
                if self._may_run(left):
                    prefills.append(request)
                    work.append(PrefillWork(request.priority, left, min(left, room - start)))
        chunks = plan_prefill_chunks(work, self._prefill_tokens)
        prefill = [(request, chunk) for request, chunk in zip(prefills, chunks, strict=True) if chunk]
        num_prefill_tokens = sum(chunks)
        self.prefill_tokens_total += num_prefill_tokens
        riding = limits.ride_along_tokens
        if (
            decodes
            and riding is not None
            and num_prefill_tokens > min(riding, limits.max_num_batched_tokens - len(decodes))
            and self._may_begin_background
        ):
            planned = self._plan_step(decodes, 0, now)
            self._ready = self._plan_step(prefill, num_prefill_tokens, now, background=True)
            return planned
        if not decodes and not prefill and not self._is_retire_due(now):
            return None
        return self._plan_step([*decodes, *prefill], num_prefill_tokens, now)

    def _plan_step(
        self, shares: list[tuple[Request, int]], num_prefill_tokens: int, now: float, background: bool = False
    ) -> PlannedStep:
        """A step of these requests and tokens."""
        step_id, book = self._next_step_id, self.book
        rows: list[StepRow] = []
        records: list[PlannedRow] = []
        for request, num_tokens in shares:
            row = request.plan_row(step_id, num_tokens)
            request.in_background = background
            rows.append(row)
            records.append(PlannedRow(request, request.admission, row.start + num_tokens, row.sample))
        num_tokens = sum(row.num_tokens for row in rows)
        pure = num_tokens == num_prefill_tokens
        self._outstanding.add(OutstandingStep(step_id, records, now, num_prefill_tokens if pure else 0, background))
        retired, book.retired = tuple(book.retired), []
        self._next_step_id += 1
        self.last_step_id = step_id
        self.steps_total += bool(rows)
        self.background_steps_total += background
        self._wanted = True
        return PlannedStep(
            StepPlan(step_id, self.epoch, tuple(rows), retired, background),
            StepNotice(step_id, self.epoch, num_tokens, num_tokens - num_prefill_tokens, last=self._is_last()),
        )

    def _is_retire_due(self, now: float) -> bool:
        """There are no rows. Whether the plan is worth sending, to tell an idle device that requests are gone."""
        book = self.book
        if len(self._outstanding) or self._wanted:
            return False
        if book.live:
            # Cannot happen: the most important request always gets a row. Never hang if it does.
            request = next(iter([*book.running, *book.waiting]))
            logger.error("event=no_progress request=%s state=%s stats=%s", request.id, request.state, self.ledger.stats)
            book.fail(request, RequestFailure("internal", "the request could not be scheduled"), now)
            self._wanted = True
            return False
        return bool(book.retired)

    def _is_last(self) -> bool:
        """Whether no row is left to plan, whatever the outstanding steps sample."""
        return (
            not len(self.book.waiting)
            and self._outstanding.background is None
            and all(
                request.num_scheduled_tokens >= request.init_tokens
                and request.num_planned_tokens >= request.max_total_tokens
                for request in self.book.running
            )
        )

    # ------------------------------------------------------------------------------------------ results

    def step_done(self, result: StepResult, now: float) -> None:
        """A step succeeded: append its tokens, end whom they end, note what may be committed."""
        step = self._take_step(result.step_id, now)
        if step is None:
            return
        answers = {row.request_id: row for row in result.rows}
        for row in step.rows:
            self.book.row_answered(row.request, row.sample)
            if row.request.state is not RequestState.FINISHED:
                self._take_row(row, answers.get(row.request.id), now)
        if step.prefill_tokens > (self.limits.ride_along_tokens or 0):
            busy_ns = result.busy_ns or result.finished_ns - result.started_ns
            self.clock.chunk_costs.add(step.prefill_tokens, busy_ns / 1e9)
        if step.rows and not result.busy_ns:
            self.clock.step_done(result.started_ns, result.finished_ns, bool(self.book.live))

    def _take_row(self, row: PlannedRow, answer: RowResult | None, now: float) -> None:
        book, request = self.book, row.request
        if answer is None or (answer.failure is None and row.sample and answer.token_id is None):
            book.fail(request, RequestFailure("internal", "the step's result lacks this request's row"), now)
            return
        if answer.failure is not None:
            if answer.failure_kind == "numeric":
                book.ledger.discard(request)
            book.fail(request, RequestFailure(answer.failure_kind, answer.failure), now)
            return
        if request.state is RequestState.RUNNING and request.admission == row.admission:
            book.ledger.computed(request, row.end)
        if row.sample:
            assert answer.token_id is not None
            book.append_token(request, answer.token_id, answer.logprob, now)

    def step_failed(self, message: StepFailed, now: float) -> None:
        """A step failed: so do its requests. The others go on."""
        step = self._take_step(message.step_id, now)
        if step is None:
            return
        self.failed_steps_total += 1
        logger.warning(
            "event=step_failed step=%d message=%r suspects=%s", message.step_id, message.message, message.suspects
        )
        self._fail_step(step, f"step {message.step_id} failed: {message.message}", now)

    def check_stalled(self, now: float) -> ActorName | None:
        """Fail the requests of the oldest step once it is unanswered for ``step_timeout_s``, and all requests once a
        reservation is; who owes the answer, if either happened.

        A stalled step goes on counting as outstanding: it occupies the device, and its blocks must not be reused. Late
        answers are welcome.
        """
        limit = f"{self.limits.step_timeout_s:g} s (scheduler.step_timeout_s)"
        if self._reply_due_s is not None and now >= self._reply_due_s:
            self._reply_due_s = None
            self.stalled_steps_total += 1
            logger.error("event=reservation_stalled step=%d", self._next_step_id)
            failure = RequestFailure("internal", f"the KV allocator did not answer within {limit}", retryable=True)
            for request in list(self.book.live.values()):
                self.book.fail(request, failure, now)
            self._wanted = True
            return ActorName.KV_ALLOCATOR
        late = self.changes.take_late(now)
        if late is not None:
            self.stalled_steps_total += 1
            return late
        step = self._outstanding.give_up(now)
        if step is None:
            return None
        self.stalled_steps_total += 1
        self._fail_rows(step, f"step {step.step_id} was not answered within {limit}", now)
        return ActorName.GPU_EXECUTOR

    def deadline_s(self) -> float | None:
        """When ``check_stalled`` is due, if an answer is."""
        moments = (self._outstanding.deadline_s(), self._reply_due_s, self.changes.due_s())
        return min((moment for moment in moments if moment is not None), default=None)

    def _take_step(self, step_id: int, now: float) -> OutstandingStep | None:
        taken = self._outstanding.take(step_id, now)
        if not taken:
            return None
        for lost in taken[:-1]:
            self._fail_step(lost, f"the result of step {lost.step_id} was lost", now)
        if taken[-1].background:
            for row in taken[-1].rows:
                row.request.in_background = False
        self._wanted = True
        return taken[-1]

    def _fail_step(self, step: OutstandingStep, message: str, now: float) -> None:
        self._fail_rows(step, message, now)
        for row in step.rows:
            self.book.row_answered(row.request, row.sample)

    def _fail_rows(self, step: OutstandingStep, message: str, now: float) -> None:
        for row in step.rows:
            if row.request.state is not RequestState.FINISHED:
                self.book.fail(row.request, RequestFailure("internal", message, retryable=True), now)
        self._wanted = True

    # ------------------------------------------------------------------------------------------ figures

    def metrics(self) -> dict[str, float]:
        """See ``ActorStatus.metrics`` for the naming rule."""
        book = self.book
        return {
            "running": float(len(book.running)),
            "waiting": float(len(book.waiting) + len(book.oversized)),
            "lingering": float(len(book.lingering)),
            "outstanding_steps": float(len(self._outstanding)),
            "steps_total": float(self.steps_total),
            "background_steps_total": float(self.background_steps_total),
            "failed_steps_total": float(self.failed_steps_total),
            "stalled_steps_total": float(self.stalled_steps_total),
            "preemptions_total": float(book.preemptions_total),
            "held_back": float(block_pressure(self.book).num_requests),
            "recomputed_tokens_total": float(book.recomputed_tokens_total),
            "resizes_total": float(self.resizes_total),
            "requests_finished_total": float(book.finished_total),
            "requests_failed_total": float(book.failed_total),
            "requests_aborted_total": float(book.aborted_total),
            "requests_rejected_total": float(book.rejected_total),
            "prompt_tokens_total": float(book.prompt_tokens_total),
            "cached_tokens_total": float(book.cached_tokens_total),
            "prefill_tokens_total": float(self.prefill_tokens_total),
            "generated_tokens_total": float(book.generated_tokens_total),
            **self.clock.metrics(),
        }
