"""Q5_0: 32 5-bit codes and a scale; ``(code - 16) * d``.

Bytes: f16 d; a 32-bit word whose bit i is the fifth bit of element i; 16 bytes of nibbles as in Q4_0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import bits_of_word, half, split_nibbles

TYPE_ID = 6
NAME = "Q5_0"
BLOCK_ELEMENTS = 32
BLOCK_BYTES = 22


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 22]`` bytes to ``[n, 32]`` float32."""
    codes = split_nibbles(blocks[:, 6:], 16) | (bits_of_word(blocks[:, 2:6]) << 4)
    return half(blocks, 0) * (codes.astype(np.float32) - np.float32(16))
