"""What the front asks of the Controller. The actor shell answers by Ray calls, the local runtime directly."""

from __future__ import annotations

from typing import Protocol

from freetoken.messages import ActorStatus, HealthView


class Control(Protocol):
    """Called from the front's event loop; may raise anything when the Controller is gone."""

    async def actors(self) -> list[ActorStatus]:
        """The newest status of every actor, this one included."""
        ...

    async def health(self) -> HealthView:
        """How the engine is."""
        ...
