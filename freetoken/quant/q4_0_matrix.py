"""A dense Q4_0 matrix in the checkpoint: two planes, as in records, one after the other.

For ``[O, I]`` (I a multiple of 32): ``O * I / 2`` bytes of nibbles, row-major, where byte j of block b of a row lies at
``16 * b + j``; zeros up to a multiple of 64 bytes; then the float16 scales ``[O, I / 32]``. The bits are those of
GGUF's blocks (see ``q4_0.py``), 4.5 a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError
from freetoken.quant.q4_0 import BLOCK_ELEMENTS
from freetoken.quant.q4_0_record import dequantize_blocks, join_blocks
from freetoken.quant.record import TILE_ALIGNMENT_BYTES
from freetoken.units import align_up


@dataclass(frozen=True, eq=False, slots=True)
class Q4_0Matrix:
    """``nibbles`` uint8 ``[O, I / 2]`` and ``scales`` float16 ``[O, I / 32]``, both C-contiguous; views or copies."""

    nibbles: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.nibbles.shape[0], self.nibbles.shape[1] * 2

    def rows(self, index: Any) -> NDArray[np.float32]:
        """The chosen rows (any NumPy index of the first axis that keeps it) in float32, exact."""
        return dequantize_blocks(join_blocks(self.nibbles[index], self.scales[index]))

    def dequantize(self) -> NDArray[np.float32]:
        """Float32 ``[O, I]``, exact."""
        return self.rows(slice(None))


def scales_offset_bytes(shape: tuple[int, ...]) -> int:
    """Where the scales of a matrix begin. Raises ``CheckpointError`` when blocks do not fit ``shape``."""
    if len(shape) != 2 or shape[1] < BLOCK_ELEMENTS or shape[1] % BLOCK_ELEMENTS:
        raise CheckpointError(f"q4_0: a matrix of shape {list(shape)} is not made of rows of {BLOCK_ELEMENTS}-blocks")
    return align_up(shape[0] * shape[1] // 2, TILE_ALIGNMENT_BYTES)


def matrix_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of both planes and what lies between. Raises ``CheckpointError`` like ``scales_offset_bytes``."""
    return scales_offset_bytes(shape) + shape[0] * shape[1] // BLOCK_ELEMENTS * 2


def matrix_view(data: NDArray[np.uint8], shape: tuple[int, ...]) -> Q4_0Matrix:
    """The matrix in ``matrix_bytes(shape)`` bytes, at least 2-byte aligned, without a copy."""
    start = scales_offset_bytes(shape)
    nibbles = data[: shape[0] * shape[1] // 2].reshape(shape[0], -1)
    scales = data[start : matrix_bytes(shape)].view(np.float16).reshape(shape[0], -1)
    return Q4_0Matrix(nibbles, scales)
