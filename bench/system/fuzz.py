"""Hostile requests against a whole engine: no fault of the server, no growth, and it works afterwards.

    python bench/system/fuzz.py [--count 10000] [--seed 1] [--url URL] [--only INDEX] [--out FILE]

Launches an engine on a tiny random model (all services in one process), or takes the one at ``--url``. The requests are
drawn from the server's own OpenAPI document, over all paths and dialects (``freetoken/testing/http_fuzz.py``).
``--only`` sends one request of the seed again. Exits with 1 when an answer was a fault (5xx other than 503, none at
all, a stream that ends with a fault or without an end), when something is left running, when an ordinary request is
not answered as before, or when the engine's memory grew by more than ``--growth-mib``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from bench.common import write_result
from bench.system.client import actor_metrics, get, stream
from freetoken.cli.process import EngineProcess
from freetoken.testing.chat_templates import THINKING
from freetoken.testing.fuzz_run import FuzzReport, run_fuzz
from freetoken.testing.tiny_models import write_tiny_checkpoint

SETTINGS = (
    "--runtime", "local",
    "--set", "server.port=0",
    "--set", "kv.num_tokens=8192",
    "--set", "max_context_tokens=1024",
    "--set", "server.max_tokens_default=8",
    "--set", "server.response_store_bytes=16MiB",
    "--set", "server.output_memory_tokens=20000",
    "--set", "elastic.auto=false",
)  # fmt: skip
WARM_SHARE = 0.3
"""Of the requests, after which the engine's memory is what later memory is compared with: by then buffers and
bounded stores have their size, but for what only rare requests bring, once: the grammar library reads its own symbols
when it first panics at a schema (50 MiB), and the first recording of routes takes its ring (16 MiB)."""
PROMPT = [(7 * i) % 500 + 5 for i in range(40)]


def rss_mib(pid: int | None) -> float:
    """Of a process and those it started; 0 without one."""
    if pid is None:
        return 0.0
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (root, *root.children(recursive=True))) / 2**20


def left_over(url: str) -> dict[str, float]:
    """What requests hold, once it has become nothing or 20 s have passed."""
    deadline = time.monotonic() + 20
    while True:
        scheduler, kv = actor_metrics(url)["Scheduler"], get(url, "/v1/cache/status")["kv"]
        left = {"running": scheduler["running"], "waiting": scheduler["waiting"], "held_blocks": kv["held_blocks"]}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def answer(url: str) -> Any:
    """An ordinary request's text-deciding figures, or its error."""
    result = stream(url, PROMPT, 8, 60, logprobs=0)
    return result.error or [result.usage["completion_tokens"], result.usage["prompt_tokens"]]


def fuzz(url: str, pid: int | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """All requests; the figures."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 80)
    model = get(url, "/v1/models")["data"][0]["id"]
    before, begun_s = answer(url), time.perf_counter()
    count = arguments.count
    warm = 0 if arguments.only is not None else int(count * WARM_SHARE)
    pieces = [[arguments.only]] if arguments.only is not None else [range(warm), range(warm, count)]
    reports, memory = [], []
    for indices in pieces:
        reports.append(asyncio.run(run_fuzz(host, port, indices, arguments.seed, arguments.concurrency, model)))
        memory.append(round(rss_mib(pid), 1))
    faults = [fault for report in reports for fault in report.faults]
    left, after = left_over(url), answer(url)
    growth = memory[-1] - memory[0]
    figures = {
        "requests": sum(report.requests for report in reports),
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - begun_s, 1),
        "kinds": dict(sorted(sum((r.kinds for r in reports), type(reports[0].kinds)()).items())),
        "statuses": dict(sorted(sum((r.statuses for r in reports), type(reports[0].statuses)()).items())),
        "faults": sum(report.num_faults for report in reports),
        "longest_request": _longest(reports),
        "rss_mib_warm": memory[0],
        "rss_mib_end": memory[-1],
        "left": left,
        "answers_as_before": before == after,
    }
    for fault in faults:
        print(fault, file=sys.stderr)
    bad = figures["faults"] or any(left.values()) or before != after or growth > arguments.growth_mib
    return {**figures, "passed": not bad}


def _longest(reports: list[FuzzReport]) -> dict[str, Any]:
    report = max(reports, key=lambda report: report.longest_s)
    return {"seconds": round(report.longest_s, 2), "index": report.longest_index, "kind": report.longest_kind}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--only", type=int, metavar="INDEX")
    parser.add_argument("--growth-mib", type=float, default=128.0)
    parser.add_argument("--url")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url, pid, engine = arguments.url, None, None
        if url is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            checkpoint = write_tiny_checkpoint("qwen3_moe", Path(directory) / "tiny", chat_template=THINKING)
            cache = ("--set", f"loader.cache_dir={directory}/cache")
            engine = stack.enter_context(EngineProcess(str(checkpoint), *SETTINGS, *cache))
            url, pid = engine.url, engine.pid
        figures = fuzz(url, pid, arguments)
        if engine is not None:
            faults = [line for line in engine.log.splitlines() if "event=request_failed" in line]
            figures["faults_in_log"] = len(faults)
            if not figures["passed"]:
                print(engine.log[-6000:], file=sys.stderr)
    write_result(arguments.out, "fuzz", figures)
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
