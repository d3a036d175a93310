"""What a launcher can do with an engine, whichever runtime it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from freetoken.engine.phases import Phase
from freetoken.errors import FreeTokenError
from freetoken.messages import ActorName, ActorStatus, HealthView


@dataclass(frozen=True, slots=True)
class Overview:
    """The engine at one moment. ``failure`` is set when the first start ended with an error for the user."""

    phase: Phase
    health: HealthView
    actors: tuple[ActorStatus, ...]
    failure: FreeTokenError | None = None

    def of(self, name: ActorName) -> ActorStatus | None:
        """One actor's status."""
        return next((status for status in self.actors if status.name == name), None)

    @property
    def url(self) -> str:
        """Where the HTTP front listens; empty before it does."""
        front = self.of(ActorName.API_FRONT)
        return front.detail if front is not None and front.detail.startswith("http") else ""


class Runtime(Protocol):
    """Made by a launcher with a ``LaunchSpec``; used from one event loop."""

    async def start(self) -> None:
        """Begin; the engine loads in the background. Raises ``FreeTokenError`` with a message for the user."""
        ...

    def notes(self) -> list[str]:
        """Lines worth printing once it has started: where the dashboard is, what could not be set up."""
        ...

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        """The engine now; actors' figures may be ``max_age_s`` old, which spares asking them. Raises
        ``FreeTokenError`` when the Controller does not answer."""
        ...

    async def stop(self) -> None:
        """End everything in order, each step within a limit; afterwards nothing is left."""
        ...

    def kill(self) -> None:
        """End everything at once, without order. Blocking, short."""
        ...
