"""What happens with the routes that a cache server keeps: a trace file, and shadow caches beside the real one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from freetoken._native import CacheServer
from freetoken.errors import ConfigError, TraceBusyError
from freetoken.experts.cache_baselines import belady, plain_lru
from freetoken.experts.route_recorder import RouteRecorder
from freetoken.experts.route_trace import TraceInfo, decode_records
from freetoken.experts.trace_files import DEFAULT_MAX_BYTES
from freetoken.messages import TraceRecording
from freetoken.tasks import repeat, spawn

logger = logging.getLogger(__name__)

RECORD_INTERVAL_S = 0.05
SHADOW_INTERVAL_S = 10.0
SHADOW_LAYERS = 2
SHADOW_PUBLISHES = 1024
"""Of the sampled layers in one comparison, and before it, to warm the shadows up."""


class RouteWatch:
    """Drains the server of the current epoch. Used on the event loop; files and shadows are on threads beside it.

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
        self._recorder: RouteRecorder | None = None
        self._last: RouteRecorder | None = None
        self._closed: asyncio.Future[None] | None = None  # of the last one's file
        self._opening = asyncio.Lock()
        self._dropped = 0  # of earlier epochs
        self._dropped_before = 0  # the recording began
        self._recent: list[NDArray[np.int64]] = []  # uses of sampled publishes, not compared yet
        self._before: list[NDArray[np.int64]] = []  # and compared
        self._counted: NDArray[np.int64] | None = None
        self._ratios: dict[str, float] = {}
        self._compare_due_s = 0.0
        self._failures = 0

    @property
    def is_recording(self) -> bool:
        """Whether routes go into a file."""
        return self._recorder is not None and not self._recorder.ended

    def check_idle(self) -> None:
        """Raises ``TraceBusyError`` while routes are recorded."""
        if self._recorder is not None and not self._recorder.ended:
            raise TraceBusyError(f"routes are being recorded to {self._recorder.path} already; stop that first")

    def attach(self, server: CacheServer) -> None:
        """Of a new epoch; it was just started."""
        self._server = server
        self._counted = None
        self._set_mode()
        self._restart()

    def detach(self) -> None:
        """The server has stopped: what it still has goes into the trace."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        server, self._server = self._server, None
        if server is None:
            return
        self._dropped += server.dropped_routes
        if self._recorder is not None:
            self._recorder.record(server)
        else:
            self._sample(server.drain_routes())

    async def start_recording(self, path: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Write what is published from now on to ``path``, which must not exist, until it would exceed ``max_bytes``.
        Goes on over epochs. Raises ``ConfigError``, and ``TraceBusyError`` while another is recorded."""
        async with self._opening:
            self.check_idle()
            if self._recorder is not None:
                self._finish("")
            if self._closed is not None:  # it still drains the server
                await asyncio.shield(self._closed)
            recorder = RouteRecorder(self.info, path, max_bytes)
            try:
                await recorder.open()
            except OSError as error:
                raise ConfigError(f"routes cannot be recorded to {path!r}: {error.strerror or error}") from error
            if self._server is not None:
                self._sample(self._server.drain_routes())
            self._recorder = recorder
            self._dropped_before = self._all_dropped()
            self._set_mode()
            if self._server is not None:  # its task may be in a long sleep
                self._restart()
        logger.info("event=recording path=%s max_bytes=%d", path, max_bytes)

    async def stop_recording(self) -> None:
        """Returns when the file is complete. Nothing happens without one."""
        if self._recorder is not None:
            self._finish("stopped")
        if self._closed is not None:
            await asyncio.shield(self._closed)

    async def recording(self) -> TraceRecording | None:
        """The recording under way, or else the last one."""
        if self._recorder is not None:
            return self._recorder.describe(self._all_dropped() - self._dropped_before)
        if self._last is None or self._closed is None:
            return None
        last = self._last
        await asyncio.shield(self._closed)
        return last.describe(last.unrecorded)

    def _finish(self, why: str) -> None:
        """Nothing more is logged for the file, which is closed once it has all that was; then shadows are kept
        again."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.unrecorded = self._all_dropped() - self._dropped_before
        if self._server is not None:
            self._server.log_routes("off", self._layers)
            recorder.record(self._server)
        self._last, self._closed = recorder, recorder.close(why)
        self._closed.add_done_callback(lambda _: self._resume_sampling())

    def _resume_sampling(self) -> None:
        self._recent.clear()
        self._set_mode()
        if self._server is not None:  # there are no shadows of what was recorded
            self._counted = self._server.layer_counters()[self._layers]

    def _all_dropped(self) -> int:
        return self._dropped + (self._server.dropped_routes if self._server is not None else 0)

    def _set_mode(self) -> None:
        if self._server is not None:
            wants_shadows = self._num_slots() > 0
            mode = "all" if self._recorder is not None else "sample" if wants_shadows else "off"
            self._server.log_routes(mode, self._layers)

    def _restart(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._compare_due_s = asyncio.get_running_loop().time() + SHADOW_INTERVAL_S
        self._task = spawn(repeat(self._look, self._interval_s, "route watch"), "route watch")

    def _interval_s(self) -> float:
        return RECORD_INTERVAL_S if self._recorder is not None else SHADOW_INTERVAL_S

    async def _look(self) -> None:
        try:
            await self._take_routes()
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._compare_due_s:
                self._compare_due_s = now_s + SHADOW_INTERVAL_S
                await self.compare()
        except Exception:
            self._failures += 1
            raise

    async def _take_routes(self) -> None:
        server, recorder = self._server, self._recorder
        if server is None:
            return
        if recorder is not None:
            await recorder.record(server)  # the next only after this one, so that a slow disk lets the ring fill up
            if recorder.ended and recorder is self._recorder:
                self._finish("")
        elif self._closed is None or self._closed.done():
            self._sample(server.drain_routes())

    def _sample(self, data: bytes) -> None:
        """Keep what the shadows are to see."""
        if not data:
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
        recorder = self._recorder or self._last
        return {
            "recording": float(self.is_recording),
            "recorded_bytes": float(recorder.num_bytes if recorder is not None else 0),
            "unrecorded_publishes_total": float(self._all_dropped()),
            "route_watch_failures_total": float(self._failures),
            **self._ratios,
        }


def _shadows(before: list[NDArray[np.int64]], recent: list[NDArray[np.int64]], num_slots: int) -> tuple[float, float]:
    uses = [*before, *recent]
    total = max(sum(len(records) for records in recent), 1)
    lru, best = (int(policy(uses, num_slots)[len(before) :, 0].sum()) for policy in (plain_lru, belady))
    return lru / total, best / total
