"""GpuExecutorService among the real WeightStreamer, ExpertCache and CpuExecutor on one event loop.

The test plays Scheduler, KVAllocator and Controller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from freetoken.checkpoint.convert import convert
from freetoken.checkpoint.streamer_service import WeightStreamerService
from freetoken.config import EngineConfig
from freetoken.elastic.machine import MachineInfo
from freetoken.engine.prepare import plan_launch
from freetoken.errors import CapacityError, CheckpointError, ConfigError, FreeTokenError, PeerLostError
from freetoken.execution import service as service_module
from freetoken.execution.service import GpuExecutorService
from freetoken.experts.cache_service import ExpertCacheService
from freetoken.experts.cpu_service import CpuExecutorService
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ArenaReady,
    ExpertCounters,
    RequestInit,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepReport,
    StepResult,
    StepRow,
    StoreShared,
    Wiring,
)
from freetoken.service import Service
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.testing.waiting import open_fds, until
from freetoken.transport.base import close_fds
from freetoken.transport.inprocess import InProcessEndpoint, InProcessHub

GREEDY = SamplingParams(temperature=0.0, seed=0)
PLAYED = (ActorName.SCHEDULER, ActorName.KV_ALLOCATOR, ActorName.CONTROLLER, ActorName.API_FRONT)
CLASSES: dict[ActorName, type[Service]] = {
    ActorName.WEIGHT_STREAMER: WeightStreamerService,
    ActorName.EXPERT_CACHE: ExpertCacheService,
    ActorName.CPU_EXECUTOR: CpuExecutorService,
    ActorName.GPU_EXECUTOR: GpuExecutorService,
}


def launch_spec(name: str, directory: Path, num_slots: int = 0, **settings: Any) -> LaunchSpec:
    """The tiny model converted, with a small KV cache and ``num_slots`` expert slots."""
    checkpoint = directory / name
    if not checkpoint.exists():
        convert(load_tiny_checkpoint(name).path, checkpoint)
    config = EngineConfig(
        model=str(checkpoint),
        **{"kv": {"num_tokens": 512, "block_size": 8}, "executor": {"wait_timeout_s": 5.0}, **settings},
    )
    spec = plan_launch(config, checkpoint, MachineInfo((0, 1), 8 << 30, 8 << 30))
    plan = dataclasses.replace(
        spec.plan,
        num_slots=num_slots,
        in_place=spec.model.is_moe and num_slots == 0,
        cpu_threads=1,
        device_threads=2,
        cpu_core_ids=(),
        device_core_ids=(),
        spin_us=0,
    )
    return dataclasses.replace(spec, plan=plan)


class Group:
    """The services of a launch and what they sent to the actors that the test plays."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self.hub = InProcessHub()
        self.endpoints: dict[ActorName, InProcessEndpoint] = {name: self.hub.endpoint(name) for name in ActorName}
        self.received: list[Any] = []
        self.fds: list[int] = []
        for name in PLAYED:
            for kind in (ArenaReady, StepResult, StepFailed, StepReport, StoreShared):
                self.endpoints[name].on(kind, self._record)
        self.services = {name: kind(spec, self.endpoints[name]) for name, kind in CLASSES.items()}
        self.epoch = 0
        self.step = 0

    def _record(self, message: Any, fds: tuple[int, ...]) -> None:
        self.received.append(message)
        self.fds += fds

    @property
    def device(self) -> GpuExecutorService:
        service = self.services[ActorName.GPU_EXECUTOR]
        assert isinstance(service, GpuExecutorService)
        return service

    async def load(self) -> None:
        await asyncio.gather(*(service.load() for service in self.services.values()))

    async def wire(self) -> None:
        self.epoch += 1
        wiring = Wiring(self.epoch, {name: endpoint.address for name, endpoint in self.endpoints.items()})
        await asyncio.gather(*(self.endpoints[name].connect(wiring) for name in PLAYED))
        await asyncio.gather(*(service.wire(wiring) for service in self.services.values()))
        await asyncio.gather(*(service.resume() for service in self.services.values()))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def send(self, *rows: StepRow, retired: tuple[str, ...] = ()) -> int:
        self.step += 1
        plan = StepPlan(self.step, self.epoch, rows, retired)
        self.endpoints[ActorName.SCHEDULER].send(ActorName.GPU_EXECUTOR, plan)
        return self.step

    async def outcome(self, step: int) -> StepResult | StepFailed:
        def find() -> list[Any]:
            return [m for m in self.received if isinstance(m, (StepResult, StepFailed)) and m.step_id == step]

        await until(lambda: bool(find()))
        found: StepResult | StepFailed = find()[0]
        return found

    async def generate(self, prompt: list[int], count: int, request_id: str) -> tuple[list[int], list[ExpertCounters]]:
        """Greedy tokens, two plans outstanding; the last plan retires nothing."""
        room = tuple(range(-(-(len(prompt) + count) // 8)))
        init = RequestInit(GREEDY, tuple(prompt), len(prompt))
        steps = [self.send(StepRow(request_id, 0, len(prompt), True, new_block_ids=room, init=init))]
        tokens, counters = [], []
        for i in range(count):
            if i + 1 < count:
                steps.append(self.send(StepRow(request_id, len(prompt) + i, 1, True, use_last_sampled=True)))
            result = await self.outcome(steps[i])
            assert isinstance(result, StepResult), result
            assert result.rows[0].token_id is not None, result
            tokens.append(result.rows[0].token_id)
            counters.append(result.experts)
        return tokens, counters

    async def close(self) -> None:
        for service in self.services.values():
            await service.close()
        for name in PLAYED:
            await self.endpoints[name].close()
        close_fds(self.fds)


@asynccontextmanager
async def running(spec: LaunchSpec) -> AsyncIterator[Group]:
    group = Group(spec)
    try:
        await group.load()
        await group.wire()
        yield group
    finally:
        await group.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ftw")


PROMPT = [5 + (i * 37) % 500 for i in range(19)]


async def test_a_routed_model_with_slots_generates_what_the_oracle_does(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    async with running(launch_spec("qwen3_moe", directory, num_slots=20)) as group:
        tokens, counters = await group.generate(PROMPT, 8, "a")
        assert tokens == tiny.oracle_greedy(PROMPT, 8)
        assert any(step.hits and step.fetches and step.cpu for step in counters)
        await until(lambda: any(report.metrics["steps_total"] == 8 for report in group.of(StepReport)))
        assert {report.sender for report in group.of(StepReport)} == {"GpuExecutor"}
        total = sum(counters, ExpertCounters())
        device = group.device.metrics()
        assert device["steps_total"] == 8 and device["tokens_total"] == len(PROMPT) + 7
        assert device["sampled_tokens_total"] == 8 and device["failed_steps_total"] == 0
        assert device["expert_hits_total"] == total.hits and device["expert_cpu_total"] == total.cpu
        assert device["busy_seconds_total"] > 0 and device["requests"] == 1


async def test_a_dense_model_needs_no_mailbox(directory: Path) -> None:
    tiny = load_tiny_checkpoint("llama")
    async with running(launch_spec("llama", directory)) as group:
        tokens, counters = await group.generate(PROMPT, 5, "a")
        assert tokens == tiny.oracle_greedy(PROMPT, 5)
        assert sum(counters, ExpertCounters()) == ExpertCounters()


async def test_bfloat16_in_place_and_deterministic(directory: Path) -> None:
    spec = launch_spec("mixtral", directory, deterministic=True, kv={"num_tokens": 64, "dtype": "bf16"})
    async with running(spec) as group:
        first, counters = await group.generate(PROMPT, 6, "a")
        assert all(step.hits and not step.fetches and not step.cpu for step in counters)
        group.send(retired=("a",))
        assert (await group.generate(PROMPT, 6, "a"))[0] == first


async def test_a_pause_ends_everything_and_the_next_epoch_works(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    async with running(launch_spec("qwen3_moe", directory, num_slots=20)) as group:
        before = open_fds()
        expected, _ = await group.generate(PROMPT, 3, "a")
        for _ in range(3):
            for i in range(20):
                init = RequestInit(GREEDY, tuple(PROMPT), len(PROMPT))
                group.send(StepRow(f"r{i}", 0, len(PROMPT), True, new_block_ids=(10, 11, 12), init=init))
            await until(lambda: group.device.metrics()["requests"] > 0)
            await asyncio.gather(*(service.pause("test") for service in group.services.values()))
            figures = group.device.metrics()
            assert figures["queued_plans"] == 0 and figures["requests"] == 0
            dropped = group.send(StepRow("late", 0, 1, True))
            await group.wire()
            again, _ = await group.generate(PROMPT, 3, "a")
            assert again == expected == tiny.oracle_greedy(PROMPT, 3)
            answered = {m.step_id for m in group.received if isinstance(m, (StepResult, StepFailed))}
            assert dropped not in answered
        arenas = group.of(ArenaReady)
        assert sorted({arena.epoch for arena in arenas}) == [1, 2, 3, 4]
        assert len({arena.arena_id for arena in arenas}) == 1
        assert (arenas[0].num_slots, arenas[0].num_kv_blocks) == (20, 64)
        close_fds(group.fds)
        group.fds.clear()
        assert len(open_fds()) <= len(before)


async def test_an_expert_cache_that_falls_silent_is_named(directory: Path) -> None:
    spec = launch_spec("qwen3_moe", directory, num_slots=20, executor={"wait_timeout_s": 0.2})
    async with running(spec) as group:
        cache = group.services[ActorName.EXPERT_CACHE]
        assert isinstance(cache, ExpertCacheService) and cache._server is not None
        cache._server.stop()
        init = RequestInit(GREEDY, tuple(PROMPT), len(PROMPT))
        failed = await group.outcome(group.send(StepRow("a", 0, 19, True, new_block_ids=(0, 1, 2), init=init)))
        assert isinstance(failed, StepFailed)
        assert failed.suspects == ("ExpertCache",) and "ExpertCache" in failed.message
        later = await group.outcome(group.send(StepRow("a", 19, 1, True, use_last_sampled=True)))
        assert isinstance(later, StepResult) and later.rows[0].failure is not None
        await asyncio.gather(*(service.pause("test") for service in group.services.values()))
        await group.wire()
        tokens, _ = await group.generate(PROMPT, 2, "a")
        assert tokens == load_tiny_checkpoint("qwen3_moe").oracle_greedy(PROMPT, 2)


async def test_a_wrong_plan_is_answered(directory: Path) -> None:
    async with running(launch_spec("llama", directory)) as group:
        failed = await group.outcome(group.send(StepRow("nobody", 0, 1, True)))
        assert isinstance(failed, StepFailed) and "nobody" in failed.message and failed.suspects == ()
        assert (await group.generate(PROMPT, 2, "a"))[0]


async def test_plans_of_another_epoch_are_dropped(directory: Path) -> None:
    async with running(launch_spec("llama", directory)) as group:
        init = RequestInit(GREEDY, (5,), 1)
        stale = StepPlan(900, 77, (StepRow("a", 0, 1, True, new_block_ids=(0,), init=init),))
        group.endpoints[ActorName.SCHEDULER].send(ActorName.GPU_EXECUTOR, stale)
        assert (await group.generate(PROMPT, 2, "b"))[0]
        assert 900 not in {m.step_id for m in group.received if isinstance(m, (StepResult, StepFailed))}


async def test_the_store_is_shared_and_kept_over_a_second_loading(directory: Path) -> None:
    async with running(launch_spec("llama", directory)) as group:
        store = group.device.store
        assert store is not None
        await group.device.share_store(ActorName.CONTROLLER)
        await until(lambda: len(group.of(StoreShared)) == 2)  # one came from WeightStreamer
        first, second = group.of(StoreShared)
        assert first == second and len(group.fds) == 2 * len(first.segments)
        assert store.is_same(first, group.fds[: len(first.segments)])
        await group.wire()
        assert group.device.store is store


async def test_wiring_fails_when_a_peer_dies(directory: Path) -> None:
    group = Group(launch_spec("qwen3_moe", directory, num_slots=20))
    try:
        await group.device.load()
        wiring = Wiring(1, {name: endpoint.address for name, endpoint in group.endpoints.items()})
        waiting = asyncio.ensure_future(group.device.wire(wiring))
        await until(lambda: group.endpoints[ActorName.GPU_EXECUTOR].epoch == 1)
        await group.endpoints[ActorName.WEIGHT_STREAMER].close()
        with pytest.raises(PeerLostError, match="WeightStreamer"):
            await waiting
    finally:
        await group.close()


async def test_wiring_fails_when_nothing_comes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "WIRE_TIMEOUT_S", 0.05)
    group = Group(launch_spec("qwen3_moe", directory, num_slots=20))
    try:
        await group.device.load()
        with pytest.raises(PeerLostError, match=r"0\.05 s"):
            await group.device.wire(Wiring(1, {name: endpoint.address for name, endpoint in group.endpoints.items()}))
    finally:
        await group.close()


class Unprepared:
    """A runtime that fails when it prepares."""

    fetchable = None

    def __init__(self, closing_fails: bool) -> None:
        self.closed = 0
        self._closing_fails = closing_fails

    def prepare(self) -> None:
        raise CapacityError("device memory is short")

    def close(self) -> None:
        self.closed += 1
        if self._closing_fails:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize("closing_fails", [False, True])
async def test_a_runtime_that_cannot_prepare_is_closed_and_the_next_wiring_builds_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch, closing_fails: bool
) -> None:
    group = Group(launch_spec("llama", directory))
    runtime = Unprepared(closing_fails)
    try:
        await group.load()
        monkeypatch.setattr(group.device, "_build_runtime", lambda store: runtime)
        with pytest.raises(CapacityError, match="short"):
            await group.wire()
        assert runtime.closed == 1 and group.device.progress() == (0, 0, "")
        monkeypatch.undo()
        await group.wire()
        tokens, _ = await group.generate(PROMPT, 2, "a")
        assert tokens == load_tiny_checkpoint("llama").oracle_greedy(PROMPT, 2) and runtime.closed == 1
    finally:
        await group.close()


async def test_a_wiring_that_is_cancelled_leaves_the_runtime_to_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(launch_spec("llama", directory))
    runtime, entered, gate = Unprepared(False), threading.Event(), threading.Event()

    def prepare() -> None:
        entered.set()
        assert gate.wait(20.0)
        assert runtime.closed == 0

    runtime.prepare = prepare  # type: ignore[method-assign]
    try:
        await group.load()
        monkeypatch.setattr(group.device, "_build_runtime", lambda store: runtime)
        wiring = asyncio.ensure_future(group.wire())
        await until(entered.is_set)
        wiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wiring
        assert runtime.closed == 0
        gate.set()
    finally:
        gate.set()
        await group.close()
    assert runtime.closed == 1


async def test_a_store_of_another_checkpoint_is_refused(directory: Path) -> None:
    group = Group(launch_spec("llama", directory))
    other = launch_spec("qwen3", directory)
    streamer = WeightStreamerService(other, group.endpoints[ActorName.WEIGHT_STREAMER])
    group.services[ActorName.WEIGHT_STREAMER] = streamer
    try:
        await group.load()
        with pytest.raises(CheckpointError):
            await group.wire()
    finally:
        await group.close()


async def test_what_cannot_work_is_refused_early(directory: Path) -> None:
    spec = launch_spec("llama", directory)
    hub = InProcessHub()

    def service(change: Callable[[EngineConfig], EngineConfig]) -> GpuExecutorService:
        changed = dataclasses.replace(spec, config=change(spec.config))
        return GpuExecutorService(changed, hub.endpoint(ActorName.GPU_EXECUTOR))

    cuda = service(lambda config: config.model_copy(update={"device": "cuda"}))
    with pytest.raises(ConfigError, match=r"device=cuda needs a PyTorch built for CUDA|no usable GPU"):
        await cuda.load()
    with pytest.raises(FreeTokenError, match="has no arena"):
        await cuda.wire(Wiring(1, {}))
    with pytest.raises(FreeTokenError, match="holds no store"):
        await cuda.share_store(ActorName.CONTROLLER)
    await cuda.close()
    await cuda.close()


def test_importing_the_service_does_not_import_torch() -> None:
    code = "import sys, freetoken.execution.service; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
