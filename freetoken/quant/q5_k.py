"""Q5_K: 256 5-bit codes in eight sub-blocks; ``d * scale * code - dmin * minimum``.

Bytes: f16 d, f16 dmin; 12 bytes of 6-bit scales and minima; 32 bytes, bit s of byte l being the fifth bit of element l
of sub-block s; 128 bytes of nibbles as in Q4_K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, scales_and_minima, split_nibbles

TYPE_ID = 13
NAME = "Q5_K"
BLOCK_ELEMENTS = 256
BLOCK_BYTES = 176


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 176]`` bytes to ``[n, 256]`` float32."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    low = split_nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    codes = (low | (high << 4)).astype(np.float32)
    step, floor = half(blocks, 0) * scales, half(blocks, 2) * minima
    return (step[:, :, None] * codes - floor[:, :, None]).reshape(-1, 256)
