"""Whether the split by live rates is as good as the best fixed one, whatever the residency.

    python bench/system/split.py --device cuda --model FTW_DIRECTORY --out split.json
    python bench/system/split.py --shape qwen3-moe-small --dtype q4_0 --residency 0.1,0.4 --fixed 0,0.5,1

For each residency one engine in process, whose slots are full: decode with ``auto`` and with every fixed split in
turn, several rounds in changing order, each after a few steps that do not count; the best round counts, as others may
use the machine too. ``auto_of_best`` is the best fixed split's time over auto's: 1 is equal, more is better. Auto
starts from the costs that are measured first (a few seconds; ``--assume`` leaves that away), and, with ``--wrong``,
once more from costs that make the CPU ten times as fast. The prompts' tokens, and so a synthetic model's routing, are
independent.

With ``--seconds`` each residency gets its share of what is left, and ends after the round in which that is used up. The
result file is written after every round, so whoever ends the run keeps what was measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_partial, write_result
from bench.system import rig
from freetoken.costs import CostModel, assumed_costs
from freetoken.engine.bandwidth import measure_profile
from freetoken.errors import FreeTokenError
from freetoken.experts.split import native_costs, split_metrics
from freetoken.testing.split_machine import with_faster_cpu

FILL_PROMPTS = 400
WITHOUT_LOOKAHEAD = "auto without lookahead"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.1, 0.25, 0.4, 0.6))
    parser.add_argument(
        "--fixed", type=rig.shares, default=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0), help="fixed splits"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60, help="measured in each turn")
    parser.add_argument("--warm-up", type=int, default=24, help="steps before them")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--assume", action="store_true", help="do not measure costs first")
    parser.add_argument("--no-lookahead", action="store_true", help="also auto without lookahead")
    parser.add_argument("--wrong", action="store_true", help="also auto that starts from wrong costs")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further round after so long")
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    begun = time.perf_counter()
    checkpoint = rig.provide_model(arguments)
    settings = rig.settings_of(arguments, scheduler={"max_num_running": 1, "max_num_batched_tokens": 512})
    figures: dict[str, Any] = {"device": arguments.device, "runs": []}
    costs = _costs(arguments, checkpoint, settings, figures)
    store = rig.LoadedStore(checkpoint)
    residencies = sorted((r for r in arguments.residency if r is not None), reverse=True)
    for number, residency in enumerate(residencies):
        started = time.perf_counter()
        left_s = arguments.seconds - (started - begun)
        if left_s <= 0:
            print(f"no time left for residency {residency}", flush=True)
            continue
        figures["runs"].append({})
        for run in measure(arguments, store, settings, residency, costs, left_s / (len(residencies) - number)):
            run["seconds"] = round(time.perf_counter() - started, 1)
            figures["runs"][-1] = run
            write_partial(arguments.out, "split", figures)
    figures["worst_auto_of_best"] = min((run["auto_of_best"] for run in figures["runs"]), default=None)
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


def measure(
    arguments: argparse.Namespace,
    store: rig.LoadedStore,
    settings: dict[str, Any],
    residency: float,
    costs: CostModel,
    limit_s: float,
) -> Iterator[dict[str, Any]]:
    """One engine: every way of splitting, in turn. Yields the figures of all rounds so far after each."""
    begun = time.perf_counter()
    index = store.index
    ways: list[tuple[str, float | CostModel]] = [("auto", costs)]
    if arguments.wrong:
        ways.append(("auto from wrong costs", with_faster_cpu(costs, 10.0)))
    ways += [(f"q={share:g}", share) for share in arguments.fixed]
    if arguments.no_lookahead:
        ways.append((WITHOUT_LOOKAHEAD, costs))
    turns = len(ways) * arguments.rounds * (arguments.warm_up + arguments.tokens)
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    shares: dict[str, dict[str, float]] = {}
    with rig.open_rig(store, settings, residency, 1.0) as engine:
        driver = rig.Driver(engine)
        resident = driver.fill(rig.prompts(index, FILL_PROMPTS, arguments.fill_tokens, arguments.seed + 1))
        driver.start("s", rig.prompts(index, 1, arguments.prompt_tokens, arguments.seed)[0], turns + 16)
        print(f"residency {residency}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
        for number in range(arguments.rounds):
            if number > 0 and time.perf_counter() - begun > limit_s:
                print(f"residency {residency}: no time left after {number} rounds", flush=True)
                return
            for name, way in ways if number % 2 == 0 else ways[::-1]:
                engine.cache_server.set_lookahead(name != WITHOUT_LOOKAHEAD)
                ms, shares[name] = _take_turn(arguments, engine, driver, way)
                times[name].append(ms)
            yield summarize(residency, resident / index.num_records, times, shares)


def _take_turn(
    arguments: argparse.Namespace, engine: Any, driver: rig.Driver, way: float | CostModel
) -> tuple[float, dict[str, float]]:
    """Milliseconds of a token, and where the experts of a layer ran."""
    server = engine.cache_server
    if isinstance(way, CostModel):
        server.set_auto_split(native_costs(way))
    else:
        server.set_fetch_fraction(way)
    driver.decode(arguments.warm_up)
    before = server.counters()
    span = driver.decode(arguments.tokens)
    after = server.counters()
    layers = max(1, span.experts.layer_steps)
    shares = {
        "hits": round(span.experts.hits / layers, 2),
        "fetched": round(span.experts.fetches / layers, 2),
        "cpu": round(span.experts.cpu / layers, 2),
    }
    copied, used = (after[name] - before[name] for name in ("copied_ahead", "used_ahead"))
    if copied:
        idle_us = server.lookahead_status()["idle_ns"] / 1e3
        shares |= {
            "copied_ahead": round(copied / layers, 3),
            "used_ahead": round(used / layers, 3),
            "idle_us": round(idle_us, 1),
        }
    status = server.split_status()
    if status is not None and isinstance(way, CostModel):
        shares |= {key: round(value, 4) for key, value in split_metrics(way, status).items()}
    return 1e3 * span.seconds / span.steps, shares


def summarize(
    residency: float, resident: float, times: dict[str, list[float]], shares: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Of all rounds so far."""
    bests = {name: min(values) for name, values in times.items()}
    fixed = {name: ms for name, ms in bests.items() if name.startswith("q=")}
    best = min(fixed, key=lambda name: fixed[name])
    run: dict[str, Any] = {"residency": residency, "resident": resident}
    run["ways"] = {
        name: {"ms_per_token": round(ms, 4), "rounds": [round(t, 4) for t in times[name]], **shares[name]}
        for name, ms in bests.items()
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
