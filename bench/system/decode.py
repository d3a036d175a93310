"""How fast tokens come, and how near the memory buses that is.

    python bench/system/decode.py --in-process --device cuda --residency 1.0,0.25 --split 0.25,0.5 [--trace]
    python bench/system/decode.py --device cuda --runtime ray,local --residency 0.25 --split 0.4
    python bench/system/decode.py --url http://127.0.0.1:8321 --model FTW_DIRECTORY

For each residency (share of the expert records that fit the slots), split (share of the misses that the device
fetches) and number of streams: tokens/s, milliseconds per token, time to first token, hit rate, records per layer and
step by where they ran, bytes over each bus, and two bounds from bandwidths measured in the same run (see
``bandwidth.bounds``) with the share of them that was reached. ``--in-process`` leaves actors and HTTP away;
``--trace`` says where a step's time goes. The prompts' tokens are independent, and so is a synthetic model's routing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_partial, write_result
from bench.system import bandwidth, rig
from bench.system.bandwidth import Bandwidths, Traffic
from bench.system.client import actor_metrics, stream
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.config.loader import merge
from freetoken.messages import ExpertCounters

FILL_PROMPTS = 64
TRACED_STEPS = 20
TTFT_SAMPLES = 7
_SETTLE_S = 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.add_argument(
        "--split", type=rig.shares, default=(0.5,), help="shares of the misses fetched, such as 0.25,0.5"
    )
    parser.add_argument("--streams", type=rig.numbers, default=(1,), help="concurrent requests, such as 1,4")
    parser.add_argument("--tokens", type=int, default=128, help="measured for each stream")
    parser.add_argument("--warm-up", type=int, default=64, help="tokens before them")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds over HTTP; the median counts")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--trace", action="store_true", help="profile decode steps of one stream (in process)")
    parser.add_argument("--mailbox", action="store_true", help="time the mailbox alone (in process, on a GPU)")
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    figures: dict[str, Any] = {"device": arguments.device, "runs": []}
    if arguments.url:
        _measure_url(arguments, figures)
    elif arguments.in_process:
        _measure_in_process(arguments, figures)
    else:
        _measure_http(arguments, figures)
    _compare_runtimes(figures)
    write_result(arguments.out, "decode", figures)


# ---------------------------------------------------------------------------------------------------- figures


def describe(
    index: FtwIndex | None,
    experts: ExpertCounters,
    steps: float,
    seconds: float,
    streams: int,
    context: float,
    rates: Bandwidths | None,
    on_gpu: bool,
    all_hit_ms: float | None,
) -> dict[str, Any]:
    """The figures of ``steps`` steps; ``context`` is the mean number of keys that a token saw."""
    steps = max(steps, 1.0)
    uses = max(1, experts.hits + experts.fetches + experts.cpu)
    layer_steps = max(1, experts.layer_steps)
    ms = 1e3 * seconds / steps
    figures: dict[str, Any] = {
        "tokens_per_s": streams * steps / seconds,
        "ms_per_token": ms,
        "hit_rate": experts.hits / uses,
        "hits_per_layer_step": experts.hits / layer_steps,
        "fetched_per_layer_step": experts.fetches / layer_steps,
        "cpu_per_layer_step": experts.cpu / layer_steps,
    }
    if index is None:
        return _rounded(figures)
    dtype_bytes = 4 if index.spec.dtype == "f32" else 2
    kv = streams * context * index.spec.kv_bytes_per_token(dtype_bytes)
    dense = bandwidth.dense_bytes_per_step(index)
    hit = experts.hits * bandwidth.mean_record_bytes(index)
    traffic = Traffic(dense + kv, hit / steps, experts.fetched_bytes / steps, experts.cpu_bytes / steps)
    figures["mb_per_step"] = {
        "dense": dense / 1e6,
        "kv": kv / 1e6,
        "hit": traffic.hit / 1e6,
        "fetched": traffic.fetched / 1e6,
        "cpu": traffic.cpu / 1e6,
    }
    # What was fetched is written to device memory and read there, or read once from the bus: count it once.
    local = traffic.dense_and_kv + traffic.hit
    figures["gbps"] = {
        "device": local / ms / 1e6,
        "pcie" if on_gpu else "fetch": traffic.fetched / ms / 1e6,
        "cpu": traffic.cpu / ms / 1e6,
    }
    if rates is not None:
        figures |= bandwidth.with_shares(bandwidth.bounds(traffic, rates, on_gpu, all_hit_ms), ms)
    return _rounded(figures)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _note(figures: dict[str, Any], run: dict[str, Any]) -> None:
    figures["runs"].append(run)
    shown = [
        *("tokens_per_s", "ms_per_token", "hit_rate", "fetched_per_layer_step", "cpu_per_layer_step"),
        *("bound_ms", "share_of_bound", "share_of_overhead_bound", "bound_exceeded_by", "cpu_busy_share", "ttft_ms"),
    ]
    where = " ".join(f"{key}={run[key]}" for key in ("runtime", "residency", "split", "streams") if key in run)
    print(f"{where}: " + "  ".join(f"{key} {run[key]}" for key in shown if key in run), flush=True)


def measure_rates(arguments: argparse.Namespace, checkpoint: Path, settings: dict[str, Any]) -> Bandwidths | None:
    """Before any engine runs, with the threads that its CpuExecutor will have; none for a model without experts."""
    share = next((r for r in arguments.residency if r is not None), None)
    plan = rig.plan_rig(checkpoint, settings, share).plan
    index = FtwIndex.load(checkpoint)
    if not index.spec.is_moe:
        return None
    begun = time.perf_counter()
    rates = bandwidth.measure(arguments.device, index, plan.cpu_threads, plan.cpu_core_ids)
    print(f"GB/s after {time.perf_counter() - begun:.1f} s: {rates.to_json()}", flush=True)
    return rates


def _all_hit_ms(figures: dict[str, Any], **run: Any) -> float | None:
    """The measured step of this many streams with everything resident, when there was one before."""
    for other in figures["runs"]:
        if other["residency"] == 1.0 and all(other.get(key) == value for key, value in run.items()):
            return float(other["ms_per_token"])
    return None


# ---------------------------------------------------------------------------------------------------- in process


def _measure_in_process(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    checkpoint = rig.provide_model(arguments)
    most = max(arguments.streams)
    rounds = len(arguments.streams) * len(arguments.split)
    room = rounds * (arguments.warm_up + arguments.tokens) + 2 * TRACED_STEPS + 16
    settings = rig.settings_of(arguments, scheduler={"max_num_running": most, "max_num_batched_tokens": 512})
    rates = measure_rates(arguments, checkpoint, settings)
    figures |= {
        "bandwidth_gbps": rates and rates.to_json(),
        "model": _describe_model(FtwIndex.load(checkpoint)),
        "mode": "in process",
    }
    store = rig.LoadedStore(checkpoint)
    index = store.index
    on_gpu = arguments.device == "cuda"
    for residency in sorted(arguments.residency, key=lambda r: -2.0 if r is None else -r):
        begun = time.perf_counter()
        whole = residency is None or residency >= 1.0
        splits = (1.0,) if whole else arguments.split
        with rig.open_rig(store, settings, residency, splits[0], pin_limit=arguments.pin_limit) as engine:
            driver = rig.Driver(engine)
            if residency is not None and index.spec.is_moe and whole:
                resident = driver.fill(rig.prompts(index, FILL_PROMPTS, arguments.fill_tokens, arguments.seed + 1))
                print(f"resident: {resident} of {index.num_records}", flush=True)
            driver.start("warm", rig.prompts(index, 1, arguments.prompt_tokens, arguments.seed + 2)[0], 1)
            driver.retire("warm")
            print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
            ttft: list[float] = []
            prompts = rig.prompts(index, most, arguments.prompt_tokens, arguments.seed)
            for streams in sorted(arguments.streams):
                while len(driver.lengths) < streams:
                    number = len(driver.lengths)
                    ttft.append(driver.start(f"s{number}", prompts[number], room).seconds)
                for split in splits:
                    if index.spec.is_moe:
                        engine.cache_server.set_fetch_fraction(split)
                    driver.decode(arguments.warm_up)
                    cpu_before, cache_before = _cpu_busy_s(engine), _cache_counters(engine)
                    span = driver.decode(arguments.tokens)
                    context = statistics.mean(driver.lengths.values()) - arguments.tokens / 2
                    run: dict[str, Any] = {"residency": residency, "split": split, "streams": streams}
                    run["steps"] = span.steps
                    all_hit = _all_hit_ms(figures, streams=streams)
                    run |= describe(
                        index, span.experts, span.steps, span.seconds, streams, context, rates, on_gpu, all_hit
                    )
                    run["cpu_busy_share"] = round((_cpu_busy_s(engine) - cpu_before) / span.seconds, 3)
                    run["layer_us"] = layer_times(cache_before, _cache_counters(engine))
                    run["ttft_ms"] = round(1e3 * statistics.median(ttft), 3)
                    _note(figures, run)
                    if arguments.trace and streams == 1 and split == splits[0]:
                        figures.setdefault("traces", []).append({"residency": residency, **trace(driver, on_gpu)})
                    write_partial(arguments.out, "decode", figures)
            if arguments.mailbox and residency == 1.0 and on_gpu and engine.device.type == "cuda":
                from bench.gpu.mailbox_graph import time_round_trips

                figures["mailbox"] = time_round_trips(engine)
                print(f"mailbox: {figures['mailbox']}", flush=True)
                write_partial(arguments.out, "decode", figures)


def _describe_model(index: FtwIndex) -> dict[str, Any]:
    source = index.source if isinstance(index.source, dict) else {}
    return {
        "architecture": index.spec.architecture,
        "layers": index.spec.num_layers,
        "experts": index.spec.num_experts,
        "top_k": index.spec.num_experts_per_tok,
        "record_bytes": [layout.stride_bytes for layout in index.layouts],
        "dense_bytes": index.dense_bytes,
        "expert_bytes": index.expert_bytes,
        "source": {key: source[key] for key in ("kind", "shape", "dtype", "overrides", "locality") if key in source},
    }


def _cpu_busy_s(engine: Any) -> float:
    server = getattr(engine, "cpu_server", None)
    return server.counters()["busy_ns"] / 1e9 if server is not None else 0.0


def _cache_counters(engine: Any) -> dict[str, int]:
    server = getattr(engine, "cache_server", None)
    return dict(server.counters()) if server is not None else {}


def layer_times(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """Microseconds of the stages of an expert layer, from the mailbox's stamps: planning; the device's own share; and,
    where the CPU had one, how long it took to begin, its work, how long the device waited for it, and from the end of
    that work to the next layer's publish."""
    spent = {name: after[name] - before.get(name, 0) for name in after}

    def mean(name: str, count: str) -> float:
        return round(spent[name] / spent[count] / 1e3, 2) if spent.get(count) else 0.0

    return {
        "plan": mean("plan_ns", "publishes"),
        "own": mean("own_ns", "own_timed"),
        "cpu_start": mean("cpu_start_ns", "cpu_timed"),
        "cpu": mean("cpu_ns", "cpu_timed"),
        "cpu_wait": mean("cpu_wait_ns", "cpu_timed"),
        "turn": mean("turn_ns", "cpu_timed"),
    }


def trace(driver: rig.Driver, on_gpu: bool, steps: int = TRACED_STEPS) -> dict[str, Any]:
    """Where the microseconds of a decode step go: by kernel on a GPU, by party on the CPU device."""
    engine = driver.rig
    if not on_gpu or engine.device.type != "cuda":
        before = _server_figures(engine)
        span = driver.decode(steps)
        after = _server_figures(engine)
        figures = {key: round((after[key] - before[key]) / steps / 1e3, 2) for key in after}
        figures["step_us"] = round(1e6 * span.seconds / steps, 1)
        print("trace (us/step): " + "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
        return figures
    import torch

    plain = driver.decode(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        span = driver.decode(steps)
        torch.cuda.synchronize()
    rows: list[dict[str, Any]] = []
    for event in profile.key_averages():
        total = float(getattr(event, "device_time_total", 0) or getattr(event, "cuda_time_total", 0))
        if total:
            rows.append({"kernel": event.key[:80], "us": total / steps, "launches": event.count / steps})
    rows.sort(key=lambda row: -float(row["us"]))
    for row in rows[:24]:
        print("{us:10.1f} us/step {launches:7.1f} x  {kernel}".format(**row), flush=True)
    busy = sum(float(row["us"]) for row in rows)
    return _rounded(
        {
            "step_us": 1e6 * plain.seconds / steps,
            "step_us_profiled": 1e6 * span.seconds / steps,
            "kernels_us": busy,
            "between_kernels_us": 1e6 * plain.seconds / steps - busy,
            "rows": [_rounded(row) for row in rows[:24]],
        }
    )


def _server_figures(engine: Any) -> dict[str, int]:
    if not hasattr(engine, "cache_server"):
        return {}
    return {
        "planning": engine.cache_server.counters()["plan_ns"],
        "cpu_executor": engine.cpu_server.counters()["busy_ns"],
    }


# ---------------------------------------------------------------------------------------------------- HTTP


def _measure_http(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    checkpoint = rig.provide_model(arguments)
    index = FtwIndex.load(checkpoint)
    most = max(arguments.streams)
    running = {"scheduler": {"max_num_running": max(8, most), "max_num_batched_tokens": 512}}
    settings = rig.settings_of(arguments, **running)
    rates = measure_rates(arguments, checkpoint, settings)
    figures |= {"bandwidth_gbps": rates and rates.to_json(), "model": _describe_model(index), "mode": "HTTP"}
    for residency in sorted(arguments.residency, key=lambda r: -2.0 if r is None else -r):
        whole = residency is None or residency >= 1.0
        for split in (1.0,) if whole else arguments.split:
            for runtime in arguments.runtime:
                begun = time.perf_counter()
                flags = launch_flags(arguments, index, checkpoint, running, residency, split, runtime)
                with rig.serve(arguments, checkpoint, flags) as engine:
                    print(f"{runtime}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
                    place = {"runtime": runtime, "residency": residency, "split": split}
                    _measure_server(arguments, engine.url, index, rates, figures, place, fill=whole)


def launch_flags(
    arguments: argparse.Namespace,
    index: FtwIndex,
    checkpoint: Path,
    sections: dict[str, Any],
    residency: float | None,
    split: float,
    runtime: str,
) -> list[str]:
    """The flags of ``freetoken launch`` for this run; the shell's settings come last, so that they win."""
    own = merge(sections, {"kv": {"num_tokens": arguments.kv_tokens}})
    flags = ["--device", arguments.device, "--runtime", runtime, "--port", "0"]
    if residency is not None:
        settings = rig.settings_of(arguments, **sections)
        flags += ["--vram", str(rig.vram_for(index, str(checkpoint), settings, residency))]
    own = merge(own, {"experts": {"split": f"q={split}"}, "loader": {"verify": False, "threads": 8}})
    own = merge(own, {"ray": {"dashboard": False}})
    if arguments.cpu_threads:
        own = merge(own, {"executor": {"cpu_threads": arguments.cpu_threads}})
    for section, values in own.items():
        for key, value in values.items():
            flags += ["--set", f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"]
    for setting in arguments.settings:
        flags += ["--set", setting]
    return flags


def _measure_url(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    index = None
    rates = None
    figures["mode"] = "HTTP"
    if arguments.model:
        index = FtwIndex.load(rig.provide_model(arguments))
        threads = int(actor_metrics(arguments.url)["CpuExecutor"].get("threads", 0))
        rates = bandwidth.measure(arguments.device, index, max(1, threads), ()) if index.spec.is_moe else None
        figures |= {"bandwidth_gbps": rates and rates.to_json(), "model": _describe_model(index)}
    _measure_server(arguments, arguments.url, index, rates, figures, {"residency": "as served"}, fill=False)


def _measure_server(
    arguments: argparse.Namespace,
    url: str,
    index: FtwIndex | None,
    rates: Bandwidths | None,
    figures: dict[str, Any],
    place: dict[str, Any],
    fill: bool,
) -> None:
    def make(count: int, length: int, seed: int) -> list[list[int]]:
        if index is not None:
            return rig.prompts(index, count, length, seed)
        return [[(31 * i + 7 * s + seed) % 4000 + 10 for i in range(length)] for s in range(count)]

    if fill:
        for prompt in make(FILL_PROMPTS, arguments.fill_tokens, arguments.seed + 1):
            _ok(stream(url, prompt, 1))
            metrics = actor_metrics(url)["ExpertCache"]
            if metrics.get("resident_slots", 0) >= metrics.get("slots", 0):
                break
    on_gpu = arguments.device == "cuda"
    for streams in sorted(arguments.streams):
        prompts = make(streams, arguments.prompt_tokens, arguments.seed + 100 * streams)
        # Prompts of their own: the prefix cache holds nothing of them.
        ttft = [
            _ok(stream(url, prompt, 1)).ttft_s
            for prompt in make(1 + TTFT_SAMPLES, arguments.prompt_tokens, arguments.seed + 7000 + streams)
        ][1:]
        _concurrently(url, prompts, arguments.warm_up)
        first = _counters(url)
        single = _concurrently(url, prompts, 1)
        second = _counters(url)
        rounds = [_concurrently(url, prompts, arguments.tokens) for _ in range(arguments.repeats)]
        results = [result for one in rounds for result in one]
        third = _counters(url)
        # Less what the prompts' (mostly cached) tokens did, which the second round shows.
        repeats = arguments.repeats
        delta = {key: third[key] - second[key] - repeats * (second[key] - first[key]) for key in third}
        experts = ExpertCounters(
            **{
                name: int(delta[f"expert_{name}_total"])
                for name in ("hits", "fetches", "cpu", "fetched_bytes", "cpu_bytes", "layer_steps")
            }
        )
        # From complete requests: how chunks reach the client says little about when tokens were made.
        whole = statistics.median(result.times_s[-1] for result in results)
        ms = 1e3 * (whole - statistics.median(result.times_s[-1] for result in single)) / (arguments.tokens - 1)
        steps = max(1.0, delta["steps_total"])
        context = arguments.prompt_tokens + arguments.tokens / 2
        run = {**place, "streams": streams, "steps": steps}
        keys = {key: value for key, value in place.items() if key == "runtime"}
        all_hit = _all_hit_ms(figures, streams=streams, **keys)
        run |= describe(index, experts, steps, ms * steps / 1e3, streams, context, rates, on_gpu, all_hit)
        run["ttft_ms"] = round(1e3 * statistics.median(ttft), 3)
        run["ttft_samples_ms"] = [round(1e3 * seconds, 3) for seconds in ttft]
        run["client_ms_per_token"] = round(statistics.median(result.decode_ms for result in results), 4)
        run["step_gap_ms"] = third["step_gap_ms"]
        _note(figures, run)
        _compare_runtimes(figures)
        write_partial(arguments.out, "decode", figures)


def _concurrently(url: str, prompts: list[list[int]], tokens: int) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return [_ok(result) for result in pool.map(lambda prompt: stream(url, prompt, tokens), prompts)]


def _ok(result: Any) -> Any:
    if result.error:
        raise RuntimeError(f"the request failed: {result.error}")
    return result


def _counters(url: str) -> dict[str, float]:
    time.sleep(_SETTLE_S)  # the last step's report may be on its way
    metrics = actor_metrics(url)
    found = {key: value for key, value in metrics["GpuExecutor"].items() if key.endswith("_total")}
    return {**found, "step_gap_ms": metrics["Scheduler"].get("step_gap_ms", 0.0)}


def _compare_runtimes(figures: dict[str, Any]) -> None:
    """How much longer a token takes under Ray than in one process, for runs that differ in nothing else."""
    by_place: dict[tuple[Any, ...], dict[str, float]] = {}
    for run in figures["runs"]:
        if "runtime" in run:
            place = (run["residency"], run["split"], run["streams"])
            by_place.setdefault(place, {})[run["runtime"]] = run["ms_per_token"]
    ratios = [
        {"residency": r, "split": q, "streams": s, "ray_over_local": round(times["ray"] / times["local"], 4)}
        for (r, q, s), times in by_place.items()
        if {"ray", "local"} <= times.keys()
    ]
    if ratios:
        figures["runtimes"] = ratios


if __name__ == "__main__":
    main()
