"""The split by live rates against every fixed one, on machines made of numbers (freetoken/testing/split_machine.py).

    python bench/system/split_simulated.py --out bench/results/split_simulated.json

``calibration`` compares the numbers of the H200 host with what was measured there: the fixed splits of
gpu_split_h200.json and the runs of gpu_decode_h200.json, both measured after the numbers were chosen. ``machines`` has,
for each kind of routing and residency, microseconds of a layer without attention and the rest, and ``auto_of_best`` (of
whole layers) by what auto believed at first. All times are of a virtual clock; the run takes a few minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system import rig
from freetoken.testing.split_machine import (
    H200,
    MACHINES,
    Comparison,
    Record,
    Routing,
    VirtualMachine,
    beginnings,
    compare,
)

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROUTINGS = {
    "independent": Routing(),
    "skewed": Routing(alpha=0.8, locality=0.3),
    "4 streams": Routing(alpha=0.8, locality=0.3, streams=4),
}
LAYERS = 48  # of the model that was measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residency", type=rig.shares, default=(0.1, 0.25, 0.4, 0.6))
    parser.add_argument("--fixed", type=rig.shares, default=tuple(i / 10 for i in range(11)), help="fixed splits")
    parser.add_argument("--machine", default="", help="only those whose name contains this")
    parser.add_argument("--routing", type=rig.names, default=tuple(ROUTINGS), help="kinds of routing")
    parser.add_argument("--seed", type=int, default=0, help="of routing and noise")
    parser.add_argument("--out", help="result file (JSON)")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"calibration": calibrate(), "machines": []}
    worst = 1e9
    for machine in MACHINES:
        if arguments.machine not in machine.name:
            continue
        for kind in arguments.routing:
            for residency in arguments.residency:
                routing = dataclasses.replace(ROUTINGS[kind], seed=arguments.seed)
                begun = beginnings(machine, Record(), routing.top_k)
                found = compare(machine, residency, routing, arguments.fixed, begun)
                row = {"machine": machine.name, "routing": kind, **describe(machine, found)}
                figures["machines"].append(row)
                worst = min(worst, *row["auto_of_best"].values())
                print(line(row), flush=True)
    figures["worst_auto_of_best"] = worst
    write_result(arguments.out, "split_simulated", figures)


def describe(machine: VirtualMachine, found: Comparison) -> dict[str, Any]:
    """For JSON."""

    auto = {
        name: {
            **{key: round(value, 2) for key, value in dataclasses.asdict(figures).items()},
            **{key: found.status[name][key] for key in ("changes", "probes")},
            "live": [round(factor, 3) for factor in found.status[name]["live"]],
        }
        for name, figures in found.auto.items()
    }
    return {
        "residency": found.residency,
        "best_fixed": found.best_fixed,
        "auto_of_best": {name: round(found.auto_of_best(name, machine.rest_us), 4) for name in found.auto},
        "fixed_layer_us": {f"{share:g}": round(figures.layer_us, 2) for share, figures in found.fixed.items()},
        "auto": auto,
    }


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in row["auto_of_best"].items())
    best_us = row["fixed_layer_us"][f"{row['best_fixed']:g}"]
    auto = next(iter(row["auto"].values()))
    return (
        f"{row['machine']:<26} {row['routing']:<12} {row['residency']:4.0%}  q={row['best_fixed']:<4g}"
        f"{best_us:8.1f} us  auto {auto['layer_us']:8.1f} us "
        f"({auto['hits']:.2f} hits, {auto['fetched']:.2f} fetched, {auto['on_cpu']:.2f} CPU)  of best: {ratios}"
    )


def calibrate() -> list[dict[str, Any]]:
    """Of the H200 host: milliseconds of a token, as measured and as simulated."""
    rows = []
    for run in json.loads((RESULTS / "gpu_split_h200.json").read_text())["figures"]["runs"]:
        measured = {
            float(name.removeprefix("q=")): way["ms_per_token"]
            for name, way in run["ways"].items()
            if name.startswith("q=")
        }
        found = compare(H200, run["resident"], Routing(), sorted(measured), {})
        for share, ms in measured.items():
            rows.append(_row("gpu_split_h200.json", run["residency"], share, ms, found.fixed[share].layer_us))
    for run in json.loads((RESULTS / "gpu_decode_h200.json").read_text())["figures"]["runs"]:
        found = compare(H200, run["residency"], Routing(), [run["split"]], {})
        layer_us = found.fixed[run["split"]].layer_us
        rows.append(_row("gpu_decode_h200.json", run["residency"], run["split"], run["ms_per_token"], layer_us))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def _row(source: str, residency: float, share: float, measured_ms: float, layer_us: float) -> dict[str, Any]:
    simulated_ms = LAYERS * (layer_us + H200.rest_us) / 1e3
    return {
        "measured_in": source,
        "residency": residency,
        "fixed": share,
        "measured_ms": round(measured_ms, 3),
        "simulated_ms": round(simulated_ms, 3),
        "simulated_of_measured": round(simulated_ms / measured_ms, 3),
    }


if __name__ == "__main__":
    main()
