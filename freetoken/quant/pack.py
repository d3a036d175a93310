"""Between an expert's matrices and its record (see ``record.py`` for the geometry). numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError
from freetoken.quant.record import RecordField, RecordLayout

STORAGE_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "bf16": np.uint16}


def _field_view(layout: RecordLayout, field: RecordField, record: NDArray[np.uint8]) -> NDArray[np.generic]:
    """The field of all tiles as ``[num_tiles, rows, columns]``, a view into ``record``."""
    tiles = record[: layout.payload_bytes].reshape(layout.num_tiles, layout.tile_stride_bytes)
    flat = tiles[:, field.offset_bytes : field.offset_bytes + field.size_bytes].view(STORAGE_DTYPES[field.dtype])
    return flat.reshape(layout.num_tiles, *field.shape)


def _tiled(layout: RecordLayout, field: RecordField, rows_are_intermediate: bool, matrix: NDArray[np.generic]) -> None:
    expected = (layout.intermediate, layout.hidden) if rows_are_intermediate else (layout.hidden, layout.intermediate)
    if matrix.shape != expected or matrix.dtype != STORAGE_DTYPES[field.dtype]:
        raise CheckpointError(
            f"expert matrix {field.name!r} is {matrix.dtype} {list(matrix.shape)}; "
            f"its record needs {field.dtype} {list(expected)}"
        )


def pack_expert(
    layout: RecordLayout,
    gate: NDArray[np.generic],
    up: NDArray[np.generic],
    down: NDArray[np.generic],
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """One record of ``layout.stride_bytes`` bytes from gate and up ``[I, H]`` and down ``[H, I]``, as checkpoints have
    them.

    Matrices have the fields' storage dtype (float32, or uint16 holding BF16). ``out`` is filled when given; its padding
    is zeroed. Raises ``CheckpointError`` on a wrong shape or dtype.
    """
    if out is None:
        out = np.zeros(layout.stride_bytes, np.uint8)
    else:
        out[...] = 0
    for name, matrix in (("gate", gate), ("up", up), ("down", down)):
        field = layout.field(name)
        is_down = name == "down"
        _tiled(layout, field, not is_down, matrix)
        view = _field_view(layout, field, out)
        by_column = matrix.T if is_down else matrix  # [I, H]
        tiles = by_column.reshape(layout.num_tiles, layout.tile_columns, layout.hidden)
        view[...] = tiles if field.axes == "IH" else tiles.transpose(0, 2, 1)
    return out


def unpack_expert(
    layout: RecordLayout, record: NDArray[np.uint8]
) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """The inverse of ``pack_expert``: fresh contiguous gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]``."""
    matrices = []
    for name in ("gate", "up", "down"):
        field = layout.field(name)
        view = _field_view(layout, field, record)
        tiles = view if field.axes == "IH" else view.transpose(0, 2, 1)
        by_column = tiles.reshape(layout.intermediate, layout.hidden)
        matrices.append(np.ascontiguousarray(by_column.T if name == "down" else by_column))
    gate, up, down = matrices
    return gate, up, down
