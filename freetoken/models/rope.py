"""Rotary embedding tables. NumPy only; computed once per process and shared by all layers.

Frequencies and angles are rounded to float32 at the places where the models' own definitions round them: at long
positions a more exact angle would be a different angle from the one the weights were trained with.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import UnsupportedModelError
from freetoken.models.spec import RopeSpec

F32 = NDArray[np.float32]


def inverse_frequencies(rope: RopeSpec) -> tuple[F32, float]:
    """(inverse frequencies [R/2], factor on cos and sin). Raises ``UnsupportedModelError`` on an unknown kind."""
    numbers = dict(rope.parameters)
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    periods = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / periods
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / np.float32(numbers["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, numbers), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, numbers), _yarn_attention_factor(numbers)
    raise UnsupportedModelError(f"rope type {rope.kind!r} is not supported")


def rope_tables(rope: RopeSpec, num_positions: int) -> tuple[F32, F32]:
    """(cos, sin), each [num_positions, R/2] float32, for half-split pairs (i, i + R/2)."""
    frequencies, factor = inverse_frequencies(rope)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    if factor != 1.0:
        cos *= np.float32(factor)
        sin *= np.float32(factor)
    return cos, sin


def _llama3(plain: F32, numbers: dict[str, float]) -> F32:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended linearly in frequency."""
    factor, low, high = numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"]
    original = numbers["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain.astype(np.float64)
    # How many turns a pair makes in the pre-training context, placed between the two thresholds.
    kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1.0 - kept) * plain / factor + kept * plain).astype(np.float32)


def _yarn(rope: RopeSpec, plain: F32, numbers: dict[str, float]) -> F32:
    """YaRN (Peng et al. 2023, section 3.2): interpolate slow pairs, keep fast ones, ramp over those between."""
    original = numbers["original_max_position_embeddings"]

    def pair_turning(turns: float) -> float:
        # The (fractional) dimension pair that makes `turns` rotations within the pre-training context.
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = pair_turning(numbers.get("beta_fast") or 32.0)
    last = pair_turning(numbers.get("beta_slow") or 1.0)
    if numbers.get("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float64)
    interpolated = np.clip((pairs - first) / (last - first), 0.0, 1.0)
    return (plain / numbers["factor"] * interpolated + plain * (1.0 - interpolated)).astype(np.float32)


def _yarn_attention_factor(numbers: dict[str, float]) -> float:
    if "attention_factor" in numbers:
        return numbers["attention_factor"]

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(numbers["factor"]) + 1.0 if numbers["factor"] > 1 else 1.0

    scale, scale_all = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if scale and scale_all:
        return magnitude(scale) / magnitude(scale_all)
    return magnitude(1.0)
