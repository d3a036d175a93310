"""What every benchmark writes beside its figures: machine, commit, command."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


@functools.cache
def provenance() -> dict[str, Any]:
    """Machine, software and command of this run; the date is that of the first call."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip() + ("+" if dirty.stdout.strip() else ""),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_result(path: str | None, name: str, figures: Any) -> None:
    """Print ``figures`` as JSON and, with ``path``, write them there with their provenance."""
    result = {"benchmark": name, **provenance(), "figures": figures}
    text = json.dumps(result, indent=1)
    print(text)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")


def write_partial(path: str | None, name: str, figures: Any) -> None:
    """What there is so far, marked ``unfinished``, for a run that may be cut short; nothing without ``path``."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": name, "unfinished": True, **provenance(), "figures": figures}
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
