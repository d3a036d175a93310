"""The bandwidth profile of a launch: found, or measured in a process of its own, which takes its GPU context along."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.elastic.bandwidth import (
    PROBE_BYTES,
    CpuFetchProbe,
    FetchProbe,
    ProbeStore,
    measure_bandwidth,
)
from freetoken.elastic.profile import (
    BandwidthProfile,
    ProfileIdentity,
    identify,
    load_profile,
    make_profile,
    save_profile,
)
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.launch_spec import LaunchSpec

logger = logging.getLogger(__name__)

_LEAST_PROBE_BYTES = 16 << 20
_LIMIT_S = 180.0


def splits_misses(spec: LaunchSpec) -> bool:
    """Whether this launch will have missing experts at all."""
    return spec.model.is_moe and not spec.plan.in_place


def identity_of(spec: LaunchSpec) -> ProfileIdentity | None:
    """What a profile of this launch must be of."""
    return identify(spec.config, spec.plan, spec.layouts, spec.model.num_experts_per_tok)


def find_profile(spec: LaunchSpec) -> BandwidthProfile | None:
    """The one kept for exactly this machine, build, device and records."""
    identity = identity_of(spec) if splits_misses(spec) else None
    return None if identity is None else load_profile(identity, spec.config.loader.cache_dir)


def measure_profile(spec: LaunchSpec) -> BandwidthProfile:
    """Measure in this process and keep the result.

    Raises ``ConfigError`` for a model without routed experts or a GPU that is not there, ``CapacityError`` when memory
    is short.
    """
    if not spec.model.is_moe:
        raise ConfigError(f"{spec.config.model} has no routed experts: there is nothing to split and to measure for it")
    identity = identity_of(spec)
    if identity is None:
        raise ConfigError("device=cuda: nvidia-smi names no GPU to measure on")
    index = FtwIndex.load(spec.checkpoint)
    plan, config = spec.plan, spec.config
    measured = measure_bandwidth(
        spec.layouts,
        spec.model.num_experts_per_tok,
        cpu_threads=plan.cpu_threads,
        cpu_cores=plan.cpu_core_ids,
        isa=config.executor.isa,
        make_fetch_probe=_fetch_probe(spec, identity.gpu),
        hits_load_memory=config.device == "cpu",
        disk_file=Path(index.path) / index.files[-1].name,
        source="",
        probe_bytes=max(_LEAST_PROBE_BYTES, min(PROBE_BYTES, index.expert_bytes)),
    )
    profile = make_profile(identity, measured, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    try:
        save_profile(profile, config.loader.cache_dir)
    except OSError as error:
        logger.warning("event=profile_not_kept error=%r", str(error))
    return profile


def check_gpu(identified: str, uuid: str) -> None:
    """Raises ``ConfigError`` unless the GPU that a profile is to be of (``ProfileIdentity.gpu``) is CUDA's device 0.

    Without ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` CUDA may count several cards in another order than nvidia-smi.
    """
    uuid = uuid.removeprefix("GPU-")
    if uuid not in identified:
        raise ConfigError(
            f"CUDA's device 0 is GPU-{uuid}, but nvidia-smi's first is {identified.split(',')[0]}; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name one card in CUDA_VISIBLE_DEVICES"
        )


def _fetch_probe(spec: LaunchSpec, profile_gpu: str) -> Callable[[ProbeStore, int], FetchProbe]:
    plan = spec.plan

    def on_cpu(store: ProbeStore, max_records: int) -> FetchProbe:
        return CpuFetchProbe(store, plan.device_threads, plan.device_core_ids, max_records)

    def on_gpu(store: ProbeStore, max_records: int) -> FetchProbe:
        import torch

        from freetoken.execution.cuda.driver import CudaDriver
        from freetoken.execution.cuda.fetch_probe import CudaFetchProbe

        if not torch.cuda.is_available():
            raise ConfigError("device=cuda: PyTorch finds no GPU")
        check_gpu(profile_gpu, str(getattr(torch.cuda.get_device_properties(0), "uuid", "")))
        return CudaFetchProbe(store, CudaDriver(0), torch.device("cuda", 0), spec.model.num_experts_per_tok)

    return on_cpu if spec.config.device == "cpu" else on_gpu


def with_profile(spec: LaunchSpec, notify: Callable[[str], None] = lambda text: None) -> LaunchSpec:
    """The launch with measured costs: from the profile that is kept, whatever the split, or with split=auto by
    measuring now (``notify`` is told), in another process. What goes wrong is logged, and costs stay assumed."""
    if not splits_misses(spec):
        return spec
    profile, experts = find_profile(spec), spec.config.experts
    if profile is None and experts.measure and experts.split == "auto":
        notify("measuring what PCIe and CPU deliver for this model's experts, once")
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                profile = pool.submit(measure_profile, spec).result(_LIMIT_S)
        except (FreeTokenError, OSError, RuntimeError, TimeoutError, ValueError) as error:
            logger.warning("event=bandwidth_not_measured error=%r", f"{type(error).__name__}: {error}")
    if profile is None:
        return spec
    return dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, costs=profile.costs))
