"""Q2_K: 256 2-bit codes in sixteen sub-blocks; ``d * scale * code - dmin * minimum``.

Bytes: 16, low nibble the scale, high nibble the minimum; 64 of codes (pair k of byte l of each half belongs to element
32 k + l); f16 d, f16 dmin.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half

TYPE_ID = 10
NAME = "Q2_K"
BLOCK_ELEMENTS = 256
BLOCK_BYTES = 84


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 84]`` bytes to ``[n, 256]`` float32."""
    scales = (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minima = (blocks[:, :16] >> 4).astype(np.float32)
    pairs = blocks[:, 16:80].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes = (pairs & np.uint8(3)).astype(np.float32).reshape(-1, 16, 16)
    step, floor = half(blocks, 80) * scales, half(blocks, 82) * minima
    return (step[:, :, None] * codes - floor[:, :, None]).reshape(-1, 256)
