"""What Q4_0 kernels on the CPU must compute, in numpy and float64: with activations as they are, or rounded to 8 bits.

The kernels round activations; ``quantize_activations`` does the same, so that the rest can be compared closely.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
BLOCK = 32


def quantize_activations(x: F32) -> F64:
    """``[..., n]`` to the values that 8-bit blocks of 32 stand for: codes in -127..127 times max|x| / 127."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    peak = np.abs(blocks).max(-1, keepdims=True)
    usable = peak >= np.float32(1e-30)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=usable)
    scale = np.where(usable, peak / np.float32(127), np.float32(0))
    codes = np.rint(blocks * inverse)
    return (codes.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


def linear(x: F32, weight: F32, *, rounded: bool) -> F64:
    """``x [T, I] @ weight [O, I].T``; ``rounded``: with 8-bit activations."""
    activations = quantize_activations(x) if rounded else x.astype(np.float64)
    return activations @ weight.astype(np.float64).T


def expert(x: F32, gate: F32, up: F32, down: F32, *, rounded: bool) -> F64:
    """One gated expert on rows x [N, H]; ``rounded``: with 8-bit activations before both products."""
    g, u = linear(x, gate, rounded=rounded), linear(x, up, rounded=rounded)
    return linear((g / (1 + np.exp(-g)) * u).astype(np.float32), down, rounded=rounded)


def relative_error(actual: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Root of the summed squares of the difference, relative to the expected values."""
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual.astype(np.float64) - expected)) / max(size, 1e-30)
