"""Typed clients of the actors: Ray's errors become the project's."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from actors.process import ProcessWatch
from actors.shell import ActorInfo
from freetoken.engine.lifecycle import Progress, Restarts
from freetoken.engine.runtime import Overview
from freetoken.errors import PeerLostError
from freetoken.messages import (
    ActorName,
    ActorStatus,
    ElasticView,
    HealthView,
    RebalanceRecord,
    RebalanceWish,
    TraceRecording,
    TraceWish,
    Wiring,
)


def describe_death(error: BaseException) -> str:
    """Ray's account of an actor's end, in one line."""
    text = str(error)
    if "connection error code 2" in text:  # all that Ray knows of a killed or crashed process: its socket closed
        return "its process was killed or crashed"
    match = re.search(r"Worker exit detail: ([^.]*)", text) or re.search(r"The actor is dead because ([^.]*)", text)
    return " ".join((match.group(1) if match else text.splitlines()[0] if text else repr(error)).split())


async def answer(name: ActorName, ref: Awaitable[Any]) -> Any:
    """The result of a call. Raises what the method raised, and ``PeerLostError`` when the actor is gone."""
    try:
        return await ref
    except (RayActorError, ActorUnavailableError) as error:
        raise PeerLostError(str(name), describe_death(error)) from None
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            raise cause from None
        raise


class RayActorHandle:
    """One of the seven; see ``freetoken.engine.lifecycle.ActorHandle``. ``watch`` is its process."""

    def __init__(self, name: ActorName, actor: Any, info: ActorInfo) -> None:
        self.name = name
        self.actor = actor
        self.info = info
        self.watch = ProcessWatch(info.process)

    @property
    def pid(self) -> int:
        return self.info.process.pid

    @property
    def address(self) -> str:
        return self.info.address

    async def run(self) -> None:
        await answer(self.name, self.actor.run.remote())

    async def load(self) -> None:
        await answer(self.name, self.actor.load.remote())

    async def progress(self) -> Progress:
        result: Progress = await answer(self.name, self.actor.progress.remote())
        return result

    async def wire(self, wiring: Wiring, restarts: Restarts) -> None:
        await answer(self.name, self.actor.wire.remote(wiring, restarts))

    async def rewire(self, wiring: Wiring, restarts: Restarts) -> None:
        await answer(self.name, self.actor.rewire.remote(wiring, restarts))

    async def resume(self) -> None:
        await answer(self.name, self.actor.resume.remote())

    async def pause(self, reason: str) -> None:
        await answer(self.name, self.actor.pause.remote(reason))

    async def share_store(self, to: ActorName, epoch: int) -> None:
        await answer(self.name, self.actor.share_store.remote(to, epoch))

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        result: TraceRecording | None = await answer(self.name, self.actor.trace.remote(wish))
        return result

    async def status(self) -> ActorStatus:
        result: ActorStatus = await answer(self.name, self.actor.status.remote())
        return result

    async def restarts(self) -> Restarts:
        result: Restarts = await answer(self.name, self.actor.restarts.remote())
        return result

    async def close(self) -> None:
        await answer(self.name, self.actor.close.remote())


class ControllerClient:
    """What launcher and ApiFront ask of the Controller. Its handle survives its restarts; while it is away, calls raise
    ``PeerLostError`` or wait, so give them a limit."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def actors(self) -> list[ActorStatus]:
        """Every actor's newest status."""
        result: list[ActorStatus] = await answer(ActorName.CONTROLLER, self.actor.actors.remote())
        return result

    async def health(self) -> HealthView:
        """How the engine is."""
        result: HealthView = await answer(ActorName.CONTROLLER, self.actor.health.remote())
        return result

    async def rebalance(self, wish: RebalanceWish) -> RebalanceRecord:
        """Divide the arena anew."""
        result: RebalanceRecord = await answer(ActorName.CONTROLLER, self.actor.rebalance.remote(wish))
        return result

    async def elastic(self) -> ElasticView:
        """How memory moves between slots and KV."""
        result: ElasticView = await answer(ActorName.CONTROLLER, self.actor.elastic.remote())
        return result

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """Begin or end the recording of a route trace, or tell of it."""
        result: TraceRecording | None = await answer(ActorName.CONTROLLER, self.actor.trace.remote(wish))
        return result

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        """Everything a launcher shows."""
        result: Overview = await answer(ActorName.CONTROLLER, self.actor.overview.remote(max_age_s))
        return result

    async def stop(self) -> None:
        """Close all actors in order; the Controller itself remains to be ended."""
        await answer(ActorName.CONTROLLER, self.actor.stop.remote())
