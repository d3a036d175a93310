"""Copies to the device from host memory that is not pinned: a thread copies into a ring of pinned buffers, and the copy
engine from there. The thread that launches steps is held up only when it needs what is not there yet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from freetoken.errors import FreeTokenError
from freetoken.execution.cuda.host_memory import PinnedRing

BUFFER_BYTES = 8 << 20
NUM_BUFFERS = 4


class BounceCopy(NamedTuple):
    """From a host address to a device address."""

    destination: int
    source: int
    size_bytes: int


class BounceCopier(Protocol):
    """The copy engine as the thread sees it."""

    def enter(self) -> None:
        """Called on the thread before anything else of a job."""
        ...

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Enqueue one copy, pinned host address to device address. Raises ``FreeTokenError`` when refused."""
        ...

    def mark_buffer(self, number: int) -> None:
        """The buffer is free once the copies so far are done."""
        ...

    def await_buffer(self, number: int) -> None:
        """Wait until the buffer is free, which it is before the first mark."""
        ...


class Bounce:
    """One job at a time. ``settle`` from any thread, all else from one."""

    def __init__(self, copier: BounceCopier, ring: PinnedRing) -> None:
        self._copier = copier
        self._ring = ring
        self._next = 0
        self._thread = ThreadPoolExecutor(1, "bounce")
        self._job: Future[None] | None = None

    def start(self, copies: Sequence[BounceCopy], at_end: Callable[[], None]) -> None:
        """Make these copies in order, then call ``at_end`` on the thread; after the job before, which is forgotten."""
        self.settle()
        self._job = self._thread.submit(self._run, copies, at_end) if copies else None
        if not copies:
            at_end()

    def join(self) -> None:
        """Wait until the job, if there is one, has enqueued its last copy. Raises ``FreeTokenError`` with the reason
        when it could not."""
        error = self.settle()
        if error is not None:
            raise FreeTokenError(f"copying by way of pinned buffers failed: {error}") from error

    def settle(self) -> BaseException | None:
        """Wait until the job enqueues nothing any more; what went wrong with it."""
        job = self._job
        return job.exception() if job is not None else None

    def close(self) -> None:
        """End the thread; idempotent. The ring stays."""
        self._thread.shutdown()

    def _run(self, copies: Sequence[BounceCopy], at_end: Callable[[], None]) -> None:
        self._copier.enter()
        step = self._ring.buffer_bytes
        for copy in copies:
            for start in range(0, copy.size_bytes, step):
                size = min(step, copy.size_bytes - start)
                number, self._next = self._next, (self._next + 1) % self._ring.num_buffers
                buffer = self._ring.address(number)
                self._copier.await_buffer(number)
                ctypes.memmove(buffer, copy.source + start, size)  # without the interpreter's lock
                self._copier.copy(copy.destination + start, buffer, size)
                self._copier.mark_buffer(number)
        at_end()
