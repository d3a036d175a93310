"""What the buses allow: bandwidths measured in the run they are compared with, and the bounds that follow from them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freetoken._native import SharedSegment, WorkerPool, stream_read_gbps
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.elastic.machine import read_machine
from freetoken.execution.cuda.host_memory import segment_address

_PROBE_BYTES = 2 << 30
_DEVICE_BYTES = 4 << 30
_WINDOW_S = 0.4


@dataclass(slots=True)
class Bandwidths:
    """10^9 bytes/s. ``device``: reads of what the device's weights lie in. ``pcie`` and ``dram`` alone, and both at
    once; without a GPU only ``device`` and ``dram``, which are the same memory."""

    device: float
    dram: float
    pcie: float = 0.0
    pcie_beside_dram: float = 0.0
    dram_beside_pcie: float = 0.0

    @property
    def missing(self) -> float:
        """At which missing records can reach arithmetic: over PCIe and on the CPU at once."""
        return self.pcie_beside_dram + self.dram_beside_pcie if self.pcie else self.dram

    def to_json(self) -> dict[str, float]:
        """For result files."""
        fields = {name: round(value, 2) for name, value in dataclasses.asdict(self).items() if value}
        return {**fields, "missing": round(self.missing, 2)}


def measure(device: str, record_bytes: int, cpu_threads: int, cpu_cores: Sequence[int]) -> Bandwidths:
    """Measure with CpuExecutor's threads and copies of ``record_bytes``; nothing else should run meanwhile."""
    size = min(_PROBE_BYTES, read_machine().available_bytes // 8) // 4096 * 4096
    segment = SharedSegment.create("bandwidth", size)
    segment.populate()
    pool = WorkerPool(cpu_threads, tuple(cpu_cores), 50 if cpu_cores else 0)
    try:
        dram = stream_read_gbps(pool, segment, 5)
        if device == "cuda":
            import torch

            if torch.cuda.is_available():
                return _measure_cuda(segment, pool, dram, record_bytes)
        cores = read_machine().physical_cores
        everyone = WorkerPool(len(cores), cores)
        try:
            return Bandwidths(max(dram, stream_read_gbps(everyone, segment, 5)), dram)
        finally:
            everyone.close()
    finally:
        pool.close()


def _measure_cuda(segment: SharedSegment, pool: WorkerPool, dram: float, record_bytes: int) -> Bandwidths:
    import torch

    from freetoken.execution.cuda.driver import CudaDriver

    driver = CudaDriver(0)
    address = segment_address(segment)
    refusal = driver.register(address, segment.size_bytes)
    if refusal is not None:
        raise RuntimeError(f"the probe of {segment.size_bytes} bytes cannot be registered: {refusal}")
    try:
        source = torch.frombuffer(memoryview(segment), dtype=torch.uint8)
        target = torch.empty(64 * record_bytes, dtype=torch.uint8, device="cuda")
        count = segment.size_bytes // record_bytes
        order = np.random.default_rng(0).permutation(count)
        at = 0

        def copy(records: int) -> None:
            nonlocal at
            for _ in range(records):
                begin = int(order[at % count]) * record_bytes
                place = at % 64 * record_bytes
                target[place : place + record_bytes].copy_(source[begin : begin + record_bytes], non_blocking=True)
                at += 1
            torch.cuda.synchronize()

        copy(64)
        pcie = _rate(copy, record_bytes, lambda elapsed: elapsed < _WINDOW_S)
        read = [0.0]
        stop = threading.Event()

        def read_memory() -> None:
            started, done = time.perf_counter(), 0
            while not stop.is_set():
                stream_read_gbps(pool, segment, 1)
                done += 1
            read[0] = done * segment.size_bytes / (time.perf_counter() - started) / 1e9

        thread = threading.Thread(target=read_memory)
        thread.start()
        beside = _rate(copy, record_bytes, lambda elapsed: elapsed < 2 * _WINDOW_S)
        stop.set()
        thread.join()
        return Bandwidths(_device_gbps(), dram, pcie, beside, read[0])
    finally:
        torch.cuda.synchronize()
        driver.unregister(address)


def _rate(copy: Any, record_bytes: int, more: Any) -> float:
    batch = max(16, (256 << 20) // record_bytes)
    started, done = time.perf_counter(), 0
    while more(time.perf_counter() - started):
        copy(batch)
        done += batch
    return done * record_bytes / (time.perf_counter() - started) / 1e9


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
