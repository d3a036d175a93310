"""Drives one service through its life on behalf of the Controller, wherever the service lives."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from freetoken.errors import FreeTokenError
from freetoken.messages import ActorName, ActorStatus, TraceRecording, TraceWish, Wiring
from freetoken.service import Service
from freetoken.transport.base import BaseEndpoint

log = logging.getLogger(__name__)

Restarts = Mapping[ActorName, int]
Progress = tuple[int, int, str]


class ActorHandle(Protocol):
    """One living actor, as the Controller sees it. Every call raises ``PeerLostError`` when its process is gone."""

    @property
    def name(self) -> ActorName: ...

    @property
    def pid(self) -> int: ...

    @property
    def address(self) -> str:
        """Of its endpoint."""
        ...

    async def load(self) -> None: ...

    async def progress(self) -> Progress: ...

    async def wire(self, wiring: Wiring, restarts: Restarts) -> None:
        """``Service.wire``. Replaces a wiring under way. ``restarts`` is kept for a later Controller."""
        ...

    async def rewire(self, wiring: Wiring, restarts: Restarts) -> None:
        """New addresses within the current epoch; the service does not notice."""
        ...

    async def resume(self) -> None: ...

    async def pause(self, reason: str) -> None:
        """``Service.pause`` if it was resumed; in any case ends a wiring under way."""
        ...

    async def share_store(self, to: ActorName, epoch: int) -> None:
        """Send the store's descriptors to ``to`` once this actor has entered ``epoch``. Raises when it has none."""
        ...

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """``ExpertCacheService.trace``. Raises for other actors."""
        ...

    async def status(self) -> ActorStatus: ...

    async def restarts(self) -> Restarts:
        """What the last ``wire`` or ``rewire`` brought."""
        ...

    async def close(self) -> None: ...


class ServiceRunner:
    """The one implementation behind every ``ActorHandle``: calls come from the Controller in any order, also while an
    earlier one is still running, and the service sees one transition at a time."""

    def __init__(self, service: Service, endpoint: BaseEndpoint) -> None:
        self.service = service
        self._endpoint = endpoint
        self._running: asyncio.Task[None] | None = None
        self._newest = 0
        self._order = asyncio.Lock()
        self._resumed = False
        self._restarts: Restarts = {}
        self._closed = asyncio.Event()

    @property
    def name(self) -> ActorName:
        """Of the service."""
        return self.service.name

    @property
    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    @property
    def address(self) -> str:
        """Of the endpoint."""
        return self._endpoint.address

    async def load(self) -> None:
        """``Service.load``."""
        await self.service.load()

    async def progress(self) -> Progress:
        """``Service.progress``."""
        return self.service.progress()

    async def wire(self, wiring: Wiring, restarts: Restarts) -> None:
        """See ``ActorHandle.wire``."""
        self._restarts = restarts
        await self._run_transition(lambda: self.service.wire(wiring))

    async def rewire(self, wiring: Wiring, restarts: Restarts) -> None:
        """See ``ActorHandle.rewire``."""
        if wiring.epoch != self._endpoint.epoch:
            raise FreeTokenError(f"{self.service.name} is in epoch {self._endpoint.epoch}, not {wiring.epoch}")
        self._restarts = restarts
        await self._endpoint.connect(wiring)

    async def resume(self) -> None:
        """``Service.resume``."""

        async def resume() -> None:
            self._resumed = True
            await self.service.resume()

        await self._run_transition(resume)

    async def pause(self, reason: str) -> None:
        """See ``ActorHandle.pause``."""

        async def pause() -> None:
            if self._resumed:
                await self.service.pause(reason)
                self._resumed = False

        await self._run_transition(pause, abandonable=False)

    async def _run_transition(self, start: Callable[[], Coroutine[Any, Any, None]], abandonable: bool = True) -> None:
        """Run one transition, once the one under way has ended: a wiring or resumption is cancelled, a pause awaited.
        One that still waits for its turn when a newer one comes is not begun."""
        self._newest += 1
        ticket = self._newest
        if self._running is not None:
            self._running.cancel()
        async with self._order:
            if self._closed.is_set():
                raise FreeTokenError(f"{self.service.name} is closed")
            if abandonable and ticket != self._newest:
                raise FreeTokenError(f"{self.service.name}: superseded by a newer transition")
            task = asyncio.ensure_future(start())
            self._running = task if abandonable else None
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:  # our caller gave up
                task.cancel()
                await asyncio.wait([task])
                raise
            finally:
                self._running = None
        if task.cancelled():
            raise FreeTokenError(f"{self.service.name}: superseded by a newer transition")
        task.result()

    async def share_store(self, to: ActorName, epoch: int) -> None:
        """See ``ActorHandle.share_store``. The caller sets the time limit."""
        share: Callable[[ActorName], Coroutine[Any, Any, None]] | None = getattr(self.service, "share_store", None)
        if share is None:
            raise FreeTokenError(f"{self.service.name} never holds the store")
        await self._endpoint.wait_for_epoch(epoch)
        await share(to)

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """See ``ActorHandle.trace``; also while a transition is under way."""
        record: Callable[[TraceWish], Coroutine[Any, Any, TraceRecording | None]] | None
        record = getattr(self.service, "trace", None)
        if record is None:
            raise FreeTokenError(f"{self.service.name} records no routes")
        return await record(wish)

    async def status(self) -> ActorStatus:
        """``Service.status``."""
        return self.service.status()

    async def restarts(self) -> Restarts:
        """See ``ActorHandle.restarts``."""
        return self._restarts

    async def close(self) -> None:
        """``Service.close``, whatever else is under way; ``wait_closed`` returns afterwards."""
        if self._running is not None:
            self._running.cancel()
        self._closed.set()
        await self.service.close()

    async def wait_closed(self) -> None:
        """Returns once ``close`` was called."""
        await self._closed.wait()
