"""From timings to costs: least squares of what a layer took, affine in bytes and in further tokens. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freetoken.costs import CostModel, SideCost


@dataclass(frozen=True, slots=True)
class Sample:
    """One party ran ``records`` records, each for ``tokens`` tokens, in ``ns`` (of several tries: the median). While
    the other party ran ``other_records`` of its own, or none."""

    records: int
    tokens: int
    record_bytes: int
    ns: float
    other_records: int = 0

    @property
    def extra_routes(self) -> int:
        """Tokens beyond the first of each record."""
        return self.records * (self.tokens - 1)

    @property
    def gbps(self) -> float:
        """10^9 bytes/s of this very layer."""
        return self.records * self.record_bytes / self.ns

    def to_json(self) -> dict[str, Any]:
        """For files and reports."""
        return {
            "records": self.records,
            "tokens": self.tokens,
            "record_bytes": self.record_bytes,
            "us": round(self.ns / 1e3, 2),
            "gbps": round(self.gbps, 2),
            **({"other_records": self.other_records} if self.other_records else {}),
        }


def fit_side(samples: Sequence[Sample]) -> SideCost:
    """The costs with the least relative squared errors. None of them is negative, and bytes cost something: what would
    come out otherwise is left out. Raises ``ValueError`` without samples, or with times that are not positive."""
    if not samples:
        raise ValueError("costs cannot be fitted to no samples")
    times = np.array([sample.ns for sample in samples], np.float64)
    if not np.all(np.isfinite(times) & (times > 0)):
        raise ValueError(f"times {times.tolist()} ns are not all positive")
    columns = np.array(
        [(1.0, float(s.records) * s.record_bytes, float(s.extra_routes) * s.record_bytes) for s in samples]
    )
    weighted = columns / times[:, None]
    best: tuple[float, np.ndarray] | None = None
    for chosen in itertools.product((False, True), repeat=3):
        part = weighted[:, list(chosen)]
        if not chosen[1] or not part.any(axis=0).all():
            continue
        scale = np.abs(part).max(axis=0)
        solution, _, rank, _ = np.linalg.lstsq(part / scale, np.ones(len(times)), rcond=None)
        if rank < part.shape[1] or np.any(solution <= 0):
            continue
        costs = np.zeros(3)
        costs[list(chosen)] = solution / scale
        error = float(np.sum((weighted @ costs - 1.0) ** 2))
        # A further cost has to earn its place: numbers from rounding errors would be no knowledge.
        if best is None or error < best[0] - 1e-9:
            best = (error, costs)
    assert best is not None  # bytes alone always fit
    fixed, byte, route = (float(value) for value in best[1])
    return SideCost(fixed, byte, route)


def fit_costs(
    fetch: Sequence[Sample],
    fetch_beside: Sequence[Sample],
    cpu: Sequence[Sample],
    cpu_beside: Sequence[Sample],
    *,
    hit_byte_ns: float,
    hits_load_memory: bool,
    source: str,
) -> CostModel:
    """The model of one machine and one model's records. A further token costs beside the other party what it costs
    alone, for as much as both are slower, unless it was timed beside it."""

    def beside(samples: Sequence[Sample], alone: SideCost) -> SideCost:
        side = fit_side(samples)
        if side.route_byte_ns == 0.0 and all(sample.tokens == 1 for sample in samples):
            return SideCost(side.fixed_ns, side.byte_ns, alone.route_byte_ns * side.byte_ns / alone.byte_ns)
        return side

    fetch_alone, cpu_alone = fit_side(fetch), fit_side(cpu)
    return CostModel(
        fetch_alone,
        beside(fetch_beside, fetch_alone),
        cpu_alone,
        beside(cpu_beside, cpu_alone),
        hit_byte_ns,
        hits_load_memory,
        measured=True,
        source=source,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """What the cost model says of ``misses`` missing records of a layer."""

    misses: int
    fetches: int
    ns: float
    fetch_only_ns: float
    cpu_only_ns: float


def decide(model: CostModel, misses: int, record_bytes: float, hits: int = 0) -> Decision:
    """The best split of one layer."""
    fetches = model.best_fetches(misses, record_bytes, hits)
    return Decision(
        misses,
        fetches,
        model.layer_ns(hits, fetches, misses - fetches, record_bytes),
        model.layer_ns(hits, misses, 0, record_bytes),
        model.layer_ns(hits, 0, misses, record_bytes),
    )


def explain(model: CostModel, misses: int, record_bytes: float, device: str) -> str:
    """In a sentence how missing experts will be split, and why."""
    decision = decide(model, misses, record_bytes)
    fetching = "PCIe" if device == "cuda" else "the device"
    alone = f"{model.fetch.effective_gbps(misses, record_bytes):.1f} GB/s through {fetching}"
    cpu = f"{model.cpu.effective_gbps(misses, record_bytes):.1f} GB/s on the CPU"
    both = model.fetch_beside.gbps + model.cpu_beside.gbps
    rates = f"{alone} alone, {cpu} alone, {both:.1f} GB/s of both at once"
    times = (
        f"{decision.ns / 1e3:.0f} us, against {decision.fetch_only_ns / 1e3:.0f} us fetching all and "
        f"{decision.cpu_only_ns / 1e3:.0f} us leaving all to the CPU"
    )
    if decision.fetches == misses:
        what = f"the device fetches all {misses} missing experts of a layer"
    elif decision.fetches == 0:
        what = f"the CPU runs all {misses} missing experts of a layer"
    else:
        what = f"of {misses} missing experts of a layer the device fetches {decision.fetches} and the CPU runs the rest"
    basis = "measured" if model.measured else "assumed"
    return f"With split=auto {what} ({times}), because {basis}: {rates}. Live rates correct this while serving."
