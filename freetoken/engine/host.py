"""Where actors live, as the supervisor sees it: Ray, one process, or a test's fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from freetoken.engine.lifecycle import ActorHandle
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName

DeathCallback = Callable[[ActorHandle, str], None]
"""``callback(handle, reason)`` on the event loop, once per process."""


class ActorHost(Protocol):
    """Creates and ends actors other than the Controller. Used from one event loop."""

    def on_death(self, callback: DeathCallback) -> None:
        """Report the end of every process this host created or adopted, whatever ended it."""
        ...

    async def create(self, name: ActorName, spec: LaunchSpec, adopt_store: bool) -> ActorHandle:
        """A new process with a constructed, not yet loaded service; an earlier actor of that name is ended first.

        ``adopt_store`` (WeightStreamer): the store will be sent by a holder instead of being read. When cancelled,
        nothing is left behind.
        """
        ...

    async def adopt(self) -> Sequence[ActorHandle]:
        """Living actors that an earlier Controller created."""
        ...

    async def kill(self, handle: ActorHandle) -> None:
        """End the process at once, also one that does not react; returns when it is gone or after a few seconds."""
        ...
