"""What copying a record ahead of time is worth, and what it costs: one engine, the graph of one request captured anew
for each way of doing it.

    python bench/gpu/lookahead.py --device cuda --model FTW_DIRECTORY --residency 0.25 --out lookahead.json

Ways: without hints in the graph; hints that are answered with nothing; copies by N programs. Each with a
split by live rates from measured costs, and with fixed ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system import rig
from freetoken.engine.bandwidth import measure_profile
from freetoken.execution.cuda import data_plane
from freetoken.experts.split import native_costs, split_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.25,))
    parser.add_argument("--fixed", type=rig.shares, default=(0.3,), help="fixed splits")
    parser.add_argument("--programs", type=int, nargs="+", default=[6, 8, 12], help="of the copy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=30)
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    checkpoint = rig.provide_model(arguments)
    settings = rig.settings_of(arguments, scheduler={"max_num_running": 1, "max_num_batched_tokens": 512})
    costs = measure_profile(rig.plan_rig(checkpoint, settings, arguments.residency[0])).costs
    store = rig.LoadedStore(checkpoint)
    begun = time.perf_counter()
    ways: list[tuple[str, int, bool]] = [("no hints", 8, False), ("no copies", 8, True)]
    ways += [(f"{count} programs", count, True) for count in arguments.programs]
    figures: dict[str, Any] = {"device": arguments.device, "residency": arguments.residency[0], "ways": {}}
    with rig.open_rig(store, settings, arguments.residency[0], 1.0) as engine:
        driver, server, model = rig.Driver(engine), engine.cache_server, engine.runtime.model
        driver.fill(rig.prompts(store.index, 60, arguments.fill_tokens, arguments.seed + 1))
        splits: list[Any] = [native_costs(costs), *arguments.fixed]
        turns = len(ways) * len(splits) * arguments.rounds * (arguments.warm_up + arguments.tokens)
        driver.start("s", rig.prompts(store.index, 1, 32, arguments.seed)[0], turns + 16)
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
        plane, hints = engine.runtime._plane, engine.runtime._plane.lookahead
        for number in range(arguments.rounds):
            for name, programs, has_hints in ways if number % 2 == 0 else ways[::-1]:
                data_plane.AHEAD_PROGRAMS = programs
                plane.lookahead = hints if has_hints else None
                server.set_lookahead(name not in ("no hints", "no copies"))
                if model.on_gpu:
                    batch = model.decode_batches[1]
                    torch.cuda.synchronize()
                    with model.on_stream():
                        batch.forget_graph()
                        batch.capture(torch.cuda.graph_pool_handle())
                    torch.cuda.synchronize()
                for split in splits:
                    if isinstance(split, float):
                        server.set_fetch_fraction(split)
                    else:
                        server.set_auto_split(split)
                    driver.decode(arguments.warm_up)
                    before = server.counters()
                    span = driver.decode(arguments.tokens)
                    after = server.counters()
                    layers = max(1, span.experts.layer_steps)
                    row = figures["ways"].setdefault(f"{name}, {split if isinstance(split, float) else 'auto'}", {})
                    row.setdefault("ms_per_token", []).append(round(1e3 * span.seconds / span.steps, 3))
                    for key in ("hits", "fetches", "cpu"):
                        row[key] = round(getattr(span.experts, key) / layers, 2)
                    for key in ("hints", "copied_ahead", "used_ahead"):
                        row[key] = round((after[key] - before[key]) / layers, 3)
                    for key in ("own", "cpu"):
                        timed = after[f"{key}_timed"] - before[f"{key}_timed"]
                        row[f"{key}_us"] = round((after[f"{key}_ns"] - before[f"{key}_ns"]) / 1e3 / max(1, timed), 1)
                    timed = max(1, after["cpu_timed"] - before["cpu_timed"])
                    for key in ("cpu_start", "cpu_wait", "turn"):
                        row[f"{key}_us"] = round((after[f"{key}_ns"] - before[f"{key}_ns"]) / 1e3 / timed, 1)
                    row |= {key: round(value, 3) for key, value in server.lookahead_status().items()}
                    status = server.split_status()
                    if status is not None and not isinstance(split, float):
                        metrics = split_metrics(costs, status)
                        row |= {
                            k: round(v, 2) for k, v in metrics.items() if "gbps" in k or "handoff" in k or "look" in k
                        }
            if arguments.out:
                Path(arguments.out).write_text(json.dumps({"unfinished": True, "figures": figures}))
            for name, row in figures["ways"].items():
                print(f"{name:28} {row}", flush=True)
    write_result(arguments.out, "lookahead", figures)


if __name__ == "__main__":
    main()
