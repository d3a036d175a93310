"""The Scheduler actor: carries messages between the core and its peers, and watches the time."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar

from freetoken.elastic.arena_shape import is_elastic
from freetoken.errors import PeerLostError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    AbortRequest,
    ActorName,
    ActorsSuspected,
    ActorState,
    ArenaReady,
    BlocksReserved,
    BlocksShort,
    KVResized,
    PoolEmptied,
    PoolVacated,
    RequestFailure,
    ReserveBlocks,
    ShrinkKV,
    StepFailed,
    StepResult,
    SubmitRequest,
    TokenBatch,
    VacateArena,
    VacatePool,
    Wiring,
)
from freetoken.scheduling.arena_changes import block_pressure
from freetoken.scheduling.limits import SchedulerLimits
from freetoken.scheduling.scheduler import Scheduler
from freetoken.service import Service
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

PRESSURE_INTERVAL_S = 0.25
_NOTIFIED = (ActorName.EXPERT_CACHE, ActorName.CPU_EXECUTOR, ActorName.WEIGHT_STREAMER)


class SchedulerService(Service):
    """Serves one ``Scheduler``. Requests arriving before ``resume`` wait; those arriving while paused are refused."""

    name: ClassVar[ActorName] = ActorName.SCHEDULER

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.scheduler = Scheduler(SchedulerLimits.from_spec(spec))
        self._pause_reason = ""
        self._run_due: asyncio.Handle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._planning_s = 0.0
        self._reserved_since_s = 0.0
        self._is_elastic = is_elastic(spec.config, spec.plan)
        self._pressure_told_s = 0.0
        self._growth_due: asyncio.TimerHandle | None = None
        endpoint.on(SubmitRequest, self._on_submit)
        endpoint.on(AbortRequest, self._on_abort)
        endpoint.on(BlocksReserved, self._on_reserved)
        endpoint.on(StepResult, self._on_step_result)
        endpoint.on(StepFailed, self._on_step_failed)
        endpoint.on(ArenaReady, self._on_arena_ready)
        endpoint.on(ShrinkKV, self._on_shrink_kv)
        endpoint.on(PoolVacated, self._on_pool_vacated)
        endpoint.on(KVResized, self._on_kv_resized)
        endpoint.on(VacateArena, self._on_vacate_arena)
        endpoint.on(PoolEmptied, self._on_pool_emptied)
        endpoint.on_peer_lost(self._on_peer_lost)

    # ------------------------------------------------------------------------------------------ life cycle

    async def wire(self, wiring: Wiring) -> None:
        """A new epoch starts empty."""
        self._drop_all("a new epoch began")
        await super().wire(wiring)
        self.scheduler.epoch = self.epoch

    async def resume(self) -> None:
        """Begin planning; requests may be waiting already."""
        await super().resume()
        self._run()

    async def pause(self, reason: str) -> None:
        """All requests end with a retryable failure, sent to ApiFront if that is still there."""
        self._pause_reason = reason
        await super().pause(reason)
        self._drop_all(reason)

    async def close(self) -> None:
        if self.state is not ActorState.STOPPED:
            self._drop_all("the engine is stopping")
        await super().close()

    def metrics(self) -> dict[str, float]:
        """Queue lengths, totals and step times."""
        return {**self.scheduler.metrics(), **self.endpoint.counters()}

    # ------------------------------------------------------------------------------------------ events

    def _on_submit(self, message: SubmitRequest, fds: tuple[int, ...]) -> None:
        if self.state in (ActorState.PAUSED, ActorState.STOPPED):
            self.scheduler.book.reject(message.request_id, _restarting(self._pause_reason))
        else:
            self.scheduler.submit(message, time.monotonic())
        self._run_soon()

    def _on_abort(self, message: AbortRequest, fds: tuple[int, ...]) -> None:
        self.scheduler.abort(message.request_id, time.monotonic())
        self._run_soon()

    def _on_reserved(self, message: BlocksReserved, fds: tuple[int, ...]) -> None:
        now = time.monotonic()
        self.scheduler.reserved(message, now)
        self._planning_s += time.monotonic() - now
        self.scheduler.clock.reservation_ms.add((now - self._reserved_since_s) * 1e3)
        self._run()

    def _on_step_result(self, message: StepResult, fds: tuple[int, ...]) -> None:
        self.scheduler.step_done(message, time.monotonic())
        self._run()

    def _on_step_failed(self, message: StepFailed, fds: tuple[int, ...]) -> None:
        self.scheduler.step_failed(message, time.monotonic())
        if message.suspects:
            self._suspect(message.suspects, f"step {message.step_id} failed: {message.message}")
        self._run()

    def _on_arena_ready(self, message: ArenaReady, fds: tuple[int, ...]) -> None:
        self.scheduler.set_num_kv_blocks(message.num_kv_blocks)

    def _on_shrink_kv(self, message: ShrinkKV, fds: tuple[int, ...]) -> None:
        self.scheduler.changes.shrink_kv(message)
        self._run()

    def _on_pool_vacated(self, message: PoolVacated, fds: tuple[int, ...]) -> None:
        if self.scheduler.blocks_vacated(message):
            self._send(ActorName.GPU_EXECUTOR, message)
        self._run()

    def _on_kv_resized(self, message: KVResized, fds: tuple[int, ...]) -> None:
        self.scheduler.kv_resized(message.stats)
        self._run()

    def _on_vacate_arena(self, message: VacateArena, fds: tuple[int, ...]) -> None:
        self.scheduler.changes.vacate(message)
        self._run()

    def _on_pool_emptied(self, message: PoolEmptied, fds: tuple[int, ...]) -> None:
        self.scheduler.emptied(message)
        self._run()

    def _on_peer_lost(self, peer: ActorName) -> None:
        if peer is ActorName.API_FRONT:
            self.scheduler.abort_all(time.monotonic())
            self._run_soon()

    # ------------------------------------------------------------------------------------------ acting

    def _run_soon(self) -> None:
        """Once for all messages that arrive together: a burst of submissions is planned as one."""
        if self._run_due is None:
            self._run_due = asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Send what is due: tokens first, unless the device has nothing to do."""
        if self._run_due is not None:
            self._run_due.cancel()
            self._run_due = None
        if self.scheduler.num_outstanding_steps:
            self._deliver(self.scheduler.take_batch())
        if self.state is ActorState.SERVING:
            self._plan()
            self._vacate()
        self._deliver(self.scheduler.take_batch())
        self._tell_pressure()
        self._watch()
        if self.scheduler.book.oversized and self._growth_due is None:
            self._growth_due = asyncio.get_running_loop().call_later(PRESSURE_INTERVAL_S, self._await_growth)

    def _await_growth(self) -> None:
        """An engine that has nothing else to do goes on asking for blocks."""
        self._growth_due = None
        self.scheduler.book.end_oversized(time.monotonic())
        self._run()

    def _plan(self) -> None:
        while True:
            now = time.monotonic()
            action = self.scheduler.advance(now)
            self._planning_s += time.monotonic() - now
            if action is None:
                return
            if isinstance(action, ReserveBlocks):
                self._reserved_since_s = time.monotonic()
                self._send(ActorName.KV_ALLOCATOR, action)
                return
            if isinstance(action, VacatePool):
                self._send(ActorName.KV_ALLOCATOR, action)
                continue
            self._send(ActorName.GPU_EXECUTOR, action.plan)
            for peer in _NOTIFIED:
                self._send(peer, action.notice)
            self.scheduler.clock.planning_ms.add(self._planning_s * 1e3)
            self._planning_s = 0.0

    def _vacate(self) -> None:
        """Once planning has nothing to send any more."""
        vacated = self.scheduler.take_vacated(time.monotonic())
        if vacated is not None:
            self._send(ActorName.GPU_EXECUTOR, vacated)
            if vacated.refusal:
                self._plan()

    def _tell_pressure(self) -> None:
        """The Controller may move memory to KV."""
        now = time.monotonic()
        book = self.scheduler.book
        if not self._is_elastic or now - self._pressure_told_s < PRESSURE_INTERVAL_S:
            return
        if len(book.waiting) or book.oversized:
            pressure = block_pressure(book)
            if pressure.num_blocks > 0:
                self._pressure_told_s = now
                self._send(ActorName.CONTROLLER, BlocksShort(self.epoch, pressure.num_requests, pressure.num_blocks))

    def _deliver(self, batch: TokenBatch | None) -> None:
        if batch is not None:
            self._send(ActorName.API_FRONT, batch)

    def _send(self, to: ActorName, message: Any) -> None:
        """A lost peer ends the epoch; until the Controller says so, there is nothing to do about it."""
        try:
            self.endpoint.send(to, message)
        except PeerLostError as error:
            logger.info("event=undeliverable message=%s error=%r", type(message).__name__, str(error))

    def _drop_all(self, reason: str) -> None:
        for handle in (self._run_due, self._watchdog, self._growth_due):
            if handle is not None:
                handle.cancel()
        self._run_due = self._watchdog = self._growth_due = None
        self._planning_s = 0.0
        self._deliver(self.scheduler.drop_all(_restarting(reason), time.monotonic()))

    # ------------------------------------------------------------------------------------------ watchdog

    def _watch(self) -> None:
        deadline = self.scheduler.deadline_s()
        if self._watchdog is None and deadline is not None:
            delay = max(deadline - time.monotonic(), 0.0)
            self._watchdog = asyncio.get_running_loop().call_later(delay, self._check_stalled)

    def _check_stalled(self) -> None:
        self._watchdog = None
        suspect = self.scheduler.check_stalled(time.monotonic())
        if suspect is not None:
            limit_s = self.scheduler.limits.step_timeout_s
            self._suspect((suspect,), f"no answer within {limit_s:g} s (scheduler.step_timeout_s)")
        self._run()

    def _suspect(self, suspects: tuple[str, ...], detail: str) -> None:
        self._send(ActorName.CONTROLLER, ActorsSuspected(self.epoch, suspects, detail))


def _restarting(reason: str) -> RequestFailure:
    message = f"the engine is restarting ({reason}); try again" if reason else "the engine is restarting; try again"
    return RequestFailure("engine_restarted", message, retryable=True)
