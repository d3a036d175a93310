"""Prefill's choice between touched experts and staging, with injected costs."""

from __future__ import annotations

import dataclasses

import pytest

from freetoken.costs import CostModel, SideCost, assumed_costs
from freetoken.execution.cuda.prefill_costs import PrefillCosts

RECORD = 2_654_208


def costs_of(fetch_gbps: float, cpu_gbps: float, route_share: float = 0.1, handover_ns: float = 10e3) -> CostModel:
    cpu = SideCost(handover_ns, 1 / cpu_gbps, route_share / cpu_gbps)
    fetch = SideCost(10e3, 1 / fetch_gbps)
    return CostModel(fetch, fetch, cpu, cpu, 1 / 400, measured=True)


def prefill(costs: CostModel, fetch_fraction: float | None = None) -> PrefillCosts:
    return PrefillCosts(128, 8, RECORD, 0.25, fetch_fraction, costs)


def test_few_tokens_touch_few_experts():
    costs = prefill(assumed_costs("cuda"), 0.5)
    assert costs.touched(16) == pytest.approx(82.4, abs=0.1)
    assert not costs.prefers_staging(16) and not costs.prefers_staging(64)
    assert not prefill(assumed_costs("cuda"), 1.0).prefers_staging(16)
    assert not dataclasses.replace(costs, resident=1.0).prefers_staging(128)
    assert dataclasses.replace(costs, resident=1.0).touched_seconds(128) == 0.0


def test_a_cpu_that_pays_for_every_token_is_no_help_with_many():
    """At 128 tokens nearly every expert is touched, by eight tokens each."""
    slow = costs_of(50.0, 20.0, route_share=1.0)
    assert prefill(slow, 0.0).prefers_staging(128)
    assert not prefill(costs_of(50.0, 100.0), 0.0).prefers_staging(128)


@pytest.mark.parametrize("tokens", [17, 32, 64, 128])
@pytest.mark.parametrize(("fetch_gbps", "cpu_gbps"), [(50, 100), (25, 60), (6, 60), (25, 9), (2.5, 180)])
def test_the_automatic_share_is_as_good_as_any_fixed_one(tokens, fetch_gbps, cpu_gbps):
    costs = costs_of(fetch_gbps, cpu_gbps)
    fixed = [prefill(costs, share / 100).touched_seconds(tokens) for share in range(101)]
    assert prefill(costs).touched_seconds(tokens) <= min(fixed)


def test_the_choice_follows_the_machine():
    """The same chunk: a machine with a fast CPU shares it, one whose CPU is a fiftieth of the bus stages it."""
    shared = prefill(costs_of(25.0, 60.0))
    alone = dataclasses.replace(prefill(costs_of(25.0, 0.5, route_share=1.0, handover_ns=1e6)), fetch_fraction=0.5)
    assert shared.touched_seconds(128) < shared.staged_seconds() < alone.touched_seconds(128)
    assert not shared.prefers_staging(128) and alone.prefers_staging(128)


@pytest.mark.parametrize("fetch_fraction", [None, 0.5, 1.0])
def test_what_is_not_pinned_is_the_cpu_s_or_staged_at_the_pace_of_a_memory_copy(fetch_fraction):
    pinned = prefill(costs_of(50.0, 60.0), fetch_fraction)
    half, none = (dataclasses.replace(pinned, unpinned=share) for share in (0.5, 1.0))
    for tokens in (17, 128):
        if fetch_fraction is None:
            assert pinned.touched_seconds(tokens) <= half.touched_seconds(tokens) <= none.touched_seconds(tokens)
        alone = dataclasses.replace(pinned, fetch_fraction=0.0).touched_seconds(tokens)
        assert none.touched_seconds(tokens) == pytest.approx(alone)
    assert none.staged_seconds() == pytest.approx(96 * RECORD / 8e9)
    assert half.staged_seconds() == pytest.approx(48 * RECORD / 8e9) and pinned.staged_seconds() < 0.006
    slow = dataclasses.replace(none, costs=costs_of(6.0, 60.0))
    assert slow.staged_seconds() == dataclasses.replace(slow, unpinned=0.0).staged_seconds()
