"""Carrier for actors that share one process and one event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from freetoken.errors import PeerLostError
from freetoken.messages import ActorName, Wiring
from freetoken.transport.base import BaseEndpoint, dup_fds
from freetoken.transport.codec import decode, encode


class InProcessHub:
    """The endpoints of one process by address. With ``encode`` every message goes through the codec, as it would
    between processes; without, receivers get the very object (messages are immutable)."""

    def __init__(self, encode: bool = False) -> None:
        self.encode = encode
        self._endpoints: dict[str, InProcessEndpoint] = {}

    def endpoint(self, name: ActorName) -> InProcessEndpoint:
        """A new endpoint with an address of its own."""
        endpoint = InProcessEndpoint(name, self)
        self._endpoints[endpoint.address] = endpoint
        return endpoint

    def find(self, address: str) -> InProcessEndpoint | None:
        """The open endpoint at ``address``."""
        return self._endpoints.get(address)

    def remove(self, endpoint: InProcessEndpoint) -> None:
        """Forget a closed endpoint and tell every other one."""
        self._endpoints.pop(endpoint.address, None)
        for other in self._endpoints.values():
            other.peer_closed(endpoint)


class InProcessEndpoint(BaseEndpoint):
    """Made by ``InProcessHub.endpoint``. Delivery happens in a later iteration of the loop, never within ``send``."""

    def __init__(self, name: ActorName, hub: InProcessHub) -> None:
        super().__init__(name)
        self._hub = hub
        self._address = f"inprocess:{secrets.token_hex(8)}"

    @property
    def address(self) -> str:
        return self._address

    async def _open(self, wiring: Wiring) -> list[ActorName]:
        return [peer for peer, address in wiring.addresses.items() if self._hub.find(address) is None]

    def send(self, to: ActorName, message: Any, fds: Sequence[int] = ()) -> None:
        address = self._addresses.get(to)
        if address is None or to == self.name:
            raise PeerLostError(str(to), "not in the wiring")
        target = self._hub.find(address)
        if target is None or self._closed:
            raise PeerLostError(str(to))
        payload = encode(message) if self._hub.encode else message
        size = len(payload) if self._hub.encode else 1
        duplicates = dup_fds(fds)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(target._arrive, self._epoch, payload, duplicates, size)
        self._count("messages_sent")
        self._count("bytes_sent", size)

    def _arrive(self, epoch: int, payload: Any, fds: tuple[int, ...], size: int) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._receive(epoch, payload, fds, size)

    def _decode(self, payload: Any) -> Any:
        return decode(payload) if self._hub.encode else payload

    def peer_closed(self, endpoint: InProcessEndpoint) -> None:
        """``endpoint`` is gone: report it if it is a peer of the current wiring."""
        if self._loop is not None and self._addresses.get(endpoint.name) == endpoint.address:
            self._loop.call_soon(self._lose, endpoint.name, endpoint.address, "closed")

    def _release(self) -> None:
        self._hub.remove(self)
