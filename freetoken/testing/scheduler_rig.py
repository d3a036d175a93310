"""Scheduler, KVAllocator and FakeDevice without transport or event loop: every delivery is a call, so a test decides
the order of events."""

from __future__ import annotations

from collections import deque

from freetoken.kv import KVAllocator
from freetoken.messages import (
    ActorName,
    BlocksReserved,
    PoolVacated,
    ReserveBlocks,
    SamplingParams,
    ShrinkKV,
    StepNotice,
    StepPlan,
    SubmitRequest,
    TokenDelta,
    VacatePool,
)
from freetoken.scheduling import Scheduler, SchedulerLimits
from freetoken.testing.fake_executor import FakeDevice


class SchedulerRig:
    """``replies`` and ``plans`` are on their way; ``deliver_reply``, ``run_step`` and ``fail_step`` let one arrive.
    Blocks that move are told among both, as messages between actors are.
    So is a ``background`` plan, which begins once the plans before it have run; ``end_background`` lets it end.

    Tokens and endings of each request are collected as its client would see them. Time is whatever ``now`` says.
    """

    def __init__(self, limits: SchedulerLimits, audit: bool = True) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, epoch=1)
        self.allocator = KVAllocator(limits.num_kv_blocks, limits.block_size, limits.prefix_cache)
        self.device = FakeDevice(limits.num_kv_blocks, limits.block_size, limits.vocab_size, audit)
        self.now = 0.0
        self._resizes = 0
        self.replies: deque[BlocksReserved | PoolVacated] = deque()
        self.plans: deque[StepPlan] = deque()
        self._moves: deque[tuple[int, PoolVacated]] = deque()  # with how many of ``plans`` come before each
        self.is_resizing = False
        self.refusal = ""
        self.background: StepPlan | None = None
        self._begun = False
        self._waits_for = 0  # plans before the background one
        self._beside = 0
        self.background_cycles = 3
        self.notices: list[StepNotice] = []
        self.reservations: list[ReserveBlocks] = []
        self.tokens: dict[str, list[int]] = {}
        self.token_steps: dict[str, list[int]] = {}
        self.endings: dict[str, TokenDelta] = {}
        self.first_deltas: dict[str, TokenDelta] = {}

    def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """A request arrives."""
        message = SubmitRequest(request_id, tuple(prompt), sampling or SamplingParams(temperature=0.0), priority)
        self.scheduler.submit(message, self.now)
        self.pump()

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        self.scheduler.abort(request_id, self.now)
        self.pump()

    def pump(self) -> None:
        """Let the scheduler send what it has to send."""
        while (action := self.scheduler.advance(self.now)) is not None:
            if isinstance(action, ReserveBlocks):
                self.reservations.append(action)
                self.replies.append(self.allocator.apply(action))
            elif isinstance(action, VacatePool):
                self.replies.append(self._vacate(action))
            else:
                if action.plan.background:
                    assert self.background is None, "two background plans are outstanding"
                    self.background = action.plan
                    self._waits_for = len(self.plans)
                else:
                    self.plans.append(action.plan)
                self.notices.append(action.notice)
        self._collect()

    def deliver_reply(self) -> bool:
        """The allocator's answer arrives, if one is on the way."""
        if not self.replies:
            return False
        reply = self.replies.popleft()
        if isinstance(reply, PoolVacated):
            assert self.scheduler.blocks_vacated(reply)
            assert self.background is None, "blocks move under a background step"
            self._moves.append((len(self.plans), reply))
            self._move_blocks()
        else:
            self.scheduler.reserved(reply, self.now)
        self.pump()
        return True

    def run_step(self) -> bool:
        """The oldest plan runs and its result arrives, if there is a plan."""
        return self._step(self._next(), None)

    def fail_step(self, message: str = "out of luck") -> bool:
        """The oldest plan fails, if there is one."""
        return self._step(self._next(), message)

    def end_background(self, message: str | None = None) -> bool:
        """The background plan ends, well or with ``message``, and its result arrives, if it has begun."""
        return self._begun and self._step(self.background, message)

    def _next(self) -> StepPlan | None:
        self._begin()
        return self.plans[0] if self.plans else None

    def _begin(self) -> None:
        """The background plan starts in its turn."""
        if self.background is not None and not self._begun and self._waits_for <= 0:
            self.device.begin(self.background)
            self._begun = True

    def _step(self, plan: StepPlan | None, message: str | None) -> bool:
        if plan is None:
            return False
        if plan.background:
            self.background, self._begun = None, False
        else:
            self.plans.popleft()
            self._waits_for -= 1
            self._moves = deque((before - 1, vacated) for before, vacated in self._moves)
        self.now += 1.0
        if message is None:
            self.scheduler.step_done(self.device.run(plan), self.now)
        else:
            self.scheduler.step_failed(self.device.fail(plan, message), self.now)
        self._move_blocks()
        self._begin()
        self.pump()
        return True

    def resize(self, num_blocks: int) -> None:
        """KV gets another size: at once if it grows, else among plans and replies (``is_resizing`` until then,
        ``refusal`` if blocks in use do not fit)."""
        assert not self.is_resizing
        self.refusal = ""
        self._resizes += 1
        if num_blocks < self.allocator.stats().total_blocks:
            self.is_resizing = True
            self.scheduler.changes.shrink_kv(ShrinkKV(1, self._resizes, num_blocks))
        else:
            self.device.resize(num_blocks, {})
            plan = self.allocator.plan_resize(num_blocks)
            assert not isinstance(plan, str)
            self.allocator.resize(plan)
            self.scheduler.kv_resized(self.allocator.stats())
        self.pump()

    def finish_resize(self) -> bool:
        """Go on until the change is made; False when it was refused."""
        while self.is_resizing:
            assert self.deliver_reply() or self.end_background() or self.run_step(), "the change never ends"
        return not self.refusal

    def _vacate(self, question: VacatePool) -> PoolVacated:
        plan = self.allocator.plan_resize(question.capacity)
        name = ActorName.KV_ALLOCATOR.value
        if isinstance(plan, str):
            return PoolVacated(1, question.resize_id, name, refusal=plan)
        self.allocator.resize(plan)
        self.allocator.check_integrity()
        moved = plan.moved
        return PoolVacated(
            1, question.resize_id, name, tuple(moved), tuple(moved.values()),
            stats=self.allocator.stats(),
        )  # fmt: skip

    def _move_blocks(self) -> None:
        """The device moves blocks in its turn among the plans."""
        while self._moves and self._moves[0][0] <= 0:
            _, vacated = self._moves.popleft()
            self.is_resizing = False
            self.refusal = vacated.refusal
            if vacated.stats is not None:
                moves = zip(vacated.moved_from, vacated.moved_to, strict=True)
                self.device.resize(vacated.stats.total_blocks, dict(moves))

    def settle_replies(self) -> None:
        """All reservations in progress come to their end; the device does not move."""
        while self.deliver_reply():
            pass

    def cycle(self) -> bool:
        """One step of a device that is slower than planning: plan as far as possible, then run one. The background
        plan ends when ``background_cycles`` steps have run beside it, or nothing else is there to run."""
        self.settle_replies()
        if self._begun and (self._beside >= self.background_cycles or not self.plans):
            self._beside = 0
            return self.end_background()
        self._beside += self._begun
        return self.run_step() or self.end_background()

    def drain(self, max_steps: int = 100_000) -> None:
        """Run until nothing moves any more."""
        for _ in range(max_steps):
            if not self.cycle():
                return
        raise AssertionError(f"requests are still running after {max_steps} steps")

    def check_baseline(self) -> None:
        """Everything ended: no request anywhere, every block free or cached. Raises ``AssertionError``."""
        self.allocator.check_integrity()
        stats = self.allocator.stats()
        held = stats.total_blocks - stats.free_blocks - stats.cached_blocks
        book = self.scheduler.book
        left = (len(book.live), len(book.lingering), len(book.running), len(book.waiting), len(book.retired))
        assert left == (0, 0, 0, 0, 0), f"requests are left: {left}"
        assert held == 0 and self.allocator.num_requests == 0, f"{held} blocks are still held"
        assert self.device.num_requests == 0, f"the device still knows {self.device.num_requests} requests"
        assert self.scheduler.num_outstanding_steps == 0 and not self.plans and not self.replies
        assert self.background is None and not self.is_resizing
        assert self.scheduler.ledger.is_empty

    def _collect(self) -> None:
        assert len(self.plans) <= 2, "more than two plans are outstanding"
        batch = self.scheduler.take_batch()
        for delta in batch.deltas if batch else ():
            who = delta.request_id
            assert who not in self.endings, f"{who} got a delta after its last"
            self.first_deltas.setdefault(who, delta)
            self.tokens.setdefault(who, []).extend(delta.token_ids)
            self.token_steps.setdefault(who, []).extend([self.device.num_steps] * len(delta.token_ids))
            if delta.finish_reason is not None:
                self.endings[who] = delta
