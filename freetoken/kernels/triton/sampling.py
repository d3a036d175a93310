"""Choosing tokens on the device: greedy, or temperature, top-k, top-p and min-p with counter-based noise; no host sync.

Contract. ``logits`` [S, V] (float32, float16, bfloat16), contiguous. ``greedy`` takes the largest, of equals the lowest
id. ``sample`` has per-row parameters in device memory (``SamplingParameters``) and applies, in this order: temperature;
top-k; top-p over what top-k left; min-p relative to the largest probability; then a draw by the Gumbel trick: argmax of
logit / temperature + noise, where the noise of a token is a Philox function of (seed, position, token id) and of
nothing else. So a draw does not depend on the batch, and repeats. Temperature 0 is greedy. ``logprobs`` are log-softmax
values of the raw logits.

How thresholds are found without sorting: logits become integer keys, their distance to the row's largest in units of
2^-17 (after temperature; 32 and beyond share one key). Two histograms of 2,048 bins, over the upper and the lower half
of the key, with counts for top-k and fixed-point masses for top-p, locate the cut; integer sums make it independent of
the order of additions. Tokens that tie with the last one kept (to within 2^-17) are kept too.

One launch per pass, each over (S, V / 4096) programs; the last program of a row to finish reads the row's histogram and
decides. Passes that a row does not need end at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.common import cdiv, is_last_arrival, next_power_of_2

_BLOCK = 4096
_BINS = 2048
# Columns of ``SamplerState.row``: the upper half of the key where the top-k (top-p) cut lies, tokens and mass before
# that bin, the last key kept by each, mass that top-k keeps.
_K_BIN, _K_COUNT, _K_MASS, _P_BIN, _P_MASS, _K_KEY, _P_KEY, _KEPT = range(8)


@dataclass(frozen=True)
class SamplingParameters:
    """One value a row: ``temperature`` float32 (0: greedy), ``top_k`` int32 (0: off), ``top_p`` float32 (1: off),
    ``min_p`` float32 (0: off), ``seed`` int64, ``position`` int64 (of the token being drawn)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


@dataclass(frozen=True)
class SamplerState:
    """Device scratch for up to S rows of V logits; zero between calls except ``peaks``, ``sums``, ``best`` and
    ``row``."""

    peaks: Tensor
    sums: Tensor
    best_score: Tensor
    best_id: Tensor
    counts: Tensor
    masses: Tensor
    row: Tensor
    arrivals: Tensor

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device | str) -> SamplerState:
        """State for ``rows`` rows."""
        blocks = cdiv(vocab_size, _BLOCK)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            peaks=zeros(rows, blocks, dtype=torch.float32),
            sums=zeros(rows, blocks, dtype=torch.float32),
            best_score=zeros(rows, blocks, dtype=torch.float32),
            best_id=zeros(rows, blocks, dtype=torch.int32),
            counts=zeros(rows, 2, _BINS, dtype=torch.int32),
            masses=zeros(rows, 2, _BINS, dtype=torch.int64),
            row=zeros(rows, 8, dtype=torch.int64),
            arrivals=zeros(rows, dtype=torch.int32),
        )


@triton.jit
def _load(logits_ptr, row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    # NaN would win or lose every comparison, depending on its side: it counts as impossible.
    return token, tl.where(x == x, x, float("-inf"))


@triton.jit
def _best(score, token):
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, 2147483647), axis=0)


@triton.jit
def _peak_kernel(
    logits_ptr, peaks_ptr, sums_ptr, best_id_ptr, arrivals_ptr, ids_ptr, logprobs_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW2: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token, x = _load(logits_ptr, row, VOCAB, BLOCK)
    peak, winner = _best(x, token)
    cell = row * BLOCKS + tl.program_id(1)
    tl.store(peaks_ptr + cell, peak)
    tl.store(sums_ptr + cell, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
    if GREEDY:
        tl.store(best_id_ptr + cell, winner)
        if is_last_arrival(arrivals_ptr + row, BLOCKS):
            b = tl.arange(0, BLOCKS_POW2)
            peaks = tl.load(peaks_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(sums_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=0.0, cache_modifier=".cg")
            winners = tl.load(best_id_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=2147483647, cache_modifier=".cg")
            top, choice = _best(peaks, winners)
            tl.store(ids_ptr + row, tl.where(choice < VOCAB, choice, 0))
            tl.store(logprobs_ptr + row, -tl.log(_total(peaks, sums, top)))


@triton.jit
def _total(peaks, sums, top):
    base = tl.where(top == float("-inf"), 0.0, top)
    return tl.sum(sums * tl.exp(tl.where(peaks == float("-inf"), float("-inf"), peaks - base)), axis=0)


@triton.jit
def _row_peak(peaks_ptr, row, BLOCKS: tl.constexpr, BLOCKS_POW2: tl.constexpr):
    b = tl.arange(0, BLOCKS_POW2)
    return tl.max(tl.load(peaks_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=float("-inf")), axis=0)


@triton.jit
def _keys(x, peak, temperature):
    # Distance to the peak in nats after temperature, and the integer key it makes.
    distance = tl.minimum((peak - x) / temperature, 31.999)
    distance = tl.where(distance == distance, distance, 31.999)
    return distance, (distance * 131072.0).to(tl.int32)


@triton.jit
def _mass(distance):
    # exp(-distance) in units of 2^-40: the sum over any vocabulary stays below 2^60.
    return (tl.exp(-distance) * 1099511627776.0).to(tl.int64)


@triton.jit
def _first_reaching(sums, target):
    """The first index whose inclusive sum reaches ``target`` (the last one if none does), and the sum before it."""
    bins = tl.arange(0, sums.shape[0])
    running = tl.cumsum(sums, axis=0)
    index = tl.min(tl.where(running >= target, bins, sums.shape[0] - 1), axis=0)
    before = tl.sum(tl.where(bins < index, sums, 0), axis=0)
    return index, before


@triton.jit
def _histogram_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, counts_ptr, masses_ptr, row_ptr, arrivals_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW2: tl.constexpr, BINS: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    # Pass 0: all tokens by the upper half of their key. Pass 1: those in the bin of the top-k cut, by the lower half.
    # Pass 2: likewise for the top-p cut.
    row = tl.program_id(0)
    state = row_ptr + row * 8
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    by_k = (top_k > 0) & (top_k < VOCAB)
    by_p = top_p < 1.0
    if PASS == 0:
        wanted = by_k | by_p
        wanted_bin = tl.zeros([], tl.int64)
    elif PASS == 1:
        wanted = by_k
        wanted_bin = tl.load(state)
    else:
        wanted = by_p
        wanted_bin = tl.load(state + 3)
    if wanted & (temperature > 0.0):
        token, x = _load(logits_ptr, row, VOCAB, BLOCK)
        distance, key = _keys(x, _row_peak(peaks_ptr, row, BLOCKS, BLOCKS_POW2), temperature)
        alive = token < VOCAB
        if PASS == 0:
            index = key // BINS
            level = 0
        else:
            index = key % BINS
            alive = alive & (key // BINS == wanted_bin)
            level = BINS
            if PASS == 2:
                alive = alive & (key <= tl.load(state + 5))
        tl.atomic_add(
            counts_ptr + row * 2 * BINS + level + index, tl.full([BLOCK], 1, tl.int32), mask=alive, sem="relaxed"
        )
        tl.atomic_add(masses_ptr + row * 2 * BINS + level + index, _mass(distance), mask=alive, sem="relaxed")
        if is_last_arrival(arrivals_ptr + row, BLOCKS):
            bins = tl.arange(0, BINS)
            count_cell = counts_ptr + row * 2 * BINS + level + bins
            mass_cell = masses_ptr + row * 2 * BINS + level + bins
            counts = tl.load(count_cell, cache_modifier=".cg")
            masses = tl.load(mass_cell, cache_modifier=".cg")
            all_mass = tl.sum(masses, axis=0)
            last: tl.constexpr = BINS * BINS - 1
            if PASS == 0:
                k_bin, k_count = _first_reaching(counts, tl.where(by_k, top_k, 2147483647))
                tl.store(state, k_bin.to(tl.int64))
                tl.store(state + 1, k_count.to(tl.int64))
                tl.store(state + 2, tl.sum(tl.where(bins < k_bin, masses, 0), axis=0))
                tl.store(state + 5, tl.full([], last, tl.int64))
                tl.store(state + 6, tl.full([], last, tl.int64))
                tl.store(state + 7, all_mass)
                p_bin, p_mass = _first_reaching(masses, (all_mass.to(tl.float64) * top_p).to(tl.int64))
                tl.store(state + 3, p_bin.to(tl.int64))
                tl.store(state + 4, p_mass)
            if PASS == 1:
                k_sub, _ = _first_reaching(counts, top_k - tl.load(state + 1).to(tl.int32))
                k_mass = tl.load(state + 2)
                kept = k_mass + tl.sum(tl.where(bins <= k_sub, masses, 0), axis=0)
                tl.store(state + 5, wanted_bin * BINS + k_sub)
                tl.store(state + 7, kept)
                # The top-p cut is relative to what top-k keeps, so it lies in this bin or before.
                target = (kept.to(tl.float64) * top_p).to(tl.int64)
                upper = tl.load(masses_ptr + row * 2 * BINS + bins, cache_modifier=".cg")
                p_bin, p_mass = _first_reaching(tl.where(bins < wanted_bin, upper, 0), target)
                inside = target > k_mass
                tl.store(state + 3, tl.where(inside, wanted_bin, p_bin.to(tl.int64)))
                tl.store(state + 4, tl.where(inside, k_mass, p_mass))
            if PASS == 2:
                target = (tl.load(state + 7).to(tl.float64) * top_p).to(tl.int64)
                p_sub, _ = _first_reaching(masses, target - tl.load(state + 4))
                # With nothing reaching the target (rounding), the last token that is there is the cut.
                there = tl.max(tl.where(counts > 0, bins, 0), axis=0)
                tl.store(state + 6, wanted_bin * BINS + tl.minimum(p_sub, there))
            if PASS > 0:
                tl.store(count_cell, tl.zeros([BINS], tl.int32))
                tl.store(mass_cell, tl.zeros([BINS], tl.int64))


@triton.jit
def _draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, peaks_ptr, sums_ptr,
    best_score_ptr, best_id_ptr, counts_ptr, masses_ptr, row_ptr, arrivals_ptr, ids_ptr, logprobs_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW2: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token, x = _load(logits_ptr, row, VOCAB, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    cut = ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0)
    peak = _row_peak(peaks_ptr, row, BLOCKS, BLOCKS_POW2)
    if temperature > 0.0:
        distance, key = _keys(x, peak, temperature)
        allowed = x > float("-inf")
        if cut:
            limit = tl.minimum(tl.load(row_ptr + row * 8 + 5), tl.load(row_ptr + row * 8 + 6))
            allowed = allowed & (key <= limit)
        allowed = allowed & (tl.exp(-distance) >= min_p)
        c0 = token.to(tl.uint32)
        position = tl.load(position_ptr + row)
        low = tl.zeros_like(c0) + position.to(tl.uint32)
        high = tl.zeros_like(c0) + (position >> 32).to(tl.uint32)
        random, _, _, _ = tl.philox(tl.load(seed_ptr + row), c0, low, high, tl.zeros_like(c0))
        # v in (0, 1), finest near 0; E = -log(1 - v) is exponential and -log(E) Gumbel, whose large values need E near
        # 0.
        v = (random.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        exponential = tl.where(
            v < 0.01, v * (1.0 + v * (0.5 + v * 0.33333334)), -tl.log(1.0 - tl.minimum(v, 0.99999994))
        )
        score = (x - peak) / temperature - tl.log(exponential)
        score = tl.where(allowed, score, float("-inf"))
    else:
        score = x
    best, winner = _best(score, token)
    cell = row * BLOCKS + tl.program_id(1)
    tl.store(best_score_ptr + cell, best)
    tl.store(best_id_ptr + cell, winner)
    if is_last_arrival(arrivals_ptr + row, BLOCKS):
        b = tl.arange(0, BLOCKS_POW2)
        inside = b < BLOCKS
        scores = tl.load(best_score_ptr + row * BLOCKS + b, mask=inside, other=float("-inf"), cache_modifier=".cg")
        winners = tl.load(best_id_ptr + row * BLOCKS + b, mask=inside, other=2147483647, cache_modifier=".cg")
        _, choice = _best(scores, winners)
        choice = tl.where(choice < VOCAB, choice, 0)
        peaks = tl.load(peaks_ptr + row * BLOCKS + b, mask=inside, other=float("-inf"))
        sums = tl.load(sums_ptr + row * BLOCKS + b, mask=inside, other=0.0)
        chosen = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + choice).to(tl.float32)
        tl.store(ids_ptr + row, choice)
        tl.store(logprobs_ptr + row, chosen - peak - tl.log(_total(peaks, sums, peak)))
        if cut & (temperature > 0.0):
            bins = tl.arange(0, BINS)
            tl.store(counts_ptr + row * 2 * BINS + bins, tl.zeros([BINS], tl.int32))
            tl.store(masses_ptr + row * 2 * BINS + bins, tl.zeros([BINS], tl.int64))


def _check(logits: Tensor, state: SamplerState, ids: Tensor) -> tuple[int, int, int]:
    rows, vocab = logits.shape
    blocks = cdiv(vocab, _BLOCK)
    if state.peaks.shape[0] < rows or state.peaks.shape[1] != blocks or not logits.is_contiguous():
        raise ValueError(
            f"sampler state for {state.peaks.shape[0]} rows of {state.peaks.shape[1]} blocks does not fit contiguous "
            f"logits {list(logits.shape)}"
        )
    if ids.shape[0] < rows:
        raise ValueError(f"ids hold {ids.shape[0]} rows, needed: {rows}")
    return rows, vocab, blocks


def greedy(logits: Tensor, state: SamplerState, ids: Tensor, logprobs: Tensor) -> None:
    """Fill ids (int32 or int64) and logprobs (float32) [S] with the largest logits; one launch."""
    rows, vocab, blocks = _check(logits, state, ids)
    _peak_kernel[(rows, blocks)](
        logits, state.peaks, state.sums, state.best_id, state.arrivals, ids, logprobs, VOCAB=vocab, BLOCK=_BLOCK,
        BLOCKS=blocks, BLOCKS_POW2=next_power_of_2(blocks), GREEDY=True, num_warps=8,
    )  # fmt: skip


def sample(logits: Tensor, parameters: SamplingParameters, state: SamplerState, ids: Tensor, logprobs: Tensor) -> None:
    """Fill ids (int32 or int64) and logprobs (float32) [S] by the rows' parameters; five launches."""
    rows, vocab, blocks = _check(logits, state, ids)
    p = parameters
    shape = {"VOCAB": vocab, "BLOCK": _BLOCK, "BLOCKS": blocks, "BLOCKS_POW2": next_power_of_2(blocks), "num_warps": 8}
    _peak_kernel[(rows, blocks)](
        logits, state.peaks, state.sums, state.best_id, state.arrivals, ids, logprobs, GREEDY=False, **shape
    )  # fmt: skip
    for number in range(3):
        _histogram_kernel[(rows, blocks)](
            logits, p.temperature, p.top_k, p.top_p, state.peaks, state.counts, state.masses, state.row, state.arrivals,
            BINS=_BINS, PASS=number, **shape,
        )  # fmt: skip
    _draw_kernel[(rows, blocks)](
        logits, p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.position, state.peaks, state.sums, state.best_score,
        state.best_id, state.counts, state.masses, state.row, state.arrivals, ids, logprobs, BINS=_BINS, **shape,
    )  # fmt: skip
