"""The split by live rates, through its bindings: properties, and what ExpertCache tells about it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken import _native
from freetoken.costs import CostModel, SideCost, assumed_costs
from freetoken.errors import ConfigError
from freetoken.experts.split import describe_change, live_costs, native_costs, split_metrics, split_mode

BYTES = 2e6
MODEL = CostModel(
    SideCost(10e3, 1 / 55), SideCost(10e3, 1 / 50), SideCost(20e3, 1 / 90, 1 / 900), SideCost(20e3, 1 / 80, 1 / 800)
)

costs = st.builds(SideCost, st.floats(0, 1e6), st.floats(1e-4, 1e2), st.floats(0, 1e2))
models = st.builds(CostModel, costs, costs, costs, costs, st.floats(0, 1.0), st.booleans())
layers = st.tuples(
    st.lists(st.integers(1, 64), max_size=16), st.integers(0, 8), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)
)


@settings(max_examples=60, deadline=None)
@given(models, st.lists(layers, max_size=40), st.data())
def test_a_choice_is_always_in_range(model, steps, data):
    planner = _native.SplitPlanner(native_costs(model))
    for routes, hits, slow_device, slow_cpu in steps:
        fetchable = data.draw(st.integers(0, len(routes)))
        fetches = planner.choose(routes, BYTES, hits, 0, fetchable, data.draw(st.integers(0, 3)))
        assert 0 <= fetches <= fetchable
        shares = _native.LayerShares(hits, fetches, len(routes) - fetches, BYTES)
        planner.observe(shares, 1e4 * slow_device, 1e4 * slow_cpu)
    status = planner.status()
    assert status["layers"] == len(steps) and all(factor > 0 for factor in status["live"][:4])


@settings(max_examples=60, deadline=None)
@given(models, st.integers(0, 12), st.integers(0, 4))
def test_the_first_choice_is_the_cost_models(model, misses, hits):
    """Up to the first trials of what has not been timed: one record more or less, or all on one side."""
    chosen = _native.SplitPlanner(native_costs(model)).choose([1] * misses, BYTES, hits)
    best = model.best_fetches(misses, BYTES, hits)
    assert chosen in {best, 0, misses} or abs(chosen - best) == 1


def run(planner, slow_cpu, steps, misses=4):
    """Fetches of every layer, on a machine whose CPU is ``slow_cpu`` times as slow as believed."""
    chosen = []
    for _ in range(steps):
        fetches = planner.choose([1] * misses, BYTES, 3)
        shares = _native.LayerShares(3, fetches, misses - fetches, BYTES)
        factors = (1, 1, slow_cpu, slow_cpu, 0, 0, 1)
        planner.observe(shares, planner.device_ns(shares, factors), planner.cpu_ns(shares, factors))
        chosen.append(fetches)
    return chosen


def test_a_slow_cpu_is_dropped_within_32_steps_and_the_reason_told():
    planner = _native.SplitPlanner(native_costs(MODEL))
    run(planner, 1.0, 300)
    before = planner.status()
    assert before["changes"] == 0 and split_mode(before["mean_misses"], before["mean_fetches"]) == "both"
    assert 4 in run(planner, 10.0, 32)
    run(planner, 10.0, 400)
    status = planner.status()
    metrics = split_metrics(MODEL, status)
    assert 0.09 < metrics["split_cpu_beside_of_profile"] < 0.25  # timed until it is dropped, and by few probes then
    assert metrics["split_cpu_beside_gbps"] == pytest.approx(80 * metrics["split_cpu_beside_of_profile"])
    text = describe_change(MODEL, status["last_change"])
    assert "cpu_beside" in text and "of 4 missing experts 4 are fetched" in text


def test_live_costs_are_those_of_the_planner():
    planner = _native.SplitPlanner(native_costs(MODEL))
    run(planner, 3.0, 600)
    live = planner.status()["live"]
    costs = live_costs(MODEL, split_metrics(MODEL, planner.status()))
    assert costs.cpu_beside.byte_ns == pytest.approx(MODEL.cpu_beside.byte_ns * live[3]) and live[3] > 2.0
    assert costs.cpu_beside.fixed_ns == pytest.approx(MODEL.cpu_beside.fixed_ns * live[3])
    assert live_costs(MODEL, {}) == MODEL


@settings(max_examples=100, deadline=None)
@given(models, st.floats(0.1, 200.0), st.integers(0, 8), st.floats(0, 8))
def test_no_share_is_better_than_the_shared_one(model, misses, hits, extra):
    """Where costs beside are no less than alone, and the device's rise with its share; a thousandth is rounding."""
    model = dataclasses.replace(model, fetch_beside=model.fetch, cpu_beside=model.cpu)
    shared = model.shared_ns(misses, BYTES, hits, extra)
    for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        fetches = share * misses
        assert shared <= model.layer_ns(hits, fetches, misses - fetches, BYTES, extra) * 1.001


def test_costs_survive_json_and_refuse_what_they_are_not():
    for model in (MODEL, assumed_costs("cpu"), assumed_costs("cuda")):
        assert CostModel.from_json(model.to_json()) == model
        native_costs(model)
    for damaged in ({}, {**MODEL.to_json(), "fetch": {"fixed_ns": 1}}, {**MODEL.to_json(), "surprise": 1}):
        with pytest.raises(ConfigError, match="not a cost model"):
            CostModel.from_json(damaged)
    with pytest.raises(ConfigError, match="not all positive"):
        CostModel.from_json({**MODEL.to_json(), "cpu": {"fixed_ns": 1.0, "byte_ns": 0.0, "route_byte_ns": 0.0}})


def test_native_costs_are_checked():
    with pytest.raises(ValueError, match=r"cpu\.byte_ns is 0"):
        _native.SplitCosts(*[_native.SideCost(1, 1)] * 2, _native.SideCost(1, 0), _native.SideCost(1, 1))
