"""What every carrier shares: handlers, epochs, lost peers and counters."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from freetoken.messages import ActorName, Wiring
from freetoken.transport.codec import PacketError, decode
from freetoken.transport.endpoint import Endpoint, Handler, M

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 64 * 1024**2


def close_fds(fds: Iterable[int]) -> None:
    """Close every descriptor in ``fds``; those already closed are ignored."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def dup_fds(fds: Iterable[int]) -> tuple[int, ...]:
    """Duplicates of all of ``fds``, or of none when one cannot be duplicated (``OSError``)."""
    duplicates: list[int] = []
    try:
        duplicates.extend(map(os.dup, fds))
    except OSError:
        close_fds(duplicates)
        raise
    return tuple(duplicates)


class BaseEndpoint(Endpoint):
    """Receiving half of an endpoint. A carrier calls ``_receive`` and ``_lose`` on the event loop, implements ``send``,
    ``_open`` (reach the peers of a wiring) and ``_release`` (give back what it holds).

    Everything but ``send`` and ``counters`` runs on the event loop that first awaited ``connect``.
    """

    def __init__(self, name: ActorName) -> None:
        self.name = name
        self._epoch = 0
        self._addresses: dict[ActorName, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._handlers: dict[type, Handler[Any]] = {}
        self._lost_callbacks: list[Callable[[ActorName], None]] = []
        self._lost: set[tuple[ActorName, str, int]] = set()
        self._held: deque[tuple[int, Any, tuple[int, ...], int]] = deque()
        self._held_bytes = 0
        self._held_due = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._unhandled: set[type] = set()
        self._epoch_waiters: list[asyncio.Future[None]] = []

    @property
    def epoch(self) -> int:
        """The epoch last entered by ``connect``; 0 before the first."""
        return self._epoch

    async def wait_for_epoch(self, epoch: int) -> None:
        """Returns once ``connect`` has entered ``epoch``. Raises ``PacketError`` when a later one was entered instead,
        or the endpoint is closed."""
        while self._epoch < epoch and not self._closed:
            waiter = asyncio.get_running_loop().create_future()
            self._epoch_waiters.append(waiter)
            await waiter
        if self._epoch != epoch or self._closed:
            raise PacketError(f"{self.name} is past epoch {epoch}")

    def _wake_epoch_waiters(self) -> None:
        waiters, self._epoch_waiters = self._epoch_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def on(self, message_type: type[M], handler: Handler[M]) -> None:
        self._handlers[message_type] = handler

    def on_peer_lost(self, callback: Callable[[ActorName], None]) -> None:
        self._lost_callbacks.append(callback)

    def counters(self) -> dict[str, float]:
        with self._counts_lock:
            return {
                f"{what}_total": float(self._counts[what])
                for what in ("messages_sent", "messages_received", "bytes_sent", "messages_dropped")
            }

    def _count(self, what: str, amount: int = 1) -> None:
        with self._counts_lock:
            self._counts[what] += amount

    async def connect(self, wiring: Wiring) -> None:
        """See ``Endpoint.connect``. The epoch changes in the last step, after which nothing is awaited: no message of
        the new epoch is handled before the caller goes on. Calling it again with the same epoch replaces the addresses
        of that epoch, for a peer that was replaced without a new one. Peers that cannot be reached count as lost."""
        if self._closed:
            raise PacketError(f"the endpoint of {self.name} is closed")
        if wiring.epoch < self._epoch:
            raise PacketError(f"epoch {wiring.epoch} is older than the current one ({self._epoch})")
        self._loop = asyncio.get_running_loop()
        unreachable = await self._open(wiring)
        if wiring.epoch > self._epoch:
            self._lost.clear()
        self._epoch = wiring.epoch
        self._addresses = dict(wiring.addresses)
        self._wake_epoch_waiters()
        for peer in unreachable:
            self._loop.call_soon(self._lose, peer, wiring.addresses[peer], "could not be reached")
        if self._held:
            self._held_due = True
            self._loop.call_soon(self._deliver_held)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake_epoch_waiters()
        self._release()
        for _, _, fds, _ in self._held:
            close_fds(fds)
        self._held.clear()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def _open(self, wiring: Wiring) -> list[ActorName]:
        """Reach every peer in ``wiring``; returns those that could not be reached. What is opened must take effect only
        once nothing more can fail, and must be given back when cancelled."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close everything; called once."""
        raise NotImplementedError

    def _receive(self, epoch: int, payload: Any, fds: tuple[int, ...], size: int) -> None:
        """One message in: ``payload`` is what ``_decode`` takes, ``size`` its bytes. Takes over ``fds``."""
        if self._held_due:
            self._deliver_held()
        if self._closed or epoch < self._epoch:
            self._drop(fds)
        elif epoch > self._epoch:
            if self._held_bytes + size > MAX_HELD_BYTES:
                log.error("event=held_overflow actor=%s epoch=%d held_bytes=%d", self.name, epoch, self._held_bytes)
                self._drop(fds)
                return
            self._held.append((epoch, payload, fds, size))
            self._held_bytes += size
        else:
            self._deliver(payload, fds)

    def _deliver_held(self) -> None:
        self._held_due = False
        held, self._held, self._held_bytes = self._held, deque(), 0
        for epoch, payload, fds, size in held:
            self._receive(epoch, payload, fds, size)

    def _drop(self, fds: tuple[int, ...]) -> None:
        self._count("messages_dropped")
        close_fds(fds)

    def _decode(self, payload: Any) -> Any:
        return decode(payload)

    def _deliver(self, payload: Any, fds: tuple[int, ...]) -> None:
        try:
            message = self._decode(payload)
        except PacketError as error:
            log.error("event=undecodable_message actor=%s error=%r", self.name, str(error))
            self._drop(fds)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            if type(message) not in self._unhandled:
                self._unhandled.add(type(message))
                log.warning("event=unhandled_message actor=%s message=%s", self.name, type(message).__name__)
            self._drop(fds)
            return
        self._count("messages_received")
        try:
            outcome = handler(message, fds)
        except Exception:
            log.exception("event=handler_failed actor=%s message=%s", self.name, type(message).__name__)
            return
        if inspect.isawaitable(outcome):
            task = asyncio.ensure_future(self._finish(outcome, type(message).__name__))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, outcome: Any, what: str) -> None:
        try:
            await outcome
        except Exception:
            log.exception("event=handler_failed actor=%s message=%s", self.name, what)

    def _lose(self, peer: ActorName, address: str, why: str) -> None:
        """Tell the callbacks that the process behind ``address`` is gone, unless it is not ``peer`` (any more) or they
        know already."""
        key = (peer, address, self._epoch)
        if self._closed or self._addresses.get(peer) != address or key in self._lost:
            return
        self._lost.add(key)
        log.debug("event=peer_lost actor=%s peer=%s epoch=%d why=%r", self.name, peer, self._epoch, why)
        for callback in self._lost_callbacks:
            try:
                callback(peer)
            except Exception:
                log.exception("event=peer_lost_callback_failed actor=%s peer=%s", self.name, peer)
