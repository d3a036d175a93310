"""Decode steps on a machine that is made of numbers: what the split of misses costs there, on a virtual clock.

The planner, the split and the slot table are the native ones; the machine only says how long each party takes, and
tells the planner what a mailbox's stamps would show. Nothing depends on the machine it runs on, so two runs are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freetoken._native import LayerShares, PublishReplay, SlotTable, SplitPlanner, replay_publishes
from freetoken.costs import CostModel, SideCost, assumed_costs
from freetoken.elastic.bandwidth import counts_to_time
from freetoken.elastic.cost_model import Sample, fit_costs
from freetoken.experts.route_trace import RouteTrace
from freetoken.experts.split import native_costs
from freetoken.experts.trace_sources import SyntheticRoutes, draw_trace

_ENDLESS = 1000  # records of the other party while one is timed beside it


@dataclass(frozen=True, slots=True)
class Record:
    """Of one expert: bytes, and tiles by which one may be divided (1: none is)."""

    num_bytes: int = 2_654_208
    num_tiles: int = 24


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """A GPU server or desktop. Rates in 10^9 bytes/s, times in microseconds.

    ``hit_gbps``: the expert kernel on resident records; ``bus_gbps``: on records behind the bus; ``cpu_gbps``: the CPU
    kernel, alone; ``memory_gbps``: what host memory gives bus and CPU together, each in proportion to what it would
    take. ``route_share``: what a further token costs the CPU, of a record's time. ``start_us``: from the plan until the
    CPU begins; ``answer_us``: from its end until a device that waits goes on; ``look_us``: what looking costs a device
    that need not wait. ``rest_us``: of a layer without its experts. Noise is log-normal; one CPU share in
    ``1 / stall_share`` is late by ``stall_us``. ``tick_ns``: of the device's clock.
    """

    name: str
    hit_gbps: float
    bus_gbps: float
    cpu_gbps: float
    memory_gbps: float
    hit_fixed_us: float = 8.0
    fetch_fixed_us: float = 7.0
    cpu_fixed_us: float = 11.0
    route_share: float = 0.1
    start_us: float = 0.5
    answer_us: float = 1.5
    look_us: float = 5.0
    rest_us: float = 40.0
    bus_noise: float = 0.03
    cpu_noise: float = 0.06
    stall_share: float = 0.002
    stall_us: float = 300.0
    tick_ns: float = 1000.0

    def layer(self, shares: LayerShares, noise: Noise | None = None, now_ns: float = 0.0) -> LayerStory:
        """One layer whose plan is out at ``now_ns``."""
        bus_noise, cpu_noise, stalls = noise or Noise()
        part = shares.split_part
        rest = 1.0 - part if part else 0.0
        fetched = shares.num_fetches + part
        on_cpu = shares.num_cpu + rest + self.route_share * (shares.cpu_extra + rest * shares.split_extra)
        starts_ns = 1e3 * (self.start_us + (self.stall_us if stalls else 0.0))
        bus_ns, cpu_ns = _ends_ns(
            1e3 * self.fetch_fixed_us, fetched * shares.record_bytes, self.bus_gbps / bus_noise,
            1e3 * self.cpu_fixed_us + starts_ns, on_cpu * shares.record_bytes, self.cpu_gbps / cpu_noise,
            self.memory_gbps,
        )  # fmt: skip
        own_ns = 1e3 * self.hit_fixed_us + shares.num_hits * shares.record_bytes / self.hit_gbps
        if fetched:
            own_ns = max(own_ns, bus_ns)
        own_seen_ns = self._seen_ns(now_ns, own_ns)
        if not on_cpu:
            return LayerStory(own_seen_ns, 0.0, 0.0, 0.0, own_ns)
        end_ns = max(own_ns + 1e3 * self.look_us, cpu_ns + 1e3 * self.answer_us)
        return LayerStory(
            own_seen_ns, self._seen_ns(now_ns + own_ns, end_ns - own_ns), cpu_ns - starts_ns, starts_ns, end_ns
        )

    def _seen_ns(self, begin_ns: float, duration_ns: float) -> float:
        """A duration by the device's clock."""
        ticks = (begin_ns + duration_ns) // self.tick_ns - begin_ns // self.tick_ns
        return float(ticks * self.tick_ns)

    def profile(self, record: Record, top_k: int = 8) -> CostModel:
        """What `freetoken bench bandwidth` would find: 1 to ``top_k`` records, alone and beside a party that is never
        through."""

        def sample(of_cpu: bool, records: int, tokens: int, others: int) -> Sample:
            fetches, on_cpu = (others, records) if of_cpu else (records, others)
            extra = records * (tokens - 1) if of_cpu else 0
            story = self.layer(LayerShares(0, fetches, on_cpu, record.num_bytes, cpu_extra=extra))
            return Sample(records, tokens, record.num_bytes, story.cpu_ns if of_cpu else story.own_ns, others)

        def samples(of_cpu: bool, others: int) -> list[Sample]:
            layers = [(n, 1) for n in counts_to_time(top_k)] + ([] if others else [(top_k, 4)])
            return [sample(of_cpu, records, tokens, others) for records, tokens in layers]

        hits_ns = self.layer(LayerShares(top_k, 0, 0, record.num_bytes)).own_ns
        return fit_costs(
            samples(False, 0),
            samples(False, _ENDLESS),
            samples(True, 0),
            samples(True, _ENDLESS),
            hit_byte_ns=hits_ns / (top_k * record.num_bytes),
            hits_load_memory=False,
            source=self.name,
        )


class Noise(NamedTuple):
    """Of one layer: how many times as slow bus and CPU are, and whether the CPU begins late."""

    bus: float = 1.0
    cpu: float = 1.0
    stalls: bool = False


class LayerStory(NamedTuple):
    """What a mailbox's stamps show of a layer (see ``SplitPlanner.observe``), and when it really ended, after its plan.
    Nanoseconds."""

    own_ns: float
    wait_ns: float
    cpu_ns: float
    start_ns: float
    end_ns: float


def _ends_ns(
    a_begin_ns: float, a_bytes: float, a_gbps: float, b_begin_ns: float, b_bytes: float, b_gbps: float, memory: float
) -> tuple[float, float]:
    """When two transfers are through, if ``memory`` (10^9 bytes/s) gives each what it asks for, or all it has in
    proportion."""
    if a_begin_ns > b_begin_ns:
        return _ends_ns(b_begin_ns, b_bytes, b_gbps, a_begin_ns, a_bytes, a_gbps, memory)[::-1]
    a_alone, b_alone = min(a_gbps, memory), min(b_gbps, memory)
    if not b_bytes or a_begin_ns + a_bytes / a_alone <= b_begin_ns:
        return a_begin_ns + a_bytes / a_alone, b_begin_ns + b_bytes / b_alone
    a_bytes -= (b_begin_ns - a_begin_ns) * a_alone
    both = min(1.0, memory / (a_gbps + b_gbps))
    a_ns, b_ns = a_bytes / (a_gbps * both), b_bytes / (b_gbps * both)
    if a_ns <= b_ns:
        return b_begin_ns + a_ns, b_begin_ns + a_ns + (b_bytes - a_ns * b_gbps * both) / b_alone
    return b_begin_ns + b_ns + (a_bytes - b_ns * a_gbps * both) / a_alone, b_begin_ns + b_ns


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Of the layers that count: mean time without ``rest_us``, and records of a layer by where they ran (a divided one
    by its parts)."""

    layer_us: float
    hits: float
    fetched: float
    on_cpu: float


def decode(
    machine: VirtualMachine,
    trace: RouteTrace,
    num_slots: int,
    way: float | SplitPlanner,
    record: Record = Record(),
    *,
    fill: int,
    warm_up: int,
    seed: int = 0,
) -> DecodeFigures:
    """The publishes of ``trace``: the first ``fill`` are all fetched, so that the slots are full; the next ``warm_up``
    do not count. ``way``: the share of misses that is fetched, or a planner, which keeps what it learns."""
    info = trace.info
    slots = SlotTable(info.num_layers, info.num_experts, num_slots)
    ends = np.cumsum(trace.token_counts, dtype=np.int64)
    filled = int(ends[fill - 1]) if fill else 0
    replay_publishes(
        slots, info.top_k, 1.0, trace.layers[:fill], trace.token_counts[:fill], trace.ids[:filled], trace.admit[:filled]
    )
    replay = PublishReplay(slots, info.top_k, int(trace.token_counts.max()))
    split = way if isinstance(way, SplitPlanner) else None
    fraction = 1.0 if isinstance(way, SplitPlanner) else way
    noises = _noises(machine, trace.num_publishes, seed)
    now_ns = measured_ns = 0.0
    sums = np.zeros(3)
    for i in range(fill, trace.num_publishes):
        rows = slice(int(ends[i] - trace.token_counts[i]), int(ends[i]))
        shares = replay.plan(
            int(trace.layers[i]), trace.ids[rows], trace.admit[rows], record.num_bytes, fraction, split,
            record.num_tiles,
        )  # fmt: skip
        story = machine.layer(shares, next(noises), now_ns)
        if split is not None:
            split.observe(shares, story.own_ns, story.cpu_ns, story.wait_ns, story.start_ns)
        now_ns += story.end_ns + 1e3 * machine.rest_us
        if i >= fill + warm_up:
            measured_ns += story.end_ns
            part = shares.split_part
            sums += (shares.num_hits, shares.num_fetches + part, shares.num_cpu + (1.0 - part if part else 0.0))
    count = trace.num_publishes - fill - warm_up
    return DecodeFigures(measured_ns / count / 1e3, *(sums / count).tolist())


def planner_of(costs: CostModel) -> SplitPlanner:
    """That begins with these costs."""
    return SplitPlanner(native_costs(costs))


def _noises(machine: VirtualMachine, count: int, seed: int) -> Iterator[Noise]:
    """The same for every way of splitting."""
    random = np.random.default_rng(seed)
    factors: NDArray[np.float64] = np.exp(random.standard_normal((count, 2)) * (machine.bus_noise, machine.cpu_noise))
    stalls = random.random(count) < machine.stall_share
    for (bus, cpu), late in zip(factors.tolist(), stalls.tolist(), strict=True):
        yield Noise(bus, cpu, late)


H200 = VirtualMachine("H200 host, PCIe 5.0 x16", 2400.0, 51.0, 100.0, 142.0)
"""16 cores. By bench/results/gpu_split_h200.json (profile) and gpu_decode_h200.json."""

MACHINES = (
    H200,
    VirtualMachine("PCIe 4.0 x16, DDR5 x2", 700.0, 24.0, 62.0, 72.0, fetch_fixed_us=9.0, start_us=2.0, answer_us=4.0),
    VirtualMachine("PCIe 4.0 x16, DDR4 x2", 500.0, 24.0, 38.0, 42.0, fetch_fixed_us=9.0, start_us=2.0, answer_us=4.0),
    VirtualMachine("PCIe 3.0 x8, DDR4 x2", 400.0, 6.5, 36.0, 40.0, fetch_fixed_us=12.0, start_us=3.0, answer_us=5.0),
    VirtualMachine("weak CPU", 500.0, 25.0, 9.0, 40.0, cpu_fixed_us=25.0, start_us=10.0, answer_us=8.0, cpu_noise=0.15),
    VirtualMachine("CPU only", 700.0, 2.5, 180.0, 200.0, fetch_fixed_us=20.0),
)


@dataclass(frozen=True, slots=True)
class Routing:
    """Of a comparison: ``alpha`` and ``locality`` as in ``SyntheticRoutes`` (0: independent), ``streams`` tokens in a
    publish. ``warm_up`` publishes do not count, ``measured`` do."""

    alpha: float = 0.0
    locality: float = 0.0
    streams: int = 1
    num_layers: int = 8
    num_experts: int = 128
    top_k: int = 8
    warm_up: int = 3000
    measured: int = 3000
    seed: int = 0

    def trace(self) -> tuple[RouteTrace, int]:
        """With enough publishes in front to fill any number of slots; and how many these are."""
        fill = self.num_layers * max(64, 12 * self.num_experts // self.top_k)
        steps = -(-(fill + self.warm_up + self.measured) // self.num_layers)
        shape = SyntheticRoutes(
            steps, self.num_layers, self.num_experts, self.top_k, self.alpha, self.locality, 0, self.streams, self.seed
        )
        return draw_trace(shape), fill


@dataclass(frozen=True, slots=True)
class Comparison:
    """At one residency: figures of each fixed share, and of the split by live rates from each beginning."""

    residency: float
    fixed: dict[float, DecodeFigures]
    auto: dict[str, DecodeFigures]
    status: dict[str, dict[str, Any]]

    @property
    def best_fixed(self) -> float:
        """The share with the least time."""
        return min(self.fixed, key=lambda share: self.fixed[share].layer_us)

    def auto_of_best(self, begun: str, rest_us: float) -> float:
        """The best fixed split's time for a layer over auto's: 1 is equal, more is better."""
        return (self.fixed[self.best_fixed].layer_us + rest_us) / (self.auto[begun].layer_us + rest_us)


def beginnings(machine: VirtualMachine, record: Record, top_k: int) -> dict[str, CostModel]:
    """What a split by live rates may believe at first: the truth, nothing of this machine, or a mistake."""
    profile = machine.profile(record, top_k)
    return {"profile": profile, "assumed": assumed_costs("cuda"), "wrong": with_faster_cpu(profile, 10.0)}


def with_faster_cpu(costs: CostModel, times: float) -> CostModel:
    """A CPU believed to be so many times as fast."""

    def faster(side: SideCost) -> SideCost:
        return SideCost(side.fixed_ns / times, side.byte_ns / times, side.route_byte_ns / times)

    return dataclasses.replace(costs, cpu=faster(costs.cpu), cpu_beside=faster(costs.cpu_beside), source="wrong")


def compare(
    machine: VirtualMachine,
    residency: float,
    routing: Routing,
    fixed: Sequence[float],
    begun: Mapping[str, CostModel],
    record: Record = Record(),
) -> Comparison:
    """Every way on the same trace with the same noise, each from the same full slots."""
    trace, fill = routing.trace()
    num_slots = round(residency * routing.num_layers * routing.num_experts)

    def run(way: float | SplitPlanner) -> DecodeFigures:
        return decode(machine, trace, num_slots, way, record, fill=fill, warm_up=routing.warm_up, seed=routing.seed)

    planners = {name: planner_of(costs) for name, costs in begun.items()}
    return Comparison(
        residency,
        {share: run(share) for share in fixed},
        {name: run(planner) for name, planner in planners.items()},
        {name: planner.status() for name, planner in planners.items()},
    )
