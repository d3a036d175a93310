"""From logits to tokens.

Order of operations for one row, as in the OpenAI-compatible engines that clients know: ``min_tokens`` masks end tokens,
``logit_bias`` is added, repetition (prompt and output), frequency and presence (output) penalties apply, and what the
request's grammar does not allow is ruled out (which keeps ``min_tokens`` in mind itself); then greedy picks the largest
logit, or the logits are divided by the temperature, cut by ``min_p``, ``top_k`` and ``top_p`` (of what ``top_k`` left),
and one token is drawn.

Every cut is a threshold on logits, so tokens equal to the last one kept are kept too and the outcome depends on values
alone. Drawing is Gumbel-max with counter-based noise, a pure function of (seed, position, token id): a token does not
depend on batch, row order, chunking or preemption.

Log-probabilities are those of the model: log-softmax of the *unmodified* logits (before bias, penalties, temperature).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.execution.batch_state import RequestState
from freetoken.execution.constraints import allowed
from freetoken.grammar import ConstraintError
from freetoken.messages import LogprobEntry, SamplingParams

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# Without a cut, tokens are drawn by groups of this many neighbouring ids first; group ids live above all token ids.
_GROUP_TOKENS = 256
_FIRST_GROUP_ID = 1 << 40
# How far below the maximum (in units of the temperature) the tokens that decide a top-k cut are looked for.
_MARGINS = (4.0, 12.0)
# The histogram that finds the end of a nucleus: 32 nats deep, the last bin takes what lies below.
_BINS_PER_NAT, _NUM_BINS = 64, 2048


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome: a token, or a ``failure`` (logits not finite, an impossible bias, a grammar that allows
    nothing)."""

    token_id: int | None
    logprob: LogprobEntry | None = None
    failure: str | None = None
    failure_kind: str = "numeric"


def sample(logits: F32, states: Sequence[RequestState]) -> list[Sampled]:
    """One token for each row of logits [S, V], given the requests the rows belong to.

    The token of state s is drawn for position ``len(s.tokens)``. Neither argument is changed.
    """
    if not states:
        return []
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum is finite only if every term is, so one cheap reduction clears the usual case.
        finite = np.isfinite(logits.sum(axis=1))
    if not finite.all():
        finite = np.isfinite(logits).all(axis=1)
    best = logits.argmax(axis=1).tolist()
    results = []
    for index, state in enumerate(states):
        if not finite[index]:
            results.append(Sampled(None, failure=_describe_non_finite(logits[index])))
            continue
        try:
            results.append(_sample_row(logits[index], best[index], state))
        except ConstraintError as error:
            results.append(Sampled(None, failure=str(error), failure_kind="constraint"))
        except Exception as error:  # parameters that nobody should have let through hurt their own request only
            logger.exception("event=sampling_failed request=%s", state.request_id)
            results.append(Sampled(None, failure=f"sampling failed: {error!r}"))
    return results


def _sample_row(logits: F32, best: int, state: RequestState) -> Sampled:
    params = state.sampling
    if any(not 0 <= token < len(logits) for token, _ in params.logit_bias):
        return Sampled(None, failure=f"logit_bias names a token outside the vocabulary of {len(logits)}")
    row, token_id = logits, best
    if _changes_logits(state):
        row = _adjusted(logits, state)
        token_id = int(row.argmax())
    if params.temperature != 0.0:
        # Tiny temperatures send hopeless tokens to minus infinity, which is where they belong.
        with np.errstate(over="ignore", under="ignore"):
            token_id = _draw(row, token_id, params, state.seed, len(state.tokens))
    entry = _logprob(logits, best, token_id, params.top_logprobs) if params.top_logprobs >= 0 else None
    return Sampled(token_id, entry)


def gumbel_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id, a pure function of the three arguments."""
    key = _mix_int(_mix_int(seed & _MASK) ^ ((position + 1) * _GOLDEN & _MASK))
    bits = token_ids.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(_GOLDEN)
    bits += np.uint64(key)
    _mix(bits)
    uniform = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)


def _mix_int(value: int) -> int:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    value = (value + _GOLDEN) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _mix(bits: NDArray[np.uint64]) -> None:
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)


def _changes_logits(state: RequestState) -> bool:
    params = state.sampling
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or state.num_output < params.min_tokens
        or state.grammar is not None
    )


def _adjusted(row: F32, state: RequestState) -> F32:
    params = state.sampling
    row = row.copy()
    if params.logit_bias:
        ids = np.fromiter((token for token, _ in params.logit_bias), dtype=np.int64)
        np.add.at(row, ids, np.fromiter((bias for _, bias in params.logit_bias), dtype=np.float32))
    if state.num_output < params.min_tokens and state.grammar is None:
        row[[token for token in (*state.eos_token_ids, *params.stop_token_ids) if 0 <= token < len(row)]] = -np.inf
    if params.repetition_penalty != 1.0:
        ids = state.seen_ids()
        seen = row[ids]
        penalty = np.float32(params.repetition_penalty)
        row[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = state.output_counts()
        row[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
    if state.grammar is not None:
        np.putmask(row, ~allowed(state.grammar.mask(), len(row)), -np.inf)
    return row


def _draw(row: F32, top: int, params: SamplingParams, seed: int, position: int) -> int:
    temperature = params.temperature
    highest = row[top]
    cut = -math.inf
    if params.min_p > 0.0:
        cut = float(highest) + temperature * math.log(params.min_p)
    if 0 < params.top_k < len(row):
        cut = max(cut, _kth_largest(row, params.top_k, float(highest), temperature))
    if params.top_p < 1.0:
        cut = max(cut, _nucleus_floor(row, cut, params.top_p, highest, temperature))
    if cut == -math.inf:
        candidates = _draw_group(row, highest, temperature, seed, position)
    else:
        candidates = np.flatnonzero(row >= np.float32(cut))
    if len(candidates) <= 1:
        return top
    scores = (row[candidates].astype(np.float64) - highest) / temperature
    scores += gumbel_noise(seed, position, candidates)
    return int(candidates[scores.argmax()])


def _draw_group(row: F32, highest: np.float32, temperature: float, seed: int, position: int) -> NDArray[np.int64]:
    """The tokens of one group of neighbouring ids, drawn by the groups' probabilities.

    Drawing a group and then a token in it is as good as drawing the token, and needs noise for few of them.
    """
    mass = np.exp((row - highest) * _inverse(temperature))
    starts = np.arange(0, len(row), _GROUP_TOKENS)
    with np.errstate(divide="ignore"):
        scores = np.log(np.add.reduceat(mass, starts, dtype=np.float64))
    scores += gumbel_noise(seed, position, _FIRST_GROUP_ID + np.arange(len(starts), dtype=np.int64))
    begin = int(starts[scores.argmax()])
    return np.arange(begin, min(begin + _GROUP_TOKENS, len(row)), dtype=np.int64)


def _kth_largest(row: F32, k: int, highest: float, temperature: float) -> float:
    for margin in _MARGINS:
        near = row[row >= np.float32(highest - margin * temperature)]
        if len(near) >= k:
            return float(np.partition(near, len(near) - k)[len(near) - k])
    return float(np.partition(row, len(row) - k)[len(row) - k])


def _nucleus_floor(row: F32, cut: float, top_p: float, highest: np.float32, temperature: float) -> float:
    """The smallest logit of the shortest list of most likely tokens that holds ``top_p`` of the mass above ``cut``."""
    kept = row if cut == -math.inf else row[row >= np.float32(cut)]
    depth = (highest - kept) * _inverse(temperature)
    mass = np.exp(-depth)
    wanted = top_p * float(mass.sum(dtype=np.float64))
    # A histogram over depth says how far down to go; only the bin where the nucleus ends needs sorting.
    bins = np.minimum(depth * np.float32(_BINS_PER_NAT), np.float32(_NUM_BINS - 1)).astype(np.int64)
    totals = np.cumsum(np.bincount(bins, weights=mass, minlength=_NUM_BINS))
    last = min(int(np.searchsorted(totals, wanted)), _NUM_BINS - 1)
    inside = bins == last
    order = np.argsort(depth[inside], kind="stable")
    running = np.cumsum(mass[inside][order], dtype=np.float64) + (totals[last - 1] if last else 0.0)
    if not len(order):  # rounding left nothing to reach; keep everything
        return float(kept.min())
    return float(kept[inside][order[min(int(np.searchsorted(running, wanted)), len(order) - 1)]])


def _inverse(temperature: float) -> np.float32:
    return np.float32(1.0 / max(temperature, 1e-30))


def _logprob(row: F32, top: int, token_id: int, num_top: int) -> LogprobEntry:
    highest = row[top]
    normaliser = float(highest) + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    best: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        num_top = min(num_top, len(row))
        ids = np.flatnonzero(row >= np.float32(_kth_largest(row, num_top, float(highest), 1.0)))
        ids = ids[np.argsort(-row[ids], kind="stable")[:num_top]]
        best = tuple((token, float(row[token]) - normaliser) for token in ids.tolist())
    return LogprobEntry(token_id, float(row[token_id]) - normaliser, best)


def _describe_non_finite(row: F32) -> str:
    count = int((~np.isfinite(row)).sum())
    return f"numeric: {count} of {len(row)} logits are not finite"
