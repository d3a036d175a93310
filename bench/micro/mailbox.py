"""Round trip of one expert layer through the mailbox, between processes.

GpuExecutor's part (the native client) runs in this process, ExpertCache's and CpuExecutor's servers in processes of
their own, each pinned to a core where there are enough. Cases:

- ``empty``: the row is padding, so the answer is an empty plan: publishing ids, weights and one hidden row, the wake-up
  or the poll on either side, planning. This is the round trip.
- ``all_hit``: eight experts, all in slots. ``over_local_us`` is what it takes longer than the same experts without a
  mailbox (``expert_ffn`` in this process).
- ``cpu_share``: eight experts, all on CpuExecutor: two hand-offs more, and its computation.

``planning`` is the time that ExpertCache's thread needs to answer a publish, without the hand-off: of decode batches,
and of a long prefill chunk (32,768 routes); run by the device alone, with a quarter of the experts in slots.

Spinning says something only where every party has a core to itself (``meaningful``): two for the first two cases, three
for the last. Everything is measured around the Python call; ``binding_us`` is what an immediately returning one takes.

    python bench/micro/mailbox.py --out bench/results/mailbox.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from freetoken._native import CacheServer, DeviceClient, Mailbox, SharedSegment, SlotTable, WorkerPool, expert_ffn
from freetoken.testing.data_plane import ServerProcess
from freetoken.testing.expert_bank import Batch, ExpertBank
from freetoken.testing.raw_mailbox import RawMailbox

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import write_result

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 2, 16, 8, 2048, 8
SPIN_US = 2000


def measure(call: Callable[[], None], count: int) -> dict[str, float]:
    """Percentiles in microseconds over ``count`` calls, after a tenth as many to warm up."""
    for _ in range(count // 10):
        call()
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return {
        "min_us": round(times[0], 2),
        "p50_us": round(statistics.median(times), 2),
        "p90_us": round(times[int(count * 0.9)], 2),
        "p99_us": round(times[int(count * 0.99)], 2),
    }


class Bench:
    """One set of processes: ``spin_us`` of every party, and the share of misses that the device fetches."""

    def __init__(self, bank: ExpertBank, cores: list[int], spin_us: int, fetch_fraction: float, with_cpu: bool) -> None:
        num_slots = LAYERS * EXPERTS
        size_bytes = Mailbox.required_bytes(1, TOP_K, HIDDEN, LAYERS, EXPERTS)
        segment = SharedSegment.create("mailbox", size_bytes)
        mailbox = Mailbox.create(segment, 1, 1, TOP_K, HIDDEN, LAYERS, EXPERTS)
        stride_bytes = bank.layout.stride_bytes
        self.bank, self.pool = bank, WorkerPool(1)
        arena = SharedSegment.create("slots", num_slots * stride_bytes)
        self.client = DeviceClient(mailbox, bank.store, arena, stride_bytes, self.pool, spin_us, 60.0, False)
        parties = 3 if with_cpu else 2
        self.meaningful = spin_us == 0 or len(cores) >= parties
        place = cores if len(cores) >= parties else [-1] * 3
        if place[0] >= 0:
            os.sched_setaffinity(0, {place[0]})
        self.servers = [
            ServerProcess(
                "cache",
                segment,
                bank,
                spin_us=spin_us,
                core=place[1],
                num_slots=num_slots,
                fetch_fraction=fetch_fraction,
            )
        ]
        if with_cpu:
            self.servers.append(ServerProcess("cpu", segment, bank, spin_us=spin_us, core=place[2], threads=1))
        self.out = np.empty((1, HIDDEN), np.float32)

    def forward(self, batch: Batch) -> None:
        """One layer."""
        self.client.forward(0, *batch, self.out)

    def local(self, batch: Batch) -> None:
        """The same without a mailbox."""
        expert_ffn(self.pool, self.bank.store, 0, *batch[:3], self.out)

    def close(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.stop()


def run_case(bank: ExpertBank, cores: list[int], case: str, spin_us: int, count: int) -> dict[str, Any]:
    """Figures of one case in one mode."""
    with_cpu = case == "cpu_share"
    bench = Bench(bank, cores, spin_us, 0.0 if with_cpu else 1.0, with_cpu)
    try:
        hidden, ids, weights, admit = bank.random_batch(np.random.default_rng(0), 1, TOP_K)
        admit[:] = 1
        if case == "empty":
            ids[:] = -1
        batch = (hidden, ids, weights, admit)
        bench.forward(batch)
        figures: dict[str, Any] = {
            "case": case,
            "mode": "spinning" if spin_us else "parked",
            "meaningful": bench.meaningful,
            **measure(lambda: bench.forward(batch), count if bench.meaningful else 200),
        }
        bench.client.begin_step(1)
        bench.forward(batch)
        step = bench.client.step_counters()
        expected = {"empty": (0, 0, 0), "all_hit": (TOP_K, 0, 0), "cpu_share": (0, 0, TOP_K)}[case]
        assert (step["hits"], step["fetches"], step["cpu"]) == expected, step
        if case != "empty":
            local = measure(lambda: bench.local(batch), count)
            figures["local_p50_us"] = local["p50_us"]
            figures["over_local_us"] = round(figures["p50_us"] - local["p50_us"], 2)
        return figures
    finally:
        bench.close()


def measure_binding(bank: ExpertBank) -> float:
    """Median time of a call that has nothing to do."""
    segment = SharedSegment.create("mailbox", Mailbox.required_bytes(1, TOP_K, HIDDEN, LAYERS, EXPERTS))
    mailbox = Mailbox.create(segment, 1, 1, TOP_K, HIDDEN, LAYERS, EXPERTS)
    client = DeviceClient(mailbox, bank.store, None, 0, WorkerPool(1), 0, 1.0, False)
    nothing = tuple(array[:0] for array in bank.random_batch(np.random.default_rng(0), 1, TOP_K))
    out = np.empty((0, HIDDEN), np.float32)
    return measure(lambda: client.forward(0, *nothing, out), 20000)["p50_us"]


def measure_planning(num_tokens: int, num_experts: int, num_layers: int = 48, count: int = 200) -> dict[str, Any]:
    """Times of planning one publish; experts are drawn by a power law, and the last 32 tokens may fill slots."""
    geometry = (num_tokens, TOP_K, 16, num_layers, num_experts, 1)
    segment = SharedSegment.create("mailbox", Mailbox.required_bytes(*geometry))
    mailbox = Mailbox.create(segment, 1, *geometry)
    slots = SlotTable(num_layers, num_experts, num_layers * num_experts // 4)
    server = CacheServer(mailbox, slots, 0.5, False, 0, [1] * num_layers, device_client=True)
    server.start()
    raw = RawMailbox(segment, mailbox.layout())
    rng = np.random.default_rng(0)
    popularity = -np.log(1 + np.arange(num_experts))
    admit = (np.arange(num_tokens) >= num_tokens - 32).astype(np.uint8)
    times: list[float] = []
    total_ns = 0
    for i in range(count):
        keys = popularity + rng.gumbel(size=(num_tokens, num_experts))
        ids = np.argpartition(-keys, TOP_K, axis=1)[:, :TOP_K].astype(np.int32)
        raw.await_plan(raw.publish(i % num_layers, ids, admit=admit, flags=raw.layout["flag_device_only"]))
        plan_ns = server.counters()["plan_ns"]
        times.append((plan_ns - total_ns) / 1000)
        total_ns = plan_ns
    server.stop()
    times = times[count // 10 :]
    return {
        "tokens": num_tokens,
        "top_k": TOP_K,
        "experts": num_experts,
        "layers": num_layers,
        "min_us": round(min(times), 2),
        "p50_us": round(statistics.median(times), 2),
        "mean_us": round(statistics.mean(times), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000, help="round trips of a spinning case (a quarter if parked)")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    bank = ExpertBank(LAYERS, EXPERTS, HIDDEN, INTERMEDIATE)
    load = os.getloadavg()[0]
    figures = []
    for case in ("empty", "all_hit", "cpu_share"):
        for spin_us in (SPIN_US, 0):
            os.sched_setaffinity(0, set(cores))
            figures.append(run_case(bank, cores, case, spin_us, arguments.count if spin_us else arguments.count // 4))
    geometry = {"tokens": 1, "top_k": TOP_K, "hidden": HIDDEN, "record_bytes": bank.layout.stride_bytes}
    result = {
        "geometry": geometry,
        "spin_us": SPIN_US,
        "load_average_before": load,
        "binding_us": measure_binding(bank),
        "cases": figures,
        "planning": [measure_planning(tokens, experts) for tokens in (1, 8, 128, 4096) for experts in (128, 512)],
    }
    write_result(arguments.out, "mailbox", result)


if __name__ == "__main__":
    main()
