"""Prefill's choice between shared passes and a streaming one, with injected costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.costs import CostModel, SideCost, assumed_costs
from freetoken.execution.cuda import prefill_costs
from freetoken.execution.cuda.prefill_costs import Missing, PrefillCosts

RECORD = 2_654_208
LAYERS, EXPERTS, TOP_K = 4, 128, 8


def costs_of(fetch_gbps: float, cpu_gbps: float, route_share: float = 0.1, handover_ns: float = 10e3) -> CostModel:
    cpu = SideCost(handover_ns, 1 / cpu_gbps, route_share / cpu_gbps)
    fetch = SideCost(10e3, 1 / fetch_gbps)
    return CostModel(fetch, fetch, cpu, cpu, 1 / 400, measured=True)


def prefill(
    costs: CostModel, fetch_fraction: float | None = None, unpinned: int = 0, capacity: int = EXPERTS
) -> PrefillCosts:
    """The first ``unpinned`` records of each layer are not pinned."""
    sizes = np.array([RECORD * (1.0 + 0.2 * layer) for layer in range(LAYERS)])
    mask = np.zeros((LAYERS, EXPERTS), bool)
    mask[:, :unpinned] = True
    return PrefillCosts(EXPERTS, TOP_K, sizes, fetch_fraction, costs, mask, capacity)


def missing_of(*counts: int, unpinned: int = 0) -> Missing:
    """By layer; of each layer so many are not pinned."""
    all_of = np.array(counts * (LAYERS // len(counts)), np.float64)
    return Missing(all_of, np.minimum(all_of, unpinned))


# ------------------------------------------------------------------------------------------------ the estimates


def brute_force_shared(costs: PrefillCosts, missing: Missing, tokens: int) -> float:
    """Pass by pass, layer by layer, over all shares."""
    total = 0.0
    model = costs.costs
    while tokens > 0:
        now = min(tokens, 128)
        tokens -= now
        touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** now)
        extra = now * TOP_K / touched - 1
        for size, every, apart in zip(costs.record_bytes, missing.all, missing.unpinned, strict=True):
            misses, fetchable = every * touched / EXPERTS, (every - apart) * touched / EXPERTS
            own = touched * size * model.hit_byte_ns
            shares = np.linspace(0, 1, 401) if costs.fetch_fraction is None else [costs.fetch_fraction]
            best = np.inf
            for share in shares:
                fetches = min(share * misses, fetchable)
                cpu, often = misses - fetches, min(1.0, misses)
                fetch_side = model.fetch_beside if cpu else model.fetch
                cpu_side = model.cpu_beside if fetches else model.cpu
                device = fetch_side.fixed_ns * often + fetches * size * fetch_side.byte_ns if fetches else 0.0
                rate = cpu_side.byte_ns + extra * cpu_side.route_byte_ns
                by_cpu = cpu_side.fixed_ns * often + cpu * size * rate if cpu else 0.0
                best = min(best, max(own + device, by_cpu))
            total += prefill_costs._PASS_NS + best
    return total * 1e-9


def brute_force_streaming(costs: PrefillCosts, missing: Missing, tokens: int) -> float:
    """The copy engine and the device, each on a clock of its own."""
    touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    copied_at, done = 0.0, [0.0, 0.0]  # a layer is copied once the layer two before is done with its half
    for layer, size in enumerate(costs.record_bytes):
        room = max(0, costs.capacity - int(costs.unpinned[layer].sum()))
        apart = missing.unpinned[layer]
        staged = apart + min(room, missing.all[layer] - apart)
        fetch = costs.costs.fetch
        copy = max(fetch.fixed_ns * min(1, staged) + staged * size * fetch.byte_ns, apart * size / 8)
        rest = (missing.all[layer] - staged) * touched / EXPERTS
        own = prefill_costs._PASS_NS + prefill_costs._FOLLOW_NS + touched * size * costs.costs.hit_byte_ns
        own += fetch.fixed_ns * min(1, rest) + rest * size * fetch.byte_ns
        # It begins as the layer before does: that one's plan has to be known.
        begun = done[-2] if costs.overlaps else done[-1]
        copied_at = max(copied_at, begun) + copy
        done.append(max(copied_at, done[-1]) + own)
    return done[-1] * 1e-9


MODELS = st.builds(
    costs_of,
    st.sampled_from([2.5, 12.0, 25.0, 50.0]),
    st.sampled_from([0.5, 9.0, 60.0, 180.0]),
    st.sampled_from([0.02, 0.1, 1.0]),
    st.sampled_from([5e3, 100e3, 1e6]),
)
FRACTIONS = st.sampled_from([None, 0.0, 0.3, 1.0])
COUNTS = st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS)
TOKENS = st.integers(1, 700)


@given(MODELS, FRACTIONS, COUNTS, TOKENS, st.sampled_from([0, 20, 128]), st.sampled_from([128, 60]), st.booleans())
def test_the_choice_is_that_of_a_brute_force_comparison(model, fraction, counts, tokens, unpinned, capacity, overlaps):
    costs = dataclasses.replace(prefill(model, fraction, unpinned, capacity), overlaps=overlaps)
    missing = missing_of(*counts, unpinned=unpinned)
    shared, streaming = (f(costs, missing, tokens) for f in (brute_force_shared, brute_force_streaming))
    assert costs.shared_seconds(missing, tokens) == pytest.approx(shared, rel=0.02)
    assert costs.shared_seconds(missing, tokens) <= shared * (1 + 1e-9)
    assert costs.streaming_seconds(missing, tokens) == pytest.approx(streaming)
    if abs(shared - streaming) > 0.02 * shared:
        assert costs.prefers_streaming(missing, tokens) == (streaming < shared)


@given(MODELS, FRACTIONS, COUNTS, TOKENS, st.integers(0, LAYERS - 1), st.sampled_from([0, 20]))
def test_more_tokens_and_fewer_resident_records_take_no_less(model, fraction, counts, tokens, layer, unpinned):
    costs = prefill(model, fraction, unpinned)
    fewer = list(counts)
    fewer[layer] = min(EXPERTS, fewer[layer] + 1)
    missing, more = (missing_of(*some, unpinned=unpinned) for some in (counts, fewer))
    for estimate in (costs.shared_seconds, costs.streaming_seconds):
        assert estimate(missing, tokens) <= estimate(missing, tokens + 1) * (1 + 1e-12)
        assert estimate(missing, tokens) <= estimate(more, tokens) * (1 + 1e-12)


@pytest.mark.parametrize("tokens", [17, 128, 300])
@pytest.mark.parametrize(("fetch_gbps", "cpu_gbps"), [(50, 100), (25, 60), (6, 60), (25, 9), (2.5, 180)])
def test_the_automatic_share_is_as_good_as_any_fixed_one(tokens, fetch_gbps, cpu_gbps):
    costs, missing = costs_of(fetch_gbps, cpu_gbps), missing_of(96, 10)
    fixed = [prefill(costs, share / 100).shared_seconds(missing, tokens) for share in range(101)]
    assert prefill(costs).shared_seconds(missing, tokens) <= min(fixed) * (1 + 1e-12)


def test_what_is_missing_is_counted_by_layer():
    slot_of = np.full((LAYERS, EXPERTS), -1, np.int32)
    slot_of[1, :100] = 7
    slot_of[2, 30:] = 0
    missing = prefill(assumed_costs("cuda"), unpinned=40).missing(slot_of)
    assert missing.all.tolist() == [128, 28, 30, 128] and missing.unpinned.tolist() == [40, 0, 30, 40]


# ------------------------------------------------------------------------------------------------ the choice


def test_few_tokens_touch_few_experts():
    costs, missing = prefill(assumed_costs("cuda"), 0.5), missing_of(96)
    assert costs.touched(16) == pytest.approx(82.4, abs=0.1)
    assert not costs.prefers_streaming(missing, 16) and not costs.prefers_streaming(missing, 64)
    assert not prefill(assumed_costs("cuda"), 1.0).prefers_streaming(missing, 16)


@pytest.mark.parametrize("fraction", [None, 0.5, 0.0])
def test_a_chunk_of_several_passes_can_be_shared_and_one_of_a_single_pass_streamed(fraction):
    fast_cpu, fast_bus = prefill(costs_of(6.0, 400.0, 0.02), fraction), prefill(costs_of(50.0, 9.0, 1.0), 0.0)
    missing = missing_of(96)
    if fraction != 0.5:
        assert not fast_cpu.prefers_streaming(missing, 200) and not fast_cpu.prefers_streaming(missing, 384)
    assert fast_cpu.prefers_streaming(missing, 8192)
    assert fast_bus.prefers_streaming(missing, 100)


@pytest.mark.parametrize("fraction", [None, 0.5, 1.0])
def test_what_is_all_resident_needs_one_pass(fraction):
    costs, missing = prefill(assumed_costs("cuda"), fraction), missing_of(0)
    assert not any(costs.prefers_streaming(missing, tokens) for tokens in (1, 17, 128))
    assert all(costs.prefers_streaming(missing, tokens) for tokens in (129, 300, 4096))


def test_the_layers_count_and_not_their_average():
    """As many records are missing in all. Where they are of one layer, its copies have nothing to hide behind."""
    costs = prefill(costs_of(25.0, 60.0), 1.0)
    first, apart = missing_of(16, 0, 0, 0), missing_of(4, 4, 4, 4)
    assert costs.streaming_seconds(first, 64) > costs.streaming_seconds(apart, 64)
    assert not costs.prefers_streaming(first, 64) and costs.prefers_streaming(apart, 64)


@pytest.mark.parametrize("fetch_fraction", [None, 0.5, 1.0])
def test_what_is_not_pinned_is_the_cpu_s_or_staged_at_the_pace_of_a_memory_copy(fetch_fraction):
    model = costs_of(50.0, 60.0)
    costs = [prefill(model, fetch_fraction, unpinned) for unpinned in (0, 48, EXPERTS)]
    missing = [missing_of(96, unpinned=unpinned) for unpinned in (0, 48, EXPERTS)]
    for tokens in (17, 128):
        pinned, half, none = (each.shared_seconds(some, tokens) for each, some in zip(costs, missing, strict=True))
        if fetch_fraction is None:
            assert pinned <= half <= none
        assert none == pytest.approx(prefill(model, 0.0).shared_seconds(missing[0], tokens))
    pinned, half, none = (each.streaming_seconds(some, 128) for each, some in zip(costs, missing, strict=True))
    copied = float(costs[0].record_bytes.sum()) / 8e9
    assert 96 * copied < none < 96 * copied + 0.002 and 48 * copied < half < 48 * copied + 0.002 and pinned < half
