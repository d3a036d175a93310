"""BF16: the upper half of a float32. numpy has no such type, so it travels as ``uint16``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TYPE_ID = 30
NAME = "BF16"
BLOCK_ELEMENTS = 1
BLOCK_BYTES = 2


def to_f32(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact widening."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def from_f32(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; a NaN stays one (made quiet), overflow becomes infinity."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = ((bits[nan] >> 16) | 0x0040).astype(np.uint16)
    return rounded


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 2]`` bytes to ``[n, 1]`` float32."""
    return to_f32(np.ascontiguousarray(blocks).view(np.uint16))
