"""The interface by which one actor reaches its peers."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from freetoken.messages import ActorName, Wiring

M = TypeVar("M")
Handler = Callable[[M, tuple[int, ...]], Awaitable[None] | None]


class Endpoint(abc.ABC):
    """One actor's door. Messages between two endpoints keep their order; delivery is at most once.

    The current epoch is stamped on every message. A receiver drops messages of an older epoch and holds those of a
    newer one until its own ``connect`` to that epoch, so actors may be wired in any order.
    """

    name: ActorName

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where peers reach this endpoint; opaque outside the transport."""

    @abc.abstractmethod
    def on(self, message_type: type[M], handler: Handler[M]) -> None:
        """Call ``handler(message, fds)`` on the endpoint's event loop for each message of that type.

        A coroutine handler is scheduled as a task; plain functions run at once and keep the message order. The handler
        owns the descriptors in ``fds``. An exception in a handler is logged and does not stop the endpoint.
        """

    @abc.abstractmethod
    async def connect(self, wiring: Wiring) -> None:
        """Enter ``wiring.epoch``: forget old connections, open new ones lazily or at once to every peer in it."""

    @abc.abstractmethod
    def send(self, to: ActorName, message: Any, fds: Sequence[int] = ()) -> None:
        """Queue ``message`` for ``to``; callable from any thread, never blocks on the peer.

        ``fds`` are duplicated; the caller keeps its own. Raises ``PeerLostError`` when the peer is known to be gone or
        is not in the wiring.
        """

    @abc.abstractmethod
    def on_peer_lost(self, callback: Callable[[ActorName], None]) -> None:
        """Call ``callback(peer)`` on the event loop when a connected peer's process ends, once per peer and epoch."""

    @abc.abstractmethod
    def counters(self) -> dict[str, float]:
        """``messages_sent_total``, ``messages_received_total``, ``bytes_sent_total``, ``messages_dropped_total``."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release sockets and pending descriptors; idempotent."""
