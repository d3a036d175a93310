"""What the machine offers, read once. Everything a plan needs, so that plans can be tested with invented machines."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """``physical_cores`` are logical CPU ids, one per physical core this process may use. ``available_bytes`` is what
    can be allocated without swapping, within the control group's limit. ``device_*``: of the GPU; None: not asked, or
    there is none."""

    physical_cores: tuple[int, ...]
    total_bytes: int
    available_bytes: int
    device_total_bytes: int | None = None
    device_free_bytes: int | None = None


def read_machine(device: str = "cpu") -> MachineInfo:
    """This machine, as seen by this process (affinity mask and memory control group included). The GPU is asked only
    for ``device="cuda"``."""
    memory = psutil.virtual_memory()
    limit = _cgroup_limit_bytes()
    total = min(memory.total, limit) if limit else memory.total
    available = memory.available
    if limit:
        available = min(available, max(0, limit - _cgroup_usage_bytes()))
    gpu = gpu_memory() if device == "cuda" else None
    return MachineInfo(_physical_cores(), total, available, *(gpu or (None, None)))


def pinnable_bytes(total_bytes: int) -> int:
    """Of a machine's memory, what may be pinned: the system and others keep a fifth that can be moved and swapped."""
    return total_bytes // 5 * 4


def gpu_memory() -> tuple[int, int] | None:
    """(all, free) bytes of the GPU that a process would see first; None when nvidia-smi does not tell."""
    found = query_gpu("memory.total,memory.free", 0)
    try:
        total, free = (int(part) << 20 for part in (found or "").split(","))  # in MiB
    except ValueError:
        return None
    return total, free


def query_gpu(fields: str, index: int) -> str | None:
    """What nvidia-smi tells of the GPU that a process would see as ``index``; None when it does not."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = visible.split(",")[index].strip() if visible else str(index)
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--id={wanted}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    line = output.strip().splitlines()
    return line[0].strip() if line else None


def _physical_cores() -> tuple[int, ...]:
    seen: dict[tuple[str, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            key = ((topology / "physical_package_id").read_text(), (topology / "core_id").read_text())
        except OSError:
            key = ("", str(cpu))
        seen.setdefault(key, cpu)
    return tuple(sorted(seen.values()))


def _cgroup_limit_bytes() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _cgroup_usage_bytes() -> int:
    """Memory that cannot be reclaimed: the group's usage less its file cache."""
    try:
        usage = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        return max(0, usage - int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
