"""Costs from samples: what comes out is what the samples were made from, never negative, and explained."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken import _native
from freetoken.costs import CostModel, SideCost, assumed_costs
from freetoken.elastic.cost_model import Sample, decide, explain, fit_costs, fit_side
from freetoken.experts.split import native_costs

MB = 1 << 20


def samples_of(side: SideCost, noise: float = 0.0, sizes: tuple[int, ...] = (2 * MB,)) -> list[Sample]:
    made = []
    for size in sizes:
        for records, tokens in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 4)):
            factor = 1.0 + noise * (-1) ** records * (tokens > 1 or records == 2)
            ns = side.ns(records, size, records * (tokens - 1)) * factor
            made.append(Sample(records, tokens, size, ns))
    return made


@settings(max_examples=50, deadline=None)
@given(st.floats(1e3, 1e5), st.floats(0.005, 1.0), st.floats(1e-3, 0.1))
def test_a_fit_finds_the_costs(fixed, byte, route):
    side = SideCost(fixed, byte, route)
    fitted = fit_side(samples_of(side))
    assert fitted.byte_ns == pytest.approx(byte, rel=1e-3)
    for records in (1, 3, 8):
        assert fitted.ns(records, 2 * MB, records) == pytest.approx(side.ns(records, 2 * MB, records), rel=1e-3)


def test_two_record_sizes_tell_fixed_costs_and_rate_apart():
    side = SideCost(45e3, 1 / 183)  # a small expert looks slow although the rate is high
    fitted = fit_side(samples_of(side, sizes=(int(1.7 * MB), int(7.6 * MB))))
    assert fitted.effective_gbps(1, 1.7 * MB) < 35 and fitted.effective_gbps(1, 7.6 * MB) > 80


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8), st.floats(1.0, 1e9)), min_size=1, max_size=12))
def test_no_cost_is_negative(rows):
    fitted = fit_side([Sample(records, tokens, MB, ns) for records, tokens, ns in rows])
    assert fitted.byte_ns > 0 and fitted.fixed_ns >= 0 and fitted.route_byte_ns >= 0


def test_impossible_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        fit_side([])
    with pytest.raises(ValueError, match="not all positive"):
        fit_side([Sample(1, 1, MB, 0.0)])


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        CostModel,
        *[st.builds(SideCost, st.floats(0, 1e5), st.floats(1e-3, 1.0), st.floats(0, 0.1))] * 4,
        st.floats(0, 0.1),
        st.booleans(),
    ),
    st.integers(0, 12),
    st.integers(0, 5),
)
def test_python_and_native_decide_alike(model, misses, hits):
    planner = _native.SplitPlanner(native_costs(model))
    native = planner.best([1] * misses, float(MB), hits)
    mine = model.best_fetches(misses, float(MB), hits)
    costs = [model.layer_ns(hits, q, misses - q, MB) for q in (native, mine)]
    assert costs[0] == pytest.approx(costs[1])
    assert costs[1] == pytest.approx(min(model.layer_ns(hits, q, misses - q, MB) for q in range(misses + 1)))


def test_a_further_token_beside_is_scaled_from_alone():
    alone, beside = SideCost(1e4, 0.02, 0.004), SideCost(1e4, 0.03)
    model = fit_costs(
        samples_of(alone),
        samples_of(beside)[:4],
        samples_of(alone),
        samples_of(beside)[:4],
        hit_byte_ns=0.001,
        hits_load_memory=False,
        source="a test",
    )
    assert model.cpu_beside.route_byte_ns == pytest.approx(0.006, rel=1e-3)
    assert model.measured and model.source == "a test"


def test_the_decision_is_told_with_its_numbers():
    model = assumed_costs("cuda")
    decision = decide(model, 8, 2.6e6)
    assert 0 < decision.fetches < 8 and decision.ns < min(decision.fetch_only_ns, decision.cpu_only_ns)
    text = explain(model, 8, 2.6e6, "cuda")
    assert f"of 8 missing experts of a layer the device fetches {decision.fetches}" in text
    assert "assumed" in text and "GB/s through PCIe" in text
    slow = SideCost(1e3, 100.0)
    fetch = SideCost(1e3, 0.01)
    assert "fetches all 4" in explain(CostModel(fetch, fetch, slow, slow), 4, 2.6e6, "cuda")
    assert "CPU runs all 4" in explain(CostModel(slow, slow, fetch, fetch), 4, 2.6e6, "cpu")
