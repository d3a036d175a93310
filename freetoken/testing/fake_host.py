"""A host whose actors live in this process and can be made to crash, hang or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from freetoken.engine.build import ServiceTable
from freetoken.engine.host import DeathCallback
from freetoken.engine.lifecycle import ActorHandle, Progress, Restarts, ServiceRunner
from freetoken.engine.local import LocalHost
from freetoken.errors import PeerLostError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, ActorStatus, TraceRecording, TraceWish, Wiring
from freetoken.testing.fake_services import FAKE_SERVICES
from freetoken.transport.inprocess import InProcessHub

T = TypeVar("T")


class FakeHandle:
    """A runner behind a "process" that can end: calls then fail with ``PeerLostError``, as do those under way."""

    _pids = iter(range(1000, 1_000_000))

    def __init__(self, runner: ServiceRunner, host: FakeHost) -> None:
        self.runner = runner
        self.host = host
        self.pid = next(FakeHandle._pids)
        self.gone = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> ActorName:
        return self.runner.name

    @property
    def address(self) -> str:
        return self.runner.address

    async def _call(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run ``call`` unless the process ends first, or the test interferes."""
        self.host.calls.append((self.name, method))

        async def run() -> T:
            await self.host.interfere(self, method)
            return await call()

        task = asyncio.ensure_future(run())
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if self.gone.done():
            raise PeerLostError(str(self.name), self.gone.result())
        return task.result()

    async def load(self) -> None:
        await self._call("load", self.runner.load)

    async def progress(self) -> Progress:
        return await self._call("progress", self.runner.progress)

    async def wire(self, wiring: Wiring, restarts: Restarts) -> None:
        await self._call("wire", lambda: self.runner.wire(wiring, restarts))

    async def rewire(self, wiring: Wiring, restarts: Restarts) -> None:
        await self._call("rewire", lambda: self.runner.rewire(wiring, restarts))

    async def resume(self) -> None:
        await self._call("resume", self.runner.resume)

    async def pause(self, reason: str) -> None:
        await self._call("pause", lambda: self.runner.pause(reason))

    async def share_store(self, to: ActorName, epoch: int) -> None:
        await self._call("share_store", lambda: self.runner.share_store(to, epoch))

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        return await self._call("trace", lambda: self.runner.trace(wish))

    async def status(self) -> ActorStatus:
        return await self._call("status", self.runner.status)

    async def restarts(self) -> Restarts:
        return await self._call("restarts", self.runner.restarts)

    async def close(self) -> None:
        await self._call("close", self.runner.close)


class FakeHost(LocalHost):
    """``calls`` is what the supervisor asked, in order. ``hanging`` (name, method) pairs never return, ``failing`` ones
    raise; ``before`` runs ahead of a call and may crash anything."""

    def __init__(self, hub: InProcessHub, services: ServiceTable = FAKE_SERVICES) -> None:
        super().__init__(hub, services)
        self.calls: list[tuple[ActorName, str]] = []
        self.created: list[tuple[ActorName, bool]] = []
        self.hanging: set[tuple[ActorName, str]] = set()
        self.failing: dict[tuple[ActorName, str], Exception] = {}
        self.before: dict[tuple[ActorName, str], Callable[[], Any]] = {}
        self.living: dict[ActorName, FakeHandle] = {}
        self._callback: DeathCallback = lambda handle, reason: None
        self._closing: set[asyncio.Task[None]] = set()

    def on_death(self, callback: DeathCallback) -> None:
        self._callback = callback

    async def interfere(self, handle: FakeHandle, method: str) -> None:
        """What the test wants to happen before ``method`` of ``handle``."""
        key = (handle.name, method)
        if key in self.before:
            self.before.pop(key)()
        if key in self.failing:
            raise self.failing[key]
        if key in self.hanging:
            await asyncio.Event().wait()

    async def create(self, name: ActorName, spec: LaunchSpec, adopt_store: bool) -> FakeHandle:  # type: ignore[override]
        self.created.append((name, adopt_store))
        if (name, "create") in self.failing:
            raise self.failing[(name, "create")]
        if (name, "create") in self.hanging:
            await asyncio.Event().wait()
        assert name not in self.living, f"a second {name}"
        handle = FakeHandle(await super().create(name, spec, adopt_store), self)
        self.living[name] = handle
        return handle

    async def adopt(self) -> Sequence[ActorHandle]:
        return list(self.living.values())

    async def kill(self, handle: ActorHandle) -> None:
        assert isinstance(handle, FakeHandle)
        await self.crash(handle.name, "killed", handle)

    def crash_soon(self, name: ActorName) -> None:
        """``crash`` from a callback."""
        task = asyncio.ensure_future(self.crash(name))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def crash(self, name: ActorName, reason: str = "signal 9", handle: FakeHandle | None = None) -> None:
        """End a process: peers and callers notice, the supervisor is told."""
        living = self.living.get(name)
        if living is None or handle not in (None, living):
            return
        del self.living[name]
        living.gone.set_result(reason)
        await living.runner.close()  # in-process peers see the endpoint's end
        self._callback(living, reason)
