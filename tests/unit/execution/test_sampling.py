"""Sampling: each rule against a plain reference, the noise, and what randomness may and may not depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.execution.batch_state import RequestState
from freetoken.execution.sampling import Sampled, gumbel_noise, sample
from freetoken.messages import RequestInit, SamplingParams


def request(
    prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), eos: tuple[int, ...] = (), **params: Any
) -> RequestState:
    init = RequestInit(SamplingParams(**{"seed": 7, **params}), prompt + output, len(prompt), eos)
    return RequestState("r", init, 0)


def one(row: np.ndarray, state: RequestState) -> Sampled:
    return sample(row.astype(np.float32)[None], [state])[0]


def allowed(row: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by sorting everything: min_p, then top_k, then top_p of what is left."""
    scaled = row.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled - scaled.max())
    kept = [int(i) for i in order if probabilities[i] >= params.min_p]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total = sum(probabilities[i] for i in kept)
        running, nucleus = 0.0, []
        for i in kept:
            nucleus.append(i)
            running += probabilities[i]
            if running >= params.top_p * total:
                break
        kept = nucleus
    return set(kept)


def logits_of(seed: int, size: int = 400, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)


def test_greedy_is_argmax_for_every_row() -> None:
    rows = np.stack([logits_of(i) for i in range(5)])
    drawn = sample(rows, [request(temperature=0.0) for _ in range(5)])
    assert [d.token_id for d in drawn] == rows.argmax(1).tolist()
    assert all(d.logprob is None and d.failure is None for d in drawn)


def test_no_rows() -> None:
    assert sample(np.empty((0, 10), dtype=np.float32), []) == []


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.05, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50, 399, 400, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    spread=st.sampled_from([0.1, 3.0, 20.0]),
)
def test_drawn_tokens_are_allowed_and_all_allowed_are_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    row = logits_of(seed, spread=spread)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    state = request(**params)
    expected = allowed(row, state.sampling)
    drawn = set()
    for i in range(40):
        state = request(seed=i, **params)
        token = one(row, state).token_id
        assert token is not None
        drawn.add(token)
    assert drawn <= expected
    if len(expected) <= 2 and spread < 1:  # near-equal probabilities: 40 draws miss one of two with chance 1e-11
        assert drawn == expected


def test_frequencies_follow_the_softmax() -> None:
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))
    count = 4000
    counts = np.zeros(4)
    for position in range(count):
        counts[one(row, request(prompt=(0,) * (position + 1))).token_id] += 1  # type: ignore[index]
    expected = np.array([0.5, 0.25, 0.15, 0.1]) * count
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


def test_drawing_by_groups_follows_the_softmax_over_many_tokens() -> None:
    row = logits_of(3, size=1000, spread=1.5)
    probabilities = torch.softmax(torch.from_numpy(row), dim=0).double().numpy()
    count = 3000
    drawn = [one(row, request(seed=seed)).token_id for seed in range(count)]
    # Ten bins of equal size over the ids; they cut through groups.
    counts = np.bincount(np.array(drawn) // 100, minlength=10)
    expected = probabilities.reshape(10, 100).sum(1) * count
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    # And by likelihood: the mean log-probability of what is drawn is minus the entropy.
    log = np.log(probabilities)
    spread = math.sqrt((probabilities * log**2).sum() - (probabilities * log).sum() ** 2)
    assert abs(log[drawn].mean() - (probabilities * log).sum()) < 4 * spread / math.sqrt(count)


def test_a_cut_that_cuts_nothing_draws_from_the_same_distribution() -> None:
    row = logits_of(5, size=600, spread=1.0)
    probabilities = torch.softmax(torch.from_numpy(row), dim=0).double().numpy()
    log = np.log(probabilities)
    drawn = [one(row, request(seed=seed, top_k=599)).token_id for seed in range(2000)]
    spread = math.sqrt((probabilities * log**2).sum() - (probabilities * log).sum() ** 2)
    assert abs(log[drawn].mean() - (probabilities * log).sum()) < 4 * spread / math.sqrt(2000)


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    noise = gumbel_noise(5, 9, np.arange(200_000))
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    for other in (gumbel_noise(6, 9, np.arange(200_000)), gumbel_noise(5, 10, np.arange(200_000))):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.01


def test_noise_accepts_any_seed() -> None:
    ids = np.arange(4)
    draws = [gumbel_noise(seed, 0, ids).tolist() for seed in (0, -1, 2**63, 2**64 + 5, 5)]
    assert draws[3] == draws[4]
    assert len({tuple(d) for d in draws}) == 4


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    rows = [logits_of(i) for i in range(6)]
    states = [
        request(temperature=0.8),
        request(temperature=0.0),
        request(top_k=5, seed=1),
        request(top_p=0.5, seed=2, top_logprobs=2),
        request(output=(4, 4), presence_penalty=1.0),
        request(min_p=0.1),
    ]
    alone = [one(row, state) for row, state in zip(rows, states, strict=True)]
    together = sample(np.stack(rows), states)
    backwards = sample(np.stack(rows[::-1]), states[::-1])[::-1]
    for a, b, c in zip(alone, together, backwards, strict=True):
        assert a.token_id == b.token_id == c.token_id


def test_the_token_depends_on_seed_and_position_only_through_known_tokens() -> None:
    row = np.zeros(400, dtype=np.float32)
    first = one(row, request(prompt=(1, 2, 3), output=(9,))).token_id
    # The same position reached as a longer prompt, as after a preemption.
    assert one(row, request(prompt=(1, 2, 3, 9))).token_id == first
    others = {one(row, request(prompt=(1,) * n)).token_id for n in range(1, 30)}
    assert len(others) > 20
    assert len({one(row, request(seed=s)).token_id for s in range(30)}) > 20


def test_tiny_temperature_is_greedy_without_warnings() -> None:
    row = logits_of(1)
    for temperature in (1e-6, 1e-30, 1e-45):
        for extra in ({}, {"top_p": 0.9}, {"top_k": 10}, {"min_p": 0.5}):
            assert one(row, request(temperature=temperature, **extra)).token_id == int(row.argmax())


def test_repetition_penalty_covers_prompt_and_output() -> None:
    row = np.array([4.0, 3.9, 3.8, -1.0, -1.1], dtype=np.float32)
    state = request(prompt=(0,), output=(1,), temperature=0.0, repetition_penalty=1.5)
    assert one(row, state).token_id == 2
    # A negative logit is pushed further down, not up.
    row = np.array([-1.0, -1.1, -9, -9, -9], dtype=np.float32)
    assert one(row, request(prompt=(0,), temperature=0.0, repetition_penalty=1.5)).token_id == 1


def test_presence_and_frequency_count_output_only() -> None:
    row = np.array([5.0, 4.5, 1.0], dtype=np.float32)
    assert (
        one(row, request(prompt=(0, 0, 0), temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)).token_id == 0
    )
    assert one(row, request(output=(0,), temperature=0.0, presence_penalty=0.6)).token_id == 1
    assert one(row, request(output=(0,), temperature=0.0, frequency_penalty=0.4)).token_id == 0
    assert one(row, request(output=(0, 0), temperature=0.0, frequency_penalty=0.4)).token_id == 1


def test_counts_follow_tokens_appended_after_the_first_use() -> None:
    row = np.array([5.0, 4.5, 1.0], dtype=np.float32)
    state = request(temperature=0.0, frequency_penalty=0.4)
    tokens = []
    for _ in range(4):
        token = one(row, state).token_id
        assert token is not None
        state.append_token(token)
        tokens.append(token)
    assert tokens == [0, 0, 1, 0]


def test_logit_bias_and_min_tokens() -> None:
    row = np.array([5.0, 4.0, 3.0, 2.0], dtype=np.float32)
    assert one(row, request(temperature=0.0, logit_bias=((0, -100.0), (3, 5.0)))).token_id == 3
    masked: dict[str, Any] = {"eos": (0, 9999), "stop_token_ids": (1,), "temperature": 0.0, "min_tokens": 2}
    assert one(row, request(**masked)).token_id == 2
    assert one(row, request(output=(3,), **masked)).token_id == 2
    assert one(row, request(output=(3, 3), **masked)).token_id == 0


def test_an_impossible_bias_fails_its_request_alone() -> None:
    rows = np.stack([logits_of(0), logits_of(1)])
    bad, good = sample(rows, [request(logit_bias=((400, 1.0),)), request(temperature=0.0)])
    assert bad.token_id is None and bad.failure is not None and "400" in bad.failure
    assert good.token_id == int(rows[1].argmax())


def test_nonsense_parameters_fail_their_request_alone() -> None:
    rows = np.stack([logits_of(0), logits_of(1)])
    bad, good = sample(rows, [request(min_p=-1.0, logit_bias=(("x", 1.0),)), request(temperature=0.0)])
    assert bad.token_id is None and bad.failure is not None and "sampling failed" in bad.failure
    assert good.token_id == int(rows[1].argmax())


def test_logprobs_are_of_the_unmodified_logits() -> None:
    row = logits_of(11)
    expected = torch.log_softmax(torch.from_numpy(row), dim=0)
    state = request(output=(3,), temperature=0.3, presence_penalty=1.5, logit_bias=((7, 100.0),), top_logprobs=4)
    entry = one(row, state).logprob
    assert entry is not None and entry.token_id == 7
    assert entry.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    best = torch.topk(expected, 4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    chosen_only = one(row, request(top_logprobs=0)).logprob
    assert chosen_only is not None and chosen_only.top == ()
    assert len(one(row[:3], request(top_logprobs=20)).logprob.top) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_fail_their_row_alone(value: float) -> None:
    rows = np.stack([logits_of(i) for i in range(3)])
    rows[1, 17] = value
    drawn = sample(rows, [request(temperature=0.0) for _ in range(3)])
    assert drawn[1] == Sampled(None, failure="numeric: 1 of 400 logits are not finite")
    assert [drawn[0].token_id, drawn[2].token_id] == [int(rows[0].argmax()), int(rows[2].argmax())]


def test_large_finite_logits_are_not_mistaken_for_overflow() -> None:
    row = np.full(400, 3e36, dtype=np.float32)
    row[5] = 3e37
    assert one(row, request(temperature=0.0)).token_id == 5


def test_the_logits_are_left_alone() -> None:
    rows = logits_of(1)[None]
    before = rows.copy()
    sample(rows, [request(output=(1, 2), repetition_penalty=1.3, frequency_penalty=1.0, logit_bias=((3, 2.0),))])
    assert np.array_equal(rows, before)
