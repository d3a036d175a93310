"""Scheduler, KVAllocator and FakeDevice without transport or event loop: every delivery is a call, so a test decides
the order of events."""

from __future__ import annotations

from collections import deque

from freetoken.kv import KVAllocator
from freetoken.messages import (
    ActorName,
    ArenaPrepared,
    BlocksReserved,
    ReserveBlocks,
    ResizeApplied,
    SamplingParams,
    StepNotice,
    StepPlan,
    SubmitRequest,
    TokenDelta,
)
from freetoken.scheduling import Scheduler, SchedulerLimits
from freetoken.testing.fake_executor import FakeDevice


class SchedulerRig:
    """``replies`` and ``plans`` are on their way; ``deliver_reply``, ``run_step`` and ``fail_step`` let one arrive.
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
        self.replies: deque[BlocksReserved] = deque()
        self.plans: deque[StepPlan] = deque()
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
        self.scheduler.reserved(self.replies.popleft(), self.now)
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
        self.now += 1.0
        if message is None:
            self.scheduler.step_done(self.device.run(plan), self.now)
        else:
            self.scheduler.step_failed(self.device.fail(plan, message), self.now)
        self._begin()
        self.pump()
        return True

    def resize(self, num_blocks: int, fails: bool = False) -> bool:
        """KV gets another size, at the next moment without steps; with ``fails`` the device refuses. False when blocks
        in use do not fit."""
        self._resizes += 1
        self.scheduler.hold(ArenaPrepared(1, self._resizes, 1, num_blocks))
        self.pump()
        while (questions := self.scheduler.take_vacate(self.now)) is None:
            assert self.deliver_reply() or self.end_background() or self.run_step(), (
                "the moment without steps never comes"
            )
        plan = self.allocator.plan_resize(questions[ActorName.KV_ALLOCATOR].capacity)
        moved: dict[int, int] = {}
        if not isinstance(plan, str) and not fails:
            moved = plan.moved
            self.device.resize(num_blocks, moved)
            self.allocator.resize(plan)
            self.allocator.check_integrity()
        for sender in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR):
            is_kv = sender is ActorName.KV_ALLOCATOR
            self.scheduler.applied(
                ResizeApplied(
                    1, self._resizes, sender.value, tuple(moved) if is_kv else (),
                    tuple(moved.values()) if is_kv else (), self.allocator.stats() if is_kv else None,
                )
            )  # fmt: skip
        self.pump()
        return not isinstance(plan, str) and not fails

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
        assert self.background is None
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
