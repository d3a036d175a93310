"""Server-sent events: framing, keep-alive, and the loop that streams a generation in any dialect."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

import orjson
from aiohttp import web

from freetoken.serving.errors import ApiError, internal
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.usage import Usage

logger = logging.getLogger(__name__)

FIRST_GRACE_S = 0.05
"""An engine that refuses a request does so at once. Until this time has passed the response has not begun, and the
refusal still gets its own HTTP status."""

KEEPALIVE_COMMENT = b": keep-alive\n\n"
HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(data: Any, name: str | None = None) -> bytes:
    """One event with a JSON payload, framed."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


News = TypeVar("News")


class StreamSource(Protocol[News]):
    """What is streamed: a ``Generation`` or a ``Reply``. Entering submits it, leaving ends it."""

    @property
    def done(self) -> bool: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def on_unread(self, callback: Callable[[], None]) -> None: ...

    async def next(self, silence_s: float) -> list[News]: ...

    async def settle(self) -> None: ...

    def usage(self) -> Usage: ...


class StreamDialect(Protocol[News]):
    """How an API writes a stream. Every method returns framed bytes, possibly of several events or none."""

    def keepalive(self) -> bytes:
        """Something that keeps clients from giving up; they may count events only, not comments."""
        ...

    def begin(self) -> bytes:
        """Before the first token."""
        ...

    def deltas(self, deltas: list[News]) -> bytes:
        """News of one or several choices."""
        ...

    def end(self, usage: Usage) -> bytes:
        """After the last token."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Instead of the rest; the last thing that is sent."""
        ...


async def stream(
    request: web.Request,
    generation: StreamSource[News],
    dialect: StreamDialect[News],
    keepalive_s: float,
    headers: Mapping[str, str] = HEADERS,
) -> web.StreamResponse:
    """Run ``generation`` and stream it to the client.

    Errors before the first byte are raised (``ApiError``); later ones end the stream with the dialect's error event. A
    client that leaves, or that does not read, ends the generation.
    """
    async with generation:
        generation.on_unread(functools.partial(_disconnect, request))
        news = await generation.next(FIRST_GRACE_S)
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            await _pump(response, generation, dialect, keepalive_s, news)
        except ConnectionError:
            raise
        except ApiError as error:
            logger.info("event=stream_failed request=%s error=%r", REQUEST_ID.get(), str(error))
            await response.write(dialect.error(error))
        except Exception:
            logger.exception("event=stream_failed request=%s", REQUEST_ID.get())
            await response.write(dialect.error(internal(REQUEST_ID.get())))
        await response.write_eof()
        return response


def _disconnect(request: web.Request) -> None:
    """Drop the connection, which cancels the handler even if it waits for the client to read."""
    if request.transport is not None:
        logger.info("event=client_does_not_read request=%s", REQUEST_ID.get())
        request.transport.abort()


async def _pump(
    response: web.StreamResponse,
    generation: StreamSource[News],
    dialect: StreamDialect[News],
    keepalive_s: float,
    news: list[News],
) -> None:
    await response.write(dialect.begin() + dialect.deltas(news))
    written_s = time.monotonic()
    while not generation.done:
        news = await generation.next(max(0.0, keepalive_s - (time.monotonic() - written_s)))
        if news:
            data = dialect.deltas(news)
        elif time.monotonic() - written_s >= keepalive_s:
            data = dialect.keepalive()
        else:
            continue
        await response.write(data)
        written_s = time.monotonic()
    await generation.settle()
    await response.write(dialect.end(generation.usage()))
