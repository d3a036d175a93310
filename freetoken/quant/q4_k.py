"""Q4_K: 256 4-bit codes in eight sub-blocks; ``d * scale * code - dmin * minimum``.

Bytes: f16 d, f16 dmin; 12 bytes of 6-bit scales and minima; 128 bytes in four chunks of 32, whose low nibbles are
sub-block 2c and whose high nibbles are sub-block 2c + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, scales_and_minima, split_nibbles

TYPE_ID = 12
NAME = "Q4_K"
BLOCK_ELEMENTS = 256
BLOCK_BYTES = 144


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 144]`` bytes to ``[n, 256]`` float32."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    codes = split_nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32).astype(np.float32)
    step, floor = half(blocks, 0) * scales, half(blocks, 2) * minima
    return (step[:, :, None] * codes - floor[:, :, None]).reshape(-1, 256)
