"""What happens with the routes that a cache server keeps: a trace file, and shadow caches beside the real one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from freetoken._native import CacheServer
from freetoken.errors import ConfigError
from freetoken.experts.cache_baselines import belady, plain_lru
from freetoken.experts.route_trace import TraceInfo, decode_records, encode_header

logger = logging.getLogger(__name__)

RECORD_INTERVAL_S = 0.05
SHADOW_INTERVAL_S = 10.0
SHADOW_LAYERS = 2
SHADOW_PUBLISHES = 1024
"""Of the sampled layers in one comparison, and before it, to warm the shadows up."""
DEFAULT_MAX_BYTES = 256 << 20


class RouteWatch:
    """Drains the server of the current epoch; used on the event loop, files and shadows on threads beside it.

    Shadows: plain LRU and Belady over the decode publishes of a few layers, with those layers' share of the slots.
    Beside them stands what the real cache hit in the same layers and time. There are none while a trace is recorded.
    """

    def __init__(self, info: TraceInfo, num_slots: Callable[[], int]) -> None:
        self.info = info
        self._num_slots = num_slots
        step = max(info.num_layers // SHADOW_LAYERS, 1)
        self._layers = list(range(step // 2, info.num_layers, step))[:SHADOW_LAYERS]
        self._server: CacheServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._file: BinaryIO | None = None
        self._path = ""
        self._max_bytes = 0
        self._bytes = 0
        self._dropped = 0  # of earlier epochs
        self._recent: list[NDArray[np.int64]] = []  # uses of sampled publishes, not compared yet
        self._before: list[NDArray[np.int64]] = []  # and compared
        self._counted: NDArray[np.int64] | None = None
        self._ratios: dict[str, float] = {}

    @property
    def is_recording(self) -> bool:
        """Whether a trace file is open."""
        return self._file is not None

    def attach(self, server: CacheServer) -> None:
        """Of a new epoch; it was just started."""
        self._server = server
        self._counted = None
        self._set_mode()
        self._task = asyncio.ensure_future(self._run())

    def detach(self) -> None:
        """The server has stopped: what it still has goes into the trace."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        server, self._server = self._server, None
        if server is not None:
            self._take(server.drain_routes())
            self._dropped += server.dropped_routes

    def start_recording(self, path: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Write what is published from now on to ``path``, which must not exist, until it would exceed ``max_bytes``.
        Goes on over epochs. Raises ``ConfigError``."""
        if self._file is not None:
            raise ConfigError(f"routes are being recorded to {self._path} already")
        if self._server is not None:
            self._take(self._server.drain_routes())  # sampled before
        header = encode_header(self.info)
        try:
            self._file = Path(path).open("xb")  # noqa: SIM115 - open until the recording ends
            self._file.write(header)
            self._file.flush()
        except OSError as error:
            self._file = None
            raise ConfigError(f"routes cannot be recorded to {path!r}: {error.strerror or error}") from error
        self._path, self._max_bytes, self._bytes = path, max_bytes, len(header)
        self._set_mode()
        if self._server is not None:  # its task may be in a long sleep
            self._restart()
        logger.info("event=recording path=%s max_bytes=%d", path, max_bytes)

    def stop_recording(self) -> None:
        """The file is complete. Nothing happens without one."""
        if self._file is None:
            return
        if self._server is not None:
            self._take(self._server.drain_routes())
        self._finish("stopped")

    def _finish(self, why: str) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            why = f"{why}: {error}"
        self._set_mode()
        if self._server is not None:  # there are no shadows of what was recorded
            self._counted = self._server.layer_counters()[self._layers]
            self._recent.clear()
        logger.info(
            "event=recorded path=%s bytes=%d dropped=%d why=%r", self._path, self._bytes, self._all_dropped(), why
        )

    def _all_dropped(self) -> int:
        return self._dropped + (self._server.dropped_routes if self._server is not None else 0)

    def _set_mode(self) -> None:
        if self._server is not None:
            wants_shadows = self._num_slots() > 0
            mode = "all" if self._file is not None else "sample" if wants_shadows else "off"
            self._server.log_routes(mode, self._layers)

    def _restart(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + SHADOW_INTERVAL_S
        while True:
            await asyncio.sleep(RECORD_INTERVAL_S if self._file is not None else SHADOW_INTERVAL_S)
            if self._server is None:
                return
            self._take(self._server.drain_routes())
            if loop.time() >= due_s:
                due_s = loop.time() + SHADOW_INTERVAL_S
                await self.compare()

    def _take(self, data: bytes) -> None:
        """Into the file, or else into the sample. ``max_bytes`` bounds the disk, the server's ring the memory."""
        if not data:
            return
        if self._file is not None:
            if self._bytes + len(data) > self._max_bytes:
                self._finish(f"the limit of {self._max_bytes} bytes was reached")
            else:
                try:
                    self._file.write(data)
                    self._file.flush()
                    self._bytes += len(data)
                except OSError as error:
                    self._finish(f"{error.strerror or error}")
            return
        trace = decode_records(self.info, data)
        sampled = np.isin(trace.layers, self._layers) & (trace.token_counts <= 64)
        self._recent += [uses for uses, chosen in zip(trace.uses(), sampled, strict=True) if chosen]
        del self._recent[:-SHADOW_PUBLISHES]

    async def compare(self) -> None:
        """Run the shadows over what was published since the last time."""
        server, num_slots = self._server, self._num_slots()
        recent, before = self._recent, self._before
        if server is None or not recent or num_slots == 0:
            return
        counted = server.layer_counters()[self._layers]
        last, self._counted = self._counted, counted
        self._recent, self._before = [], recent
        share = round(num_slots * len(self._layers) / self.info.num_layers)
        lru, best = await asyncio.to_thread(_shadows, before, recent, share)
        self._ratios = {"shadow_lru_hit_ratio": lru, "shadow_belady_hit_ratio": best}
        real = (counted - last if last is not None else counted).sum(axis=0)
        if real.sum() > 0:
            self._ratios["sampled_hit_ratio"] = float(real[0] / real.sum())

    def figures(self) -> dict[str, float]:
        """For metrics. Hit ratios are those of the last comparison."""
        return {
            "recording": float(self.is_recording),
            "recorded_bytes": float(self._bytes),
            "unrecorded_publishes_total": float(self._all_dropped()),
            **self._ratios,
        }


def _shadows(before: list[NDArray[np.int64]], recent: list[NDArray[np.int64]], num_slots: int) -> tuple[float, float]:
    uses = [*before, *recent]
    total = max(sum(len(records) for records in recent), 1)
    lru, best = (int(policy(uses, num_slots)[len(before) :, 0].sum()) for policy in (plain_lru, belady))
    return lru / total, best / total
