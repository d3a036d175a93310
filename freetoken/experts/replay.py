"""Route traces through the serving policy: the planner and the slot table that ExpertCache runs, at any capacity."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken._native import SlotTable, replay_publishes
from freetoken.experts.cache_baselines import belady, best_static
from freetoken.experts.route_trace import RouteTrace, TraceError

POLICIES = ("crf", "lru")
BASELINES = ("belady", "static")


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """As in the settings section ``experts``. None: as the slot table has it."""

    half_life_tokens: float | None = None
    long_half_life_tokens: float | None = None
    margin: float | None = None
    floor: float | None = None

    def check(self) -> None:
        """Raises ``TraceError`` for what no slot table takes."""
        try:
            SlotTable(1, 1, 1, POLICIES[0], **self.given())
        except ValueError as error:
            raise TraceError(str(error)) from None

    def given(self) -> dict[str, float]:
        """Those that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy at one capacity. ``hit_ratio``: uses found in a slot, of the distinct (layer, expert) uses of each
    publish. ``replacements_per_token``: fills that evicted something; the other fills went to slots that were empty.
    ``late_*``: of the second half of the trace."""

    policy: str
    num_slots: int
    capacity: float
    hit_ratio: float
    fills_per_token: float
    replacements_per_token: float
    late_hit_ratio: float
    late_fills_per_token: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded to what means something."""
        return {name: round(v, 5) if isinstance(v, float) else v for name, v in asdict(self).items()}


def parse_capacities(text: str, num_records: int) -> list[int]:
    """``5%,10%,96`` as numbers of slots, ascending. Raises ``TraceError`` naming what is wrong."""
    slots = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", part)
        if match is None or (not match[2] and "." in match[1]):
            raise TraceError(f"capacity {part.strip()!r} is neither a number of slots nor a percentage")
        count = num_records * float(match[1]) / 100 if match[2] else int(match[1])
        if count > num_records:
            raise TraceError(f"capacity {part.strip()!r} is not within the model's {num_records} experts")
        slots.add(int(count))
    return sorted(slots)


def replay(
    trace: RouteTrace,
    capacities: Sequence[int],
    policies: Sequence[str] = (*POLICIES, *BASELINES),
    settings: PolicySettings = PolicySettings(),
    fetch_fraction: float = 1.0,
    progress: Callable[[str, int], None] = lambda policy, num_slots: None,
) -> list[ReplayResult]:
    """Every policy at every capacity, from empty slots. ``fetch_fraction``: of the misses of a layer; what CpuExecutor
    computes cannot fill a slot (baselines fill as they like). A policy named twice runs once. Raises ``TraceError`` for
    an empty trace, an unknown policy, and settings that are out of range."""
    if trace.num_publishes == 0:
        raise TraceError("the trace is empty")
    for name in policies:
        if name not in (*POLICIES, *BASELINES):
            raise TraceError(f"policy {name!r} is not one of {', '.join((*POLICIES, *BASELINES))}")
    if not 0.0 <= fetch_fraction <= 1.0:
        raise TraceError(f"fetched share {fetch_fraction} is not from 0 to 1")
    settings.check()
    uses = trace.uses()
    sizes = np.array([len(records) for records in uses], np.int64)
    results = []
    for num_slots in capacities:
        for name in dict.fromkeys(policies):
            progress(name, num_slots)
            if name == "belady":
                counts = belady(uses, num_slots)
            elif name == "static":
                counts = best_static(uses, num_slots)
            else:
                counts = replay_policy(trace, num_slots, name, settings, fetch_fraction)
            results.append(_summary(trace, name, num_slots, sizes, counts))
    return results


def replay_policy(
    trace: RouteTrace,
    num_slots: int,
    policy: str,
    settings: PolicySettings = PolicySettings(),
    fetch_fraction: float = 1.0,
) -> NDArray[np.int64]:
    """[N, 3]: hits, fills and evictions of each publish."""
    table = SlotTable(trace.info.num_layers, trace.info.num_experts, num_slots, policy, **settings.given())
    counts = replay_publishes(
        table, trace.info.top_k, fetch_fraction, trace.layers, trace.token_counts, trace.ids, trace.admit
    )
    table.check_integrity()
    return counts[:, [0, 3, 4]]


def _summary(
    trace: RouteTrace, policy: str, num_slots: int, sizes: NDArray[np.int64], counts: NDArray[np.int64]
) -> ReplayResult:
    half = len(sizes) // 2
    hits, fills, evicted = (int(n) for n in counts.sum(axis=0))
    late_hits, late_fills, _ = (int(n) for n in counts[half:].sum(axis=0))
    late_tokens = int(trace.token_counts[half:].sum()) / trace.info.num_layers
    return ReplayResult(
        policy,
        num_slots,
        num_slots / (trace.info.num_layers * trace.info.num_experts),
        hits / max(int(sizes.sum()), 1),
        fills / max(trace.num_tokens, 1e-9),
        evicted / max(trace.num_tokens, 1e-9),
        late_hits / max(int(sizes[half:].sum()), 1),
        late_fills / max(late_tokens, 1e-9),
    )
