"""Carrier over remote procedure calls: slower than sockets, for clusters where those do not work.

The call layer (``Caller``) may run calls of one sender in any order; sequence numbers restore it. Descriptors do not
travel in calls: the receiver, on the same node, reopens them by their path under ``/proc`` of the sender, which keeps
duplicates until the call is answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from freetoken.errors import PeerLostError
from freetoken.messages import ActorName, Wiring
from freetoken.transport.base import BaseEndpoint, close_fds, dup_fds
from freetoken.transport.codec import encode

log = logging.getLogger(__name__)

MAX_IN_FLIGHT_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Parcel:
    """The argument of one call. ``sender`` is unique to the sending endpoint, ``sequence`` counts its messages to one
    receiver within one epoch."""

    sender: str
    epoch: int
    sequence: int
    payload: bytes
    fd_paths: tuple[str, ...]


class Caller(Protocol):
    """The call layer; usable from any thread. Futures may complete on any thread."""

    def deliver(self, address: str, parcel: Parcel) -> Future[None]:
        """Run ``CallEndpoint.receive(parcel)`` of the endpoint at ``address``; fails when its process is gone."""

    def linger(self, address: str) -> Future[None]:
        """Completes, in whatever way, when the process at ``address`` is gone."""


@dataclass(slots=True)
class _Peer:
    name: ActorName
    address: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    epoch: int = 0
    sequence: int = 0
    in_flight_bytes: int = 0
    lost: bool = False


@dataclass(slots=True)
class _Stream:
    """What came from one sender in one epoch: the next sequence number, and parcels that came before their turn."""

    epoch: int
    next: int = 0
    early: dict[int, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict)


class CallEndpoint(BaseEndpoint):
    """``address`` is what the call layer reaches this endpoint by; it must differ between two lives of one actor."""

    def __init__(self, name: ActorName, address: str, caller: Caller, max_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        super().__init__(name)
        self._address = address
        self._caller = caller
        self._max_bytes = max_bytes
        self._sender = f"{name}-{secrets.token_hex(8)}"
        self._peers: dict[ActorName, _Peer] = {}
        self._streams: dict[str, _Stream] = {}

    @property
    def address(self) -> str:
        return self._address

    async def _open(self, wiring: Wiring) -> list[ActorName]:
        peers: dict[ActorName, _Peer] = {}
        for name, address in wiring.addresses.items():
            if name == self.name:
                continue
            known = self._peers.get(name)
            if known is not None and known.address == address and not known.lost:
                peers[name] = known
            else:
                peers[name] = _Peer(name, address)
                self._on_done(self._caller.linger(address), self._peer_gone, peers[name])
        self._peers = peers
        for sender in [sender for sender, stream in self._streams.items() if stream.epoch < wiring.epoch]:
            self._forget(self._streams.pop(sender))
        return []

    def _on_done(self, future: Future[None], callback: Callable[..., None], *args: Any) -> None:
        """Run ``callback(error or None, *args)`` on the event loop when ``future`` is done."""
        loop = asyncio.get_running_loop() if self._loop is None else self._loop

        def done(completed: Future[None]) -> None:
            error = None if completed.cancelled() else completed.exception()
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, error, *args)

        future.add_done_callback(done)

    def _peer_gone(self, error: BaseException | None, peer: _Peer) -> None:
        peer.lost = True
        self._lose(peer.name, peer.address, str(error) if error is not None else "closed")

    def send(self, to: ActorName, message: Any, fds: Sequence[int] = ()) -> None:
        peer = self._peers.get(to)
        if peer is None:
            raise PeerLostError(str(to), "not in the wiring")
        if peer.lost or self._closed:
            raise PeerLostError(str(to))
        payload = encode(message)
        if peer.in_flight_bytes + len(payload) > self._max_bytes:
            raise PeerLostError(
                str(to),
                f"does not read its messages: {peer.in_flight_bytes + len(payload)} bytes on the way, "
                f"limit {self._max_bytes}",
            )
        duplicates = dup_fds(fds)
        paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in duplicates)
        try:
            with peer.lock:
                if peer.epoch != self._epoch:
                    peer.epoch, peer.sequence = self._epoch, 0
                parcel = Parcel(self._sender, peer.epoch, peer.sequence, payload, paths)
                peer.sequence += 1
                peer.in_flight_bytes += len(payload)
                future = self._caller.deliver(peer.address, parcel)
        except BaseException:
            close_fds(duplicates)
            raise
        self._on_done(future, self._delivered, peer, len(payload), duplicates)
        self._count("messages_sent")
        self._count("bytes_sent", len(payload))

    def _delivered(self, error: BaseException | None, peer: _Peer, size: int, fds: tuple[int, ...]) -> None:
        close_fds(fds)
        with peer.lock:
            peer.in_flight_bytes -= size
        if error is not None:
            self._peer_gone(error, peer)

    def receive(self, parcel: Parcel) -> None:
        """Take in one parcel, on the event loop. Returns once its descriptors are open here."""
        if self._closed or parcel.epoch < self._epoch:
            self._count("messages_dropped")
            return
        stream = self._streams.get(parcel.sender)
        if stream is None or stream.epoch < parcel.epoch:
            if stream is not None:
                self._forget(stream)
            stream = self._streams[parcel.sender] = _Stream(parcel.epoch)
        elif stream.epoch > parcel.epoch:
            self._count("messages_dropped")
            return
        try:
            fds = _reopen(parcel.fd_paths)
        except OSError as error:
            log.error("event=descriptors_lost actor=%s sender=%s error=%r", self.name, parcel.sender, str(error))
            raise
        stream.early[parcel.sequence] = (parcel.payload, fds)
        while stream.next in stream.early:
            payload, owned = stream.early.pop(stream.next)
            stream.next += 1
            self._receive(stream.epoch, payload, owned, len(payload))

    def _forget(self, stream: _Stream) -> None:
        for _, fds in stream.early.values():
            self._drop(fds)
        stream.early.clear()

    def _release(self) -> None:
        for stream in self._streams.values():
            self._forget(stream)
        self._streams.clear()
        self._peers = {}


def _reopen(paths: Sequence[str]) -> tuple[int, ...]:
    fds: list[int] = []
    try:
        for path in paths:
            try:
                fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            except PermissionError:
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        close_fds(fds)
        raise
    return tuple(fds)
