"""Whether the split by live rates is as good as the best fixed one, whatever the residency.

    python bench/system/split.py --device cuda --model FTW_DIRECTORY --out split.json
    python bench/system/split.py --shape qwen3-moe-small --dtype q4_0 --residency 0.1,0.4 --fixed 0,0.5,1

For each residency one engine in process, whose slots are full: decode with ``auto`` and with every fixed split in
turn, several rounds in changing order, each after a few steps that do not count; the best round counts, as others may
use the machine too. ``auto_of_best`` is the best fixed split's time over auto's: 1 is equal, more is better. Auto
starts from the costs that are measured first (a few seconds; ``--assume`` leaves that away), and, with ``--wrong``,
once more from costs that make the CPU ten times as fast. The prompts' tokens, and so a synthetic model's routing, are
independent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system import rig
from freetoken.costs import CostModel, SideCost, assumed_costs
from freetoken.engine.bandwidth import measure_profile
from freetoken.errors import FreeTokenError
from freetoken.experts.split import native_costs, split_metrics

FILL_PROMPTS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.1, 0.25, 0.4, 0.6))
    parser.add_argument("--fixed", type=rig.shares, default=(0.0, 0.25, 0.4, 0.6, 1.0), help="fixed splits")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60, help="measured in each turn")
    parser.add_argument("--warm-up", type=int, default=24, help="steps before them")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--assume", action="store_true", help="do not measure costs first")
    parser.add_argument("--wrong", action="store_true", help="also auto that starts from wrong costs")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further residency is begun after so long")
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    begun = time.perf_counter()
    checkpoint = rig.provide_model(arguments)
    settings = rig.settings_of(arguments, scheduler={"max_num_running": 1, "max_num_batched_tokens": 512})
    figures: dict[str, Any] = {"device": arguments.device, "runs": []}
    costs = _costs(arguments, checkpoint, settings, figures)
    store = rig.LoadedStore(checkpoint)
    for residency in sorted((r for r in arguments.residency if r is not None), reverse=True):
        if time.perf_counter() - begun > arguments.seconds:
            print(f"no time left for residency {residency}", flush=True)
            continue
        started = time.perf_counter()
        run = measure(arguments, store, settings, residency, costs)
        run["seconds"] = round(time.perf_counter() - started, 1)
        figures["runs"].append(run)
        if arguments.out:
            Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.out).write_text(json.dumps({"benchmark": "split", "unfinished": True, "figures": figures}))
    ratios = [run["auto_of_best"] for run in figures["runs"]]
    figures["worst_auto_of_best"] = min(ratios, default=None)
    write_result(arguments.out, "split", figures)


def _costs(
    arguments: argparse.Namespace, checkpoint: Path, settings: dict[str, Any], figures: dict[str, Any]
) -> CostModel:
    """Measured, or else assumed."""
    if not arguments.assume:
        spec = rig.plan_rig(checkpoint, settings, arguments.residency[0])
        try:
            profile = measure_profile(spec)
            figures["profile"] = profile.to_json()
            print(f"costs: {profile.costs}", flush=True)
            return profile.costs
        except (FreeTokenError, RuntimeError) as error:
            print(f"costs could not be measured: {error}", flush=True)
            figures["not_measured"] = str(error)
    return assumed_costs(arguments.device)


def _wrong(costs: CostModel) -> CostModel:
    """A CPU believed to be ten times as fast."""

    def faster(side: SideCost) -> SideCost:
        return SideCost(side.fixed_ns / 10, side.byte_ns / 10, side.route_byte_ns / 10)

    return dataclasses.replace(costs, cpu=faster(costs.cpu), cpu_beside=faster(costs.cpu_beside), source="wrong")


def measure(
    arguments: argparse.Namespace, store: rig.LoadedStore, settings: dict[str, Any], residency: float, costs: CostModel
) -> dict[str, Any]:
    """One engine: every way of splitting, in turn."""
    index = store.index
    ways: list[tuple[str, float | CostModel]] = [("auto", costs)]
    if arguments.wrong:
        ways.append(("auto from wrong costs", _wrong(costs)))
    ways += [(f"q={share:g}", share) for share in arguments.fixed]
    turns = len(ways) * arguments.rounds * (arguments.warm_up + arguments.tokens)
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    shares: dict[str, dict[str, float]] = {}
    run: dict[str, Any] = {"residency": residency}
    with rig.open_rig(store, settings, residency, 1.0) as engine:
        driver = rig.Driver(engine)
        resident = driver.fill(rig.prompts(index, FILL_PROMPTS, arguments.fill_tokens, arguments.seed + 1))
        run["resident"] = resident / index.num_records
        driver.start("s", rig.prompts(index, 1, arguments.prompt_tokens, arguments.seed)[0], turns + 16)
        server = engine.cache_server
        for number in range(arguments.rounds):
            for name, way in ways if number % 2 == 0 else ways[::-1]:
                if isinstance(way, CostModel):
                    server.set_auto_split(native_costs(way))
                else:
                    server.set_fetch_fraction(way)
                driver.decode(arguments.warm_up)
                span = driver.decode(arguments.tokens)
                times[name].append(1e3 * span.seconds / span.steps)
                layers = max(1, span.experts.layer_steps)
                shares[name] = {
                    "hits": round(span.experts.hits / layers, 2),
                    "fetched": round(span.experts.fetches / layers, 2),
                    "cpu": round(span.experts.cpu / layers, 2),
                }
                status = server.split_status()
                if status is not None and isinstance(way, CostModel):
                    shares[name] |= {key: round(value, 4) for key, value in split_metrics(way, status).items()}
    bests = {name: min(values) for name, values in times.items()}
    fixed = {name: ms for name, ms in bests.items() if name.startswith("q=")}
    best = min(fixed, key=lambda name: fixed[name])
    run["ways"] = {
        name: {"ms_per_token": round(bests[name], 4), "rounds": [round(t, 4) for t in times[name]], **shares[name]}
        for name, _ in ways
    }
    run["best_fixed"] = best
    for name, ms in bests.items():
        if name.startswith("auto"):
            run[f"{name.replace(' ', '_')}_of_best"] = round(fixed[best] / ms, 4)
    shown = "  ".join(f"{name} {ms:.3f}" for name, ms in bests.items())
    print(f"residency {residency}: ms per token {shown}; auto {run['auto_of_best']} of {best}", flush=True)
    return run


if __name__ == "__main__":
    main()
