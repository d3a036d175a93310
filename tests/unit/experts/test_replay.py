"""Replays of the serving policy: against the baselines, and what recency-frequency is there for."""

import numpy as np
import pytest

from freetoken.experts.cache_baselines import plain_lru
from freetoken.experts.replay import PolicySettings, parse_capacities, replay, replay_policy
from freetoken.experts.route_trace import TraceError
from freetoken.experts.trace_sources import SyntheticRoutes, draw_trace


def by_policy(trace, num_slots, *policies):
    return {result.policy: result for result in replay(trace, [num_slots], policies)}


@pytest.mark.parametrize("num_slots", [0, 5, 37, 96])
def test_the_native_lru_is_lru(num_slots):
    """One layer: across layers a publish protects its own records only, in both."""
    trace = draw_trace(SyntheticRoutes(300, 3, 32, 4, 0.7, 0.4, streams=2))
    native = replay_policy(trace, num_slots, "lru")
    ours = plain_lru(trace.uses(), num_slots)
    # Which of a publish's records is the older one is a matter of taste; the totals hardly differ.
    assert abs(native[:, 0].sum() - ours[:, 0].sum()) <= 0.02 * max(ours[:, 0].sum(), 1)
    uses = sum(len(records) for records in trace.uses())
    assert np.all(native[:, 0] + native[:, 1] <= [len(records) for records in trace.uses()])
    assert native[:, 0].sum() + native[:, 1].sum() == uses or num_slots < 8


@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.6])
def test_independent_zipf_comes_close_to_the_best_static_set(alpha, share):
    trace = draw_trace(SyntheticRoutes(1500, 2, 128, 8, alpha))
    result = by_policy(trace, int(2 * 128 * share), "crf", "static", "lru")
    assert result["crf"].late_hit_ratio >= result["static"].late_hit_ratio - 0.02
    assert result["crf"].replacements_per_token <= 0.25 * result["lru"].replacements_per_token


def test_locality_and_drift():
    """Text that changes its subject: a fraction of LRU's fills, hits close to it, and no fixed set comes close."""
    trace = draw_trace(SyntheticRoutes(1500, 2, 128, 8, 1.0, 0.4, drift_tokens=300, seed=1))
    result = by_policy(trace, int(2 * 128 * 0.4), "crf", "lru", "belady", "static")
    assert result["lru"].hit_ratio - 0.04 < result["crf"].hit_ratio < result["belady"].hit_ratio
    assert result["static"].hit_ratio < result["crf"].hit_ratio - 0.05
    assert result["crf"].replacements_per_token < 0.75 * result["lru"].replacements_per_token


def test_what_the_cpu_computes_fills_no_slot():
    trace = draw_trace(SyntheticRoutes(100, 2, 32, 4))
    assert replay_policy(trace, 16, "crf", fetch_fraction=0.0).sum() == 0
    some, every = (replay_policy(trace, 16, "lru", fetch_fraction=q)[:, 1].sum() for q in (0.5, 1.0))
    assert 0 < some < every


def test_settings_reach_the_policy():
    trace = draw_trace(SyntheticRoutes(200, 2, 32, 4, 0.5))
    strict = replay_policy(trace, 16, "crf", PolicySettings(margin=50.0))
    lax = replay_policy(trace, 16, "crf", PolicySettings(margin=1.0, floor=0.0))
    assert strict[:, 1].sum() < lax[:, 1].sum()


def test_a_trace_is_replayed_the_same_twice():
    trace = draw_trace(SyntheticRoutes(200, 2, 32, 4, 0.5, streams=3))
    assert np.array_equal(replay_policy(trace, 20, "crf"), replay_policy(trace, 20, "crf"))


def test_capacities():
    assert parse_capacities("10%, 7,50%,7", 200) == [7, 20, 100]
    assert parse_capacities("29%", 100) == [29]  # not 28.999
    for text, match in (
        ("", "neither"),
        ("1.5", "neither"),
        ("101%", "not within"),
        ("100.1%", "not within"),
        ("201", "not within"),
    ):
        with pytest.raises(TraceError, match=match):
            parse_capacities(text, 200)


def test_refusals():
    trace = draw_trace(SyntheticRoutes(2, 1, 8, 2))
    with pytest.raises(TraceError, match="'fifo'"):
        replay(trace, [4], ["fifo"])
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(TraceError, match="not from 0 to 1"):
            replay(trace, [4], ["crf"], fetch_fraction=share)
    for settings in (
        {"half_life_tokens": 0.0},
        {"half_life_tokens": 1e6},
        {"margin": float("nan")},
        {"margin": 0.0},
        {"floor": -1.0},
    ):
        with pytest.raises(TraceError, match=next(iter(settings))):
            replay(trace, [4], ["crf"], PolicySettings(**settings))


def test_a_policy_named_twice_runs_once():
    trace = draw_trace(SyntheticRoutes(2, 1, 8, 2))
    assert [result.policy for result in replay(trace, [4], ["lru", "crf", "lru"])] == ["lru", "crf"]
