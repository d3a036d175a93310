"""Q6_K: 256 6-bit codes in sixteen sub-blocks; ``d * scale * (code - 32)``.

Bytes: 128 of low nibbles, 64 of upper bit pairs, 16 int8 scales, f16 d. Each half block of 128 elements takes 64 bytes
of nibbles (low nibbles of all, then high nibbles) and 32 bytes of pairs (pair k of byte l belongs to element 32 k + l).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, signed, split_nibbles

TYPE_ID = 14
NAME = "Q6_K"
BLOCK_ELEMENTS = 256
BLOCK_BYTES = 210


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 210]`` bytes to ``[n, 256]`` float32."""
    low = split_nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes = (low | ((pairs & np.uint8(3)) << 4)).astype(np.float32).reshape(-1, 16, 16) - np.float32(32)
    step = half(blocks, 208) * signed(blocks, 192, 208)
    return (step[:, :, None] * codes).reshape(-1, 256)
