"""The Controller actor: the only one that Ray restarts. A new one adopts the actors of the old one."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import ray

from actors.gauges import INTERVAL_S, SHOWN, RayGauges
from actors.host import RayHost
from actors.launch import end_actor
from actors.process import ProcessWatch
from actors.settings import GroupSettings
from actors.shell import ActorShell
from freetoken.engine.build import create_service
from freetoken.engine.controller import ControllerService
from freetoken.engine.runtime import Overview
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorStatus,
    ElasticView,
    HealthView,
    RebalanceRecord,
    RebalanceWish,
    TraceRecording,
    TraceWish,
)
from freetoken.service import Service
from freetoken.tasks import repeat, spawn

log = logging.getLogger(__name__)


class Controller(ActorShell):
    """Begins its work by itself, since nobody is there to ask it after a restart."""

    name: ClassVar[ActorName] = ActorName.CONTROLLER
    service: ControllerService

    def __init__(self, spec: LaunchSpec, settings: GroupSettings) -> None:
        context = ray.get_runtime_context()
        self._self = context.current_actor
        self._host = RayHost(settings, self._self)
        super().__init__(spec, settings)
        self.service.start(adopt=context.was_current_actor_reconstructed)
        self._launcher = spawn(self._outlive_no_launcher(), "launcher watch")
        self._gauges = RayGauges(settings.namespace)
        self._showing = spawn(repeat(self._show_gauges, lambda: INTERVAL_S, "gauges"), "gauges")

    def _make_service(self, spec: LaunchSpec, arguments: dict[str, Any]) -> Service:
        return create_service(
            self.name, spec, self.endpoint, self.settings.services, host=self._host, policy=self.settings.policy
        )

    async def _show_gauges(self) -> None:
        """What pings have brought; nobody is asked for it."""
        known = [self.service.supervisor.last_status(name) for name in SHOWN if name is not self.name]
        self._gauges.show([self.service.status(), *(status for status in known if status is not None)])

    async def _outlive_no_launcher(self) -> None:
        launcher = self.settings.launcher
        if launcher is None:
            return
        watch = ProcessWatch(launcher)
        try:
            await watch.wait()
        finally:
            watch.close()
        log.warning("event=launcher_gone pid=%d", launcher.pid)
        try:
            await self.stop()
        finally:
            end_actor(self._self)

    async def actors(self) -> list[ActorStatus]:
        """See ``ControllerClient``, as for all below."""
        return await self.service.actors()

    async def health(self) -> HealthView:
        return await self.service.health()

    async def rebalance(self, wish: RebalanceWish) -> RebalanceRecord:
        return await self.service.rebalance(wish)

    async def elastic(self) -> ElasticView:
        return await self.service.elastic()

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        return await self.service.trace(wish)

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        return await self.service.overview(max_age_s)

    async def stop(self) -> None:
        await self.service.stop()
        self._host.sweep()
        await self._runner.close()
