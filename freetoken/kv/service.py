"""The KVAllocator actor: answers the Scheduler's reservations and keeps its tables true to the arena."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar

from freetoken.errors import PeerLostError
from freetoken.kv.allocator import KVAllocator
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ArenaReady,
    ArenaReplaced,
    ArenaResized,
    BlocksReserved,
    KVResized,
    PoolEmptied,
    PoolVacated,
    ReserveBlocks,
    VacatePool,
    Wiring,
)
from freetoken.service import Service
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)


class PeakHeld:
    """Most blocks held by requests within the last 15 to 30 seconds."""

    WINDOW_S = 15.0

    def __init__(self) -> None:
        self._since_s = 0.0
        self._now = self._before = 0

    def add(self, num_blocks: int, now_s: float) -> None:
        """So many are held now."""
        self._turn(now_s)
        self._now = max(self._now, num_blocks)

    def value(self, now_s: float) -> int:
        """The peak."""
        self._turn(now_s)
        return max(self._now, self._before)

    def _turn(self, now_s: float) -> None:
        if now_s - self._since_s >= self.WINDOW_S:
            self._before = self._now if now_s - self._since_s < 2 * self.WINDOW_S else 0
            self._now, self._since_s = 0, now_s


class KVAllocatorService(Service):
    """Owns the block table and the prefix tree; the KV bytes belong to GpuExecutor's arena.

    A new epoch starts without requests. The tree survives it as long as the arena does.
    """

    name: ClassVar[ActorName] = ActorName.KV_ALLOCATOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.allocator = self._new_allocator(spec.plan.num_kv_blocks)
        self._arena_id: str | None = None
        self._arena: asyncio.Future[ArenaReady] | None = None
        self._vacated_id = 0  # the last change for which blocks moved to other places
        self._peak = PeakHeld()
        self._reservations_total = 0
        self._exhausted_total = 0
        endpoint.on(ArenaReady, self._on_arena_ready)
        endpoint.on(ReserveBlocks, self._on_reserve_blocks)
        endpoint.on(VacatePool, self._on_vacate)
        endpoint.on(ArenaResized, self._on_resized)
        endpoint.on(ArenaReplaced, self._on_replaced)
        endpoint.on_peer_lost(self._on_peer_lost)

    async def wire(self, wiring: Wiring) -> None:
        """Waits for GpuExecutor's ``ArenaReady``. Raises ``PeerLostError`` when GpuExecutor dies before sending it."""
        self._arena = asyncio.get_running_loop().create_future()  # before connecting, which may deliver held messages
        try:
            await super().wire(wiring)
            arena = await self._arena
        finally:
            self._arena = None
        vacated_id, self._vacated_id = self._vacated_id, 0
        # Where the epoch ended before the device had copied them, the blocks are not where the tables say.
        is_true = arena.arena_id == self._arena_id and vacated_id <= arena.resize_id
        if not is_true or self.allocator.stats().total_blocks > arena.num_kv_blocks:
            self._empty(arena)
        else:
            self.allocator.release_all()
            self._grow(arena.num_kv_blocks)
            logger.info("event=kv_kept epoch=%d cached_blocks=%d", self.epoch, self.allocator.stats().cached_blocks)

    def metrics(self) -> dict[str, float]:
        """Blocks by state, prefix hits and evictions."""
        stats = self.allocator.stats()
        queried = stats.query_tokens_total
        return {
            "blocks": float(stats.total_blocks),
            "free_blocks": float(stats.free_blocks),
            "cached_blocks": float(stats.cached_blocks),
            "held_blocks": float(stats.total_blocks - stats.free_blocks - stats.cached_blocks),
            "peak_held_blocks": float(self._peak.value(time.monotonic())),
            "block_size_tokens": float(stats.block_size),
            "requests": float(self.allocator.num_requests),
            "evicted_blocks_total": float(stats.evicted_blocks_total),
            "hit_tokens_total": float(stats.hit_tokens_total),
            "query_tokens_total": float(queried),
            "hit_ratio": stats.hit_tokens_total / queried if queried else 0.0,
            "reservations_total": float(self._reservations_total),
            "exhausted_total": float(self._exhausted_total),
            **self.endpoint.counters(),
        }

    def _new_allocator(self, num_blocks: int) -> KVAllocator:
        return KVAllocator(num_blocks, self.spec.plan.kv_block_size, self.spec.config.kv.prefix_cache)

    def _on_arena_ready(self, message: ArenaReady, fds: tuple[int, ...]) -> None:
        if self._arena is not None and not self._arena.done():
            self._arena.set_result(message)

    def _on_peer_lost(self, peer: ActorName) -> None:
        if peer is ActorName.GPU_EXECUTOR and self._arena is not None and not self._arena.done():
            self._arena.set_exception(PeerLostError(str(peer), "it ended before its arena was ready"))

    def _on_vacate(self, message: VacatePool, fds: tuple[int, ...]) -> None:
        """From here on every message to the Scheduler has the new places. It passes the answer on among its plans."""
        plan = self.allocator.plan_resize(message.capacity)
        if isinstance(plan, str):
            refused = PoolVacated(self.epoch, message.resize_id, self.name.value, refusal=plan)
            self._send(ActorName.SCHEDULER, refused)
            return
        self.allocator.resize(plan)
        self._vacated_id = message.resize_id
        logger.info(
            "event=kv_vacated resize=%d blocks=%d moved=%d evicted=%d",
            message.resize_id, plan.num_blocks, len(plan.moved), plan.num_evicted,
        )  # fmt: skip
        vacated = PoolVacated(
            self.epoch,
            message.resize_id,
            self.name.value,
            tuple(plan.moved),
            tuple(plan.moved.values()),
            stats=self.allocator.stats(),
        )
        self._send(ActorName.SCHEDULER, vacated)

    def _on_resized(self, message: ArenaResized, fds: tuple[int, ...]) -> None:
        if message.resize_id < self._vacated_id:
            return  # it took longer than the question of a later change, which comes by way of the Scheduler
        if self._grow(message.num_kv_blocks):
            self._send(ActorName.SCHEDULER, KVResized(self.epoch, self.allocator.stats()))

    def _grow(self, num_blocks: int) -> bool:
        """To so many blocks, if there are fewer."""
        if num_blocks <= self.allocator.stats().total_blocks:
            return False
        plan = self.allocator.plan_resize(num_blocks)
        assert not isinstance(plan, str)  # only fewer blocks can be too few
        self.allocator.resize(plan)
        logger.info("event=kv_grown blocks=%d", num_blocks)
        return True

    def _on_replaced(self, message: ArenaReplaced, fds: tuple[int, ...]) -> None:
        self._empty(message)
        emptied = PoolEmptied(self.epoch, message.resize_id, self.name.value, self.allocator.stats())
        self._send(ActorName.SCHEDULER, emptied)

    def _empty(self, arena: ArenaReady | ArenaReplaced) -> None:
        """Nothing is left of what the arena held."""
        self.allocator = self._new_allocator(arena.num_kv_blocks)
        self._arena_id = arena.arena_id
        logger.info("event=kv_emptied epoch=%d blocks=%d", self.epoch, arena.num_kv_blocks)

    def _on_reserve_blocks(self, message: ReserveBlocks, fds: tuple[int, ...]) -> None:
        if message.epoch != self.epoch:
            return
        reply: BlocksReserved = self.allocator.apply(message)
        self._reservations_total += 1
        stats = reply.stats
        self._peak.add(stats.total_blocks - stats.free_blocks - stats.cached_blocks, time.monotonic())
        self._exhausted_total += len(reply.exhausted)
        self._send(ActorName.SCHEDULER, reply)

    def _send(self, to: ActorName, message: Any) -> None:
        try:
            self.endpoint.send(to, message)
        except PeerLostError:
            logger.info("event=undeliverable peer=%s message=%s", to, type(message).__name__)
