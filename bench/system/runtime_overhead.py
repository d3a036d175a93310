"""What the actor runtime costs: the same model under `--runtime ray` and `--runtime local`, in turn, in one run.

Figures: milliseconds per decode step of one stream and of several, their ratio; messages per step; the time from the
end of step n to the start of step n+1; CPU seconds per second of all actor processes while idle.

    python bench/system/runtime_overhead.py [--model demo] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system.client import actor_metrics, get, stream
from freetoken.cli.process import EngineProcess

PROMPT = [(37 * i) % 4000 + 10 for i in range(48)]


def measure(url: str, tokens: int, streams: int) -> dict[str, float]:
    """Decode ``tokens`` tokens on ``streams`` concurrent streams; milliseconds per step and messages per step."""
    before = actor_metrics(url)
    prompts = [[(31 * i + 7 * s) % 4000 + 10 for i in range(48)] for s in range(streams)]
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        results = list(pool.map(lambda p: stream(url, p, tokens), prompts))
    errors = [r.error for r in results if r.error]
    if errors:
        raise RuntimeError(errors[0])
    after = actor_metrics(url)
    steps = after["Scheduler"]["steps_total"] - before["Scheduler"]["steps_total"]
    sent = sum(
        metrics.get("messages_sent_total", 0) - before.get(name, {}).get("messages_sent_total", 0)
        for name, metrics in after.items()
    )
    return {
        "decode_ms": statistics.median(r.decode_ms for r in results),
        "messages_per_step": sent / max(1, steps),
        "gap_ms": after["Scheduler"].get("step_gap_ms", float("nan")),
        "plan_ms": after["Scheduler"].get("plan_ms", float("nan")),
    }


def idle_cores(url: str, seconds: float) -> dict[str, float]:
    """Cores used by each actor process while nothing is asked of the engine."""
    actors = get(url, "/v1/actors")["actors"]
    processes = {a["name"]: psutil.Process(a["pid"]) for a in actors}
    before = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
    time.sleep(seconds)
    return {name: (sum(p.cpu_times()[:2]) - before[name]) / seconds for name, p in processes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--out")
    args = parser.parse_args()
    arguments = ["--profile", "demo", "--set", "server.port=0"]
    for setting in args.settings:
        arguments += ["--set", setting]
    runs: list[dict[str, Any]] = []
    for round_index in range(args.rounds):
        for runtime in ("ray", "local") if round_index % 2 == 0 else ("local", "ray"):
            with EngineProcess(args.model, *arguments, "--runtime", runtime) as engine:
                measure(engine.url, 16, 1)
                run: dict[str, Any] = {"runtime": runtime, "round": round_index}
                run["one_stream"] = measure(engine.url, args.tokens, 1)
                run["streams"] = measure(engine.url, args.tokens, args.streams)
                if runtime == "ray":
                    time.sleep(1.0)
                    run["idle_cores"] = idle_cores(engine.url, 5.0)
                runs.append(run)

    def median(runtime: str, section: str, key: str) -> float:
        return statistics.median(r[section][key] for r in runs if r["runtime"] == runtime)

    summary: dict[str, Any] = {}
    for section in ("one_stream", "streams"):
        ray, local = median("ray", section, "decode_ms"), median("local", section, "decode_ms")
        summary[section] = {
            "ray_ms": ray,
            "local_ms": local,
            "added_ms": ray - local,
            "ratio": ray / local,
            "messages_per_step": median("ray", section, "messages_per_step"),
            "gap_ms_ray": median("ray", section, "gap_ms"),
            "gap_ms_local": median("local", section, "gap_ms"),
        }
    idle = [sum(r["idle_cores"].values()) for r in runs if "idle_cores" in r]
    summary["idle_cores_all_actors"] = statistics.median(idle)
    write_result(args.out, "runtime_overhead", {"model": args.model, "summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
