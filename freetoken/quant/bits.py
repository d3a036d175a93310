"""Pieces that GGUF block formats share. Blocks are ``uint8`` arrays ``[n, bytes]``; scalars are little-endian."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def half(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float32]:
    """The float16 at byte ``offset`` of each block, as ``[n, 1]`` float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def signed(blocks: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.float32]:
    """Bytes ``start:stop`` of each block as signed numbers in float32."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(np.int8).astype(np.float32)


def split_nibbles(packed: NDArray[np.uint8], group: int) -> NDArray[np.uint8]:
    """``[n, m]`` bytes to ``[n, 2m]`` 4-bit codes: of each ``group`` bytes the low nibbles, then the high ones."""
    groups = packed.reshape(len(packed), -1, 1, group)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return ((groups >> shifts) & np.uint8(15)).reshape(len(packed), -1)


def bits_of_word(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``[n, 4]`` bytes (one 32-bit word each) to ``[n, 32]`` bits, lowest first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def scales_and_minima(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima, both ``[n, 8]``.

    The first four of each lie in the low six bits of bytes 0-3 and 4-7; of the last four, the low halves are the
    nibbles of bytes 8-11 and the upper two bits are the top bits of bytes 0-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)
