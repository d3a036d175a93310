"""What a wiring waits for: one message each from some peers, within a time limit, unless one of them dies first."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from freetoken.errors import PeerLostError
from freetoken.messages import ActorName

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Between ``expect`` and ``clear``: one value from each expected peer. Values from others are not kept. Used on the
    event loop only."""

    def __init__(self, what: str) -> None:
        """``what`` names the awaited thing in errors."""
        self._what = what
        self._futures: dict[ActorName, asyncio.Future[T]] = {}

    def expect(self, *peers: ActorName) -> None:
        """Start anew. To be called before connecting: held messages are delivered while that is awaited."""
        self.clear()
        self._futures = {peer: asyncio.get_running_loop().create_future() for peer in peers}

    def deliver(self, peer: ActorName, value: T) -> bool:
        """False when nothing (more) is expected from ``peer``."""
        future = self._futures.get(peer)
        if future is None or future.done():
            return False
        future.set_result(value)
        return True

    def peer_lost(self, peer: ActorName) -> None:
        """Whoever waits for ``peer`` gets a ``PeerLostError``."""
        future = self._futures.get(peer)
        if future is not None and not future.done():
            future.set_exception(PeerLostError(str(peer), f"it ended before {self._what} came"))

    async def wait(self, timeout_s: float) -> dict[ActorName, T]:
        """The values by peer. Raises ``PeerLostError`` naming who died or stayed silent; clears in any case."""
        try:
            if self._futures:
                await asyncio.wait(self._futures.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for future in self._futures.values():
                if future.done():
                    future.result()
            for peer, future in self._futures.items():
                if not future.done():
                    raise PeerLostError(str(peer), f"{self._what} did not come within {timeout_s:g} s")
            return {peer: future.result() for peer, future in self._futures.items()}
        finally:
            self.clear()

    def clear(self) -> None:
        """Expect nothing."""
        for future in self._futures.values():
            if future.done() and not future.cancelled():
                future.exception()  # retrieved: nobody else will
            future.cancel()
        self._futures = {}
