"""The engine's slow figures as gauges of Ray's metrics agent, which Prometheus reads and the dashboard's Metrics page
draws. Named as on ``/metrics``; Ray puts ``ray_`` before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.messages import ActorName, ActorStatus
from freetoken.telemetry.names import metric_name

INTERVAL_S = 1.0
SHOWN: dict[ActorName, tuple[str, ...]] = {
    ActorName.EXPERT_CACHE: (
        "slots", "resident_slots", "hit_", "shadow_", "sampled_hit_ratio", "fetch_fraction", "split_"
    ),
    ActorName.KV_ALLOCATOR: ("blocks", "free_blocks", "cached_blocks", "held_blocks", "hit_ratio"),
    ActorName.CONTROLLER: ("ready", "epoch", "rebalance_busy", "last_decision_"),
}  # fmt: skip
"""How their keys begin: rates, split, hit rates, pools, the last decision."""


def shown_figures(statuses: Sequence[ActorStatus]) -> dict[str, float]:
    """By name; counters are left to ``/metrics``."""
    return {
        metric_name(status.name.value, key): float(value)
        for status in statuses
        for key, value in status.metrics.items()
        if key.startswith(SHOWN.get(status.name, ("no figure",))) and not key.endswith("_total")
    }


class RayGauges:
    """``engine`` (its namespace) is the label that tells engines of a cluster apart. In a process that Ray made."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._gauges: dict[str, Any] = {}

    def show(self, statuses: Sequence[ActorStatus]) -> None:
        """Hand the newest figures to Ray; some microseconds each. Whatever goes wrong there is raised."""
        from ray.util.metrics import Gauge

        for name, value in shown_figures(statuses).items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = Gauge(name, f"{name} on /metrics.", tag_keys=("engine",))
                gauge.set_default_tags({"engine": self._engine})
            gauge.set(value)
