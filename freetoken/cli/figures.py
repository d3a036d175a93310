"""What the live view and ``freetoken status`` read out of an overview."""

from __future__ import annotations

import time
from collections import deque

from freetoken.engine.runtime import Overview
from freetoken.messages import ActorName, ActorStatus

_WINDOW_S = 5.0


def metrics_of(overview: Overview, name: ActorName) -> dict[str, float]:
    """One actor's figures; empty while it does not tell."""
    status = overview.of(name)
    return {} if status is None else status.metrics


class TokenRate:
    """Generated tokens per second over the last seconds, from a counter that restarts with its actor."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def update(self, overview: Overview, now: float | None = None) -> float:
        """The rate including the newest overview."""
        total = metrics_of(overview, ActorName.SCHEDULER).get("generated_tokens_total", 0.0)
        now = time.monotonic() if now is None else now
        if self._samples and total < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, total))
        while len(self._samples) > 2 and self._samples[0][0] < now - _WINDOW_S:
            self._samples.popleft()
        (start_s, start), (end_s, end) = self._samples[0], self._samples[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else 0.0


def requests_line(overview: Overview, rate: float) -> str:
    """Queue and speed."""
    scheduler = metrics_of(overview, ActorName.SCHEDULER)
    step = f" · step {scheduler['step_ms']:.1f} ms" if "step_ms" in scheduler else ""
    return (
        f"{scheduler.get('running', 0):.0f} running · {scheduler.get('waiting', 0):.0f} waiting · "
        f"{rate:.1f} tokens/s{step}"
    )


def experts_line(overview: Overview) -> str:
    """Hit rate, and where experts ran."""
    cache = metrics_of(overview, ActorName.EXPERT_CACHE)
    uses = [(what, cache.get(f"{key}_total", 0.0)) for what, key in _USES]
    total = sum(count for _, count in uses)
    if not total:
        return "no expert used yet"
    shares = " · ".join(f"{what} {100 * count / total:.1f} %" for what, count in uses)
    slots = f" · slots {cache.get('resident_slots', 0):.0f}/{cache['slots']:.0f}" if cache.get("slots") else ""
    return shares + slots


_USES = (("hits", "hits"), ("fetched", "fetches"), ("CPU", "cpu"))


def kv_line(overview: Overview) -> str:
    """Blocks held, cached and free."""
    kv = metrics_of(overview, ActorName.KV_ALLOCATOR)
    if not kv.get("blocks"):
        return "unknown"
    tokens = kv["blocks"] * kv.get("block_size_tokens", 0)
    return (
        f"{kv.get('held_blocks', 0):.0f} held · {kv.get('cached_blocks', 0):.0f} cached · "
        f"{kv.get('free_blocks', 0):.0f} free of {kv['blocks']:.0f} blocks ({tokens:.0f} tokens)"
    )


def actor_row(status: ActorStatus) -> tuple[str, ...]:
    """Name, state, process, epoch, restarts, detail."""
    return (
        str(status.name),
        status.state.value,
        str(status.pid or "-"),
        str(status.epoch),
        str(status.restarts),
        status.detail,
    )
