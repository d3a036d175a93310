"""Time to the first token of so many new tokens, after no context or a cached one.

    python bench/system/prefill.py --in-process --device cuda --residency 0.25 --new 16,512,4096 [--out FILE]
    python bench/system/prefill.py --device cuda --runtime local --residency 0.25 --context 0,2048

For each residency, context and number of new tokens: seconds of several prompts of independent tokens (median, best,
all of them), tokens/s of the median, how many experts of a layer were resident, read by the device from the store, or
run on the CPU, bytes over each bus and the bandwidth achieved, and the bound from bandwidths measured in the same run
(``bound``) with the share of it that was reached. Over HTTP the seconds are the client's time to the first token; no
prompt comes twice, so the prefix cache answers only ``--context``. Whether the cache of decode survived is told by the
resident records before and after (in process).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_partial, write_result
from bench.system import bandwidth, decode, rig
from bench.system.bandwidth import Bandwidths, Traffic
from bench.system.client import actor_metrics, stream
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.config.loader import merge
from freetoken.messages import ExpertCounters

_COUNTED = {
    name: f"expert_{name}_total" for name in ("hits", "fetches", "cpu", "fetched_bytes", "cpu_bytes", "layer_steps")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.25,))
    parser.add_argument("--new", type=rig.numbers, default=(16, 512, 4096), help="new tokens")
    parser.add_argument("--context", type=rig.numbers, default=(0,), help="cached tokens before them")
    parser.add_argument("--split", type=rig.shares, default=(0.5,))
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length")
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
        _measure_server(arguments, arguments.url, index, None, figures, {"residency": "as served"})
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
    figures["mode"] = "in process"
    rates = _measure_rates(arguments, checkpoint, settings, figures)
    store = rig.LoadedStore(checkpoint)
    on_gpu = arguments.device == "cuda"
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
                        run: dict[str, Any] = {"residency": residency, "split": split, "context": context, "new": new}
                        experts = sum((span.experts for span in spans), ExpertCounters())
                        seconds = [span.seconds for span in spans]
                        run |= describe(seconds, new, context, experts, store.index, rates, on_gpu)
                        run["steps"] = spans[-1].steps
                        run["resident_before_after"] = resident[-1]
                        run["resident_share"] = round(resident[-1][0] / max(1, store.index.num_records), 4)
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


def describe(
    seconds: list[float],
    new: int,
    context: int,
    experts: ExpertCounters,
    index: FtwIndex | None,
    rates: Bandwidths | None,
    on_gpu: bool,
) -> dict[str, Any]:
    """Times of all prompts, and where their experts ran (``experts``: of all prompts, shown for one of them)."""
    count = len(seconds)
    layers = max(1, experts.layer_steps)
    median_s = statistics.median(seconds)
    figures: dict[str, Any] = {
        "median_s": median_s,
        "best_s": min(seconds),
        "worst_s": max(seconds),
        "samples_s": seconds,
        "tokens_per_s": new / median_s,
        "hit_rate": experts.hits / max(1, experts.hits + experts.fetches + experts.cpu),
        "resident_per_layer": experts.hits / layers,
        "fetched_per_layer": experts.fetches / layers,
        "cpu_per_layer": experts.cpu / layers,
        "counters": dataclasses.asdict(experts),
    }
    if index is not None:
        kv = (context + new) * index.spec.kv_bytes_per_token(4 if index.spec.dtype == "f32" else 2)
        steps = experts.layer_steps / count / max(1, len(index.spec.moe_layers))
        dense = steps * bandwidth.dense_bytes_per_step(index)
        hit = experts.hits * bandwidth.mean_record_bytes(index)
        traffic = Traffic(dense + kv, hit / count, experts.fetched_bytes / count, experts.cpu_bytes / count)
        figures["gb"] = {name: getattr(traffic, name) / 1e9 for name in ("dense_and_kv", "hit", "fetched", "cpu")}
        figures["gbps"] = {
            "pcie" if on_gpu else "fetch": traffic.fetched / median_s / 1e9,
            "cpu": traffic.cpu / median_s / 1e9,
        }
        if rates is not None:
            figures |= bandwidth.with_shares(bound(traffic, rates, on_gpu), median_s)
    return _rounded(figures)


def bound(traffic: Traffic, rates: Bandwidths, on_gpu: bool) -> dict[str, float]:
    """Seconds that a prompt cannot be faster than, whatever its arithmetic.

    Where the CPU took a part, the missing records of the experts that the prompt touched come over PCIe and the CPU at
    once; where it took none, a streaming pass moves all that are missing over PCIe alone.
    """
    if not on_gpu or traffic.cpu > 0:
        return {"bound_s": bandwidth.bounds(traffic, rates, on_gpu, None)["bound_ms"] / 1e3}
    rest = max(traffic.hit / rates.device, traffic.fetched / rates.pcie)
    return {"bound_s": (traffic.dense_and_kv / rates.device + rest) / 1e9}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _measure_rates(
    arguments: argparse.Namespace, checkpoint: Path, settings: dict[str, Any], figures: dict[str, Any]
) -> Bandwidths | None:
    rates = decode.measure_rates(arguments, checkpoint, settings)
    figures["bandwidth_gbps"] = rates and rates.to_json()
    return rates


def _note(figures: dict[str, Any], run: dict[str, Any], out: str | None) -> None:
    figures["runs"].append(run)
    where = " ".join(f"{key}={run[key]}" for key in ("runtime", "residency", "split", "context", "new") if key in run)
    shown = [
        *("median_s", "best_s", "worst_s", "tokens_per_s", "resident_per_layer", "fetched_per_layer", "cpu_per_layer"),
        *("bound_s", "share_of_bound", "bound_exceeded_by"),
    ]
    print(f"{where}: " + "  ".join(f"{key} {run[key]}" for key in shown if key in run), flush=True)
    write_partial(out, "prefill", figures)


def _resident(engine: Any) -> int:
    server = getattr(engine, "cache_server", None)
    return int(server.counters()["resident"]) if server is not None else 0


def _measure_http(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    checkpoint = rig.provide_model(arguments)
    index = FtwIndex.load(checkpoint)
    figures["mode"] = "HTTP"
    rates = _measure_rates(arguments, checkpoint, rig.settings_of(arguments, **_settings(arguments)), figures)
    for residency in arguments.residency:
        for split in arguments.split:
            for runtime in arguments.runtime:
                flags = decode.launch_flags(
                    arguments, index, checkpoint, _settings(arguments), residency, split, runtime
                )
                with rig.serve(arguments, checkpoint, flags) as engine:
                    place = {"runtime": runtime, "residency": residency, "split": split}
                    _measure_server(arguments, engine.url, index, rates, figures, place)


def _measure_server(
    arguments: argparse.Namespace,
    url: str,
    index: FtwIndex | None,
    rates: Bandwidths | None,
    figures: dict[str, Any],
    place: dict[str, Any],
) -> None:
    def make(length: int, seed: int) -> list[int]:
        if index is not None:
            return rig.prompts(index, 1, length, seed)[0]
        return [(i * 7919 + seed * 104729) % 4000 + 10 for i in range(length)]

    _ok(stream(url, make(min(512, max(arguments.new)), arguments.seed + 50), 64))
    on_gpu = arguments.device == "cuda"
    for context in arguments.context:
        for new in arguments.new:
            seconds, cached, total = [], [], ExpertCounters()
            after = None
            for repeat in range(-1, arguments.repeats):  # the first compiles and does not count
                tokens = make(context + new, arguments.seed + 1000 * new + 7 * context + repeat)
                if context:
                    _ok(stream(url, tokens[:context], 1))
                    after = None
                before = after or _counters(url)
                result = _ok(stream(url, tokens, 1))
                after = _counters(url)
                if repeat < 0:
                    continue
                seconds.append(result.ttft_s)
                cached.append((result.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
                counted = {name: int(after[key] - before[key]) for name, key in _COUNTED.items()}
                total = total + ExpertCounters(**counted)
            run: dict[str, Any] = {**place, "context": context, "new": new, "cached": max(cached)}
            run |= describe(seconds, new, context, total, index, rates, on_gpu)
            _note(figures, run, arguments.out)


def _counters(url: str) -> dict[str, float]:
    time.sleep(0.3)  # the last step's report may be on its way
    metrics = actor_metrics(url)["GpuExecutor"]
    return {name: metrics[name] for name in _COUNTED.values()}


def _ok(result: Any) -> Any:
    if result.error:
        raise RuntimeError(f"the request failed: {result.error}")
    return result


if __name__ == "__main__":
    main()
