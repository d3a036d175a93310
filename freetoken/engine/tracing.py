"""The Controller's part in recording routes: ExpertCache does it, and the Controller tells what became of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from freetoken.engine.lifecycle import ActorHandle
from freetoken.errors import FreeTokenError, PeerLostError
from freetoken.experts.route_trace import measure_trace
from freetoken.messages import ActorName, TraceRecording, TraceWish

log = logging.getLogger(__name__)

_GONE = "ExpertCache ended; the file has what was recorded until then"


class RouteTracing:
    """``find`` returns ExpertCache, or None while it is being replaced.

    A recording ends with the process that makes it: the slots that the next one begins with are not those of the
    trace. A new Controller learns of a recording from ExpertCache.
    """

    def __init__(self, find: Callable[[], ActorHandle | None]) -> None:
        self._find = find
        self._last: TraceRecording | None = None

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """The recording under way or the last one, after ``wish`` was granted. Raises ``ConfigError`` and
        ``TraceBusyError``, and ``PeerLostError`` when there is nobody to begin a recording."""
        handle = self._find()
        answer: TraceRecording | None = None
        try:
            if handle is None:
                raise PeerLostError(str(ActorName.EXPERT_CACHE), "it is being replaced")
            answer = await handle.trace(wish)
        except PeerLostError:
            if wish.action == "start":
                raise
        self._last = answer if answer is not None else await self._what_is_left()
        return self._last

    async def _what_is_left(self) -> TraceRecording | None:
        last = self._last
        if last is None or last.ended:
            return last
        try:
            info, publishes, rows, num_bytes = await asyncio.to_thread(measure_trace, last.path)
        except (OSError, FreeTokenError) as error:
            log.warning("event=trace_lost path=%s error=%r", last.path, str(error))
            return dataclasses.replace(last, num_bytes=0, publishes=0, tokens=0.0, ended=f"{_GONE} ({error})")
        return dataclasses.replace(
            last, num_bytes=num_bytes, publishes=publishes, tokens=rows / info.num_layers, ended=_GONE
        )
