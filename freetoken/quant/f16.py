"""F16: IEEE half precision; every value is exact in float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.quant.bits import half

TYPE_ID = 1
NAME = "F16"
BLOCK_ELEMENTS = 1
BLOCK_BYTES = 2


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 2]`` bytes to ``[n, 1]`` float32."""
    return half(blocks, 0)
