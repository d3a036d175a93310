"""Q4_1: 32 4-bit codes, a scale and a minimum; ``code * d + m``.

Bytes: f16 d, f16 m; 16 bytes of nibbles as in Q4_0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, split_nibbles

TYPE_ID = 3
NAME = "Q4_1"
BLOCK_ELEMENTS = 32
BLOCK_BYTES = 20


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 20]`` bytes to ``[n, 32]`` float32."""
    codes = split_nibbles(blocks[:, 4:], 16).astype(np.float32)
    return half(blocks, 0) * codes + half(blocks, 2)
