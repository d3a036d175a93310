"""What the front asks of the Controller. The actor shell answers by Ray calls, the local runtime directly."""

from __future__ import annotations

from typing import Protocol

from freetoken.messages import (
    ActorStatus,
    ElasticView,
    HealthView,
    RebalanceRecord,
    RebalanceWish,
    TraceRecording,
    TraceWish,
)


class Control(Protocol):
    """Called from the front's event loop; may raise anything when the Controller is gone."""

    async def actors(self) -> list[ActorStatus]:
        """The newest status of every actor, this one included."""
        ...

    async def health(self) -> HealthView:
        """How the engine is."""
        ...

    async def rebalance(self, wish: RebalanceWish) -> RebalanceRecord:
        """Divide the arena anew. Raises ``RebalanceBusyError`` and ``CapacityError``."""
        ...

    async def elastic(self) -> ElasticView:
        """How memory moves between slots and KV."""
        ...

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """Begin or end the recording of a route trace; the one under way, or the last. Raises ``ConfigError`` and
        ``TraceBusyError``."""
        ...
