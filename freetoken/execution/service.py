"""The GpuExecutor actor: owns the device's memory, runs the steps; only this service imports torch, in ``load``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, ClassVar

from freetoken._native import Mailbox, SharedSegment, WorkerPool
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore, close_fds, receive_store
from freetoken.errors import ConfigError, FreeTokenError, PeerLostError
from freetoken.execution.arena import Arena
from freetoken.execution.step_thread import StepThread
from freetoken.experts.arrivals import Arrivals
from freetoken.experts.reports import StepReporter
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorState,
    ArenaReady,
    MailboxShared,
    StepFailed,
    StepNotice,
    StepPlan,
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

WIRE_TIMEOUT_S = 60.0
# The step thread and the event loop share the interpreter; the default of 5 ms would add to every step.
SWITCH_INTERVAL_S = 0.0005


class GpuExecutorService(Service):
    """Arena, weights and step thread live as long as the actor; mailbox, executor and requests are of one epoch."""

    name: ClassVar[ActorName] = ActorName.GPU_EXECUTOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.store: HeldStore | None = None
        self._arena: Arena | None = None
        self._pool: WorkerPool | None = None
        self._thread: StepThread | None = None
        self._runtime: ModelRuntime | None = None  # on `store`; made at the first wiring after it came
        self._arrivals: Arrivals[Mailbox | None] = Arrivals("its shared memory")
        self._mailbox: Mailbox | None = None
        self._executor: StepExecutor | None = None
        self._doing = ""
        self._reporter = StepReporter(endpoint, self.name, self.metrics)
        endpoint.on(StoreShared, self._on_store_shared)
        endpoint.on(MailboxShared, self._on_mailbox_shared)
        endpoint.on(StepPlan, self._on_step_plan)
        endpoint.on_peer_lost(self._arrivals.peer_lost)

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
        self._doing = "starting PyTorch"
        # Between products PyTorch's threads must sleep: the native pool needs their cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        torch.set_num_threads(plan.device_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            self._pool = WorkerPool(
                plan.device_threads, plan.device_core_ids, plan.spin_us, self.spec.config.executor.isa
            )
        except ValueError as error:
            raise ConfigError(f"GpuExecutor cannot start its workers: {error}") from error
        self._doing = "allocating the arena"
        self._arena = Arena.of(self.spec)
        self._doing = ""
        logger.info("event=arena_allocated arena=%s bytes=%d", self._arena.arena_id, self._arena.size_bytes)

    def progress(self) -> tuple[int, int, str]:
        """What ``load`` or ``wire`` is doing; without numbers."""
        return (0, 0, self._doing)

    async def wire(self, wiring: Wiring) -> None:
        """Announce the arena, wait for the store (unless it is held already) and, with routed experts, for this epoch's
        mailbox; then build on them.

        Raises ``PeerLostError`` when the sender of one of them dies or it does not come within a minute,
        ``CheckpointError`` when store and checkpoint do not belong together.
        """
        if self._arena is None:
            raise FreeTokenError("GpuExecutor was wired before it was loaded")
        await self._end_epoch()
        expected = [ActorName.EXPERT_CACHE] if self.spec.model.is_moe else []
        if self.store is None:
            expected.append(ActorName.WEIGHT_STREAMER)
        self._arrivals.expect(*expected)
        await super().wire(wiring)
        plan = self.spec.plan
        for peer in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR):
            self.endpoint.send(peer, ArenaReady(self.epoch, self._arena.arena_id, plan.num_slots, plan.num_kv_blocks))
        self._mailbox = (await self._arrivals.wait(WIRE_TIMEOUT_S)).get(ActorName.EXPERT_CACHE)
        assert self.store is not None
        store, runtime = self.store, self._runtime
        if runtime is None:
            runtime = await asyncio.to_thread(self._build_runtime, store)
        if self.store is store:
            self._runtime = runtime
        self._executor = runtime.build_executor(self._mailbox)
        logger.info("event=device_wired epoch=%d arena=%s", self.epoch, self._arena.arena_id)

    def _build_runtime(self, store: HeldStore) -> ModelRuntime:
        from freetoken.execution.model_runtime import ModelRuntime

        assert self._arena is not None and self._pool is not None and self._thread is not None
        self._doing = "mapping the weights"
        index = FtwIndex.load(self.spec.checkpoint)
        runtime = ModelRuntime(self.spec, index, store, self._arena, self._pool)
        self._doing = "warming up"
        # On the thread that will run the steps: PyTorch keeps a team of threads for each caller.
        self._thread.call(runtime.warm_up)
        self._doing = ""
        return runtime

    async def pause(self, reason: str) -> None:
        """Abort the mailbox, drop queued plans, wait for the running step, forget all requests."""
        await super().pause(reason)
        await self._end_epoch()

    async def _end_epoch(self) -> None:
        self._arrivals.clear()
        self._reporter.stop()
        mailbox, self._mailbox = self._mailbox, None
        self._executor = None
        if mailbox is not None:
            mailbox.abort()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.drain, self.spec.config.scheduler.step_timeout_s)

    async def close(self) -> None:
        """Ends the step thread after the step it is running."""
        self._arrivals.clear()
        self._reporter.stop()
        if self._mailbox is not None:
            self._mailbox.abort()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.close, self.spec.config.scheduler.step_timeout_s)
        self._executor = self._runtime = self._mailbox = self._arena = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        store, self.store = self.store, None
        if store is not None:
            store.close()
        await super().close()

    # ------------------------------------------------------------------------------------------ shared memory

    async def share_store(self, to: ActorName) -> None:
        """Send the store's descriptors to ``to``. Raises ``FreeTokenError`` when none is held."""
        if self.store is None:
            raise FreeTokenError("GpuExecutor holds no store")
        self.store.share(self.endpoint, to, self.epoch)

    def _on_store_shared(self, message: StoreShared, fds: tuple[int, ...]) -> None:
        store = receive_store(self.store, message, fds)
        if store is not self.store:
            # An executor that still runs on the old one keeps it until the next wiring.
            if self.store is not None:
                self.store.close()
            self.store = store
            self._runtime = None
            logger.info("event=store_held epoch=%d bytes=%d", message.epoch, store.size_bytes)
        self._arrivals.deliver(ActorName.WEIGHT_STREAMER, None)

    def _on_mailbox_shared(self, message: MailboxShared, fds: tuple[int, ...]) -> None:
        try:
            mailbox = Mailbox.attach(SharedSegment.attach(fds[0], message.size_bytes, "freetoken-mailbox"))
        finally:
            close_fds(fds)
        self._arrivals.deliver(ActorName.EXPERT_CACHE, mailbox)

    # ------------------------------------------------------------------------------------------ steps

    def _on_step_plan(self, plan: StepPlan, fds: tuple[int, ...]) -> None:
        if plan.epoch != self.epoch or self._executor is None or self._thread is None:
            logger.info("event=plan_dropped step=%d epoch=%d own_epoch=%d", plan.step_id, plan.epoch, self.epoch)
            return
        self._thread.submit(self._executor, plan)
        self._reporter.notice(StepNotice(plan.step_id, plan.epoch, 0, 0))

    def _on_outcome(self, plan: StepPlan, outcome: StepResult | StepFailed) -> None:
        # On the step thread. The outcome of a step that a pause cut short is of no use to the next epoch.
        if plan.epoch != self.epoch:
            return
        try:
            self.endpoint.send(ActorName.SCHEDULER, outcome)
        except PeerLostError as error:
            logger.info("event=outcome_undeliverable step=%d detail=%r", plan.step_id, str(error))

    def metrics(self) -> dict[str, float]:
        """Steps, tokens, busy time and expert uses since start; arena geometry."""
        plan, executor, thread = self.spec.plan, self._executor, self._thread
        figures = thread.stats.metrics() if thread is not None else {}
        return {
            **figures,
            "requests": float(len(executor.requests) if executor is not None else 0),
            "queued_plans": float(thread.queued if thread is not None else 0),
            "arena_bytes": float(self._arena.size_bytes if self._arena is not None else 0),
            "slots": float(plan.num_slots),
            "kv_blocks": float(plan.num_kv_blocks),
            "device_threads": float(plan.device_threads),
        }
