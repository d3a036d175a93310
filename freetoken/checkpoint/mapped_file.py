"""A read-only memory map whose pages can be given back."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError


class MappedFile:
    """The bytes of one file. Views taken from it keep the map alive; ``close`` then only drops this reference."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror or error}") from error
        try:
            self.size_bytes = os.fstat(fd).st_size
            if self.size_bytes == 0:
                raise CheckpointError(f"{self.path}: the file is empty")
            self._map = mmap.mmap(fd, self.size_bytes, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be mapped: {error.strerror or error}") from error
        finally:
            os.close(fd)
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def bytes_at(self, offset: int, size: int) -> bytes:
        """A copy of ``size`` bytes; fewer at the end of the file."""
        return self.data[offset : offset + size].tobytes()

    def release(self) -> None:
        """Let the kernel take back the pages read so far, so that a long conversion does not look like a big one."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap unless somebody still holds a view. Idempotent."""
        self.data = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
