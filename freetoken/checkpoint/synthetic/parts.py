"""A checkpoint's files as parts that can be made in any order, and writing them.

A part is a run of bytes of one file and the way to make it. Everything is written beside its destination and moved
there when it is complete and flushed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.synthetic.parallel import for_each
from freetoken.errors import CheckpointError
from freetoken.units import format_bytes

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is being written)."""


@dataclass(frozen=True, slots=True)
class Part:
    """``size_bytes`` at ``offset_bytes`` of ``file``; ``make`` returns an array of that many bytes."""

    file: str
    offset_bytes: int
    size_bytes: int
    what: str
    make: Callable[[], NDArray[Any]]


class Counter:
    """Progress reported from several threads."""

    def __init__(self, progress: Progress | None, total_bytes: int, done_bytes: int = 0) -> None:
        self._progress = progress or (lambda done, total, what: None)
        self._total = total_bytes
        self._done = done_bytes
        self._lock = Lock()

    def add(self, count: int, what: str) -> None:
        """Report ``count`` more bytes."""
        with self._lock:
            self._done += count
            self._progress(self._done, self._total, what)


def write_files(
    directory: Path,
    sizes: Mapping[str, int],
    parts: Iterable[Part],
    num_threads: int,
    progress: Progress | None = None,
) -> None:
    """Create files of ``sizes`` in ``directory`` and fill them with ``parts``, several at a time, flushed at the end.

    Memory: one part a thread. Raises ``CheckpointError`` when the space does not suffice or the system refuses.
    """
    free = shutil.disk_usage(directory).free
    total = sum(sizes.values())
    if total > free:
        raise CheckpointError(
            f"{directory}: {format_bytes(total)} are needed on this file system, {format_bytes(free)} are free"
        )
    counter = Counter(progress, total)
    fds: dict[str, int] = {}
    try:
        for name, size in sizes.items():
            fds[name] = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            os.ftruncate(fds[name], size)

        def write(part: Part) -> None:
            data = np.ascontiguousarray(part.make()).data.cast("B")
            if len(data) != part.size_bytes:
                raise CheckpointError(f"{part.what} has {len(data)} bytes, {part.size_bytes} were planned")
            offset = part.offset_bytes
            while len(data):
                written = os.pwrite(fds[part.file], data, offset)
                data, offset = data[written:], offset + written
            counter.add(part.size_bytes, part.what)

        for_each(write, parts, num_threads)
        for fd in fds.values():
            os.fsync(fd)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot write: {error.strerror or error}") from error
    finally:
        for fd in fds.values():
            os.close(fd)


def interleave(runs: Iterable[list[Part]]) -> list[Part]:
    """One part of each run, then the second of each, and so on: neighbours in the result then go to different files,
    where writers do not wait for each other."""
    waiting = [iter(run) for run in runs]
    result = []
    while waiting:
        still = []
        for run in waiting:
            if (part := next(run, None)) is not None:
                result.append(part)
                still.append(run)
        waiting = still
    return result
