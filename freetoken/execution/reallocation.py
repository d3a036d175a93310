"""GpuExecutor's part in dividing anew an arena that is ordinary memory; see ``messages/reallocation.py``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit
from freetoken.errors import PeerLostError
from freetoken.execution.division import Division
from freetoken.messages import (
    ActorName,
    ActorsSuspected,
    ArenaReplaced,
    ArenaResized,
    ArenaVacated,
    ResizeArena,
    VacateArena,
)
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)


class ReplaceableArena(Protocol):
    """``Arena`` and ``CudaArena`` without pools, as far as messages tell of them."""

    arena_id: str

    @property
    def division(self) -> Division: ...


@dataclass(frozen=True, slots=True)
class _Change:
    resize_id: int
    epoch: int
    division: Division


class ArenaReallocator:
    """One change at a time: all requests give up their KV, then the arena is allocated anew on the step thread.

    Until Scheduler has answered nothing has changed, and an epoch's end drops the change. After that it is made, and
    the next epoch begins with what came of it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        arena: ReplaceableArena,
        shape: ArenaShape,
        serving_epoch: Callable[[], int | None],
        replace: Callable[[Division], Awaitable[str]],
    ) -> None:
        """``serving_epoch``: None while no step could run. ``replace``: ``divide_anew`` between two executors."""
        self._endpoint = endpoint
        self._arena = arena
        self._shape = shape
        self._serving_epoch = serving_epoch
        self._replace = replace
        self._change: _Change | None = None
        self._replacing = asyncio.Lock()
        self.resizes_total = 0
        self.failed_resizes_total = 0
        self.last_ms = 0.0
        self.slowest_ms = 0.0
        endpoint.on(ResizeArena, self._on_resize)
        endpoint.on(ArenaVacated, self._on_vacated)

    def _on_resize(self, message: ResizeArena, fds: tuple[int, ...]) -> None:
        epoch = self._serving_epoch()
        if message.epoch != epoch:
            return
        if self._change is not None:
            self._answer(message.resize_id, message.epoch, "another change is under way")
            return
        division = Division.of(self._shape, ArenaSplit(message.slot_granules, message.kv_granules))
        self._change = _Change(message.resize_id, message.epoch, division)
        self._send(ActorName.SCHEDULER, VacateArena(message.epoch, message.resize_id, division.num_blocks))

    async def _on_vacated(self, message: ArenaVacated, fds: tuple[int, ...]) -> None:
        change = self._change
        if change is None or message.resize_id != change.resize_id:
            return
        if message.refusal:
            self._change = None
            self._answer(change.resize_id, change.epoch, message.refusal)
            return
        async with self._replacing:
            await self._make(change)

    async def _make(self, change: _Change) -> None:
        started_s = time.monotonic()
        try:
            failure = await self._replace(change.division)
        except asyncio.CancelledError:  # the queue of the step thread was dropped: the epoch has ended
            return
        except Exception as error:
            # Neither division can be had. A new process begins with free memory and the division of the boot plan.
            logger.exception("event=arena_lost resize=%d", change.resize_id)
            detail = f"its arena could not be allocated again: {type(error).__name__}: {error}"
            suspects = (ActorName.GPU_EXECUTOR.value,)
            self._send(ActorName.CONTROLLER, ActorsSuspected(change.epoch, suspects, detail))
            return
        took_ms = (time.monotonic() - started_s) * 1e3
        division = self._arena.division
        logger.info(
            "event=arena_reallocated resize=%d arena=%s slots=%d kv_blocks=%d ms=%.1f failure=%r",
            change.resize_id, self._arena.arena_id, division.num_slots, division.num_blocks, took_ms, failure,
        )  # fmt: skip
        if failure:
            failure = f"the old division was allocated again, empty, because the new one failed: {failure}"
        else:
            self.last_ms, self.slowest_ms = took_ms, max(self.slowest_ms, took_ms)
        if self._change is not change:  # the epoch has ended: the next one begins with this arena
            return
        self._change = None
        replaced = ArenaReplaced(
            change.epoch, change.resize_id, self._arena.arena_id, division.num_slots, division.num_blocks
        )
        for peer in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR):
            self._send(peer, replaced)
        self._answer(change.resize_id, change.epoch, failure)

    def _answer(self, resize_id: int, epoch: int, failure: str) -> None:
        """To the Controller."""
        self.resizes_total += not failure
        self.failed_resizes_total += bool(failure)
        division = self._arena.division
        self._send(
            ActorName.CONTROLLER, ArenaResized(epoch, resize_id, division.num_slots, division.num_blocks, failure)
        )

    async def end_epoch(self) -> None:
        """Drop a change; one that is being made comes to its end first. The step thread has been drained."""
        self._change = None
        async with self._replacing:
            pass

    def _send(self, to: ActorName, message: VacateArena | ArenaReplaced | ArenaResized | ActorsSuspected) -> None:
        try:
            self._endpoint.send(to, message)
        except PeerLostError as error:  # ends the epoch, or is the Controller's own affair
            logger.info("event=undeliverable message=%s error=%r", type(message).__name__, str(error))

    def metrics(self) -> dict[str, float]:
        """By the naming rule of ``ActorStatus.metrics``; the same as ``ArenaResizer``'s."""
        return {
            "elastic": 1.0,
            "reallocates": 1.0,
            "resizes_total": float(self.resizes_total),
            "failed_resizes_total": float(self.failed_resizes_total),
            "resize_moved_bytes_total": 0.0,
            "resize_ms": self.last_ms,
            "resize_slowest_pause_ms": self.slowest_ms,
            **self._shape.figures(self._arena.division.split),
        }
