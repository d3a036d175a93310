"""Fills the store: every data file into a shared segment of its own, each byte read once and checked once.

Two files are under way at any time, so that the checksums of one are computed while the next is being read. The bytes
go from the disk straight into the segment (O_DIRECT) or, where the file system refuses that, through the page cache,
which is emptied behind the read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from freetoken._native import DirectReader, SharedSegment, crc32c_ranges
from freetoken.checkpoint.ftw import FILE_ALIGNMENT_BYTES, FtwIndex
from freetoken.checkpoint.verify import Checked, checked_ranges
from freetoken.errors import CapacityError, CheckpointError, FreeTokenError
from freetoken.units import format_bytes

_FILES_UNDER_WAY = 2
_MAX_CHECK_THREADS = 4


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """``used_direct`` when any byte bypassed the page cache; ``num_checked`` tensors and records had their checksum
    compared."""

    num_bytes: int
    seconds: float
    used_direct: bool
    num_checked: int

    @property
    def gbps(self) -> float:
        """10^9 bytes a second, checksums included."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


class StoreLoader:
    """One load. ``run`` blocks; ``progress`` and ``cancel`` may be called from other threads meanwhile."""

    def __init__(
        self,
        index: FtwIndex,
        *,
        threads: int = 4,
        chunk_bytes: int = 8 * 1024**2,
        direct: bool = True,
        verify: bool = True,
    ) -> None:
        self._index = index
        self._threads = threads
        self._chunk_bytes = max(FILE_ALIGNMENT_BYTES, chunk_bytes // FILE_ALIGNMENT_BYTES * FILE_ALIGNMENT_BYTES)
        self._direct = direct
        self._ranges: list[list[Checked]] = [[] for _ in index.files]
        if verify:
            for checked in checked_ranges(index):
                self._ranges[checked.file_index].append(checked)
        self._lock = threading.Lock()
        self._readers: list[DirectReader] = []  # under way; each has threads of its own
        self._read_bytes = 0  # of files that are complete
        self._used_direct = False
        self._cancelled = False
        self.figures: LoadFigures | None = None

    def progress(self) -> int:
        """Bytes read so far."""
        with self._lock:
            return self._read_bytes + sum(reader.progress() for reader in self._readers)

    def cancel(self) -> None:
        """Make ``run`` end soon, with an error unless it was done already. Returns at once."""
        with self._lock:
            self._cancelled = True
            for reader in self._readers:
                reader.cancel()

    def run(self) -> list[SharedSegment]:
        """The segments in the order of ``index.files``, complete, each named like its file.

        Raises ``CheckpointError`` naming file and record or tensor when something cannot be read or a checksum differs,
        ``CapacityError`` when memory is short, ``FreeTokenError`` after ``cancel``. On failure nothing is kept.
        """
        started = time.monotonic()
        with ThreadPoolExecutor(_FILES_UNDER_WAY, "store-loader") as pool:
            tasks = [pool.submit(self._load_file, number) for number in range(len(self._index.files))]
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            errors = [task.exception() for task in tasks if task in done and task.exception() is not None]
            if errors:
                self.cancel()
                for task in tasks:
                    task.cancel()
                raise _most_telling(errors)
        segments = [task.result() for task in tasks]
        self.figures = LoadFigures(
            num_bytes=self._index.store_bytes,
            seconds=time.monotonic() - started,
            used_direct=self._used_direct,
            num_checked=sum(len(ranges) for ranges in self._ranges),
        )
        return segments

    def _load_file(self, number: int) -> SharedSegment:
        file = self._index.files[number]
        path = self._index.path / file.name
        try:
            segment = SharedSegment.create(file.name, file.size_bytes)
            # In one go this costs a quarter less kernel time than page by page under the reads, and a shortage is an
            # error here instead of a signal there.
            os.posix_fallocate(segment.fd, 0, file.size_bytes)
        except (OSError, MemoryError) as error:
            raise CapacityError(
                f"cannot allocate {format_bytes(file.size_bytes)} for {path} "
                f"(the whole store takes {format_bytes(self._index.store_bytes)}): {error}"
            ) from error
        reader = DirectReader(self._threads, self._chunk_bytes, self._direct)
        with self._lock:
            if self._cancelled:
                raise _CancelledError("loading was cancelled")
            self._readers.append(reader)
        try:
            reader.submit(str(path), file.size_bytes, segment)
            reader.wait()
        except (OSError, ValueError) as error:  # ValueError: cancelled between append and submit
            if self._cancelled:
                raise _CancelledError("loading was cancelled") from error
            raise CheckpointError(f"cannot be read completely: {error}") from error
        with self._lock:
            self._readers.remove(reader)
            self._read_bytes += file.size_bytes
            self._used_direct = self._used_direct or reader.used_direct
        self._check(number, segment)
        return segment

    def _check(self, number: int, segment: SharedSegment) -> None:
        ranges = self._ranges[number]
        if not ranges:
            return
        found = crc32c_ranges(
            segment,
            np.array([r.offset_bytes for r in ranges], np.int64),
            np.array([r.size_bytes for r in ranges], np.int64),
            min(_MAX_CHECK_THREADS, len(os.sched_getaffinity(0))),
        )
        bad = np.flatnonzero(found != np.array([r.crc32c for r in ranges], np.uint32))
        if len(bad):
            first = ranges[int(bad[0])]
            more = f" ({len(bad)} damaged in this file)" if len(bad) > 1 else ""
            raise CheckpointError(
                f"{first.what}: checksum is {int(found[bad[0]]):08x}, the index says {first.crc32c:08x}{more}; "
                "the file is damaged, convert again"
            )


class _CancelledError(FreeTokenError):
    """Follows from another error or from ``cancel``; never the interesting one."""


def _most_telling(errors: Sequence[BaseException | None]) -> BaseException:
    real = [error for error in errors if error is not None and not isinstance(error, _CancelledError)]
    return real[0] if real else FreeTokenError("loading was cancelled")
