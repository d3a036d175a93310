"""The Controller: lifecycle and health of the other seven, and a spare set of descriptors of the store."""

from __future__ import annotations

import dataclasses
import logging
from typing import ClassVar

from freetoken.checkpoint.held_store import HeldStore, receive_store
from freetoken.engine.host import ActorHost
from freetoken.engine.lifecycle import ServiceRunner
from freetoken.engine.members import SupervisionPolicy
from freetoken.engine.phases import Phase
from freetoken.engine.rebalancer import Rebalancer
from freetoken.engine.runtime import Overview
from freetoken.engine.supervisor import Supervisor
from freetoken.engine.tracing import RouteTracing
from freetoken.errors import FreeTokenError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorsSuspected,
    ActorStatus,
    ElasticView,
    HealthView,
    RebalanceRecord,
    RebalanceWish,
    StepReport,
    StoreShared,
    TraceRecording,
    TraceWish,
)
from freetoken.service import Service
from freetoken.transport.base import BaseEndpoint

log = logging.getLogger(__name__)


class ControllerService(Service):
    """``start`` begins the engine's life, ``stop`` ends it; ``actors`` and ``health`` are what ApiFront asks for."""

    name: ClassVar[ActorName] = ActorName.CONTROLLER

    def __init__(
        self, spec: LaunchSpec, endpoint: BaseEndpoint, host: ActorHost, policy: SupervisionPolicy | None = None
    ) -> None:
        super().__init__(spec, endpoint)
        self.reports: dict[str, StepReport] = {}
        self._reports_total = 0
        self._store: HeldStore | None = None
        self.supervisor = Supervisor(
            host,
            ServiceRunner(self, endpoint),
            policy or SupervisionPolicy.from_config(spec.config.health),
            self._spec_for,
            own_holds_store=lambda: self.holds_store,
        )
        self.rebalancer = Rebalancer(
            spec,
            endpoint,
            lambda: self.epoch,
            self.supervisor.actors,
            lambda: self.supervisor.phase is Phase.READY,
            self.supervisor.last_status,
        )
        self.tracing = RouteTracing(lambda: self.supervisor.handle(ActorName.EXPERT_CACHE))
        endpoint.on(StoreShared, self._on_store)
        endpoint.on(StepReport, self._on_report)
        endpoint.on(ActorsSuspected, self._on_suspected)

    @property
    def holds_store(self) -> bool:
        """Whether a new WeightStreamer could be given the store from here."""
        return self._store is not None and self._store.is_complete

    def drop_store(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def start(self, adopt: bool = False) -> None:
        """Create, load, wire and resume everybody, in the background; or take over what an earlier Controller left."""
        self.supervisor.start(adopt)
        self.rebalancer.start()

    async def stop(self) -> None:
        """Close the others in order, then this service."""
        await self.rebalancer.close()
        await self.supervisor.stop()
        await self.close()

    async def actors(self) -> list[ActorStatus]:
        """Every actor's newest status, this one's included."""
        return await self.supervisor.actors()

    async def health(self) -> HealthView:
        """How the engine is."""
        return self.supervisor.health()

    async def rebalance(self, wish: RebalanceWish) -> RebalanceRecord:
        """See ``Rebalancer.rebalance``."""
        return await self.rebalancer.rebalance(wish)

    async def elastic(self) -> ElasticView:
        """How memory moves between slots and KV."""
        return self.rebalancer.view()

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """See ``RouteTracing.trace``."""
        return await self.tracing.trace(wish)

    async def resume(self) -> None:
        """The epoch has begun."""
        await super().resume()
        self.rebalancer.epoch_begun()

    async def pause(self, reason: str) -> None:
        """The epoch is over."""
        await super().pause(reason)
        self.rebalancer.epoch_ended()

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        """Everything a launcher shows; actors' figures may be ``max_age_s`` old."""
        supervisor = self.supervisor
        failure = supervisor.failure
        if failure is None and supervisor.phase is Phase.FAILED:
            failure = FreeTokenError(supervisor.health().detail)
        return Overview(supervisor.phase, supervisor.health(), tuple(await supervisor.actors(max_age_s)), failure)

    def metrics(self) -> dict[str, float]:
        """Epoch, restarts and the endpoint's counters."""
        return {
            "epoch": float(self.supervisor.epoch),
            "restarts_total": float(self.supervisor.total_restarts),
            "ready": float(self.supervisor.phase is Phase.READY),
            "store_held": float(self.holds_store),
            "step_reports_total": float(self._reports_total),
            **self.rebalancer.metrics(),
            **self.endpoint.counters(),
        }

    async def share_store(self, to: ActorName) -> None:
        """Send the store's descriptors to ``to``. Raises ``FreeTokenError`` when there are none."""
        if self._store is None:
            raise FreeTokenError("no store is held")
        self._store.share(self.endpoint, to, self.epoch)

    async def close(self) -> None:
        """Let go of the store and close the endpoint."""
        await self.rebalancer.close()
        self.drop_store()
        await super().close()

    def _on_store(self, message: StoreShared, fds: tuple[int, ...]) -> None:
        held = receive_store(self._store, message, fds)
        if held is not self._store:
            self.drop_store()
            self._store = held

    def _on_report(self, report: StepReport, fds: tuple[int, ...]) -> None:
        self.reports[report.sender] = report
        self._reports_total += 1

    async def _on_suspected(self, message: ActorsSuspected, fds: tuple[int, ...]) -> None:
        await self.supervisor.suspect(message.epoch, message.suspects, message.detail)

    def _spec_for(self, name: ActorName) -> LaunchSpec:
        """A new ApiFront listens where clients know the old one, also when the system chose the port."""
        front = self.supervisor.last_status(ActorName.API_FRONT)
        port = int(front.metrics.get("port", 0)) if front is not None else 0
        if name is not ActorName.API_FRONT or not port:
            return self.spec
        server = self.spec.config.server.model_copy(update={"port": port})
        return dataclasses.replace(self.spec, config=self.spec.config.model_copy(update={"server": server}))
