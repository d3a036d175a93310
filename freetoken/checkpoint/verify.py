"""Reading a whole FTW checkpoint and comparing every checksum."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.integrity import crc32c

_CHUNK_BYTES = 8 * 1024**2
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Checked:
    """One checksummed range of a data file."""

    file_index: int
    offset_bytes: int
    size_bytes: int
    crc32c: int
    what: str


@dataclass(slots=True)
class VerifyReport:
    """``problems`` has one line for each damaged record or tensor, naming its file; empty when all is well."""

    num_records: int
    num_tensors: int
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def checked_ranges(index: FtwIndex) -> list[Checked]:
    """Everything in the data files that has a checksum, in file order."""
    ranges = [
        Checked(t.file_index, t.offset_bytes, t.size_bytes, t.crc32c, index.describe_tensor(t.name))
        for t in index.tensors.values()
    ]
    for layer, expert in np.ndindex(*index.record_file.shape):
        ranges.append(
            Checked(
                int(index.record_file[layer, expert]),
                int(index.record_offset[layer, expert]),
                index.layout_of(layer).stride_bytes,
                int(index.record_crc32c[layer, expert]),
                index.describe_record(layer, expert),
            )
        )
    return sorted(ranges, key=lambda r: (r.file_index, r.offset_bytes))


def verify_checkpoint(path: str | Path, progress: Callable[[int, int, str], None] | None = None) -> VerifyReport:
    """Check the index, then every byte that has a checksum. Raises ``CheckpointError`` when the index itself is bad."""
    index = FtwIndex.load(path)
    ranges = checked_ranges(index)
    report = VerifyReport(index.num_records, len(index.tensors))
    total = sum(r.size_bytes for r in ranges)
    fds = [os.open(index.path / file.name, os.O_RDONLY | os.O_CLOEXEC) for file in index.files]
    try:
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "verify") as pool:
            for checked, problem in zip(ranges, pool.map(lambda r: _check(fds[r.file_index], r), ranges), strict=True):
                report.num_bytes += checked.size_bytes
                if problem:
                    report.problems.append(f"{checked.what}: {problem}")
                if progress is not None:
                    progress(report.num_bytes, total, checked.what)
    finally:
        for fd in fds:
            os.close(fd)
    return report


def _check(fd: int, checked: Checked) -> str:
    crc = 0
    try:
        for data in _chunks(fd, checked.offset_bytes, checked.size_bytes):
            crc = crc32c(data, crc)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if crc != checked.crc32c:
        return f"checksum is {crc:08x}, the index says {checked.crc32c:08x}"
    return ""


def _chunks(fd: int, offset: int, size: int) -> Iterator[bytes]:
    while size:
        data = os.pread(fd, min(size, _CHUNK_BYTES), offset)
        if not data:
            raise OSError(0, "the file ends early")
        yield data
        offset, size = offset + len(data), size - len(data)
