"""F32: plain little-endian float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TYPE_ID = 0
NAME = "F32"
BLOCK_ELEMENTS = 1
BLOCK_BYTES = 4


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """``[n, 4]`` bytes to ``[n, 1]`` float32."""
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)
