"""The weight formats that a checkpoint may hold, by name: sizes, record layouts, and records back to matrices."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError
from freetoken.quant.pack import unpack_expert
from freetoken.quant.q4_0_matrix import matrix_bytes
from freetoken.quant.q4_0_record import FORMAT as Q4_0
from freetoken.quant.q4_0_record import dequantize_q4_0_expert, plan_q4_0_layout
from freetoken.quant.record import DTYPE_BYTES, RecordLayout, plan_record_layout

FORMATS: tuple[str, ...] = (*DTYPE_BYTES, Q4_0)
"""Of dense tensors and of records."""


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor. Raises ``CheckpointError`` for a shape that ``q4_0`` cannot have."""
    return matrix_bytes(shape) if dtype == Q4_0 else math.prod(shape) * DTYPE_BYTES[dtype]


def plan_layout(record_format: str, hidden: int, intermediate: int, tile_columns: int | None = None) -> RecordLayout:
    """The layout of gated experts in one of ``FORMATS``; ``tile_columns`` None means the format's own default.

    Raises ``CheckpointError`` for another format, or sizes that its tiles or blocks do not divide.
    """
    if record_format != Q4_0:
        return plan_record_layout(record_format, hidden, intermediate, tile_columns)
    if tile_columns is None:
        return plan_q4_0_layout(hidden, intermediate)
    return plan_q4_0_layout(hidden, intermediate, tile_columns)


def unpack_record(
    layout: RecordLayout, record: NDArray[np.uint8]
) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """Gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]`` as fresh arrays: float32, or uint16 holding BF16. Exact."""
    if layout.format == Q4_0:
        return dequantize_q4_0_expert(layout, record)
    if layout.format not in DTYPE_BYTES:
        raise CheckpointError(f"record format {layout.format!r} is not one of {', '.join(FORMATS)}")
    return unpack_expert(layout, record)
