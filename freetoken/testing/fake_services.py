"""A group of services that does nothing useful but passes every kind of message: for tests of supervision and of the
actor shell. The store is one memfd; ``reads.log`` in the checkpoint directory counts how often it was "read"."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, ClassVar

from freetoken.config import EngineConfig
from freetoken.engine.build import SERVICES, ServiceTable
from freetoken.errors import CheckpointError, PeerLostError
from freetoken.launch_spec import LaunchSpec, ResolvedPlan
from freetoken.messages import (
    ActorName,
    ActorState,
    ActorStatus,
    BlocksReserved,
    FinishReason,
    KVStats,
    ReserveBlocks,
    RowResult,
    SamplingParams,
    SegmentInfo,
    StepNotice,
    StepPlan,
    StepReport,
    StepResult,
    StoreShared,
    SubmitRequest,
    TokenBatch,
    TokenDelta,
    Wiring,
)
from freetoken.models.spec import ModelSpec, RopeSpec
from freetoken.service import Service
from freetoken.transport import Endpoint

STORE_BYTES = 1 << 16


def fake_spec(directory: Path, **settings: Any) -> LaunchSpec:
    """A spec for fake services, with ``directory`` as the checkpoint."""
    model = ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=16,
        hidden_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=RopeSpec(10000.0),
        dtype="f32",
        eos_token_ids=(2,),
    )
    plan = ResolvedPlan(16, 4, "f32", 64, 0, 4096, 0, 0, STORE_BYTES, 1, 1, (0,), (0,), 0, 16)
    config = EngineConfig(model=str(directory), **settings)
    return LaunchSpec(config, model, plan, str(directory), "0" * 16, "fake")


def count_reads(directory: Path) -> int:
    """How often a WeightStreamer read the store."""
    log = directory / "reads.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


class FakeService(Service):
    """Sends to peers that may be gone."""

    def metrics(self) -> dict[str, float]:
        return {**self.endpoint.counters()}

    def tell(self, to: ActorName, message: Any) -> None:
        """Send, or forget it when the peer is gone."""
        try:
            self.endpoint.send(to, message)
        except PeerLostError:
            pass


class StoreHolder(FakeService):
    """Has the store from ``StoreShared`` on; ``metrics`` tells which one."""

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.store = -1
        self.has_store = asyncio.Event()
        endpoint.on(StoreShared, self._on_store)

    def _on_store(self, message: StoreShared, fds: tuple[int, ...]) -> None:
        self._drop_store()
        self.store = fds[0]
        self.has_store.set()

    def _drop_store(self) -> None:
        if self.store >= 0:
            os.close(self.store)
            self.store = -1

    async def share_store(self, to: ActorName) -> None:
        """Send the store to ``to``."""
        if self.store < 0:
            raise CheckpointError(f"{self.name} has no store")
        segment = SegmentInfo("data-0", STORE_BYTES)
        message = StoreShared(self.epoch, self.spec.checkpoint, self.spec.fingerprint, (segment,))
        self.endpoint.send(to, message, [self.store])

    async def wire(self, wiring: Wiring) -> None:
        await super().wire(wiring)
        await self.has_store.wait()

    def metrics(self) -> dict[str, float]:
        inode = float(os.fstat(self.store).st_ino) if self.store >= 0 else 0.0
        return {**super().metrics(), "store_inode": inode, "store_bytes": float(STORE_BYTES if inode else 0)}

    async def close(self) -> None:
        self._drop_store()
        await super().close()


class FakeWeightStreamer(StoreHolder):
    """Makes the store, or waits for it."""

    name: ClassVar[ActorName] = ActorName.WEIGHT_STREAMER

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint, adopt: bool = False) -> None:
        super().__init__(spec, endpoint)
        self.adopt = adopt
        self._loaded = 0

    async def load(self) -> None:
        self.state = ActorState.LOADING
        if self.adopt:
            return
        with (Path(self.spec.checkpoint) / "reads.log").open("a") as log:
            log.write("read\n")
        if (Path(self.spec.checkpoint) / "corrupt").exists():
            raise CheckpointError("data-0: record 3 is corrupt")
        self.store = os.memfd_create("freetoken-fake-store")
        os.ftruncate(self.store, STORE_BYTES)
        self._loaded = STORE_BYTES
        self.has_store.set()

    def progress(self) -> tuple[int, int, str]:
        return (self._loaded, STORE_BYTES, "fake weights")

    async def wire(self, wiring: Wiring) -> None:
        await super().wire(wiring)
        for holder in (ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR, ActorName.CONTROLLER):
            await self.share_store(holder)


class FakeReporter(FakeService):
    """Answers step notices with a report to the Controller."""

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        endpoint.on(StepNotice, self._on_notice)

    def _on_notice(self, notice: StepNotice, fds: tuple[int, ...]) -> None:
        self.tell(
            ActorName.CONTROLLER,
            StepReport(str(self.name), notice.epoch, notice.step_id, {"steps_total": float(notice.step_id)}),
        )


class FakeExpertCache(FakeReporter):
    """Only reports."""

    name: ClassVar[ActorName] = ActorName.EXPERT_CACHE


class FakeCpuExecutor(FakeReporter, StoreHolder):
    """Reports, and holds the store."""

    name: ClassVar[ActorName] = ActorName.CPU_EXECUTOR


class FakeGpuExecutor(StoreHolder):
    """Every row samples token 7."""

    name: ClassVar[ActorName] = ActorName.GPU_EXECUTOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        endpoint.on(StepPlan, self._on_plan)

    def _on_plan(self, plan: StepPlan, fds: tuple[int, ...]) -> None:
        rows = tuple(RowResult(row, token_id=7) for row in plan.retired)
        self.tell(ActorName.SCHEDULER, StepResult(plan.step_id, plan.epoch, rows, 0, 1))


class FakeKVAllocator(FakeService):
    """Grants nothing, but answers."""

    name: ClassVar[ActorName] = ActorName.KV_ALLOCATOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        endpoint.on(ReserveBlocks, self._on_reserve)

    def _on_reserve(self, message: ReserveBlocks, fds: tuple[int, ...]) -> None:
        self.tell(ActorName.SCHEDULER, BlocksReserved(message.step_id, message.epoch, (), (), KVStats(4, 4, 0, 16)))


class FakeScheduler(FakeService):
    """Front -> here -> KVAllocator -> here -> GpuExecutor -> here -> front, with notices to the others."""

    name: ClassVar[ActorName] = ActorName.SCHEDULER

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self._step = 0
        self._waiting: dict[int, str] = {}
        endpoint.on(SubmitRequest, self._on_submit)
        endpoint.on(BlocksReserved, self._on_blocks)
        endpoint.on(StepResult, self._on_result)

    async def pause(self, reason: str) -> None:
        self._waiting.clear()
        await super().pause(reason)

    def _on_submit(self, request: SubmitRequest, fds: tuple[int, ...]) -> None:
        self._step += 1
        self._waiting[self._step] = request.request_id
        self.tell(ActorName.KV_ALLOCATOR, ReserveBlocks(self._step, self.epoch))

    def _on_blocks(self, reserved: BlocksReserved, fds: tuple[int, ...]) -> None:
        request = self._waiting.get(reserved.step_id)
        if request is not None:
            self.tell(ActorName.GPU_EXECUTOR, StepPlan(reserved.step_id, self.epoch, retired=(request,)))
            for peer in (ActorName.EXPERT_CACHE, ActorName.CPU_EXECUTOR):
                self.tell(peer, StepNotice(reserved.step_id, self.epoch, 1, 1))

    def _on_result(self, result: StepResult, fds: tuple[int, ...]) -> None:
        request = self._waiting.pop(result.step_id, None)
        if request is not None:
            delta = TokenDelta(request, (7,), finish_reason=FinishReason.LENGTH)
            self.tell(ActorName.API_FRONT, TokenBatch(result.step_id, self.epoch, (delta,)))


class FakeApiFront(FakeService):
    """Its own client: while serving, keeps one request going; ``answered_total`` counts answers over all epochs and
    ``answered_in_epoch`` those since the last resume."""

    name: ClassVar[ActorName] = ActorName.API_FRONT

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint, control: Any = None) -> None:
        super().__init__(spec, endpoint)
        self.control = control
        self._answered = 0
        self._answered_in_epoch = 0
        self._port = 0
        self._client: asyncio.Task[None] | None = None
        endpoint.on(TokenBatch, self._on_tokens)

    async def load(self) -> None:
        self._port = self.spec.config.server.port or 40000 + os.getpid() % 1000

    async def resume(self) -> None:
        await super().resume()
        self._answered_in_epoch = 0
        self._client = asyncio.ensure_future(self._ask_for_ever())

    async def _ask_for_ever(self) -> None:
        number = 0
        while True:
            number += 1
            self.tell(ActorName.SCHEDULER, SubmitRequest(f"r{number}", (1, 2, 3), SamplingParams()))
            await asyncio.sleep(0.03)

    async def pause(self, reason: str) -> None:
        await super().pause(reason)
        self._stop_client()

    def _stop_client(self) -> None:
        if self._client is not None:
            self._client.cancel()
            self._client = None

    def _on_tokens(self, batch: TokenBatch, fds: tuple[int, ...]) -> None:
        self._answered += len(batch.deltas)
        self._answered_in_epoch += len(batch.deltas)

    def metrics(self) -> dict[str, float]:
        return {
            **super().metrics(),
            "port": float(self._port),
            "answered_total": float(self._answered),
            "answered_in_epoch": float(self._answered_in_epoch),
        }

    def status(self) -> ActorStatus:
        base = super().status()
        return ActorStatus(
            base.name,
            base.state,
            base.pid,
            base.epoch,
            base.uptime_s,
            detail=f"http://127.0.0.1:{self._port}",
            metrics=base.metrics,
        )

    async def close(self) -> None:
        self._stop_client()
        await super().close()


FAKE_SERVICES: ServiceTable = {
    **SERVICES,
    **{
        cls.name: f"{__name__}:{cls.__name__}"
        for cls in (
            FakeScheduler,
            FakeKVAllocator,
            FakeExpertCache,
            FakeWeightStreamer,
            FakeCpuExecutor,
            FakeGpuExecutor,
            FakeApiFront,
        )
    },
}
