"""Identity of source files, cheap for files of any size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from freetoken.checkpoint.integrity import digest_json
from freetoken.errors import CheckpointError

_HEAD_BYTES = 1024**2


def fingerprint_files(paths: Iterable[Path], base: Path) -> str:
    """SHA-256 over each file's name relative to ``base``, size, modification time and first MiB (its header)."""
    entries = []
    for path in sorted(paths):
        try:
            stat = path.stat()
            with path.open("rb") as file:
                head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        entries.append([str(path.relative_to(base)), stat.st_size, stat.st_mtime_ns, head])
    return digest_json(entries)
