"""The one body of all actors: a service, its endpoint and its runner, made callable by Ray."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from typing import Any, ClassVar

from actors.process import identify, prepare_process
from actors.settings import GroupSettings, ProcessId
from actors.transport import RayCaller, call_address
from freetoken.engine.build import create_service
from freetoken.engine.lifecycle import Progress, Restarts, ServiceRunner
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, ActorStatus, TraceRecording, TraceWish, Wiring
from freetoken.service import Service
from freetoken.telemetry import setup_logging
from freetoken.telemetry.logs import ENVIRONMENT_VARIABLE as LOG_LEVEL
from freetoken.transport.base import BaseEndpoint
from freetoken.transport.calls import CallEndpoint, Parcel
from freetoken.transport.seqpacket import SeqpacketEndpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where an actor is."""

    process: ProcessId
    address: str
    warning: str


class ActorShell:
    """An asyncio actor: everything here runs on its event loop. Subclasses name the actor and may add arguments for its
    service. ``run`` lasts as long as the actor, so that its end can be awaited and the dashboard shows it running."""

    name: ClassVar[ActorName]

    def __init__(self, spec: LaunchSpec, settings: GroupSettings, **arguments: Any) -> None:
        if settings.log_level:
            os.environ[LOG_LEVEL] = settings.log_level
        setup_logging(str(self.name))
        self.settings = settings
        self._warning = prepare_process()
        if self._warning:
            log.warning("event=priority actor=%s detail=%r", self.name, self._warning)
        self.endpoint = self._make_endpoint()
        self.service = self._make_service(spec, arguments)
        self._runner = ServiceRunner(self.service, self.endpoint)
        log.info("event=created actor=%s pid=%d", self.name, os.getpid())

    def __repr__(self) -> str:
        return f"FT:{self.name}"

    def _make_endpoint(self) -> BaseEndpoint:
        if self.settings.transport == "ray":
            address = call_address(self.name, secrets.token_hex(8))
            return CallEndpoint(self.name, address, RayCaller(self.settings.namespace))
        return SeqpacketEndpoint(self.name)

    def _make_service(self, spec: LaunchSpec, arguments: dict[str, Any]) -> Service:
        return create_service(self.name, spec, self.endpoint, self.settings.services, **arguments)

    async def describe(self) -> ActorInfo:
        """The actor's process and the address of its endpoint."""
        process = identify(os.getpid())
        assert process is not None
        return ActorInfo(process, self.endpoint.address, self._warning)

    async def run(self) -> None:
        """Returns when the actor was closed."""
        await self._runner.wait_closed()

    async def load(self) -> None:
        """See ``ActorHandle``, as for all below."""
        await self._runner.load()

    async def progress(self) -> Progress:
        return await self._runner.progress()

    async def wire(self, wiring: Wiring, restarts: Restarts) -> None:
        await self._runner.wire(wiring, restarts)

    async def rewire(self, wiring: Wiring, restarts: Restarts) -> None:
        await self._runner.rewire(wiring, restarts)

    async def resume(self) -> None:
        await self._runner.resume()

    async def pause(self, reason: str) -> None:
        await self._runner.pause(reason)

    async def share_store(self, to: ActorName, epoch: int) -> None:
        await self._runner.share_store(to, epoch)

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        return await self._runner.trace(wish)

    async def status(self) -> ActorStatus:
        return await self._runner.status()

    async def restarts(self) -> Restarts:
        return await self._runner.restarts()

    async def close(self) -> None:
        await self._runner.close()

    async def deliver(self, address: str, parcel: Parcel) -> None:
        """A message by Ray call (transport ``ray``)."""
        if not isinstance(self.endpoint, CallEndpoint) or self.endpoint.address != address:
            raise ConnectionError(f"{address} is not here any more")
        self.endpoint.receive(parcel)

    async def linger(self, address: str) -> None:
        """Returns when the endpoint at ``address`` is closed (transport ``ray``)."""
        if self.endpoint.address == address:
            await self._runner.wait_closed()
