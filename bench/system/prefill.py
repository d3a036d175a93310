"""Time to the first token of so many new tokens, after no context or a cached one.

    python bench/system/prefill.py --in-process --device cuda --residency 0.25 --new 16,512,4096 [--out FILE]
    python bench/system/prefill.py --device cuda --runtime local --residency 0.25 --context 0,2048

For each residency, context and number of new tokens: seconds (best and median of several prompts of independent
tokens), tokens/s, and how many experts of a layer were resident, read by the device from the store, or run on the CPU.
Whether the cache of decode survived is told by the resident records before and after.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system import decode, rig
from bench.system.client import actor_metrics, stream
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.config.loader import merge
from freetoken.messages import ExpertCounters

_COUNTED = ("hits", "fetches", "cpu", "fetched_bytes", "cpu_bytes", "layer_steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.25,))
    parser.add_argument("--new", type=rig.numbers, default=(16, 512, 4096), help="new tokens")
    parser.add_argument("--context", type=rig.numbers, default=(0,), help="cached tokens before them")
    parser.add_argument("--split", type=rig.shares, default=(0.5,))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--trace", action="store_true", help="time the phases of one more prompt (in process, on a GPU)"
    )
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of one step at most")
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    longest = max(arguments.new) + max(arguments.context) + 64
    arguments.kv_tokens = max(arguments.kv_tokens, 2 * longest)
    figures: dict[str, Any] = {"device": arguments.device, "runs": []}
    if arguments.url:
        index = FtwIndex.load(rig.provide_model(arguments)) if arguments.model else None
        _measure_server(arguments, arguments.url, index, figures, {"residency": "as served"})
    elif arguments.in_process:
        _measure_in_process(arguments, figures)
    else:
        _measure_http(arguments, figures)
    write_result(arguments.out, "prefill", figures)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    chunk = arguments.chunk
    return {
        "scheduler": {"max_num_running": 4, "max_num_batched_tokens": chunk, "prefill_chunk_tokens": min(chunk, 1024)}
    }


def _measure_in_process(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    checkpoint = rig.provide_model(arguments)
    settings = rig.settings_of(arguments, **_settings(arguments))
    store = rig.LoadedStore(checkpoint)
    figures["mode"] = "in process"
    for residency in arguments.residency:
        for split in arguments.split:
            # The device's cost model looks at the setting.
            own = merge(settings, {"experts": {"split": f"q={split}"}})
            with rig.open_rig(store, own, residency, split, pin_limit=arguments.pin_limit) as engine:
                driver = rig.Driver(engine)
                # Fill the slots as decoding would have, and compile what is compiled at first use.
                for number, length in enumerate((64, 512)):
                    warm = rig.prompts(store.index, 1, min(length, max(arguments.new)), arguments.seed + 50 + number)[0]
                    driver.start("warm", warm, 128)
                    driver.decode(64)
                    driver.retire("warm")
                for context in arguments.context:
                    for new in arguments.new:
                        spans, resident = [], []
                        for repeat in range(arguments.repeats):
                            seed = arguments.seed + 1000 * new + 7 * context + repeat
                            tokens = rig.prompts(store.index, 1, context + new, seed)[0]
                            before = _resident(engine)
                            spans.append(driver.start("p", tokens, 1, cached=context))
                            driver.retire("p")
                            resident.append((before, _resident(engine)))
                        last = spans[-1]
                        run: dict[str, Any] = {"residency": residency, "split": split, "context": context, "new": new}
                        run |= describe([span.seconds for span in spans], new, last.experts)
                        run["steps"] = last.steps
                        run["resident_before_after"] = resident[-1]
                        if arguments.trace and arguments.device == "cuda" and engine.device.type == "cuda":
                            run["trace_ms"] = _trace(driver, tokens, context)
                        _note(figures, run, arguments.out)


def _trace(driver: rig.Driver, tokens: list[int], context: int) -> dict[str, float]:
    """Milliseconds of each phase of a prompt on the device's stream, and of the copy engine beside it."""
    import torch

    from freetoken.execution.cuda.trace import Trace

    model = driver.rig.runtime.model
    copier = getattr(model.stager, "_copier", None)
    model.program.trace = computing = Trace()
    copying = Trace()
    if copier is not None:
        copier.trace = copying
    try:
        driver.start("t", tokens, 1, cached=context)
        driver.retire("t")
        torch.cuda.synchronize()
    finally:
        model.program.trace = None
        if copier is not None:
            copier.trace = None
    phases = computing.milliseconds() | {f"copier: {name}": ms for name, ms in copying.milliseconds().items()}
    print("  " + "  ".join(f"{name} {ms:.2f} ms" for name, ms in phases.items()), flush=True)
    return {name: round(ms, 3) for name, ms in phases.items()}


def describe(seconds: list[float], new: int, experts: ExpertCounters) -> dict[str, Any]:
    """Times of all prompts, and where the last one's experts ran."""
    layers = max(1, experts.layer_steps)
    best = min(seconds)
    figures = {
        "best_s": best,
        "median_s": statistics.median(seconds),
        "first_s": seconds[0],
        "tokens_per_s": new / best,
        "resident_per_layer": experts.hits / layers,
        "fetched_per_layer": experts.fetches / layers,
        "cpu_per_layer": experts.cpu / layers,
        "fetched_gb": experts.fetched_bytes / 1e9,
        "cpu_gb": experts.cpu_bytes / 1e9,
        "counters": dataclasses.asdict(experts),
    }
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in figures.items()}


def _note(figures: dict[str, Any], run: dict[str, Any], out: str | None) -> None:
    figures["runs"].append(run)
    where = " ".join(f"{key}={run[key]}" for key in ("runtime", "residency", "split", "context", "new") if key in run)
    shown = ("best_s", "median_s", "tokens_per_s", "resident_per_layer", "fetched_per_layer", "cpu_per_layer")
    print(f"{where}: " + "  ".join(f"{key} {run[key]}" for key in shown), flush=True)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps({"benchmark": "prefill", "unfinished": True, "figures": figures}))


def _resident(engine: Any) -> int:
    server = getattr(engine, "cache_server", None)
    return int(server.counters()["resident"]) if server is not None else 0


def _measure_http(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    checkpoint = rig.provide_model(arguments)
    index = FtwIndex.load(checkpoint)
    figures["mode"] = "HTTP"
    for residency in arguments.residency:
        for split in arguments.split:
            for runtime in arguments.runtime:
                flags = decode.launch_flags(
                    arguments, index, checkpoint, _settings(arguments), residency, split, runtime
                )
                with rig.serve(arguments, checkpoint, flags) as engine:
                    place = {"runtime": runtime, "residency": residency, "split": split}
                    _measure_server(arguments, engine.url, index, figures, place)


def _measure_server(
    arguments: argparse.Namespace, url: str, index: FtwIndex | None, figures: dict[str, Any], place: dict[str, Any]
) -> None:
    def make(length: int, seed: int) -> list[int]:
        if index is not None:
            return rig.prompts(index, 1, length, seed)[0]
        return [(i * 7919 + seed * 104729) % 4000 + 10 for i in range(length)]

    _ok(stream(url, make(min(512, max(arguments.new)), arguments.seed + 50), 64))
    for context in arguments.context:
        for new in arguments.new:
            seconds = []
            cached = 0
            delta = ExpertCounters()
            for repeat in range(arguments.repeats):
                tokens = make(context + new, arguments.seed + 1000 * new + 7 * context + repeat)
                if context:
                    _ok(stream(url, tokens[:context], 1))
                before = _counters(url)
                result = _ok(stream(url, tokens, 1))
                after = _counters(url)
                seconds.append(result.ttft_s)
                cached = (result.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                delta = ExpertCounters(**{name: int(after[name] - before[name]) for name in _COUNTED})
            run: dict[str, Any] = {**place, "context": context, "new": new, "cached": cached}
            _note(figures, run | describe(seconds, new, delta), arguments.out)


def _counters(url: str) -> dict[str, float]:
    time.sleep(0.3)  # the last step's report may be on its way
    metrics = actor_metrics(url)["GpuExecutor"]
    return {name: metrics[f"expert_{name}_total"] for name in _COUNTED}


def _ok(result: Any) -> Any:
    if result.error:
        raise RuntimeError(f"the request failed: {result.error}")
    return result


if __name__ == "__main__":
    main()
