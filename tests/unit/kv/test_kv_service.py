"""KVAllocatorService on an in-process endpoint: replies, and what survives a new epoch."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from freetoken.errors import PeerLostError
from freetoken.kv.service import KVAllocatorService
from freetoken.messages import (
    ActorName,
    ActorState,
    ArenaReady,
    ArenaResized,
    BlockCommit,
    BlockNeed,
    BlocksReserved,
    KVResized,
    PoolVacated,
    ReserveBlocks,
    VacatePool,
    Wiring,
)
from freetoken.testing.fake_executor import fake_launch_spec
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

PEERS = (ActorName.SCHEDULER, ActorName.GPU_EXECUTOR)


class Group:
    """The service with two played peers."""

    def __init__(self, hub, **spec):
        self.service = KVAllocatorService(fake_launch_spec(**spec), hub.endpoint(ActorName.KV_ALLOCATOR))
        self.peers = {name: hub.endpoint(name) for name in PEERS}
        self.replies = []
        self.peers[ActorName.SCHEDULER].on(BlocksReserved, lambda message, fds: self.replies.append(message))
        self.epoch = 0

    async def wire(self, arena_id, num_kv_blocks=64):
        self.epoch += 1
        everyone = {**self.peers, self.service.name: self.service.endpoint}
        wiring = Wiring(self.epoch, {name: endpoint.address for name, endpoint in everyone.items()})
        for endpoint in self.peers.values():
            await endpoint.connect(wiring)
        waiting = asyncio.ensure_future(self.service.wire(wiring))
        if arena_id is None:
            return waiting
        arena = ArenaReady(self.epoch, arena_id, 0, num_kv_blocks)
        self.peers[ActorName.GPU_EXECUTOR].send(ActorName.KV_ALLOCATOR, arena)
        await waiting
        await self.service.resume()
        return waiting

    async def reserve(self, **parts):
        count = len(self.replies)
        self.peers[ActorName.SCHEDULER].send(ActorName.KV_ALLOCATOR, ReserveBlocks(count, self.epoch, **parts))
        await until(lambda: len(self.replies) > count)
        self.service.allocator.check_integrity()
        return self.replies[-1]


@asynccontextmanager
async def group(**spec):
    hub = InProcessHub(encode=True)
    members = Group(hub, **spec)
    try:
        yield members
    finally:
        await members.service.close()
        await members.service.close()
        for endpoint in members.peers.values():
            await endpoint.close()


def need(request_id, length=8):
    return BlockNeed(request_id, 0, length, tuple(range(length)))


async def test_reservations_are_answered_in_order():
    async with group() as members:
        await members.wire("arena")
        assert members.service.status().state is ActorState.SERVING
        first = await members.reserve(needs=(need("a"),))
        assert (first.step_id, first.epoch, first.grants[0].request_id) == (0, 1, "a")
        second = await members.reserve(commits=(BlockCommit("a", 8),), releases=("a",), needs=(need("b", 9),))
        assert (second.step_id, second.grants[0].num_cached_tokens) == (1, 8)
        metrics = members.service.metrics()
        assert (metrics["hit_tokens_total"], metrics["query_tokens_total"]) == (8, 17)
        assert metrics["hit_ratio"] == pytest.approx(8 / 17)
        assert metrics["free_blocks"] + metrics["cached_blocks"] + metrics["held_blocks"] == metrics["blocks"] == 64
        assert metrics["reservations_total"] == 2 and metrics["messages_sent_total"] == 2


async def test_same_arena_keeps_the_prefixes_but_no_request():
    async with group() as members:
        await members.wire("arena")
        await members.reserve(needs=(need("a"), need("b", 5)))
        await members.reserve(commits=(BlockCommit("a", 8),))
        await members.wire("arena")
        metrics = members.service.metrics()
        assert (metrics["requests"], metrics["held_blocks"], metrics["cached_blocks"]) == (0, 0, 2)
        assert (await members.reserve(needs=(need("c", 9),))).grants[0].num_cached_tokens == 8


async def test_new_arena_empties_everything_and_may_have_another_size():
    async with group() as members:
        await members.wire("arena")
        await members.reserve(needs=(need("a"),))
        await members.reserve(commits=(BlockCommit("a", 8),))
        await members.wire("another", num_kv_blocks=32)
        metrics = members.service.metrics()
        assert (metrics["cached_blocks"], metrics["free_blocks"], metrics["blocks"]) == (0, 32, 32)
        assert (await members.reserve(needs=(need("c", 9),))).grants[0].num_cached_tokens == 0


async def test_prefix_cache_can_be_switched_off():
    async with group(prefix_cache=False) as members:
        await members.wire("arena")
        await members.reserve(needs=(need("a"),))
        reply = await members.reserve(commits=(BlockCommit("a", 8),), releases=("a",), needs=(need("b", 9),))
        assert reply.grants[0].num_cached_tokens == 0


async def test_wiring_fails_when_the_gpu_executor_dies_first():
    async with group() as members:
        waiting = await members.wire(None)
        await until(lambda: members.service.epoch == 1)
        await members.peers[ActorName.GPU_EXECUTOR].close()
        with pytest.raises(PeerLostError, match="GpuExecutor"):
            await waiting
        await members.peers[ActorName.SCHEDULER].close()  # nobody to answer: no exception escapes
        members.service._on_reserve_blocks(ReserveBlocks(0, 1), ())


async def test_a_change_that_is_told_late_does_not_undo_a_later_one():
    """GpuExecutor's word of one change and the Scheduler's question of the next come on two ways."""
    async with group() as members:
        await members.wire("arena")
        scheduler, device = (members.peers[name] for name in PEERS)
        vacated = []
        scheduler.on(PoolVacated, lambda message, fds: vacated.append(message))
        scheduler.on(KVResized, lambda message, fds: None)
        scheduler.send(ActorName.KV_ALLOCATOR, VacatePool(1, 2, 32))
        await until(lambda: len(vacated) == 1)
        device.send(ActorName.KV_ALLOCATOR, ArenaResized(1, 1, 0, 80))
        device.send(ActorName.KV_ALLOCATOR, ArenaResized(1, 2, 0, 32))
        assert (await members.reserve(needs=(need("a"),))).stats.total_blocks == 32
        device.send(ActorName.KV_ALLOCATOR, ArenaResized(1, 3, 0, 48))
        await until(lambda: members.service.allocator.stats().total_blocks == 48)
