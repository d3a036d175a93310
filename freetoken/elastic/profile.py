"""The bandwidth profile of a machine for one model's records, and where it is kept.

A profile counts only for the very machine, build, device and records that it was measured with: the whole identity is
in the file and compared when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import freetoken
from freetoken import _native
from freetoken.config import EngineConfig
from freetoken.costs import CostModel
from freetoken.elastic.bandwidth import Measurement
from freetoken.elastic.machine import query_gpu
from freetoken.errors import ConfigError
from freetoken.launch_spec import ResolvedPlan
from freetoken.quant.record import RecordLayout

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ProfileIdentity:
    """What a measurement depends on. ``gpu`` is UUID and driver, or empty on the CPU device; ``build`` the version and
    a digest of the native library and the kernels; ``layouts`` a digest of the record layouts; ``threads`` those of
    CpuExecutor and of the CPU device."""

    device: str
    gpu: str
    cpu: str
    cores: int
    threads: tuple[int, int]
    isa: str
    build: str
    layouts: str
    record_bytes: tuple[int, ...]
    top_k: int

    @property
    def digest(self) -> str:
        """For a file name."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class BandwidthProfile:
    """A measurement and what it is of."""

    identity: ProfileIdentity
    measured_at: str
    costs: CostModel
    dram_gbps: float
    disk_gbps: float
    figures: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "version": _VERSION,
            "identity": _plain(self.identity),
            "measured_at": self.measured_at,
            "costs": self.costs.to_json(),
            "dram_gbps": self.dram_gbps,
            "disk_gbps": self.disk_gbps,
            "figures": self.figures,
        }


def identify(
    config: EngineConfig, plan: ResolvedPlan, layouts: Sequence[RecordLayout], top_k: int
) -> ProfileIdentity | None:
    """Of what a measurement made now for this launch would be; None when the GPU cannot be told from others."""
    gpu = ""
    if config.device == "cuda":
        found = gpu_identity()
        if found is None:
            return None
        gpu = found
    text = json.dumps([layout.to_json() for layout in layouts], sort_keys=True)
    return ProfileIdentity(
        device=config.device,
        gpu=gpu,
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=(plan.cpu_threads, plan.device_threads if config.device == "cpu" else 0),
        isa=config.executor.isa,
        build=_build(),
        layouts=hashlib.sha256(text.encode()).hexdigest()[:20],
        record_bytes=tuple(layout.stride_bytes for layout in layouts),
        top_k=top_k,
    )


def profile_path(identity: ProfileIdentity, cache_dir: str | None) -> Path:
    """Where the profile of this identity is kept."""
    root = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "freetoken"
    return root / "profiles" / f"{identity.digest}.json"


def load_profile(identity: ProfileIdentity, cache_dir: str | None) -> BandwidthProfile | None:
    """The profile of exactly this identity; None when there is none, or it is damaged."""
    path = profile_path(identity, cache_dir)
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION or data["identity"] != _plain(identity):
            logger.warning("event=profile_ignored path=%s detail='it is of another machine, build or model'", path)
            return None
        return BandwidthProfile(
            identity,
            str(data["measured_at"]),
            CostModel.from_json(data["costs"]),
            float(data["dram_gbps"]),
            float(data["disk_gbps"]),
            dict(data["figures"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        logger.warning("event=profile_ignored path=%s detail=%r", path, f"it cannot be read: {error}")
        return None


def save_profile(profile: BandwidthProfile, cache_dir: str | None) -> Path:
    """Keep it in place of an earlier one. Raises ``OSError``."""
    path = profile_path(profile.identity, cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(profile.to_json(), indent=1))
    temporary.replace(path)
    return path


def make_profile(identity: ProfileIdentity, measured: Measurement, measured_at: str) -> BandwidthProfile:
    """``measured_at``: for people."""
    source = f"measured {measured_at} on {identity.gpu or identity.cpu}"
    return BandwidthProfile(
        identity,
        measured_at,
        dataclasses.replace(measured.costs, source=source),
        measured.dram_gbps,
        measured.disk_gbps,
        measured.to_json(),
    )


def gpu_identity(index: int = 0) -> str | None:
    """UUID and driver of the GPU that a process would see as ``index``; None when nvidia-smi does not tell."""
    return query_gpu("uuid,driver_version,name", index)


def _plain(identity: ProfileIdentity) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(identity)))
    return data


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine


@functools.cache
def _build() -> str:
    digest = hashlib.sha256()
    package = Path(freetoken.__file__).parent
    for path in (Path(_native.__file__), *sorted((package / "kernels" / "triton").glob("*.py"))):
        digest.update(path.read_bytes())
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(name).encode())
    return f"{freetoken.__version__} {digest.hexdigest()[:16]}"
