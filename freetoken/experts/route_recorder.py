"""A trace file that grows while the engine serves; a thread of its own drains the cache server and writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from freetoken._native import CacheServer
from freetoken.experts.route_trace import TraceInfo, encode_header, measure_records
from freetoken.messages import TraceRecording

logger = logging.getLogger(__name__)


class RouteRecorder:
    """Used on the event loop. What the thread counts may be read at any time.

    ``ended`` becomes the reason when the file is full, the disk fails, or ``close`` was called; nothing is written
    after that. The server's ring bounds what waits to be written.
    """

    def __init__(self, info: TraceInfo, path: str, max_bytes: int) -> None:
        self.path = str(Path(path).absolute())
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.publishes = 0
        self.unrecorded = 0
        self.ended = ""
        self._info = info
        self._rows = 0
        self._started_s = time.time()
        self._ended_s: float | None = None
        self._file: BinaryIO | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="route-trace")

    async def open(self) -> None:
        """Make the file, which must not exist. Raises ``OSError``."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._open)))
        except BaseException:
            self._thread.submit(self._discard)
            self._thread.shutdown(wait=False)
            raise

    def record(self, server: CacheServer) -> asyncio.Future[None]:
        """Write what ``server`` has logged since the last time; done when that is in the file."""
        return asyncio.shield(asyncio.wrap_future(self._thread.submit(self._record, server)))

    def close(self, why: str) -> asyncio.Future[None]:
        """After what was to be recorded before; done when the file is complete."""
        closed = asyncio.shield(asyncio.wrap_future(self._thread.submit(self._close, why)))
        self._thread.shutdown(wait=False)
        return closed

    def describe(self, unrecorded: int) -> TraceRecording:
        """The recording so far."""
        return TraceRecording(
            self.path,
            self._info.model,
            self._started_s,
            (self._ended_s or time.time()) - self._started_s,
            self.num_bytes,
            self.max_bytes,
            self.publishes,
            self._rows / self._info.num_layers,
            unrecorded,
            self.ended,
        )

    # ------------------------------------------------------------------------------------------ on the thread

    def _open(self) -> None:
        self._file = Path(self.path).open("xb", buffering=0)  # noqa: SIM115 - open until the recording ends
        self._write(encode_header(self._info))

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):
                Path(self.path).unlink()

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.num_bytes += len(data)

    def _record(self, server: CacheServer) -> None:
        data = server.drain_routes()
        if self.ended or not data:
            return
        publishes, rows, end = measure_records(data, self.max_bytes - self.num_bytes)
        try:
            self._write(memoryview(data)[:end])
        except OSError as error:
            self._end(f"the file cannot be written: {error.strerror or error}")
            return
        self.publishes += publishes
        self._rows += rows
        if end < len(data):
            self._end(f"the limit of {self.max_bytes} bytes was reached")

    def _end(self, why: str) -> None:
        self._ended_s = time.time()
        self.ended = why

    def _close(self, why: str) -> None:
        if not self.ended:
            self._end(why)
        assert self._file is not None
        try:
            self._file.truncate(self.num_bytes)  # what was written of a record before the disk failed
            self._file.close()
        except OSError as error:
            self._end(f"{self.ended}; the file may be incomplete: {error.strerror or error}")
        logger.info("event=recorded path=%s bytes=%d why=%r", self.path, self.num_bytes, self.ended)
