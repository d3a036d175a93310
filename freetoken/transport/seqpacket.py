"""Carrier between processes of one node: SOCK_SEQPACKET sockets with random abstract names.

Each endpoint listens; to send to a peer it opens a connection of its own, so a connection carries one direction only
and its end tells that the process at the other side is gone. Connections outlive epochs (every packet says its epoch),
and are replaced when the peer's address is. The kernel keeps packet bounds and carries descriptors; abstract names need
no cleaning up, and a peer must be of our own user.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from freetoken.errors import PeerLostError
from freetoken.messages import ActorName, Wiring
from freetoken.transport.base import BaseEndpoint, close_fds, dup_fds
from freetoken.transport.codec import (
    HEADER,
    MAX_FDS,
    Assembler,
    Header,
    Kind,
    PacketError,
    encode,
    parse_header,
    split,
)

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 128 * 1024
MAX_QUEUED_BYTES = 64 * 1024**2
_PREFIX = "seqpacket:"
_SEND_BUFFER_BYTES = 4 * 1024**2
_BACKLOG = 64
_PACKETS_PER_WAKE = 64
_ACCEPT_RETRY_S = 0.2
_FD = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * _FD.size)


class _Outgoing:
    """The connection to one peer. ``send`` from any thread; the rest on the event loop."""

    def __init__(self, peer: ActorName, address: str, sock: socket.socket, max_queued_bytes: int) -> None:
        self.peer = peer
        self.address = address
        self.sock = sock
        self.packet_bytes = min(MAX_PACKET_BYTES, sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 3)
        self.closed = False
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._queued_bytes = 0

    def send(self, packets: list[bytes], fds: Sequence[int], request_flush: Callable[[_Outgoing], None]) -> None:
        """Send ``packets`` in order, behind those queued before, or queue what the socket does not take now.

        Raises ``PeerLostError`` when the connection is closed or broken, or the peer reads too slowly.
        """
        with self._lock:
            if self.closed:
                raise PeerLostError(str(self.peer))
            must_request = not self._queue
            sent = 0
            if must_request:
                try:
                    while sent < len(packets) and self._transmit(packets[sent], fds if sent == 0 else ()):
                        sent += 1
                except OSError as error:
                    raise PeerLostError(str(self.peer), str(error)) from error
                if sent == len(packets):
                    return
            rest = sum(map(len, packets[sent:]))
            if self._queued_bytes + rest > self._max_queued_bytes:
                raise PeerLostError(
                    str(self.peer),
                    f"does not read its messages: {self._queued_bytes + rest} bytes queued, "
                    f"limit {self._max_queued_bytes}",
                )
            duplicates = dup_fds(fds) if sent == 0 else ()
            for index in range(sent, len(packets)):
                self._queue.append((packets[index], duplicates if index == 0 else ()))
            self._queued_bytes += rest
        if must_request:
            request_flush(self)

    def flush(self) -> bool:
        """Send what is queued; true once the queue is empty. Raises ``OSError`` when the connection is broken."""
        with self._lock:
            while self._queue and not self.closed:
                packet, fds = self._queue[0]
                if not self._transmit(packet, fds):
                    return False
                self._queue.popleft()
                self._queued_bytes -= len(packet)
                close_fds(fds)
            return True

    def _transmit(self, packet: bytes, fds: Sequence[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        try:
            self.sock.sendmsg([packet], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):
                return False
            raise
        return True

    def close(self) -> None:
        """Close the socket and drop what is queued."""
        with self._lock:
            self.closed = True
            for _, fds in self._queue:
                close_fds(fds)
            self._queue.clear()
            self._queued_bytes = 0
            self.sock.close()


class _Incoming:
    """A connection that a peer opened to us; anonymous until its hello."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer: ActorName | None = None
        self.address = ""
        self.assembler = Assembler()
        self.fds: tuple[int, ...] = ()


class SeqpacketEndpoint(BaseEndpoint):
    """Listens from construction on, so peers may connect before this endpoint does; nothing is read until then."""

    def __init__(self, name: ActorName, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        super().__init__(name)
        self._max_queued_bytes = max_queued_bytes
        self._token = f"freetoken-{secrets.token_hex(16)}"
        self._listener = _socket()
        self._listener.bind("\0" + self._token)
        self._listener.listen(_BACKLOG)
        self._listening = False
        self._outgoing: dict[ActorName, _Outgoing] = {}
        self._incoming: set[_Incoming] = set()
        self._buffer = memoryview(bytearray(MAX_PACKET_BYTES))

    @property
    def address(self) -> str:
        return _PREFIX + self._token

    def send(self, to: ActorName, message: Any, fds: Sequence[int] = ()) -> None:
        connection = self._outgoing.get(to)
        if connection is None:
            raise PeerLostError(str(to), "not in the wiring")
        if len(fds) > MAX_FDS:
            raise PacketError(f"{len(fds)} descriptors beside one message exceed the limit of {MAX_FDS}")
        payload = encode(message)
        packets = split(payload, Kind.MESSAGE, self._epoch, len(fds), connection.packet_bytes)
        try:
            connection.send(packets, fds, self._request_flush)
        except PeerLostError as error:
            self._threadsafe(self._close_outgoing, connection, error.detail)
            raise
        self._count("messages_sent")
        self._count("bytes_sent", len(payload))

    def _request_flush(self, connection: _Outgoing) -> None:
        self._threadsafe(self._flush_when_writable, connection)

    def _threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _flush_when_writable(self, connection: _Outgoing) -> None:
        if not connection.closed:
            assert self._loop is not None
            self._loop.add_writer(connection.sock, self._flush, connection)

    def _flush(self, connection: _Outgoing) -> None:
        assert self._loop is not None
        try:
            if connection.flush():
                self._loop.remove_writer(connection.sock)
        except OSError as error:
            self._close_outgoing(connection, str(error))

    async def _open(self, wiring: Wiring) -> list[ActorName]:
        loop = asyncio.get_running_loop()
        fresh: dict[ActorName, _Outgoing] = {}
        unreachable: list[ActorName] = []
        try:
            for peer, address in wiring.addresses.items():
                known = self._outgoing.get(peer)
                if peer == self.name or (known is not None and known.address == address and not known.closed):
                    continue
                try:
                    fresh[peer] = await self._dial(peer, address)
                except OSError as error:
                    log.warning("event=peer_unreachable actor=%s peer=%s error=%r", self.name, peer, str(error))
                    unreachable.append(peer)
        except BaseException:
            for connection in fresh.values():
                connection.close()
            raise
        for peer in list(self._outgoing):
            if peer in fresh or peer in unreachable or peer not in wiring.addresses:
                self._hang_up(self._outgoing.pop(peer))
        for peer, connection in fresh.items():
            self._outgoing[peer] = connection
            loop.add_reader(connection.sock, self._on_outgoing_readable, connection)
        if not self._listening:
            self._listening = True
            loop.call_soon(self._listen)
        return unreachable

    async def _dial(self, peer: ActorName, address: str) -> _Outgoing:
        if not address.startswith(_PREFIX):
            raise PacketError(f"{address!r} is not an address of this transport")
        sock = _socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            while True:
                try:
                    sock.connect("\0" + address[len(_PREFIX) :])
                    break
                except BlockingIOError:  # the peer's backlog is full; it drains as soon as the peer connects
                    await asyncio.sleep(0.005)
            _check_user(sock)
            hello = f"{self.name}\n{self.address}".encode()
            sock.send(Header(Kind.HELLO, 0, len(hello), 0, 0).pack() + hello)
        except BaseException:
            sock.close()
            raise
        return _Outgoing(peer, address, sock, self._max_queued_bytes)

    def _close_outgoing(self, connection: _Outgoing, why: str) -> None:
        if not connection.closed:
            self._hang_up(connection)
            self._lose(connection.peer, connection.address, why)

    def _hang_up(self, connection: _Outgoing) -> None:
        if connection.closed:
            return
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.remove_reader(connection.sock)
            self._loop.remove_writer(connection.sock)
        connection.close()

    def _on_outgoing_readable(self, connection: _Outgoing) -> None:
        # Nothing is ever sent this way: readable means closed.
        self._close_outgoing(connection, "closed its socket")

    def _listen(self) -> None:
        if not self._closed:
            assert self._loop is not None
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._loop is not None
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # most likely no descriptors left; the peer waits in the backlog
                log.error("event=accept_failed actor=%s error=%r", self.name, str(error))
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
                return
            sock.setblocking(False)
            try:
                _check_user(sock)
            except OSError as error:
                log.warning("event=connection_refused actor=%s error=%r", self.name, str(error))
                sock.close()
                continue
            connection = _Incoming(sock)
            self._incoming.add(connection)
            self._loop.add_reader(sock, self._on_incoming_readable, connection)

    def _on_incoming_readable(self, connection: _Incoming) -> None:
        for _ in range(_PACKETS_PER_WAKE):
            if self._closed or connection not in self._incoming:
                return
            try:
                size, ancillary, flags, _ = connection.sock.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._close_incoming(connection, str(error))
                return
            fds = _received_fds(ancillary)
            if size == 0:
                close_fds(fds)
                self._close_incoming(connection, "closed its socket")
                return
            try:
                if flags & socket.MSG_TRUNC:
                    raise PacketError(f"a packet exceeds {MAX_PACKET_BYTES} bytes")
                self._on_packet(connection, self._buffer[:size], fds)
            except PacketError as error:
                log.error("event=bad_packet actor=%s peer=%s error=%r", self.name, connection.peer, str(error))
                self._close_incoming(connection, str(error))
                return

    def _on_packet(self, connection: _Incoming, packet: memoryview, fds: tuple[int, ...]) -> None:
        # Descriptors belong to the connection until its message is complete, so that closing it closes them too.
        connection.fds += fds
        header = parse_header(packet)
        piece = packet[HEADER.size :]
        if connection.peer is None:
            self._on_hello(connection, header, bytes(piece))
            return
        if header.kind is not Kind.MESSAGE:
            raise PacketError(f"a packet of kind {header.kind.name} in the middle of a connection")
        if len(fds) != header.num_fds:
            raise PacketError(f"{len(fds)} of {header.num_fds} descriptors arrived (limit of open files reached?)")
        payload = connection.assembler.add(header, piece)
        if payload is not None:
            owned, connection.fds = connection.fds, ()
            self._receive(header.epoch, payload, owned, len(payload))

    def _on_hello(self, connection: _Incoming, header: Header, payload: bytes) -> None:
        try:
            if header.kind is not Kind.HELLO:
                raise ValueError("no hello")
            name, address = payload.decode().split("\n")
            connection.peer, connection.address = ActorName(name), address
        except ValueError as error:
            raise PacketError(f"a connection began wrongly: {error}") from None

    def _close_incoming(self, connection: _Incoming, why: str) -> None:
        if connection not in self._incoming:
            return
        assert self._loop is not None
        self._incoming.discard(connection)
        if not self._loop.is_closed():
            self._loop.remove_reader(connection.sock)
        connection.sock.close()
        close_fds(connection.fds)
        connection.fds = ()
        if connection.peer is not None:
            self._lose(connection.peer, connection.address, why)

    def _release(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._listener)
        self._listener.close()
        for outgoing in self._outgoing.values():
            self._hang_up(outgoing)
        for incoming in list(self._incoming):
            self._close_incoming(incoming, "closed here")


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    return sock


def _check_user(sock: socket.socket) -> None:
    """Abstract names have no permissions: accept and call only processes of our own user."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the peer runs as user {uid}, not {os.geteuid()}")


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    return tuple(
        fd
        for level, kind, data in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size])
    )
