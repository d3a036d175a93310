"""Sampling on the device against sorting, and against the same noise in numpy (see ``triton_device``)."""

import pytest
import torch

from freetoken.kernels.triton import reference
from freetoken.kernels.triton.sampling import SamplerState, SamplingParameters, greedy, sample
from tests.kernels.triton_device import DEVICE

VOCAB = 4200  # two programs a row


def parameters(rows):
    """rows: (temperature, top_k, top_p, min_p, seed, position)."""
    columns = list(zip(*rows, strict=True))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    return SamplingParameters(*(torch.tensor(c, dtype=d, device=DEVICE) for c, d in zip(columns, dtypes, strict=True)))


def draw(logits, rows):
    state = SamplerState.empty(len(rows), VOCAB, DEVICE)
    ids = torch.full((len(rows),), -7, dtype=torch.int64, device=DEVICE)
    logprobs = torch.empty(len(rows), device=DEVICE)
    sample(logits, parameters(rows), state, ids, logprobs)
    assert not state.arrivals.any() and not state.counts.any() and not state.masses.any()
    expected = torch.log_softmax(logits.double(), -1).gather(1, ids[:, None])[:, 0].float()
    assert torch.allclose(logprobs, expected, atol=1e-4)
    return ids.tolist()


def random_logits(rows, seed=0, spread=3.0):
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread).to(DEVICE)


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_nan():
    logits = random_logits(3)
    logits[0, [4100, 17, 99]] = 50.0
    logits[1, 5] = float("nan")
    state = SamplerState.empty(3, VOCAB, DEVICE)
    ids = torch.empty(3, dtype=torch.int32, device=DEVICE)
    logprobs = torch.empty(3, device=DEVICE)
    greedy(logits, state, ids, logprobs)
    clean = logits.nan_to_num(nan=float("-inf"))
    assert ids.tolist() == [17, *clean[1:].argmax(-1).tolist()]
    assert torch.allclose(logprobs, torch.log_softmax(clean, -1).gather(1, ids[:, None].long())[:, 0], atol=1e-5)


CASES = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 40, 0.5, 0.0),
    (2.0, 7, 0.999, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 300, 0.95, 0.01),
    (5.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.01, 50, 0.9, 0.0),
    (1.0, VOCAB + 5, 1.0, 0.0),
]


@pytest.mark.parametrize("seed", [3, 2**40 + 11])
def test_draws_are_the_best_kept_score_under_the_same_noise(seed):
    logits = random_logits(len(CASES))
    rows = [(*case, seed + i, 1000 * i + (i << 33)) for i, case in enumerate(CASES)]
    ids = draw(logits, rows)
    for i, (temperature, top_k, top_p, min_p) in enumerate(CASES):
        if temperature == 0:
            assert ids[i] == int(logits[i].argmax())
            continue
        keep = reference.kept_tokens(logits[i].cpu(), temperature, top_k, top_p, min_p)
        scores = reference.gumbel_scores(logits[i], temperature, rows[i][4], rows[i][5])
        scores = torch.where(keep, scores, float("-inf"))
        assert keep[ids[i]], CASES[i]
        assert scores[ids[i]] > scores.max() - 1e-4, CASES[i]


def test_draws_do_not_depend_on_the_batch_and_follow_position_and_seed():
    logits = random_logits(1, spread=0.5).expand(6, -1).contiguous()
    rows = [(1.0, 0, 1.0, 0.0, seed, position) for seed, position in ((1, 5), (1, 6), (2, 5), (1, 5), (9, 9), (1, 6))]
    ids = draw(logits, rows)
    assert ids[0] == ids[3] and ids[1] == ids[5]
    assert len(set(ids)) == 4
    assert draw(logits[:1], rows[:1]) == ids[:1]


def test_frequencies_follow_the_distribution():
    """32 draws at as many positions over four possible tokens: chi-square with three degrees of freedom, p = 0.001."""
    logits = torch.full((32, VOCAB), float("-inf"), device=DEVICE)
    chance = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens = [3, 4000, 4150, 77]
    logits[:, tokens] = chance.log().to(DEVICE)
    ids = draw(logits, [(1.0, 0, 1.0, 0.0, 42, i) for i in range(32)])
    observed = torch.tensor([ids.count(t) for t in tokens], dtype=torch.float32)
    assert observed.sum() == 32
    assert float(((observed - 32 * chance) ** 2 / (32 * chance)).sum()) < 16.3


def test_refusals():
    state = SamplerState.empty(1, VOCAB, DEVICE)
    logits = random_logits(2)
    with pytest.raises(ValueError, match="state for 1 rows"):
        greedy(logits, state, torch.empty(2, dtype=torch.int64), torch.empty(2))
