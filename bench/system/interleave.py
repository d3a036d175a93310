"""A long prompt beside running streams: what each costs the other.

    python bench/system/interleave.py --device cuda --model MODEL --residency 0.25 --long 4096 [--out FILE]

In process: the engine's scheduler, block allocator and step thread over one device, without actors and HTTP. Streams
decode alone, then a prompt of independent tokens comes. Measured: the streams' rate alone and until the prompt's first
token, the longest time without a token of a stream, and the prompt's time to its first token, beside the streams and
alone. ``background``: the prompt is computed in groups of layers between decode steps; ``mixed``: it shares their steps
in chunks of ``scheduler.prefill_chunk_tokens``.

With ``--seconds`` no sample begins that would probably end later: a run then has fewer of them (``samples``), and what
has none is named in ``not_measured``. The result file is written after every run, marked ``unfinished`` until the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_partial, write_result
from bench.system import rig
from freetoken.config.loader import merge
from freetoken.messages import SamplingParams
from freetoken.scheduling import SchedulerLimits
from freetoken.testing.step_engine import StepEngine

_LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.set_defaults(residency=(0.25,))
    parser.add_argument("--split", type=rig.shares, default=(0.5,))
    parser.add_argument("--long", type=rig.numbers, default=(4096,), help="tokens of the prompt that comes")
    parser.add_argument("--streams", type=rig.numbers, default=(1,), help="decoding requests")
    parser.add_argument("--solo-tokens", type=int, default=64, help="of each stream, to measure its rate alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long, loading counted")
    parser.add_argument("--modes", type=rig.names, default=("background", "mixed"))
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of one step at most")
    arguments = parser.parse_args()
    if arguments.url:
        parser.error("--url: this benchmark runs in process only")
    unknown = set(arguments.modes) - {"background", "mixed"}
    if unknown:
        parser.error(f"--modes: {', '.join(sorted(unknown))} is neither background nor mixed")
    rig.end_on_sigterm()
    end = time.perf_counter() + arguments.seconds
    room = 4 * arguments.solo_tokens + 512
    arguments.kv_tokens = max(arguments.kv_tokens, max(arguments.long) + 64 + max(arguments.streams) * (64 + 8 * room))
    checkpoint = rig.provide_model(arguments)
    chunk = min(arguments.chunk, max(arguments.long) + 64)
    scheduler = {
        "max_num_running": max(arguments.streams) + 1,
        "max_num_batched_tokens": chunk,
        "prefill_chunk_tokens": min(256, chunk),
    }
    settings = rig.settings_of(arguments, scheduler=scheduler)
    store = rig.LoadedStore(checkpoint)
    figures: dict[str, Any] = {"device": arguments.device, "mode": "in process", "runs": []}
    for residency in arguments.residency:
        for split in arguments.split:
            own = merge(settings, {"experts": {"split": f"q={split}"}})
            with rig.open_rig(store, own, residency, split, pin_limit=arguments.pin_limit) as engine:
                for mode in arguments.modes:
                    place = {"residency": residency, "split": split, "mode": mode}
                    _measure(arguments, engine, store, figures, place, end)
    write_result(arguments.out, "interleave", figures)


def _measure(
    arguments: argparse.Namespace,
    device: Any,
    store: rig.LoadedStore,
    figures: dict[str, Any],
    place: dict[str, Any],
    end: float,
) -> None:
    limits = SchedulerLimits.from_spec(device.launch)
    limits = dataclasses.replace(limits, prefix_cache=False)
    if place["mode"] == "mixed":
        limits = dataclasses.replace(limits, ride_along_tokens=None)
    servers = [getattr(device, name) for name in ("cache_server", "cpu_server") if hasattr(device, name)]

    def notice() -> None:
        for server in servers:
            server.notice()

    pipelined = device.launch.config.device == "cuda"
    with StepEngine(limits, device.executor, pipelined=pipelined, before_step=notice) as engine:
        bench = _Bench(arguments, engine, store)
        bench.warm_up()
        for count in arguments.streams:
            for length in arguments.long:
                run = {**place, "streams": count, "long": length}
                samples: list[dict[str, Any]] = []
                longest_s = 0.0
                while len(samples) < arguments.repeats and (now := time.perf_counter()) + longest_s < end:
                    samples.append(bench.sample(count, length))
                    longest_s = max(longest_s, time.perf_counter() - now)
                if not samples:
                    print(f"no time left for {run}", flush=True)
                    figures.setdefault("not_measured", []).append(run)
                    continue
                run |= {"samples": len(samples), **_summary(samples)}
                run["turns"] = {**engine.thread.turns.metrics(), **_chunk_metrics(engine)}
                _note(figures, run, arguments.out)
        bench.retire()


class _Bench:
    def __init__(self, arguments: argparse.Namespace, engine: StepEngine, store: rig.LoadedStore) -> None:
        self._arguments = arguments
        self._engine = engine
        self._index = store.index
        self._number = 0

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return rig.prompts(self._index, 1, length, self._arguments.seed + 4000 + self._number)[0]

    def _submit(self, name: str, length: int, tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = self._prompt(length)
        begun = time.perf_counter()
        self._engine.submit(name, prompt, sampling)
        return begun

    def _run_until_ended(self, *names: str) -> None:
        self._engine.run_until(lambda: all(name in self._engine.endings for name in names), _LIMIT_S)
        for name in names:
            failure = self._engine.endings[name].failure
            if failure is not None:
                raise RuntimeError(f"{name} failed: {failure.message}")

    def warm_up(self) -> None:
        """Compile what is compiled at first use, fill the slots as decoding would, and learn what chunks cost."""
        longest = max(self._arguments.long)
        self._submit("warm", 16, 10**6)
        self._engine.run_until(lambda: len(self._engine.tokens["warm"]) >= self._arguments.solo_tokens, _LIMIT_S)
        for number, length in enumerate((longest // 2, longest)):
            self._submit(f"warm{number}", max(length, 32), 1)
            self._run_until_ended(f"warm{number}")
        self.retire()
        self._submit("alone", max(longest, 32), 1)
        self._run_until_ended("alone")

    def retire(self) -> None:
        """End what runs."""
        for name in list(self._engine.scheduler.book.live):
            self._engine.abort(name)
        self._engine.run_until(lambda: not self._engine.scheduler.num_outstanding_steps, _LIMIT_S)

    def sample(self, streams: int, length: int) -> dict[str, Any]:
        """One long prompt beside ``streams`` streams, and one alone."""
        engine, solo_tokens = self._engine, self._arguments.solo_tokens
        begun = self._submit(name := f"alone{self._number}", length, 1)
        self._run_until_ended(name)
        alone_s = engine.times[name][0] - begun
        names = [f"s{self._number}-{i}" for i in range(streams)]
        for name in names:
            self._submit(name, 32, 10**6)
        engine.run_until(lambda: all(len(engine.tokens[name]) >= 8 + solo_tokens for name in names), _LIMIT_S)
        solo = [_rate(engine.times[name][8:]) for name in names]
        steps = engine.scheduler.background_steps_total
        begun = self._submit(long := f"long{self._number}", length, 1)
        self._run_until_ended(long)
        ended = engine.times[long][0]
        steps = engine.scheduler.background_steps_total - steps
        engine.run_until(lambda: all(engine.times[name][-1] > ended for name in names), _LIMIT_S)
        beside, gaps = [], []
        for name in names:
            times = engine.times[name]
            first = next(i for i, at in enumerate(times) if at > begun)
            last = next(i for i, at in enumerate(times) if at > ended)
            # Tokens within the time of the prompt; its ends fall between two tokens.
            beside.append((last - first) / (ended - begun))
            gaps.append(max(b - a for a, b in pairwise(times[first - 1 : last + 1])))
        self.retire()
        return {
            "solo_tokens_per_s": statistics.mean(solo),
            "beside_tokens_per_s": statistics.mean(beside),
            "kept_share": statistics.mean(beside) / statistics.mean(solo),
            "longest_gap_s": max(gaps),
            "ttft_s": ended - begun,
            "ttft_alone_s": alone_s,
            "background_steps": steps,
        }


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def _summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    worst = {
        "worst_kept_share": min(sample["kept_share"] for sample in samples),
        "worst_gap_s": max(sample["longest_gap_s"] for sample in samples),
    }
    return {name: float(f"{value:.5g}") for name, value in (medians | worst).items()}


def _chunk_metrics(engine: StepEngine) -> dict[str, float]:
    metrics = engine.scheduler.metrics()
    return {name: metrics[name] for name in ("chunk_fixed_ms", "chunk_token_us") if name in metrics}


def _note(figures: dict[str, Any], run: dict[str, Any], out: str | None) -> None:
    figures["runs"].append(run)
    print("  ".join(f"{name} {value}" for name, value in run.items()), flush=True)
    write_partial(out, "interleave", figures)


if __name__ == "__main__":
    main()
