"""All actors in one process, on one event loop: for debugging, and the yardstick for what the actor runtime costs.

Same services, same supervision code; but nothing here can die by itself, so there is no recovery short of a new start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from freetoken.engine.build import SERVICES, ServiceTable, create_service
from freetoken.engine.controller import ControllerService
from freetoken.engine.host import DeathCallback
from freetoken.engine.lifecycle import ActorHandle, ServiceRunner
from freetoken.engine.members import SupervisionPolicy
from freetoken.engine.runtime import Overview
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName
from freetoken.transport.inprocess import InProcessHub

log = logging.getLogger(__name__)


class LocalHost:
    """Actors as plain objects. ``control`` is handed to ApiFront."""

    def __init__(self, hub: InProcessHub, services: ServiceTable = SERVICES) -> None:
        self.control: ControllerService | None = None
        self._hub = hub
        self._services = services

    def on_death(self, callback: DeathCallback) -> None:
        """Nothing dies by itself here."""

    async def create(self, name: ActorName, spec: LaunchSpec, adopt_store: bool) -> ServiceRunner:
        """See ``ActorHost.create``."""
        endpoint = self._hub.endpoint(name)
        try:
            service = create_service(name, spec, endpoint, self._services, **self._arguments(name, adopt_store))
        except BaseException:
            await endpoint.close()
            raise
        return ServiceRunner(service, endpoint)

    def _arguments(self, name: ActorName, adopt_store: bool) -> dict[str, Any]:
        if name is ActorName.WEIGHT_STREAMER:
            return {"adopt": adopt_store}
        if name is ActorName.API_FRONT:
            return {"control": self.control}
        return {}

    async def adopt(self) -> Sequence[ActorHandle]:
        """Nothing outlives this process."""
        return []

    async def kill(self, handle: ActorHandle) -> None:
        """Close it; there is no process to end."""
        try:
            await handle.close()
        except Exception:
            log.exception("event=close_failed actor=%s", handle.name)


class LocalRuntime:
    """See ``freetoken.engine.runtime.Runtime``."""

    def __init__(self, spec: LaunchSpec, services: ServiceTable = SERVICES, encode: bool = False) -> None:
        self._hub = InProcessHub(encode)
        self._host = LocalHost(self._hub, services)
        self._spec = spec
        self._controller: ControllerService | None = None

    @property
    def controller(self) -> ControllerService:
        """Valid after ``start``."""
        assert self._controller is not None
        return self._controller

    async def start(self) -> None:
        """See ``Runtime.start``."""
        policy = SupervisionPolicy(
            ping_interval_s=None,
            load_timeout_s=self._spec.config.health.load_timeout_s,
            max_restarts=0,
            start_attempts=1,
        )
        endpoint = self._hub.endpoint(ActorName.CONTROLLER)
        self._controller = ControllerService(self._spec, endpoint, self._host, policy)
        self._host.control = self._controller
        self._controller.start()

    def notes(self) -> list[str]:
        """See ``Runtime.notes``."""
        return ["all actors run in this process (runtime=local)"]

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        """See ``Runtime.overview``."""
        return await self.controller.overview(max_age_s)

    async def stop(self) -> None:
        """See ``Runtime.stop``."""
        if self._controller is not None:
            await self._controller.stop()

    def kill(self) -> None:
        """Nothing to do: it all ends with this process."""
