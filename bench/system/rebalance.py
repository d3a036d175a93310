"""What moving memory between expert slots and KV costs those who are being served.

    python bench/system/rebalance.py --device cuda --model FTW_DIRECTORY --residency 0.4 --out rebalance.json
    python bench/system/rebalance.py --url http://127.0.0.1:8321

An engine is launched (or found at ``--url``), its KV is filled with cached prefixes and its slots by decoding; then,
while ``--streams`` requests decode, memory of ``--move`` is moved to KV and back by turns. For each change: the longest
time between two tokens of any stream while it lasts, the same for times as long before and after it, in which nothing
is changed, and the hit rate right after it and later at the same capacity.

What a change costs (``gap_added_ms``) is its longest time less the median of those of the slower of both capacities:
fewer slots make every step slower, which is not the change's doing. What the same arithmetic says of a time without a
change is ``gap_added_by_nothing_ms``: the part of it that is the machine's. Beside them all times between tokens
without changes, and how many graphs were captured (none may be; with ``--set elastic.mode=reallocate`` all are, every
time).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from bench.system import rig
from bench.system.client import actor_metrics, get, stream
from bench.system.decode import launch_flags
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.units import parse_bytes

_AFTERWARDS_S = 0.05  # how long after its answer a change may still be felt
_RIGHT_AFTER_S = 0.5
_CONTROLS = 4  # times without a change, looked at before and after each change


class TokenClock:
    """Streams that never end; ``times`` are the moments of every token, by stream."""

    def __init__(self, url: str, streams: int, context: int, vocab: int, seed: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(streams)]
        self.errors: list[str] = []
        self._url = url
        self._context = context
        self._vocab = vocab
        self._stop = threading.Event()
        self._model = get(url, "/v1/models")["data"][0]["id"]
        self._threads = [
            threading.Thread(target=self._run, args=(number, random.Random(seed + number)), daemon=True)
            for number in range(streams)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the streams."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int, rng: random.Random) -> None:
        while not self._stop.is_set():
            prompt = [rng.randrange(5, self._vocab) for _ in range(32)]
            try:
                self._stream(number, prompt)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return

    def _stream(self, number: int, prompt: list[int]) -> None:
        parts = urlsplit(self._url)
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": self._context - 40, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.read().decode())
            # The pause before the first token is that of a new request, not of a running one.
            self.times[number].append(float("nan"))
            for line in response:
                if line.startswith(b"data: {") and b'"choices":[{' in line:
                    self.times[number].append(time.perf_counter())
                    if b'"error"' in line:
                        raise RuntimeError(line.decode())
                if self._stop.is_set():
                    return

    def gaps(self, begin: float, end: float, *, after: float = -math.inf, before: float = math.inf) -> list[float]:
        """Milliseconds between tokens of one stream, for pairs that touch the time from ``begin`` to ``end``.

        Only those that lie between ``after`` and ``before`` with all their length.
        """
        found = []
        for times in self.times:
            moments = list(times)
            found += [
                1e3 * (later - earlier)
                for earlier, later in itertools.pairwise(moments)
                if later >= begin and earlier <= end and earlier >= after and later <= before
            ]
        return [gap for gap in found if gap == gap]

    def longest_gap(self, begin: float, length_s: float, **limits: float) -> float | None:
        """Milliseconds between two tokens of any stream, at most, for the time that begins there."""
        gaps = self.gaps(begin, begin + length_s, **limits)
        return round(max(gaps), 3) if gaps else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rig.add_engine_arguments(parser)
    parser.add_argument("--split", type=float, default=0.5, help="share of the misses fetched")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--move", type=parse_bytes, default=1 << 30, help="moved each time, at most a quarter of all")
    parser.add_argument("--rounds", type=int, default=20, help="changes; every other one goes back")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between changes")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds of decoding before the first change")
    arguments = parser.parse_args()
    rig.end_on_sigterm()
    figures: dict[str, Any] = {"device": arguments.device, "streams": arguments.streams}
    with _engine(arguments) as url:
        try:
            _measure(arguments, url, figures)
        finally:
            write_result(arguments.out, "rebalance", figures)


@contextlib.contextmanager
def _engine(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.url:
        yield arguments.url
        return
    checkpoint = rig.provide_model(arguments)
    index = FtwIndex.load(checkpoint)
    sections = {
        "scheduler": {"max_num_running": max(8, arguments.streams), "max_num_batched_tokens": 512},
        "elastic": {"auto": False},
    }
    residency, runtime = arguments.residency[0], arguments.runtime[0]
    flags = launch_flags(arguments, index, checkpoint, sections, residency, arguments.split, runtime)
    with rig.serve(arguments, checkpoint, flags) as engine:
        yield engine.url


def _measure(arguments: argparse.Namespace, url: str, figures: dict[str, Any]) -> None:
    status = get(url, "/v1/cache/status")
    plan, elastic = status["plan"], status["elastic"]
    if not elastic["elastic"]:
        raise SystemExit("the arena is not elastic: it takes a VRAM budget")
    vocab = 1000
    budget = elastic["granules"] * elastic["granule_bytes"]
    move_bytes = min(arguments.move, budget // 4)
    move_tokens = move_bytes // plan["kv_block_bytes"] * plan["kv_block_size"]
    low = status["kv"]["capacity_tokens"]
    figures |= {
        "mode": elastic["mode"], "budget_bytes": budget, "granule_bytes": elastic["granule_bytes"],
        "move_bytes": move_bytes, "kv_tokens": [low, low + move_tokens],
    }  # fmt: skip
    context = min(plan["max_context_tokens"], max(64, low // (2 * arguments.streams)))
    _fill_kv(url, vocab, low, context, arguments.seed)
    graphs = actor_metrics(url)["GpuExecutor"].get("graphs_captured_total", 0.0)
    clock = TokenClock(url, arguments.streams, context, vocab, arguments.seed)
    try:
        time.sleep(arguments.warm_up)
        quiet_from = time.perf_counter()
        time.sleep(max(3.0, arguments.pause))
        quiet = clock.gaps(quiet_from, time.perf_counter())
        if not quiet:
            raise SystemExit(f"no stream decodes: {clock.errors}")
        figures["without"] = _spread(quiet)
        targets = [low + (move_tokens if number % 2 == 0 else 0) for number in range(arguments.rounds)]
        rounds = [_round(arguments, url, clock, tokens) for tokens in targets]
    finally:
        clock.close()
    figures["rounds"] = rounds
    figures["errors"] = clock.errors
    done = [entry for entry in rounds if entry["status"] == 200 and entry["outcome"] == "done"]
    figures["done"] = len(done)
    if done:
        figures["longest_gap_ms"] = _spread([entry["longest_gap_ms"] for entry in done])
        figures["gap_added_ms"] = _spread([entry["gap_added_ms"] for entry in done])
        figures["gap_added_by_nothing_ms"] = _spread(
            [gap for entry in done for gap in entry["gaps_added_by_nothing_ms"]]
        )
        figures["duration_ms"] = _spread([entry["duration_ms"] for entry in done])
        figures["hit_rate_lost"] = _spread([e["hit_rate_later"] - e["hit_rate_right_after"] for e in done])
    device = actor_metrics(url)["GpuExecutor"]
    figures["graphs_captured"] = device.get("graphs_captured_total", 0.0) - graphs
    figures["slowest_pause_of_step_thread_ms"] = device.get("resize_slowest_pause_ms")


def _fill_kv(url: str, vocab: int, tokens: int, context: int, seed: int) -> None:
    """Prompts until KV holds little but prefixes."""
    rng = random.Random(seed + 999)
    length = max(16, min(context - 8, 512))
    for _ in range(tokens // length + 1):
        stream(url, [rng.randrange(5, vocab) for _ in range(length)], 1)
        kv = get(url, "/v1/cache/status")["kv"]
        if kv["free_blocks"] < 0.05 * kv["blocks"]:
            return


def _round(arguments: argparse.Namespace, url: str, clock: TokenClock, kv_tokens: int) -> dict[str, Any]:
    begin = time.perf_counter()
    status, answer = _post(url, {"kv_tokens": kv_tokens})
    end = time.perf_counter()
    before = _uses(url)
    time.sleep(_RIGHT_AFTER_S)
    between = _uses(url)
    length_s = end - begin + _AFTERWARDS_S
    time.sleep(max(arguments.pause - _RIGHT_AFTER_S, (_CONTROLS + 1) * length_s, 0.5))
    after = _uses(url)
    felt_until = end + _AFTERWARDS_S
    longest = clock.longest_gap(begin, length_s)
    earlier = [clock.longest_gap(begin - n * length_s, length_s, before=begin) for n in range(1, _CONTROLS + 1)]
    later = [
        clock.longest_gap(end + _RIGHT_AFTER_S + n * length_s, length_s, after=felt_until) for n in range(_CONTROLS)
    ]
    controls = [[gap for gap in gaps if gap is not None] for gaps in (earlier, later)]
    usual = max((statistics.median(gaps) for gaps in controls if gaps), default=0.0)
    entry = {
        "kv_tokens": kv_tokens,
        "status": status,
        "outcome": answer.get("outcome", answer.get("error", {}).get("message")),
        "longest_gap_ms": longest,
        "longest_gaps_before_ms": controls[0],
        "longest_gaps_after_ms": controls[1],
        "gap_added_ms": round((longest or 0.0) - usual, 3),
        "gaps_added_by_nothing_ms": [round(gap - statistics.median(gaps), 3) for gaps in controls for gap in gaps],
        "duration_ms": answer.get("duration_ms", 0.0),
        "moved_bytes": answer.get("moved_bytes", 0),
        "slots": answer.get("slots"),
        "hit_rate_right_after": _hit_rate(before, between),
        "hit_rate_later": _hit_rate(between, after),
    }
    print(json.dumps(entry), flush=True)
    return entry


def _post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=300)) as line:
        line.request("POST", "/v1/cache/rebalance", json.dumps(body), {"Content-Type": "application/json"})
        response = line.getresponse()
        return response.status, json.loads(response.read())


def _uses(url: str) -> tuple[float, float]:
    experts = actor_metrics(url)["ExpertCache"]
    hits = experts["hits_total"]
    return hits, hits + experts["fetches_total"] + experts["cpu_total"]


def _hit_rate(earlier: tuple[float, float], later: tuple[float, float]) -> float:
    return round((later[0] - earlier[0]) / max(1.0, later[1] - earlier[1]), 4)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 4),
        "max": round(ordered[-1], 4),
    }


if __name__ == "__main__":
    main()
