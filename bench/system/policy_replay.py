"""Replay of recorded and synthetic route traces through the slot policy, against Belady, the best static set and LRU.

Recorded traces are files of ``freetoken trace record`` or ``import``, or routing CSVs; they are not part of the
repository. ``aims`` says for each whether recency-frequency is within 5 points of Belady at 40 % residency, and whether
it takes at most half of LRU's fills: of all of them, and of those that replace something resident. Filling the empty
slots once is the same for everybody, and on traces of some 150 tokens already more than half of all that LRU fills. For
synthetic traces it says how far recency-frequency is from the best static set in the second half of the trace.
``changed_subject`` is a recorded trace followed by itself with every layer's experts renamed, twice. ``planning_us`` is
the time of one publish, planner and slot table together, of the first trace.

    python bench/system/policy_replay.py TRACE... --out bench/results/policy_replay.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from freetoken.experts.replay import ReplayResult, parse_capacities, replay, replay_policy
from freetoken.experts.route_trace import RouteTrace, read_trace
from freetoken.experts.trace_sources import SyntheticRoutes, draw_trace, import_csv

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import write_result

CAPACITIES = "5%,10%,20%,40%,60%"
SYNTHETIC = [SyntheticRoutes(2000, 4, 128, 8, alpha) for alpha in (0.6, 0.8, 1.0, 1.3)]


def load(path: str) -> RouteTrace:
    """A trace, or a CSV file."""
    return import_csv(path) if ".csv" in Path(path).name else read_trace(path)


def rename_experts(trace: RouteTrace, seed: int) -> RouteTrace:
    """The same trace of a model whose experts are numbered differently in each layer."""
    info = trace.info
    random = np.random.default_rng(seed)
    names = np.argsort(random.random((info.num_layers, info.num_experts)), axis=1).astype(np.int32)
    layer_of_row = np.repeat(trace.layers, trace.token_counts)[:, None]
    return dataclasses.replace(trace, ids=np.where(trace.ids < 0, -1, names[layer_of_row, trace.ids]).astype(np.int32))


def concatenate(traces: list[RouteTrace]) -> RouteTrace:
    """One after the other."""
    fields = ("layers", "token_counts", "step_ids", "ids", "weights", "admit")
    return RouteTrace(traces[0].info, *(np.concatenate([getattr(t, name) for t in traces]) for name in fields))


def at(results: list[ReplayResult], policy: str, num_slots: int) -> ReplayResult:
    """One of them."""
    return next(r for r in results if r.policy == policy and r.num_slots == num_slots)


def recorded(trace: RouteTrace) -> dict[str, Any]:
    """Everything about one recorded trace."""
    num_records = trace.info.num_layers * trace.info.num_experts
    results = replay(trace, parse_capacities(CAPACITIES, num_records))
    (forty,) = parse_capacities("40%", num_records)
    crf, lru, best = (at(results, name, forty) for name in ("crf", "lru", "belady"))
    gap = 100 * (best.hit_ratio - crf.hit_ratio)
    replacements = crf.replacements_per_token / lru.replacements_per_token
    fills = crf.fills_per_token / lru.fills_per_token
    changed = concatenate([trace, rename_experts(trace, 1), rename_experts(trace, 2)])
    return {
        "model": trace.info.model,
        "tokens": round(trace.num_tokens, 1),
        "layers": trace.info.num_layers,
        "experts": trace.info.num_experts,
        "experts_a_token": trace.info.top_k,
        "results": [r.as_dict() for r in results],
        "aims": {
            "points_below_belady_at_40": round(gap, 2),
            "replacements_of_lru_at_40": round(replacements, 3),
            "fills_of_lru_at_40": round(fills, 3),
            "belady_met": gap <= 5.0,
            "replacements_met": replacements <= 0.5,
            "fills_met": fills <= 0.5,
        },
        "changed_subject": [
            r.as_dict() for r in replay(changed, parse_capacities("10%,20%,40%", num_records), ("crf", "lru", "belady"))
        ],
    }


def synthetic(shape: SyntheticRoutes) -> dict[str, Any]:
    """How far from the best static set."""
    trace = draw_trace(shape)
    capacities = parse_capacities(CAPACITIES, shape.num_layers * shape.num_experts)
    results = replay(trace, capacities, ("crf", "lru", "static", "belady"))
    gaps = [100 * (at(results, "static", n).late_hit_ratio - at(results, "crf", n).late_hit_ratio) for n in capacities]
    return {
        "shape": dataclasses.asdict(shape),
        "results": [r.as_dict() for r in results],
        "aims": {"most_points_below_static": round(max(gaps), 2), "met": max(gaps) <= 2.0},
    }


def planning_us(trace: RouteTrace) -> dict[str, float]:
    """Of one publish, at a quarter resident."""
    slots = trace.info.num_layers * trace.info.num_experts // 4
    times = {}
    for policy in ("crf", "lru"):
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            replay_policy(trace, slots, policy)
            best = min(best, time.perf_counter() - start)
        times[policy] = round(best / trace.num_publishes * 1e6, 2)
    return times


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--out", metavar="FILE")
    args = parser.parse_args()
    traces = [load(path) for path in args.traces]
    figures: dict[str, Any] = {
        "recorded": [recorded(trace) for trace in traces],
        "synthetic": [synthetic(shape) for shape in SYNTHETIC],
        "planning_us": planning_us((traces or [draw_trace(SYNTHETIC[2])])[0]),
    }
    sys.argv[1:] = [Path(argument).name if argument in args.traces else argument for argument in sys.argv[1:]]
    write_result(args.out, "policy_replay", figures)


if __name__ == "__main__":
    main()
