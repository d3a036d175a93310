"""Ends steps that do not end: when the mailbox's words stand still for too long, it is aborted and all waits fall
through."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that sleeps while no step runs. ``progress`` changes while steps advance; ``on_late`` is called once per
    standstill of ``limit_s``, on the watchdog's thread."""

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], Hashable],
        on_late: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._progress = progress
        self._on_late = on_late
        self._clock = clock
        self._condition = threading.Condition()
        self._running = 0
        self._changed = 0  # a step began or ended
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ft-watchdog", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A step was enqueued."""
        with self._condition:
            self._running += 1
            self._changed += 1
            if self._running == 1:
                self._condition.notify_all()

    def end(self) -> None:
        """A step is over."""
        with self._condition:
            self._running -= 1
            self._changed += 1

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._running > 0 or self._closed)
            seen: Hashable = None
            since = self._clock()
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._closed, self._limit_s / 8)
                    if self._closed:
                        return
                    if self._running == 0:
                        break
                    now: Hashable = (self._changed, self._progress())
                if now != seen:
                    seen, since = now, self._clock()
                elif self._clock() - since >= self._limit_s:
                    logger.error("event=step_stuck seconds=%.1f", self._clock() - since)
                    self._on_late()
                    seen, since = None, self._clock()
