"""What every actor is, without Ray: a service with a short life cycle and an endpoint to its peers.

The Ray shell in ``actors/`` and the one-process runtime in ``freetoken/engine/local.py`` drive the same classes.
"""

from __future__ import annotations

import abc
import os
import time
from typing import ClassVar

from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, ActorState, ActorStatus, Wiring
from freetoken.transport import Endpoint


class Service(abc.ABC):
    """One actor's body. All coroutines run on the actor's one asyncio loop; handlers registered with the endpoint too.

    Life: ``__init__`` (cheap) -> ``load`` (slow: weights, torch) -> ``wire`` -> ``resume`` -> serving. Recovery calls
    ``pause`` on every survivor, then ``wire`` with a higher epoch, then ``resume``. ``close`` is final and idempotent.
    """

    name: ClassVar[ActorName]

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        self.spec = spec
        self.endpoint = endpoint
        self.state = ActorState.CREATED
        self.epoch = 0
        self._created_s = time.monotonic()

    async def load(self) -> None:
        """Acquire what does not depend on peers. Runs once. Raises ``FreeTokenError`` with a message for the user."""
        return

    def progress(self) -> tuple[int, int, str]:
        """(done, total, what) of ``load``, for the progress display; total 0 when unknown."""
        return (0, 0, "")

    async def wire(self, wiring: Wiring) -> None:
        """Connect to peers for ``wiring.epoch`` and exchange shared memory; returns when this actor could serve.

        Overrides call ``super().wire`` first. Everything belonging to an older epoch is dropped here.
        """
        self.epoch = wiring.epoch
        await self.endpoint.connect(wiring)
        self.state = ActorState.WIRED

    async def resume(self) -> None:
        """All actors are wired: begin serving this epoch."""
        self.state = ActorState.SERVING

    async def pause(self, reason: str) -> None:
        """Stop serving: fail or drop what is in flight, return once nothing of this epoch runs here any more."""
        self.state = ActorState.PAUSED

    def metrics(self) -> dict[str, float]:
        """Current figures; see ``ActorStatus.metrics`` for the naming rule."""
        return {}

    def status(self) -> ActorStatus:
        """This actor's account of itself. Cheap; may be called at any time."""
        return ActorStatus(
            name=self.name,
            state=self.state,
            pid=os.getpid(),
            epoch=self.epoch,
            uptime_s=time.monotonic() - self._created_s,
            metrics=self.metrics(),
        )

    async def close(self) -> None:
        """Release everything. Safe to call in any state and more than once."""
        self.state = ActorState.STOPPED
        await self.endpoint.close()
