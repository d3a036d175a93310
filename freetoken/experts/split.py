"""The split of missing experts between device and CPU: what the native planner is told, and what it reports."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from freetoken import _native
from freetoken.costs import CostModel, SideCost

logger = logging.getLogger(__name__)

_MOSTLY = 0.97
ARMS = ("fetch", "fetch_beside", "cpu", "cpu_beside")
"""Order of the planner's factors; nanoseconds for handing over to the CPU, and for a look at its answer, follow, and
then the factor of a GPU's resident records."""


def native_costs(model: CostModel) -> _native.SplitCosts:
    """For ``CacheServer.set_auto_split``."""

    def side(cost: SideCost) -> _native.SideCost:
        return _native.SideCost(cost.fixed_ns, cost.byte_ns, cost.route_byte_ns)

    return _native.SplitCosts(
        side(model.fetch),
        side(model.fetch_beside),
        side(model.cpu),
        side(model.cpu_beside),
        model.hit_byte_ns,
        model.hits_load_memory,
    )


def split_mode(misses: float, fetches: float) -> str:
    """In a word where the misses go."""
    if misses <= 0:
        return "idle"
    share = fetches / misses
    return "fetch" if share > _MOSTLY else "cpu" if share < 1 - _MOSTLY else "both"


def split_metrics(model: CostModel, status: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a split by live rates (``CacheServer.split_status``): rates in 10^9 bytes/s without fixed costs."""
    live = dict(zip(ARMS, status["live"], strict=False))
    misses, fetches = status["mean_misses"], status["mean_fetches"]
    mode = split_mode(misses, fetches)
    change = status["last_change"]
    return {
        **{f"split_{arm}_gbps": getattr(model, arm).gbps / live[arm] for arm in ARMS},
        **{f"split_{arm}_fixed_us": getattr(model, arm).fixed_ns * live[arm] / 1e3 for arm in ARMS},
        **{f"split_{arm}_of_profile": 1.0 / live[arm] for arm in ARMS},
        "split_handoff_us": status["live"][len(ARMS)] / 1e3,
        "split_look_us": status["live"][len(ARMS) + 1] / 1e3,
        **({} if model.hits_load_memory else {"split_hits_of_profile": 1.0 / status["live"][len(ARMS) + 2]}),
        "split_timings_total": float(sum(status["timings"])),
        "split_misses_per_layer": misses,
        "split_fetches_per_layer": fetches,
        "split_layer_us": status["measured_ns"] / 1e3,
        "split_layer_predicted_us": status["predicted_ns"] / 1e3,
        "split_fetch_only": float(mode == "fetch"),
        "split_cpu_only": float(mode == "cpu"),
        "split_changes_total": float(status["changes"]),
        "split_probes_total": float(status["probes"]),
        "split_last_change_gain": change["gain"],
        "split_last_change_fetched_before": change["fetched_before"],
        "split_last_change_fetched_after": change["fetched_after"],
        "split_cost_model_measured": float(model.measured),
    }


def live_costs(model: CostModel, metrics: Mapping[str, float]) -> CostModel:
    """The costs that ``metrics`` (of ``split_metrics``) tell of; ``model`` itself where they do not."""

    def side(arm: str) -> SideCost:
        believed: SideCost = getattr(model, arm)
        factor = 1.0 / metrics.get(f"split_{arm}_of_profile", 1.0)
        return SideCost(believed.fixed_ns * factor, believed.byte_ns * factor, believed.route_byte_ns * factor)

    hit_byte_ns = model.hit_byte_ns / metrics.get("split_hits_of_profile", 1.0)
    fetch, fetch_beside, cpu, cpu_beside = (side(arm) for arm in ARMS)
    return dataclasses.replace(
        model, fetch=fetch, fetch_beside=fetch_beside, cpu=cpu, cpu_beside=cpu_beside, hit_byte_ns=hit_byte_ns
    )


def describe_change(model: CostModel, change: Mapping[str, Any]) -> str:
    """The last change of a split in a sentence with its numbers."""
    before = dict(zip(ARMS, change["before"], strict=False))
    after = dict(zip(ARMS, change["after"], strict=False))
    rates = "; ".join(
        f"{arm} {getattr(model, arm).gbps / before[arm]:.1f} -> {getattr(model, arm).gbps / after[arm]:.1f} GB/s"
        for arm in ARMS
        if abs(after[arm] / before[arm] - 1.0) > 0.02
    )
    handoffs = [change[when][len(ARMS)] / 1e3 for when in ("before", "after")]
    if abs(handoffs[1] - handoffs[0]) > 2.0:
        rates += f"{'; ' if rates else ''}hand-over {handoffs[0]:.0f} -> {handoffs[1]:.0f} us"
    misses = change["misses"]
    return (
        f"{rates or 'rates as before'}: of {misses} missing experts {round(change['fetched_after'] * misses)} are "
        f"fetched instead of {round(change['fetched_before'] * misses)}; the old split lost "
        f"{change['gain']:.0%} of the layers' time"
    )
