"""GpuExecutor's part in moving memory between the arena's pools; what is true of the arena is decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from freetoken.elastic.arena_shape import ArenaSplit
from freetoken.errors import FreeTokenError, PeerLostError
from freetoken.execution.arena_pools import ArenaPools, Moves
from freetoken.messages import ActorName, ArenaPrepared, ArenaResized, PoolVacated, ResizeArena
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)


class ResizableArena(Protocol):
    """``Arena`` and ``CudaArena``."""

    @property
    def pools(self) -> ArenaPools | None: ...

    def change(self, slot_moves: Moves, block_moves: Moves) -> None: ...

    def settle(self) -> None: ...


class ResizableExecutor(Protocol):
    """What follows a change: block tables and limits of one epoch's executor. On the step thread, between steps."""

    def resized(self, num_slots: int, num_blocks: int, block_moves: Moves) -> None: ...


@dataclass
class _Change:
    resize_id: int
    epoch: int
    vacated: dict[str, PoolVacated] = field(default_factory=dict)


class ArenaResizer:
    """One change at a time: prepared while steps run, made on the step thread once both tables have said what moves.

    An epoch's end undoes a change that was not made.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        arena: ResizableArena,
        current: Callable[[], tuple[int, ResizableExecutor | None]],
        on_step_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        """``current``: the epoch and its executor. ``on_step_thread``: run there, blocking."""
        self._endpoint = endpoint
        self._arena = arena
        self._current = current
        self._on_step_thread = on_step_thread
        self._change: _Change | None = None
        self._memory = asyncio.Lock()  # over the pools, while they are changed
        self.resizes_total = 0
        self.failed_resizes_total = 0
        self.moved_bytes_total = 0
        self.last_ms = 0.0
        self.slowest_ms = 0.0
        endpoint.on(ResizeArena, self._on_resize)
        endpoint.on(PoolVacated, self._on_vacated)

    async def _on_resize(self, message: ResizeArena, fds: tuple[int, ...]) -> None:
        epoch, executor = self._current()
        pools = self._arena.pools
        if message.epoch != epoch or executor is None:
            return
        if pools is None:
            self._answer(message.resize_id, "the arena is not elastic (see elastic.enabled)")
            return
        if self._change is not None:
            self._answer(message.resize_id, "another change is under way")
            return
        change = self._change = _Change(message.resize_id, epoch)
        split = ArenaSplit(message.slot_granules, message.kv_granules)
        async with self._memory:
            try:
                num_slots, num_blocks = await asyncio.to_thread(pools.prepare, message.resize_id, split)
            except (FreeTokenError, ValueError) as error:
                self._fail(change, str(error))
                return
            if self._change is not change:  # the epoch ended meanwhile
                await asyncio.to_thread(pools.abort)
                return
        self._send(ActorName.SCHEDULER, ArenaPrepared(epoch, change.resize_id, num_slots, num_blocks))

    async def _on_vacated(self, message: PoolVacated, fds: tuple[int, ...]) -> None:
        change = self._change
        if change is None or message.resize_id != change.resize_id:
            return
        change.vacated[message.sender] = message
        if len(change.vacated) < 2:
            return
        async with self._memory:
            if self._change is change:
                await self._make(change)

    async def _make(self, change: _Change) -> None:
        pools, (epoch, executor) = self._arena.pools, self._current()
        assert pools is not None
        if executor is None or epoch != change.epoch:
            return
        refusals = [message.refusal for message in change.vacated.values() if message.refusal]
        if refusals:
            await asyncio.to_thread(pools.abort)
            self._fail(change, refusals[0])
            return
        slots, blocks = (
            list(zip(found.moved_from, found.moved_to, strict=True))
            for found in (change.vacated[ActorName.EXPERT_CACHE], change.vacated[ActorName.KV_ALLOCATOR])
        )
        started_s = time.monotonic()

        def make() -> None:
            self._arena.change(slots, blocks)
            executor.resized(pools.num_slots, pools.num_blocks, blocks)

        try:
            await asyncio.to_thread(self._on_step_thread, make)
        except asyncio.CancelledError:  # the queue of the step thread was dropped: the epoch has ended
            return
        except Exception as error:
            if pools.resize_id == change.resize_id:  # made, but the executor does not know: it must not go on
                raise
            logger.exception("event=resize_failed resize=%d", change.resize_id)
            await asyncio.to_thread(pools.abort)
            self._fail(change, f"{type(error).__name__}: {error}")
            return
        self._change = None
        self.resizes_total += 1
        moved = len(slots) * pools.shape.slot_stride_bytes + len(blocks) * pools.shape.block_bytes
        self.moved_bytes_total += moved
        self._answer(change.resize_id, "", moved)
        self.last_ms = (time.monotonic() - started_s) * 1e3
        self.slowest_ms = max(self.slowest_ms, self.last_ms)
        logger.info(
            "event=arena_resized resize=%d slots=%d kv_blocks=%d moved_bytes=%d ms=%.2f",
            change.resize_id, pools.num_slots, pools.num_blocks, moved, self.last_ms,
        )  # fmt: skip
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        assert self._arena.pools is not None
        self._arena.settle()
        self._arena.pools.release()

    async def end_epoch(self) -> None:
        """Undo a change that was not made. No step runs and none will."""
        self._change = None
        async with self._memory:
            if self._arena.pools is not None:
                await asyncio.to_thread(self._arena.pools.abort)

    def _fail(self, change: _Change, why: str) -> None:
        if self._change is change:
            self._change = None
        self.failed_resizes_total += 1
        logger.warning("event=resize_undone resize=%d why=%r", change.resize_id, why)
        self._answer(change.resize_id, why, to_tables=bool(change.vacated))

    def _answer(self, resize_id: int, failure: str, moved_bytes: int = 0, *, to_tables: bool | None = None) -> None:
        """To those who wait for the end of the change. Nobody but the Controller does while it is being prepared."""
        pools, (epoch, _) = self._arena.pools, self._current()
        num_slots, num_blocks = (pools.num_slots, pools.num_blocks) if pools is not None else (0, 0)
        message = ArenaResized(epoch, resize_id, num_slots, num_blocks, failure, moved_bytes)
        if to_tables if to_tables is not None else not failure:
            for peer in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR):
                self._send(peer, message)
        self._send(ActorName.CONTROLLER, message)

    def _send(self, to: ActorName, message: ArenaPrepared | ArenaResized) -> None:
        try:
            self._endpoint.send(to, message)
        except PeerLostError as error:  # ends the epoch, or is the Controller's own affair
            logger.info("event=undeliverable message=%s error=%r", type(message).__name__, str(error))

    def metrics(self) -> dict[str, float]:
        """By the naming rule of ``ActorStatus.metrics``."""
        pools = self._arena.pools
        return {
            "elastic": float(pools is not None),
            "resizes_total": float(self.resizes_total),
            "failed_resizes_total": float(self.failed_resizes_total),
            "resize_moved_bytes_total": float(self.moved_bytes_total),
            "resize_ms": self.last_ms,
            "resize_slowest_ms": self.slowest_ms,
            **(pools.figures() if pools is not None else {}),
        }
