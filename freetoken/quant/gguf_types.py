"""Tensor types of GGUF by number: the ones that can be read, and the names of the others for messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.quant import bf16, f16, f32, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0


@dataclass(frozen=True, slots=True)
class GgufType:
    """``dequantize`` turns ``[n, block_bytes]`` uint8 into ``[n, block_elements]`` float32, to the bit."""

    type_id: int
    name: str
    block_elements: int
    block_bytes: int
    dequantize: Callable[[NDArray[np.uint8]], NDArray[np.float32]]


GGUF_TYPES: dict[int, GgufType] = {
    m.TYPE_ID: GgufType(m.TYPE_ID, m.NAME, m.BLOCK_ELEMENTS, m.BLOCK_BYTES, m.dequantize)
    for m in (f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k)
}

_OTHER_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


def describe_type(type_id: int) -> str:
    """``"type 29 (IQ1_M)"``, or just the number when nobody here has heard of it."""
    name = GGUF_TYPES[type_id].name if type_id in GGUF_TYPES else _OTHER_NAMES.get(type_id)
    return f"type {type_id} ({name})" if name else f"type {type_id}"
