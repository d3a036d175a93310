"""The GpuExecutor actor: owns the device's memory, runs the steps; only this service imports torch, in ``load``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, ClassVar, TypeVar

from freetoken import _native
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.errors import ConfigError, FreeTokenError, PeerLostError
from freetoken.execution.arena import Arena
from freetoken.execution.step_thread import StepThread
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorState,
    ArenaReady,
    MailboxShared,
    StepFailed,
    StepPlan,
    StepReport,
    StepResult,
    StoreShared,
    Wiring,
)
from freetoken.service import Service
from freetoken.transport import Endpoint

if TYPE_CHECKING:
    from freetoken.execution.model_runtime import ModelRuntime
    from freetoken.execution.step_executor import StepExecutor

logger = logging.getLogger(__name__)

T = TypeVar("T")
WIRE_TIMEOUT_S = 60.0
REPORT_INTERVAL_S = 0.25
# The step thread and the event loop share the interpreter; the default of 5 ms would add to every step.
SWITCH_INTERVAL_S = 0.0005


class GpuExecutorService(Service):
    """Holds arena and weights over epochs; mailbox, operations and request state are of one epoch."""

    name: ClassVar[ActorName] = ActorName.GPU_EXECUTOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self._arena: Arena | None = None
        self._pool: _native.WorkerPool | None = None
        self._thread: StepThread | None = None
        self._store: HeldStore | None = None
        self._runtime: ModelRuntime | None = None
        self._mailbox: _native.Mailbox | None = None
        self._executor: StepExecutor | None = None
        self._waiting: dict[ActorName, asyncio.Future[None]] = {}
        self._progress = (0, 0, "")
        self._reported_s = 0.0
        endpoint.on(StoreShared, self._on_store_shared)
        endpoint.on(MailboxShared, self._on_mailbox_shared)
        endpoint.on(StepPlan, self._on_step_plan)
        endpoint.on_peer_lost(self._on_peer_lost)

    # ------------------------------------------------------------------------------------------ life

    async def load(self) -> None:
        """Import torch, start the threads, allocate the arena. Raises ``ConfigError`` or ``CapacityError``."""
        self.state = ActorState.LOADING
        if self.spec.config.device != "cpu":
            raise ConfigError(
                f"device={self.spec.config.device} is not available in this version; set device=cpu "
                "(--device cpu runs the same engine on the processor)"
            )
        await asyncio.to_thread(self._load)
        self._thread = StepThread(self._on_outcome)

    def _load(self) -> None:
        plan = self.spec.plan
        self._progress = (0, 0, "starting PyTorch")
        # Between products PyTorch's threads must sleep: the native pool needs their cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        torch.set_num_threads(plan.device_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._pool = _native.WorkerPool(
            plan.device_threads, plan.device_core_ids, plan.spin_us, self.spec.config.executor.isa
        )
        self._progress = (0, 0, "allocating the arena")
        self._arena = Arena.of(self.spec)
        self._progress = (0, 0, "")
        logger.info("event=arena_ready arena=%s bytes=%d", self._arena.arena_id, self._arena.size_bytes)

    def progress(self) -> tuple[int, int, str]:
        """What ``load`` or ``wire`` is at; without numbers."""
        return self._progress

    async def wire(self, wiring: Wiring) -> None:
        """Announce the arena, then wait for the store and, with routed experts, the mailbox, and build on them.

        Raises ``PeerLostError`` when one of them does not come within a minute or its sender dies.
        """
        if self._arena is None:
            raise FreeTokenError("GpuExecutor was wired before it was loaded")
        await self._end_epoch()
        loop = asyncio.get_running_loop()
        # Before connecting, which may deliver messages that were held back.
        self._waiting = {ActorName.WEIGHT_STREAMER: loop.create_future()}
        if self.spec.model.is_moe:
            self._waiting[ActorName.EXPERT_CACHE] = loop.create_future()
        try:
            await super().wire(wiring)
            arena = ArenaReady(self.epoch, self._arena.arena_id, self.spec.plan.num_slots, self.spec.plan.num_kv_blocks)
            for peer in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR):
                self.endpoint.send(peer, arena)
            await self._wait_for_peers()
        finally:
            for future in self._waiting.values():
                future.cancel()
            self._waiting = {}
        self._executor = await asyncio.to_thread(self._build)

    async def _wait_for_peers(self) -> None:
        done, pending = await asyncio.wait(self._waiting.values(), timeout=WIRE_TIMEOUT_S)
        for peer, future in self._waiting.items():
            if future in pending:
                raise PeerLostError(str(peer), f"its shared memory did not come within {WIRE_TIMEOUT_S:g} s")
        for future in done:
            future.result()

    def _build(self) -> StepExecutor:
        from freetoken.execution.model_runtime import ModelRuntime

        assert self._store is not None and self._arena is not None and self._pool is not None
        if self._runtime is None:
            self._progress = (0, 0, "mapping the weights")
            index = FtwIndex.load(self.spec.checkpoint)
            runtime = ModelRuntime(self.spec, index, self._store, self._arena, self._pool)
            self._progress = (0, 0, "warming up")
            runtime.warm_up()
            self._runtime = runtime
        self._progress = (0, 0, "")
        return self._runtime.build_executor(self._mailbox)

    async def pause(self, reason: str) -> None:
        """Abort the mailbox, drop queued plans, wait for the running step, forget all requests."""
        await super().pause(reason)
        await self._end_epoch()

    async def _end_epoch(self) -> None:
        if self._mailbox is not None:
            self._mailbox.abort()
        self._executor = None
        if self._thread is not None:
            await asyncio.to_thread(self._thread.drain, self.spec.config.scheduler.step_timeout_s)
        self._mailbox = None

    async def close(self) -> None:
        """Ends the step thread after the step it is running."""
        if self._mailbox is not None:
            self._mailbox.abort()
        self._executor = None
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.close, self.spec.config.scheduler.step_timeout_s)
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._runtime = None
        self._mailbox = None
        self._arena = None
        self._store = None
        await super().close()

    # ------------------------------------------------------------------------------------------ shared memory

    async def share_store(self, to: ActorName) -> None:
        """Send the store's descriptors to ``to``. Raises ``FreeTokenError`` when none is held."""
        if self._store is None:
            raise FreeTokenError("GpuExecutor holds no store")
        self._store.share(self.endpoint, to, self.epoch)

    def _on_store_shared(self, message: StoreShared, fds: tuple[int, ...]) -> None:
        if self._store is None or not self._store.is_same(message, fds):
            store = HeldStore.adopt(message, fds)
            self._runtime = None
            self._store = store
        else:
            close_all(fds)
        self._arrived(ActorName.WEIGHT_STREAMER)

    def _on_mailbox_shared(self, message: MailboxShared, fds: tuple[int, ...]) -> None:
        try:
            segment = _native.SharedSegment.attach(fds[0], message.size_bytes, "mailbox")
            self._mailbox = _native.Mailbox.attach(segment)
        finally:
            close_all(fds)
        self._arrived(ActorName.EXPERT_CACHE)

    def _arrived(self, peer: ActorName) -> None:
        future = self._waiting.get(peer)
        if future is not None and not future.done():
            future.set_result(None)

    def _on_peer_lost(self, peer: ActorName) -> None:
        future = self._waiting.get(peer)
        if future is not None and not future.done():
            future.set_exception(PeerLostError(str(peer), "it ended before its shared memory came"))

    # ------------------------------------------------------------------------------------------ steps

    def _on_step_plan(self, plan: StepPlan, fds: tuple[int, ...]) -> None:
        if plan.epoch != self.epoch or self._executor is None or self._thread is None:
            logger.info("event=plan_dropped step=%d epoch=%d own_epoch=%d", plan.step_id, plan.epoch, self.epoch)
            return
        self._thread.submit(self._executor, plan)

    def _on_outcome(self, plan: StepPlan, outcome: StepResult | StepFailed) -> None:
        # On the step thread. A late outcome of a paused epoch is stamped with it and dropped by the receiver.
        try:
            self.endpoint.send(ActorName.SCHEDULER, outcome)
            now = time.monotonic()
            if now - self._reported_s >= REPORT_INTERVAL_S:
                self._reported_s = now
                report = StepReport(str(self.name), plan.epoch, plan.step_id, self.metrics())
                self.endpoint.send(ActorName.CONTROLLER, report)
        except PeerLostError as error:
            logger.info("event=outcome_undeliverable step=%d detail=%s", plan.step_id, error)

    def metrics(self) -> dict[str, float]:
        """Steps, tokens, busy time and expert figures since start; arena geometry."""
        plan, executor, thread = self.spec.plan, self._executor, self._thread
        figures = thread.stats.metrics() if thread is not None else {}
        return {
            **figures,
            "requests": len(executor.requests) if executor is not None else 0,
            "queued_plans": thread.queued if thread is not None else 0,
            "arena_bytes": self._arena.size_bytes if self._arena is not None else 0,
            "slots": plan.num_slots,
            "kv_blocks": plan.num_kv_blocks,
            "device_threads": plan.device_threads,
        }


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)
