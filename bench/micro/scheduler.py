"""Python time that one step costs Scheduler and KVAllocator, and the messages it takes.

    python bench/micro/scheduler.py [--out bench/results/scheduler.json] [--steps 2000]

The core and the allocator run without transport and without a model: a step's result is there at once. Reported per
step: planning (needs, reply, rows), the result (tokens, endings, batch for the front), the allocator's share, and how
many messages crossed actors. Medians and 99th percentiles in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from freetoken.kv import KVAllocator
from freetoken.messages import (
    BlockCommit,
    BlockNeed,
    ReserveBlocks,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    SubmitRequest,
)
from freetoken.scheduling import Scheduler, SchedulerLimits

BLOCK_SIZE = 16
NUM_NOTIFIED = 3


class Clock:
    """Sums of time by what it was spent on, closed once a step."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self._open: Counter[str] = Counter()

    def measure(self, what: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        self._open[what] += time.perf_counter() - begin
        return result

    def close_step(self) -> None:
        for what, seconds in self._open.items():
            self.samples.setdefault(what, []).append(seconds * 1e6)
        self._open = Counter(dict.fromkeys(self._open, 0.0))

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            what: {
                "median_us": round(statistics.median(values), 1),
                "p99_us": round(statistics.quantiles(values, n=100)[98], 1),
            }
            for what, values in self.samples.items()
        }


class Loop:
    """Scheduler and allocator, driven at full speed with one plan always queued behind the running one."""

    def __init__(self, num_running: int, context_tokens: int) -> None:
        self.limits = SchedulerLimits(
            max_num_running=num_running + 8,
            max_num_waiting=num_running + 8,
            max_num_batched_tokens=512,
            prefill_chunk_tokens=256,
            step_timeout_s=120.0,
            max_context_tokens=1 << 20,
            block_size=BLOCK_SIZE,
            num_kv_blocks=(num_running + 8) * (context_tokens + 100_000) // BLOCK_SIZE,
            vocab_size=32_000,
        )
        self.scheduler = Scheduler(self.limits, epoch=1)
        self.allocator = KVAllocator(self.limits.num_kv_blocks, BLOCK_SIZE)
        self.plans: deque[StepPlan] = deque()
        self.messages: Counter[str] = Counter()
        self.clock = Clock()

    def submit(self, name: str, num_tokens: int, salt: int, max_tokens: int) -> None:
        prompt = tuple((salt * 7919 + index * 31) % 32_000 for index in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
        self.scheduler.submit(SubmitRequest(name, prompt, sampling), 0.0)

    def plan(self) -> None:
        scheduler, clock = self.scheduler, self.clock
        while (action := clock.measure("planning", lambda: scheduler.advance(0.0))) is not None:
            if isinstance(action, ReserveBlocks):
                message = action
                reply = clock.measure("allocator", lambda message=message: self.allocator.apply(message))
                clock.measure("planning", lambda reply=reply: scheduler.reserved(reply, 0.0))
                self.messages.update(("ReserveBlocks", "BlocksReserved"))
            else:
                self.plans.append(action.plan)
                self.messages["StepPlan"] += 1
                self.messages["StepNotice"] += NUM_NOTIFIED

    def step(self) -> None:
        scheduler, clock = self.scheduler, self.clock
        plan = self.plans.popleft()
        rows = tuple(RowResult(row.request_id, 1000 if row.sample else None) for row in plan.rows)
        result = StepResult(plan.step_id, plan.epoch, rows, 0, 1)
        clock.measure("result", lambda: scheduler.step_done(result, 0.0))
        self.messages["StepResult"] += 1
        if clock.measure("result", scheduler.take_batch) is not None:
            self.messages["TokenBatch"] += 1
        self.plan()

    def measure(self, num_steps: int) -> dict[str, Any]:
        self.clock = Clock()
        self.messages.clear()
        for _ in range(num_steps):
            self.step()
            self.clock.close_step()
        messages = {name: round(count / num_steps, 3) for name, count in sorted(self.messages.items())}
        return {**self.clock.figures(), "messages_per_step": messages, "messages": round(sum(messages.values()), 2)}


def bench_decode(num_running: int, num_steps: int) -> dict[str, Any]:
    """All requests decode, each at a context of about 1,000 tokens."""
    loop = Loop(num_running, 1000)
    for index in range(num_running):
        # Lengths differ so that block boundaries do not fall together, as in life.
        loop.submit(f"r{index}", 1000 + index * 5, index, 10_000_000)
    loop.plan()
    while any(request.num_prefill_tokens for request in loop.scheduler.book.live.values()):
        loop.step()
    return loop.measure(num_steps)


def bench_mixed(num_running: int, num_steps: int) -> dict[str, Any]:
    """The same beside prompts of 50,000 tokens that come in chunks."""
    loop = Loop(num_running, 1000)
    for index in range(num_running):
        loop.submit(f"r{index}", 1000 + index * 5, index, 10_000_000)
    loop.plan()
    while any(request.num_prefill_tokens for request in loop.scheduler.book.live.values()):
        loop.step()
    count = 0
    loop.clock = Clock()
    loop.messages.clear()
    for _ in range(num_steps):
        if len(loop.scheduler.book.live) < num_running + 2:
            count += 1
            loop.submit(f"p{count}", 50_000, 1000 + count, 1)
        loop.step()
        loop.clock.close_step()
    return loop.clock.figures()


def bench_prefix(num_tokens: int) -> dict[str, float]:
    """A long prompt: first need with nothing cached, commit, release, then the next turn's first need (all cached)."""
    allocator = KVAllocator(2 * num_tokens // BLOCK_SIZE + 64, BLOCK_SIZE)
    prompt = tuple(index * 31 % 32_000 for index in range(num_tokens))
    figures: dict[str, list[float]] = {"cold_ms": [], "commit_ms": [], "release_ms": [], "warm_ms": [], "evict_ms": []}

    def timed(what: str, message: ReserveBlocks) -> None:
        begin = time.perf_counter()
        reply = allocator.apply(message)
        figures[what].append((time.perf_counter() - begin) * 1e3)
        assert not reply.exhausted

    for turn in range(7):
        fresh = tuple((token + turn) % 32_000 for token in prompt)
        timed("cold_ms", ReserveBlocks(1, 1, needs=(BlockNeed("a", 0, num_tokens, fresh),)))
        timed("commit_ms", ReserveBlocks(1, 1, commits=(BlockCommit("a", num_tokens),)))
        timed("release_ms", ReserveBlocks(1, 1, releases=("a",)))
        timed("warm_ms", ReserveBlocks(1, 1, needs=(BlockNeed("b", 0, 256, (*fresh, 1, 2, 3)),)))
        allocator.apply(ReserveBlocks(1, 1, releases=("b",)))
        total = allocator.stats().total_blocks
        timed("evict_ms", ReserveBlocks(1, 1, needs=(BlockNeed("c", 0, 10**9, (31_999,) * (total * BLOCK_SIZE)),)))
        allocator.apply(ReserveBlocks(1, 1, releases=("c",)))
    return {what: round(statistics.median(values), 3) for what, values in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the figures here as JSON")
    parser.add_argument("--steps", type=int, default=2000, help="steps to measure for each setting")
    arguments = parser.parse_args()
    figures = {
        "decode": {str(count): bench_decode(count, arguments.steps) for count in (1, 16, 64)},
        "decode_beside_prefill": {str(count): bench_mixed(count, arguments.steps) for count in (1, 16, 64)},
        "prefix": {str(tokens): bench_prefix(tokens) for tokens in (1_000, 30_000, 120_000)},
    }
    write_result(arguments.out, "scheduler", figures)


if __name__ == "__main__":
    main()
