"""What the buses allow: bandwidths measured in the run they are compared with, and the bounds that follow from them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freetoken._native import WorkerPool, stream_read_gbps, time_experts
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.elastic.bandwidth import ProbeStore
from freetoken.elastic.machine import read_machine
from freetoken.execution.cuda.fetch_probe import CudaFetchProbe

_PROBE_BYTES = 2 << 30
_DEVICE_BYTES = 4 << 30
_WINDOW_S = 0.25
_ROUNDS = 3
_LEAST_CALLS = 2

EXCEEDED = (
    "the figure is better than its bound: what was measured side by side is less than the buses gave the engine, "
    "or other work disturbed the measurement; the ratio is no share"
)

Busy = Callable[[float], float]
"""Keeps one bus busy for so many seconds; returns 10^9 bytes/s while it did."""


@dataclass(slots=True)
class Bandwidths:
    """10^9 bytes/s. ``device``: reads of what the device's weights lie in. ``fetch``: the fetch kernel; ``copy``: the
    copy engine; ``experts``: the CPU's expert kernel; ``dram``: plain reads; each alone. ``together``: both buses at
    once, by pair, as (PCIe, CPU). Without a GPU only ``device``, ``dram`` and ``experts``, which are one memory."""

    device: float
    dram: float
    experts: float
    fetch: float = 0.0
    copy: float = 0.0
    together: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def pcie(self) -> float:
        """The better way over PCIe."""
        return max(self.fetch, self.copy)

    @property
    def missing(self) -> float:
        """At which missing records can reach arithmetic: over PCIe and on the CPU at once, the best pair."""
        return max([self.pcie, self.dram, self.experts, *(sum(pair) for pair in self.together.values())])

    def to_json(self) -> dict[str, Any]:
        """For result files."""
        fields = {name: round(value, 2) for name, value in dataclasses.asdict(self).items() if name != "together"}
        together = {name: [round(rate, 2) for rate in pair] for name, pair in self.together.items()}
        return {**fields, "together": together, "missing": round(self.missing, 2)}


def measure(device: str, index: FtwIndex, cpu_threads: int, cpu_cores: Sequence[int]) -> Bandwidths:
    """Measure with CpuExecutor's threads and the model's records; nothing else should run meanwhile.

    The records lie in a store of 2 GiB, or an eighth of the free memory or the model's size where those are less, and
    are run in turn, so no cache holds them. Every rate is the best of some rounds of ``_WINDOW_S`` each. Without a GPU
    the device "cuda" is Triton's interpreter, whose rates mean nothing.
    """
    store = ProbeStore(index.layouts[:1], min(_PROBE_BYTES, read_machine().available_bytes // 8, index.expert_bytes))
    stride, top_k = store.layouts[0].stride_bytes, index.spec.num_experts_per_tok
    pool = WorkerPool(cpu_threads, tuple(cpu_cores), 50 if cpu_cores else 0)

    def run_experts(window_s: float) -> float:
        times = time_experts(pool, store.store, 0, top_k, 1, window_s)
        return top_k * stride * len(times) / int(times.sum())

    def read(window_s: float) -> float:
        return _sustained(lambda: stream_read_gbps(pool, store.segment, 1), 2 * store.segment.size_bytes, window_s)

    on_cpu: dict[str, Busy] = {"experts": run_experts, "read": read}
    try:
        experts = _best(run_experts)
        dram = max(stream_read_gbps(pool, store.segment, 5), experts)
        if device == "cuda":
            return _measure_cuda(store, top_k, on_cpu, dram, experts)
        cores = read_machine().physical_cores
        everyone = WorkerPool(len(cores), cores)
        try:
            return Bandwidths(max(dram, stream_read_gbps(everyone, store.segment, 5)), dram, experts)
        finally:
            everyone.close()
    finally:
        pool.close()


def _measure_cuda(
    store: ProbeStore,
    top_k: int,
    on_cpu: dict[str, Busy],
    dram: float,
    experts: float,
) -> Bandwidths:
    import torch

    from freetoken.execution.cuda.driver import CudaDriver
    from freetoken.testing.cuda_rig import HostDriver

    on_gpu = torch.cuda.is_available()
    driver = CudaDriver(0) if on_gpu else HostDriver()
    stride = store.layouts[0].stride_bytes
    probe = CudaFetchProbe(store, driver, torch.device("cuda" if on_gpu else "cpu"), top_k)
    source = torch.frombuffer(memoryview(store.segment), dtype=torch.uint8)
    # A copy per step that is long enough for the call not to count, as where streaming joins records.
    piece = min(max(stride, 16 << 20), store.segment.size_bytes)
    target = torch.empty(piece, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    order = np.random.default_rng(0).permutation(store.segment.size_bytes // piece)
    at = 0

    def fetch(window_s: float) -> float:
        times = probe.time(0, top_k, 1, window_s)
        return top_k * stride * len(times) / int(times.sum())

    def copy_some() -> None:
        nonlocal at
        for _ in range(8):
            begin = int(order[at % len(order)]) * piece
            target.copy_(source[begin : begin + piece], non_blocking=True)
            at += 1
        if on_gpu:
            torch.cuda.synchronize()

    def copy(window_s: float) -> float:
        return _sustained(copy_some, 8 * piece, window_s)

    over_pcie: dict[str, Busy] = {"fetch": fetch, "copy": copy}
    try:
        for busy in over_pcie.values():
            busy(0.0)  # compiles
        together = {
            f"{bus} beside {work}": _best_pair(over_pcie[bus], on_cpu[work]) for bus in over_pcie for work in on_cpu
        }
        device = _device_gbps() if on_gpu else dram
        return Bandwidths(device, dram, experts, _best(fetch), _best(copy), together)
    finally:
        probe.close()


def _sustained(run: Callable[[], Any], size: int, window_s: float) -> float:
    """10^9 bytes/s of calls that move ``size`` bytes each."""
    started, calls = time.perf_counter(), 0
    while calls < _LEAST_CALLS or time.perf_counter() - started < window_s:
        run()
        calls += 1
    return calls * size / (time.perf_counter() - started) / 1e9


def _best(busy: Busy) -> float:
    return max(busy(_WINDOW_S) for _ in range(_ROUNDS))


def _best_pair(first: Busy, second: Busy) -> tuple[float, float]:
    """What both give while they run side by side, in the round with the best sum."""
    return max((_at_once(first, second) for _ in range(_ROUNDS)), key=sum)


def _at_once(first: Busy, second: Busy) -> tuple[float, float]:
    other: list[float] = []
    thread = threading.Thread(target=lambda: other.append(second(_WINDOW_S)))
    thread.start()
    mine = first(_WINDOW_S)
    thread.join()
    if not other:
        raise RuntimeError("the CPU could not be timed beside PCIe")
    return mine, other[0]


def _device_gbps() -> float:
    """The better of reading alone and of a copy (both directions counted)."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    data = torch.zeros(min(_DEVICE_BYTES, free // 4) // 4, dtype=torch.float32, device="cuda")
    other = torch.empty_like(data)
    size = data.numel() * 4

    def best_ms(run: Any) -> float:
        times = []
        for _ in range(6):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    figures = (size / best_ms(lambda: data.sum()), 2 * size / best_ms(lambda: other.copy_(data)))
    return max(figures) / 1e6


def dense_bytes_per_step(index: FtwIndex) -> int:
    """Dense weights that a step reads: all but the embedding table, unless it is also the output projection."""
    size = index.dense_bytes
    if not index.spec.tie_word_embeddings:
        size -= index.tensors["model.embed_tokens.weight"].size_bytes
    return size


def mean_record_bytes(index: FtwIndex) -> float:
    """Mean stride of a record."""
    return index.expert_bytes / max(1, index.num_records)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step: dense weights with KV, and expert records by where they ran."""

    dense_and_kv: float
    hit: float
    fetched: float
    cpu: float

    @property
    def missing(self) -> float:
        return self.fetched + self.cpu


def bounds(traffic: Traffic, rates: Bandwidths, on_gpu: bool, all_hit_ms: float | None) -> dict[str, float]:
    """Milliseconds that a step cannot be faster than.

    ``bound_ms``: dense weights and KV, then hits from device memory beside the missing ones over the other buses (one
    memory carries everything on the CPU device). ``overhead_bound_ms``: the measured step without misses, and then the
    missing bytes.
    """
    if on_gpu:
        bound = traffic.dense_and_kv / rates.device + max(traffic.hit / rates.device, traffic.missing / rates.missing)
    else:
        bound = (traffic.dense_and_kv + traffic.hit + traffic.missing) / rates.device
    figures = {"bound_ms": bound / 1e6}
    if all_hit_ms is not None and on_gpu:
        figures["overhead_bound_ms"] = all_hit_ms + traffic.missing / rates.missing / 1e6
    return figures


def with_shares(limits: dict[str, float], time: float) -> dict[str, Any]:
    """The bounds and how much of each ``time``, in their unit, reached (``share_of_...``). A figure that is better than
    its bound gets no share but ``bound_exceeded``, by how much, and what that means."""
    figures: dict[str, Any] = dict(limits)
    exceeded = {}
    for name, limit in limits.items():
        ratio = limit / time
        if ratio > 1.0:
            exceeded[name] = ratio
        else:
            figures[f"share_of_{name.rpartition('_')[0]}"] = ratio
    if exceeded:
        figures |= {"bound_exceeded": True, "bound_exceeded_by": exceeded, "bound_exceeded_means": EXCEEDED}
    return figures
