"""Q5_1: 32 5-bit codes, a scale and a minimum; ``code * d + m``.

Bytes: f16 d, f16 m; a 32-bit word of fifth bits; 16 bytes of nibbles as in Q4_0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import bits_of_word, half, split_nibbles

TYPE_ID = 7
NAME = "Q5_1"
BLOCK_ELEMENTS = 32
BLOCK_BYTES = 24


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 24]`` bytes to ``[n, 32]`` float32."""
    codes = split_nibbles(blocks[:, 8:], 16) | (bits_of_word(blocks[:, 4:8]) << 4)
    return half(blocks, 0) * codes.astype(np.float32) + half(blocks, 2)
