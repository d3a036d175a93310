"""Measuring what the parts of the machine deliver for one model's records: CPU experts, fetches, both, memory, disk.

The CPU experts are CpuExecutor's kernel on its worker pool. What a fetch is depends on the device, so it comes as a
``FetchProbe``: a GPU's is in ``freetoken.execution.cuda.fetch_probe``, the CPU device's here. A few seconds in all.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freetoken._native import ExpertStore, SharedSegment, WorkerPool, stream_read_gbps, time_experts
from freetoken.costs import CostModel
from freetoken.elastic.cost_model import Sample, fit_costs
from freetoken.errors import CapacityError
from freetoken.quant.native_layout import native_layout
from freetoken.quant.record import RecordLayout

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 30
"""Of records: several times the caches."""

_WINDOW_S = 0.04
_BESIDE_S = 0.08
_DISK_S = 0.4
_DISK_BYTES = 512 << 20
_TOKENS = 4
# Bytes of every record. As BF16 and F32 a number near 0.01, as F16 (the scales of Q4_0) about 1, as nibbles 12 and 3:
# no number that would be slow or overflow.
_FILL = 0x3C


class FetchProbe(Protocol):
    """The device's way of running records that it does not hold. One thread at a time."""

    def time(self, layout: int, records: int, tokens: int, window_s: float) -> NDArray[np.int64]:
        """Nanoseconds of each of some layers that run ``records`` records for all of ``tokens`` tokens."""
        ...

    def hit_byte_ns(self, layout: int) -> float:
        """Of a resident record."""
        ...

    def close(self) -> None: ...


class ProbeStore:
    """Records of every layout in shared memory: "layer" i of the store has those of layout i, as many as fit."""

    def __init__(self, layouts: Sequence[RecordLayout], size_bytes: int = PROBE_BYTES) -> None:
        """Raises ``CapacityError`` when memory is short."""
        self.layouts = tuple(layouts)
        largest = max(layout.stride_bytes for layout in layouts)
        self.num_records = max(16, size_bytes // len(layouts) // largest)
        starts = np.cumsum([0] + [self.num_records * layout.stride_bytes for layout in layouts])
        try:
            self.segment = SharedSegment.create("freetoken-probe", int(starts[-1]))
            self.segment.populate()
        except (MemoryError, OSError) as error:
            raise CapacityError(
                f"the bandwidth probe needs {int(starts[-1]) >> 20} MiB, which are not available ({error})"
            ) from error
        np.frombuffer(memoryview(self.segment), np.uint8)[:] = _FILL
        offsets = np.array(
            [starts[i] + np.arange(self.num_records) * layout.stride_bytes for i, layout in enumerate(layouts)],
            np.int64,
        )
        self.offsets = offsets
        self.store = ExpertStore(
            [self.segment],
            [native_layout(layout) for layout in layouts],
            list(range(len(layouts))),
            np.zeros(offsets.shape, np.int32),
            offsets,
        )


class CpuFetchProbe:
    """The CPU device: copies a record to its slot and runs it there, on the device's worker pool."""

    def __init__(self, store: ProbeStore, threads: int, cores: Sequence[int], max_records: int) -> None:
        self._store = store
        self._pool = WorkerPool(threads, tuple(cores), 50 if cores else 0)
        stride = max(layout.stride_bytes for layout in store.layouts)
        size = max(max_records * stride, store.segment.size_bytes // 4)
        self._slots = SharedSegment.create("freetoken-probe-slots", size)
        self._slots.populate()

    def time(self, layout: int, records: int, tokens: int, window_s: float) -> NDArray[np.int64]:
        return time_experts(self._pool, self._store.store, layout, records, tokens, window_s, self._slots)

    def hit_byte_ns(self, layout: int) -> float:
        times = time_experts(self._pool, self._store.store, layout, 2, 1, _WINDOW_S)
        return typical(times) / (2 * self._store.layouts[layout].stride_bytes)

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True, slots=True)
class Measurement:
    """``costs``: of this machine for these records. Rates in 10^9 bytes/s; ``disk_gbps`` 0: not measured. Samples by
    what was timed: fetch, fetch_beside, cpu, cpu_beside."""

    costs: CostModel
    dram_gbps: float
    disk_gbps: float
    seconds: float
    samples: dict[str, tuple[Sample, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For files and reports."""
        return {
            "costs": self.costs.to_json(),
            "dram_gbps": round(self.dram_gbps, 3),
            "disk_gbps": round(self.disk_gbps, 3),
            "seconds": round(self.seconds, 2),
            "samples": {name: [sample.to_json() for sample in samples] for name, samples in self.samples.items()},
        }


def typical(times: NDArray[np.int64]) -> float:
    """The lower quartile: what an undisturbed layer takes, where others want the processors now and then."""
    return float(np.percentile(times, 25))


def counts_to_time(top_k: int) -> tuple[int, ...]:
    """Of 1..K records in a layer: few enough to be quick, with both ends."""
    return tuple(sorted({1, 2, max(1, top_k // 2), top_k}))


def measure_bandwidth(
    layouts: Sequence[RecordLayout],
    top_k: int,
    *,
    cpu_threads: int,
    cpu_cores: Sequence[int],
    isa: str,
    make_fetch_probe: Callable[[ProbeStore, int], FetchProbe],
    hits_load_memory: bool,
    disk_file: Path | None,
    source: str,
    probe_bytes: int = PROBE_BYTES,
) -> Measurement:
    """Time everything, one after the other; nothing else should run meanwhile.

    ``make_fetch_probe(store, max_records)``. Raises ``CapacityError`` when there is no memory for the probe.
    """
    started = time.perf_counter()
    store = ProbeStore(layouts, probe_bytes)
    pool = WorkerPool(cpu_threads, tuple(cpu_cores), 50 if cpu_cores else 0, isa)
    fetcher = make_fetch_probe(store, max(2, top_k))
    counts = counts_to_time(top_k)
    samples: dict[str, list[Sample]] = {"fetch": [], "fetch_beside": [], "cpu": [], "cpu_beside": []}

    def run_cpu(layout: int, records: int, tokens: int, window_s: float) -> NDArray[np.int64]:
        return time_experts(pool, store.store, layout, records, tokens, window_s)

    try:
        for i, layout in enumerate(layouts):
            stride = layout.stride_bytes
            alone: tuple[tuple[str, Callable[[int, int, int, float], NDArray[np.int64]]], ...] = (
                ("fetch", fetcher.time),
                ("cpu", run_cpu),
            )
            for name, run in alone:
                run(i, top_k, 1, 0.0)
                for records, tokens in [*((count, 1) for count in counts), (top_k, _TOKENS)]:
                    times = run(i, records, tokens, _WINDOW_S)
                    samples[name].append(Sample(records, tokens, stride, typical(times)))
            pairs = {(count, other) for count in counts for other in (count, max(1, top_k // 2))}
            for mine, other in sorted(pairs):
                fetched, computed = _at_once(
                    functools.partial(fetcher.time, i, mine, 1, _BESIDE_S),
                    functools.partial(run_cpu, i, other, 1, _BESIDE_S),
                )
                samples["fetch_beside"].append(Sample(mine, 1, stride, fetched, other))
                samples["cpu_beside"].append(Sample(other, 1, stride, computed, mine))
        costs = fit_costs(
            samples["fetch"],
            samples["fetch_beside"],
            samples["cpu"],
            samples["cpu_beside"],
            hit_byte_ns=float(np.mean([fetcher.hit_byte_ns(i) for i in range(len(layouts))])),
            hits_load_memory=hits_load_memory,
            source=source,
        )
        dram = stream_read_gbps(pool, store.segment, 1)
    finally:
        fetcher.close()
        pool.close()
    disk = measure_disk(disk_file) if disk_file is not None else 0.0
    frozen = {name: tuple(values) for name, values in samples.items()}
    return Measurement(costs, dram, disk, time.perf_counter() - started, frozen)


def _at_once(fetch: Callable[[], NDArray[np.int64]], compute: Callable[[], NDArray[np.int64]]) -> tuple[float, float]:
    """What both take while they run side by side."""
    results: list[NDArray[np.int64]] = []
    thread = threading.Thread(target=lambda: results.append(compute()))
    thread.start()
    fetched = fetch()
    thread.join()
    if not results:
        raise RuntimeError("the CPU experts could not be timed beside the fetches")
    return typical(fetched), typical(results[0])


def measure_disk(path: Path, threads: int = 4, chunk_bytes: int = 8 << 20, window_s: float = _DISK_S) -> float:
    """10^9 bytes/s at which the file's first half GiB at most is read past the page cache, as the loader reads it; 0
    where the file system does not allow that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    try:
        chunks = min(os.fstat(fd).st_size, _DISK_BYTES) // chunk_bytes
        if chunks == 0:
            return 0.0
        started = time.perf_counter()

        def read(worker: int) -> int:
            buffer = mmap.mmap(-1, chunk_bytes)  # page-aligned
            done = 0
            for chunk in range(worker, chunks, threads):
                if time.perf_counter() - started > window_s:
                    break
                done += os.preadv(fd, [buffer], chunk * chunk_bytes)
            return done

        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(read, range(threads)))
        return total / (time.perf_counter() - started) / 1e9
    except OSError as error:
        logger.info("event=disk_not_measured path=%s error=%s", path, error)
        return 0.0
    finally:
        os.close(fd)
