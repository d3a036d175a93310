"""Where traces that are recorded on request lie: names, limits and space of ``experts.trace_dir``."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

from freetoken.config import EngineConfig
from freetoken.errors import ConfigError, TraceBusyError
from freetoken.units import format_bytes

SUFFIX = ".routes"
DEFAULT_MAX_BYTES = 256 << 20
MIN_BYTES = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}" + re.escape(SUFFIX))


def check_trace_name(name: str) -> str:
    """``name`` if it is a trace's. Raises ``ConfigError``; above all for anything that would lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:200]!r} is no name of a trace: at most 120 letters, digits, '.', '_' and '-', then {SUFFIX}"
        )
    return name


def find_trace(directory: Path, name: str) -> Path | None:
    """The file of that name, if there is one. Raises ``ConfigError`` for what is no name of a trace."""
    path = directory / check_trace_name(name)
    return path if path.is_file() and not path.is_symlink() else None


def plan_trace_file(config: EngineConfig, model: str, name: str, max_bytes: int | None) -> tuple[str, int]:
    """Path and limit of a new trace; ``name`` may be empty. Makes the directory, but not the file.

    Raises ``ConfigError``, and ``TraceBusyError`` when the traces there leave no space.
    """
    directory = config.trace_dir
    if not name:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model).lstrip("._-")[:64] or "model"
        name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}{SUFFIX}"
    path = directory / check_trace_name(name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        used = sum(file.stat().st_size for file in directory.glob(f"*{SUFFIX}") if file.is_file())
    except OSError as error:
        raise ConfigError(f"experts.trace_dir {directory}: {error.strerror or error}") from error
    limit = min(max_bytes or DEFAULT_MAX_BYTES, config.experts.trace_dir_bytes - used)
    if limit < MIN_BYTES:
        raise TraceBusyError(
            f"the traces in {directory} take {format_bytes(used)} of {format_bytes(config.experts.trace_dir_bytes)} "
            "(experts.trace_dir_bytes); delete some"
        )
    return str(path), limit
