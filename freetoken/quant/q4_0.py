"""Q4_0: 32 4-bit codes and a scale; ``(code - 8) * d``.

Bytes: f16 d; 16 bytes, byte j holds element j (low nibble) and j + 16 (high).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, split_nibbles

TYPE_ID = 2
NAME = "Q4_0"
BLOCK_ELEMENTS = 32
BLOCK_BYTES = 18


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 18]`` bytes to ``[n, 32]`` float32."""
    codes = split_nibbles(blocks[:, 2:], 16).astype(np.float32)
    return half(blocks, 0) * (codes - np.float32(8))
