"""The GpuExecutor actor: owns the device's memory, runs the steps; only this service imports torch, in ``load``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from freetoken._native import Mailbox, SharedSegment, WorkerPool
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore, close_fds, receive_store
from freetoken.errors import ConfigError, FreeTokenError, PeerLostError
from freetoken.execution.arena import Arena
from freetoken.execution.division import Division, divide_anew
from freetoken.execution.pipelined_thread import PipelinedStepThread
from freetoken.execution.reallocation import ArenaReallocator
from freetoken.execution.resizing import ArenaResizer
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
    from freetoken.execution.cuda.arena import CudaArena
    from freetoken.execution.cuda.executor import CudaStepExecutor
    from freetoken.execution.cuda.runtime import CudaRuntime
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
        self._arena: Arena | CudaArena | None = None
        self._pool: WorkerPool | None = None
        self._thread: StepThread | None = None
        # On `store`; made at the first wiring after it came. One on an older store ends at the next wiring.
        self._runtime: ModelRuntime | CudaRuntime | None = None
        self._old_runtime: ModelRuntime | CudaRuntime | None = None
        self._arrivals: Arrivals[Mailbox | None] = Arrivals("its shared memory")
        self._mailbox: Mailbox | None = None
        self._executor: StepExecutor | CudaStepExecutor | None = None
        self._progress: tuple[int, int, str] = (0, 0, "")
        self._resizer: ArenaResizer | ArenaReallocator | None = None
        self._reporter = StepReporter(endpoint, self.name, self.metrics)
        endpoint.on(StoreShared, self._on_store_shared)
        endpoint.on(MailboxShared, self._on_mailbox_shared)
        endpoint.on(StepPlan, self._on_step_plan)
        endpoint.on_peer_lost(self._arrivals.peer_lost)

    # ------------------------------------------------------------------------------------------ life

    async def load(self) -> None:
        """Import torch, start the threads, allocate the arena. Raises ``ConfigError`` or ``CapacityError``."""
        self.state = ActorState.LOADING
        await asyncio.to_thread(self._load)
        kind = PipelinedStepThread if self._on_cuda else StepThread
        thread = self._thread = kind(self._on_outcome, self.spec.config.scheduler.decode_share)
        arena = self._arena
        assert arena is not None
        if arena.shape is not None and arena.pools is None:
            self._resizer = ArenaReallocator(
                self.endpoint,
                arena,
                arena.shape,
                lambda: self.epoch if self._executor is not None else None,
                self._replace_arena,
            )
        else:
            self._resizer = ArenaResizer(
                self.endpoint,
                arena,
                lambda: (self.epoch, self._executor),
                thread.post,
                self.spec.config.scheduler.step_timeout_s,
            )

    @property
    def _on_cuda(self) -> bool:
        return self.spec.config.device == "cuda"

    def _load(self) -> None:
        plan = self.spec.plan
        self._say("starting PyTorch")
        # Between products PyTorch's threads must sleep: the native pool needs their cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        torch.set_num_threads(plan.device_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        arena: Arena | CudaArena
        if self._on_cuda:
            from freetoken.execution.cuda.device import require_cuda

            device = require_cuda()
            from freetoken.execution.cuda.arena import CudaArena

            self._say("allocating the arena")
            arena = CudaArena.of(self.spec, device)
        else:
            try:
                self._pool = WorkerPool(
                    plan.device_threads, plan.device_core_ids, plan.spin_us, self.spec.config.executor.isa
                )
            except ValueError as error:
                raise ConfigError(f"GpuExecutor cannot start its workers: {error}") from error
            self._say("allocating the arena")
            arena = Arena.of(self.spec)
        self._arena = arena
        self._say("")
        logger.info("event=arena_allocated arena=%s bytes=%d", arena.arena_id, arena.size_bytes)

    def progress(self) -> tuple[int, int, str]:
        """What ``load`` or ``wire`` is doing; with numbers while graphs are captured."""
        return self._progress

    def _say(self, what: str) -> None:
        self._progress = (0, 0, what)

    def _note_progress(self, done: int, total: int, what: str) -> None:
        self._progress = (done, total, what)

    async def wire(self, wiring: Wiring) -> None:
        """Announce the arena, wait for the store (unless it is held already) and, with routed experts, for this epoch's
        mailbox; then build on them.

        Raises ``PeerLostError`` when the sender of one of them dies or it does not come within a minute,
        ``CheckpointError`` when store and checkpoint do not belong together.
        """
        if self._arena is None:
            raise FreeTokenError("GpuExecutor has no arena: it was not loaded, or could not allocate it again")
        await self._end_epoch()
        expected = [ActorName.EXPERT_CACHE] if self.spec.model.is_moe else []
        if self.store is None:
            expected.append(ActorName.WEIGHT_STREAMER)
        self._arrivals.expect(*expected)
        await super().wire(wiring)
        if not self._on_cuda:
            self._announce(None)
        self._mailbox = (await self._arrivals.wait(WIRE_TIMEOUT_S)).get(ActorName.EXPERT_CACHE)
        assert self.store is not None and self._thread is not None
        await self._close_old_runtime()
        store, runtime = self.store, self._runtime
        is_new = runtime is None
        if runtime is None:
            runtime = await asyncio.to_thread(self._build_runtime, store)
        try:
            if self._on_cuda:  # what can be fetched is known now
                self._announce(runtime.fetchable)
            if is_new:
                # On the thread that will run the steps: PyTorch keeps a team of threads for each caller.
                await asyncio.to_thread(self._thread.call, runtime.prepare)
                self._say("")
        except BaseException as error:
            if is_new:
                self._say("")
                # It has registered the store. A cancelled one may still be preparing on the step thread, which the next
                # wiring, or the end, waits for before it closes this.
                self._old_runtime = runtime
                if isinstance(error, Exception):
                    await self._close_failed_runtime()
            raise
        if self.store is store:
            self._runtime = runtime
        else:
            self._old_runtime = runtime
        self._executor = await asyncio.to_thread(runtime.build_executor, self._mailbox)
        logger.info("event=device_wired epoch=%d arena=%s", self.epoch, self._arena.arena_id)

    def _announce(self, fetchable: tuple[int, ...] | None) -> None:
        arena = self._arena
        assert arena is not None
        resize_id = arena.pools.resize_id if arena.pools is not None else 0
        ready = ArenaReady(self.epoch, arena.arena_id, arena.num_slots, arena.num_blocks, fetchable, resize_id)
        for peer in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.SCHEDULER):
            self.endpoint.send(peer, ready)

    def _build_runtime(self, store: HeldStore) -> ModelRuntime | CudaRuntime:
        assert self._arena is not None
        self._say("mapping the weights")
        index = FtwIndex.load(self.spec.checkpoint)
        if self._on_cuda:
            from freetoken.execution.cuda.arena import CudaArena
            from freetoken.execution.cuda.driver import CudaDriver
            from freetoken.execution.cuda.runtime import CudaRuntime

            assert isinstance(self._arena, CudaArena)
            return CudaRuntime(self.spec, index, store, self._arena, CudaDriver(), self._note_progress)
        from freetoken.execution.model_runtime import ModelRuntime

        assert isinstance(self._arena, Arena) and self._pool is not None
        runtime = ModelRuntime(self.spec, index, store, self._arena, self._pool)
        self._say("warming up")
        return runtime

    async def _close_old_runtime(self) -> None:
        old, self._old_runtime = self._old_runtime, None
        if old is not None:
            await asyncio.to_thread(old.close)

    async def _close_failed_runtime(self) -> None:
        try:
            await self._close_old_runtime()
        except Exception:  # the reason for which it failed is the one to report
            logger.exception("event=runtime_not_closed epoch=%d", self.epoch)

    async def _replace_arena(self, division: Division) -> str:
        """Another division for an arena that is ordinary memory, and an executor on what came of it: why it is the old
        division again, or "". No step is under way. Raises when there is no arena any more; nothing can be wired
        then."""
        arena, runtime, mailbox = self._arena, self._runtime, self._mailbox
        assert arena is not None and runtime is not None and self._thread is not None
        self._executor = None
        try:
            failure = await asyncio.to_thread(self._thread.call, partial(divide_anew, arena, runtime, division))
        except Exception:
            self._arena = None
            raise
        if self._mailbox is mailbox:
            executor: StepExecutor | CudaStepExecutor = await asyncio.to_thread(runtime.build_executor, mailbox)
            if self._mailbox is mailbox:  # else the epoch has ended
                self._executor = executor
        return failure

    async def pause(self, reason: str) -> None:
        """Abort the mailbox, drop queued plans, wait for the running step, forget all requests."""
        await super().pause(reason)
        await self._end_epoch()

    async def _end_epoch(self) -> None:
        self._arrivals.clear()
        self._reporter.stop()
        executor, self._executor = self._executor, None
        mailbox, self._mailbox = self._mailbox, None
        if executor is not None and not self._on_cuda:
            cast("StepExecutor", executor).abort()
        if mailbox is not None:
            mailbox.abort()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.drain, self.spec.config.scheduler.step_timeout_s)
        if self._resizer is not None:
            await self._resizer.end_epoch()

    async def close(self) -> None:
        """Ends the step thread after the step it is running."""
        self._arrivals.clear()
        self._reporter.stop()
        if self._executor is not None and not self._on_cuda:
            cast("StepExecutor", self._executor).abort()
        if self._mailbox is not None:
            self._mailbox.abort()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.close, self.spec.config.scheduler.step_timeout_s)
        await self._close_old_runtime()
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await asyncio.to_thread(runtime.close)
        if self._resizer is not None:
            await self._resizer.end_epoch()
        arena, self._arena = self._arena, None
        self._executor = self._mailbox = self._resizer = None
        if arena is not None:
            arena.close()
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
            if self._runtime is not None:
                self._old_runtime, self._runtime = self._runtime, None
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
        plan, executor, thread, arena = self.spec.plan, self._executor, self._thread, self._arena
        figures = {**thread.stats.metrics(), **thread.turns.metrics()} if thread is not None else {}
        return {
            **figures,
            "requests": float(len(executor.requests) if executor is not None else 0),
            "graphs_captured_total": float(self._runtime.graphs_captured if self._runtime is not None else 0),
            "queued_plans": float(thread.queued if thread is not None else 0),
            "arena_bytes": float(arena.size_bytes if arena is not None else 0),
            "slots": float(arena.num_slots if arena is not None else plan.num_slots),
            "kv_blocks": float(arena.num_blocks if arena is not None else plan.num_kv_blocks),
            **(self._resizer.metrics() if self._resizer is not None else {}),
            "device_threads": float(plan.device_threads),
        }
