"""ArenaResizer between played peers: which messages a change takes, what undoes it, and that another can follow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit
from freetoken.execution.arena import Arena
from freetoken.execution.batch_state import BatchState
from freetoken.execution.granules import HostGranules
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.resizing import ArenaResizer
from freetoken.execution.step_thread import StepThread
from freetoken.messages import (
    ActorName,
    ActorsSuspected,
    ArenaResized,
    PlacesLeft,
    PoolVacated,
    RecordsMoved,
    RequestInit,
    ResizeArena,
    SamplingParams,
    ShrinkKV,
    StepPlan,
    StepRow,
    VacatePool,
    Wiring,
)
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

LIMIT_S = 20.0
SHAPE = ArenaShape(4096, 12, 5000, 3000, 16, max_slots=9, min_slots=1, min_blocks=1)
BEFORE, MORE_KV, LESS_KV = (ArenaSplit(12 - kv, kv) for kv in (4, 8, 2))
CACHE, KV, SCHEDULER, CONTROLLER = (
    ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.SCHEDULER, ActorName.CONTROLLER,
)  # fmt: skip


class Executor:
    """Notes what it follows."""

    def __init__(self) -> None:
        self.requests = BatchState(10, 16, 5, 100)
        self.sizes: list[tuple[int, int]] = []

    def resized(self, num_slots: int, num_blocks: int, block_moves: Any) -> None:
        self.requests.resized(num_blocks, block_moves)
        self.sizes.append((num_slots, num_blocks))


class Rig:
    """A resizer on a real arena and step thread. Peers note what they get; a test answers for them."""

    def __init__(self, timeout_s: float) -> None:
        hub = InProcessHub(encode=True)
        kv = KVGeometry(num_blocks=5, num_layers=1, block_size=1, num_kv_heads=1, head_dim=375, dtype="f32")
        self.arena = Arena(kv, 99, SHAPE.slot_stride_bytes, (SHAPE, BEFORE), HostGranules(12 * 4096))
        self.executor = Executor()
        self.thread = StepThread(lambda plan, outcome: None)
        self.endpoint = hub.endpoint(ActorName.GPU_EXECUTOR)
        self.resizer = ArenaResizer(self.endpoint, self.arena, lambda: (1, self.executor), self.thread.post, timeout_s)
        self.peers = {name: hub.endpoint(name) for name in (CACHE, KV, SCHEDULER, CONTROLLER)}
        self.received: dict[ActorName, list[Any]] = {name: [] for name in self.peers}
        for name, peer in self.peers.items():
            for kind in (VacatePool, RecordsMoved, ArenaResized, ShrinkKV, ActorsSuspected):
                peer.on(kind, lambda message, fds, name=name: self.received[name].append(message))

    async def start(self) -> None:
        everyone = [self.endpoint, *self.peers.values()]
        wiring = Wiring(1, {endpoint.name: endpoint.address for endpoint in everyone})
        for endpoint in everyone:
            await endpoint.connect(wiring)

    async def stop(self) -> None:
        self.thread.close(LIMIT_S)
        for endpoint in (self.endpoint, *self.peers.values()):
            await endpoint.close()
        self.arena.close()

    def send(self, sender: ActorName, message: Any) -> None:
        self.peers[sender].send(ActorName.GPU_EXECUTOR, message)

    def wish(self, resize_id: int, split: ArenaSplit) -> None:
        self.send(CONTROLLER, ResizeArena(1, resize_id, split.slot_granules, split.kv_granules))

    async def wait_for(self, receiver: ActorName, kind: type, resize_id: int | None = None) -> Any:
        """The newest such message, once there is one (of the change)."""

        def found() -> list[Any]:
            messages = [message for message in self.received[receiver] if isinstance(message, kind)]
            return [m for m in messages if resize_id is None or m.resize_id == resize_id]

        await until(lambda: bool(found()), LIMIT_S)
        return found()[-1]

    async def grow_kv(self, resize_id: int) -> ArenaResized:
        """A change to more KV, with all answers."""
        self.wish(resize_id, MORE_KV)
        await self.wait_for(CACHE, VacatePool, resize_id)
        self.send(CACHE, PoolVacated(1, resize_id, CACHE.value, (5, 4), (0, 2)))
        moved = await self.wait_for(CACHE, RecordsMoved, resize_id)
        if moved.made:
            self.send(CACHE, PlacesLeft(1, resize_id))
        outcome: ArenaResized = await self.wait_for(CONTROLLER, ArenaResized, resize_id)
        return outcome

    async def shrink_kv(self, resize_id: int, moves: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())) -> None:
        """A change to less KV, as far as the Scheduler's answer."""
        self.wish(resize_id, LESS_KV)
        await self.wait_for(SCHEDULER, ShrinkKV, resize_id)
        self.send(SCHEDULER, PoolVacated(1, resize_id, KV.value, *moves))


@asynccontextmanager
async def running(timeout_s: float = LIMIT_S) -> AsyncIterator[Rig]:
    rig = Rig(timeout_s)
    try:
        await rig.start()
        yield rig
    finally:
        await rig.stop()


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise error

    return fail


ERRORS = [RuntimeError("no luck"), IndexError("no luck"), MemoryError("no luck")]


def test_a_request_that_has_ended_may_name_blocks_that_are_long_gone() -> None:
    state = BatchState(10, 16, 100, 1000)
    ended, goes_on = (
        StepRow(name, 0, 4, False, new_block_ids=blocks, init=RequestInit(SamplingParams(), (1,) * 5, 5))
        for name, blocks in (("ended", (90, 2)), ("goes on", (3, 40)))
    )
    state.apply(StepPlan(1, 1, (ended, goes_on)))
    assert state.resized(50, []) == []
    assert state.resized(30, [(40, 4)]) == [state["goes on"]]
    assert state["goes on"].blocks.tolist() == [3, 4]


async def test_both_ways() -> None:
    async with running() as rig:
        outcome = await rig.grow_kv(1)
        assert (outcome.failure, outcome.num_slots, outcome.num_kv_blocks, outcome.moved_bytes) == ("", 3, 10, 10000)
        assert (await rig.wait_for(KV, ArenaResized)).num_kv_blocks == 10
        await rig.shrink_kv(2, ((9, 8), (0, 1)))
        outcome = await rig.wait_for(CONTROLLER, ArenaResized, 2)
        assert (outcome.failure, outcome.num_slots, outcome.num_kv_blocks, outcome.moved_bytes) == ("", 8, 2, 6000)
        assert rig.executor.sizes == [(3, 10), (8, 2)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_whatever_keeps_slots_from_moving_undoes_the_change(error: Exception) -> None:
    async with running() as rig:
        move, rig.arena.move = rig.arena.move, failing(error)  # type: ignore[method-assign]
        outcome = await rig.grow_kv(1)
        assert "no luck" in outcome.failure and (outcome.num_slots, outcome.num_kv_blocks) == (6, 5)
        assert not (await rig.wait_for(CACHE, RecordsMoved)).made
        rig.arena.move = move  # type: ignore[method-assign]
        assert not (await rig.grow_kv(2)).failure


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("part", ["move", "commit", "mark", "wait"])
async def test_whatever_goes_wrong_once_blocks_have_new_names_replaces_the_executor(
    part: str, error: Exception
) -> None:
    async with running() as rig:
        fail = failing(error)
        setattr(rig.arena, "mark" if part == "wait" else part, (lambda: fail) if part == "wait" else fail)
        await rig.shrink_kv(1)
        suspicion = await rig.wait_for(CONTROLLER, ActorsSuspected)
        assert suspicion.suspects == (ActorName.GPU_EXECUTOR.value,) and "no luck" in suspicion.detail
        assert not any(isinstance(message, ArenaResized) for message in rig.received[KV])
        if part != "wait":
            with pytest.raises(RuntimeError, match=r"GpuExecutor cannot go on: .*no luck"):
                rig.executor.requests.apply(StepPlan(1, 1, ()))
        await rig.resizer.end_epoch()


async def end_epoch(rig: Rig) -> None:
    """As the service does: nothing runs any more, then the change is given up."""
    await asyncio.to_thread(rig.thread.drain, LIMIT_S)
    await asyncio.wait_for(rig.resizer.end_epoch(), LIMIT_S)


@pytest.mark.parametrize("unanswered", [VacatePool, RecordsMoved])
async def test_an_epoch_that_ends_before_slots_are_left_undoes_the_change(unanswered: type) -> None:
    async with running() as rig:
        rig.wish(1, MORE_KV)
        await rig.wait_for(CACHE, VacatePool)
        vacated = PoolVacated(1, 1, CACHE.value, (5, 4), (0, 2))
        if unanswered is RecordsMoved:
            rig.send(CACHE, vacated)
            assert (await rig.wait_for(CACHE, RecordsMoved)).made
        await end_epoch(rig)
        rig.send(CACHE, vacated if unanswered is VacatePool else PlacesLeft(1, 1))  # too late
        assert (rig.arena.num_slots, rig.arena.num_blocks, rig.executor.sizes) == (6, 5, [])
        assert not (await rig.grow_kv(2)).failure
        assert [m.resize_id for m in rig.received[CONTROLLER]] == [2]


async def test_blocks_that_are_dropped_with_the_queue_are_where_they_were() -> None:
    async with running() as rig:
        gate = threading.Event()
        try:
            rig.thread.post(lambda: gate.wait(LIMIT_S))
            await rig.shrink_kv(1)
            await until(lambda: rig.thread.queued == 1)
            draining = asyncio.ensure_future(asyncio.to_thread(rig.thread.drain, LIMIT_S))
            await until(lambda: rig.thread.queued == 0)
        finally:
            gate.set()
        await draining
        await asyncio.wait_for(rig.resizer.end_epoch(), LIMIT_S)
        assert (rig.arena.num_slots, rig.arena.num_blocks) == (6, 5)
        assert rig.arena.pools is not None and rig.arena.pools.resize_id == 0
        assert not (await rig.grow_kv(2)).failure


async def test_blocks_that_were_copied_are_at_their_new_places_in_the_next_epoch() -> None:
    """Also where the answer comes between the last step and the end of the epoch."""
    async with running() as rig:
        done = threading.Event()
        rig.arena.mark = lambda: lambda: done.wait(LIMIT_S) and None  # type: ignore[method-assign]
        rig.wish(1, LESS_KV)
        await rig.wait_for(SCHEDULER, ShrinkKV)
        await asyncio.to_thread(rig.thread.drain, LIMIT_S)
        rig.send(SCHEDULER, PoolVacated(1, 1, KV.value))
        await until(lambda: bool(rig.executor.sizes))
        ending = asyncio.ensure_future(rig.resizer.end_epoch())
        await asyncio.sleep(0)
        assert not ending.done()  # the device may still copy
        done.set()
        await asyncio.wait_for(ending, LIMIT_S)
        assert rig.arena.pools is not None and rig.arena.pools.resize_id == 1
        assert (rig.arena.num_slots, rig.arena.num_blocks, rig.received[KV]) == (8, 2, [])


async def test_a_cache_that_does_not_answer_is_suspected_and_may_answer_late() -> None:
    async with running(timeout_s=0.01) as rig:
        rig.wish(1, MORE_KV)
        suspicion = await rig.wait_for(CONTROLLER, ActorsSuspected)
        assert suspicion.suspects == (CACHE.value,)
        rig.wish(2, MORE_KV)
        assert "another change" in (await rig.wait_for(CONTROLLER, ArenaResized, 2)).failure
        rig.send(CACHE, PoolVacated(1, 7, CACHE.value))  # of no change that is known
        rig.send(CACHE, PoolVacated(1, 1, CACHE.value))
        await rig.wait_for(CACHE, RecordsMoved)
        rig.send(CACHE, PlacesLeft(1, 1))
        assert not (await rig.wait_for(CONTROLLER, ArenaResized, 1)).failure
