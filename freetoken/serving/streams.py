"""The way of tokens from the Scheduler's batches to the request handlers that wait for them.

Everything here runs on the front's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from freetoken.messages import RequestFailure, TokenBatch, TokenDelta
from freetoken.serving.errors import busy, unavailable

MAX_PENDING_TOKENS = 16384
"""Tokens of one API request that may wait for a client that reads slower than the engine writes."""


class Inbox:
    """What has arrived for one API request (all its choices) and was not taken yet. One reader."""

    def __init__(self, max_pending_tokens: int = MAX_PENDING_TOKENS) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_pending_tokens = max_pending_tokens
        self._deltas: list[TokenDelta] = []
        self.pending_tokens = 0
        self._failure: RequestFailure | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self.on_overflow: Callable[[], None] | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add what arrived. Beyond the bound the request fails (``slow_client``), and ``on_overflow`` is called because
        the reader is likely stuck in a write."""
        self.pending_tokens += len(delta.token_ids)
        if self.pending_tokens > self._max_pending_tokens:
            self.fail(
                RequestFailure(
                    "slow_client",
                    f"the client left more than {self._max_pending_tokens} generated tokens unread",
                )
            )
            if self.on_overflow is not None:
                self.on_overflow()
            return
        self._deltas.append(delta)
        self._wake()

    def fail(self, failure: RequestFailure) -> None:
        """End the request: what has not been taken is dropped, and ``take`` reports the failure from now on."""
        if self._failure is None:
            self._failure = failure
        self._deltas.clear()
        self._wake()

    async def take(self, silence_s: float) -> list[TokenDelta] | RequestFailure:
        """All deltas since the last call, waiting for at least one; an empty list after ``silence_s`` without any."""
        if not self._deltas and self._failure is None:
            self._arm(silence_s)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            return self._failure
        deltas, self._deltas = self._deltas, []
        self.pending_tokens = 0
        return deltas

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, silence_s: float) -> None:
        """One timer serves many waits: it is only moved when it would fire too late, and looks again when it fires."""
        self._deadline = self._loop.time() + silence_s
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._silent)

    def _silent(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._silent)
        else:
            self._waiter.set_result(None)


class RequestStreams:
    """All requests between this front and the Scheduler, by request id. ``max_requests`` bounds them."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._inboxes: dict[str, Inbox] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.unknown_deltas_total = 0
        self._busy_since_s = 0.0

    def __len__(self) -> int:
        return len(self._inboxes)

    def open(self, request_ids: Sequence[str]) -> Inbox:
        """One inbox for all of these. Raises 429 when they would exceed the bound."""
        if len(self._inboxes) + len(request_ids) > self.max_requests:
            raise busy(
                f"{len(self._inboxes)} sequences are running or waiting and {len(request_ids)} more were requested; "
                f"this server holds {self.max_requests}"
            )
        if not self._inboxes:
            self._busy_since_s = time.monotonic()
        inbox = Inbox()
        for request_id in request_ids:
            self._inboxes[request_id] = inbox
        self._idle.clear()
        return inbox

    @property
    def pending_tokens(self) -> int:
        """Tokens that arrived and were not taken yet, of requests under way."""
        return sum(inbox.pending_tokens for inbox in set(self._inboxes.values()))

    @property
    def busy_since_s(self) -> float | None:
        """``time.monotonic()`` since when requests have been under way without a pause; None when none is."""
        return self._busy_since_s if self._inboxes else None

    def forget(self, request_id: str) -> bool:
        """No more deltas are wanted. True when the request was still under way, as far as is known here."""
        known = self._inboxes.pop(request_id, None) is not None
        if not self._inboxes:
            self._idle.set()
        return known

    def deliver(self, batch: TokenBatch) -> None:
        """Hand out a batch. Requests that are unknown (already given up) are ignored."""
        for delta in batch.deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                self.unknown_deltas_total += 1
                continue
            if delta.finish_reason is not None:
                self.forget(delta.request_id)
            inbox.put(delta)

    def fail_all(self, failure: RequestFailure) -> None:
        """End every request under way. The Scheduler is not told: it is gone, paused or failing them itself."""
        inboxes = set(self._inboxes.values())
        self._inboxes.clear()
        self._idle.set()
        for inbox in inboxes:
            inbox.fail(failure)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False when some still are after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True


class Gate:
    """Whether new requests may go to the Scheduler."""

    def __init__(self) -> None:
        self._closed_because = "the engine is loading"
        self._code = "engine_loading"
        self._open = False
        self._retry_after_s = 2.0

    @property
    def is_open(self) -> bool:
        """True while requests are accepted."""
        return self._open

    @property
    def reason(self) -> str:
        """Why the gate is closed; empty when it is open."""
        return "" if self._open else self._closed_because

    def open(self) -> None:
        """Accept requests."""
        self._open = True

    def close(self, reason: str, code: str, retry_after_s: float = 2.0) -> None:
        """Refuse requests with 503 from now on."""
        self._open = False
        self._closed_because, self._code, self._retry_after_s = reason, code, retry_after_s

    def check(self) -> None:
        """Raises 503 while closed."""
        if not self._open:
            raise unavailable(self._closed_because, self._code, self._retry_after_s)
