"""Q8_0: 32 signed bytes and a scale.

Bytes: f16 d; 32 int8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half, signed

TYPE_ID = 8
NAME = "Q8_0"
BLOCK_ELEMENTS = 32
BLOCK_BYTES = 34


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 34]`` bytes to ``[n, 32]`` float32."""
    return half(blocks, 0) * signed(blocks, 2, 34)
