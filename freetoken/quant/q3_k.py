"""Q3_K: 256 3-bit codes in sixteen sub-blocks; ``d * (scale - 32) * (code - 4)``.

Bytes: 32 of third bits (bit k of byte l belongs to element 32 k + l); 64 of lower pairs as in Q2_K; 12 of 6-bit scales
(low halves in the nibbles of bytes 0-7, upper pairs in bytes 8-11); f16 d.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, split_nibbles

TYPE_ID = 11
NAME = "Q3_K"
BLOCK_ELEMENTS = 256
BLOCK_BYTES = 110


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 110]`` bytes to ``[n, 256]`` float32."""
    low = split_nibbles(blocks[:, 96:104], 8)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = ((blocks[:, None, 104:108] >> shifts) & np.uint8(3)).reshape(-1, 16)
    scales = (low | (high << 4)).astype(np.float32) - np.float32(32)
    pairs = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts[None]) & np.uint8(3)
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    codes = (pairs.reshape(-1, 8, 32) | (third << 2)).astype(np.float32).reshape(-1, 16, 16) - np.float32(4)
    return ((half(blocks, 108) * scales)[:, :, None] * codes).reshape(-1, 256)
