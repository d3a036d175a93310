"""The expert record: one routed expert of one layer as one contiguous, 4,096-aligned run of bytes.

The same bytes lie in the FTW data file, in the store, and in an expert slot. A record is a sequence of *tiles*; a
tile holds ``tile_columns`` intermediate columns of the expert, complete in themselves: their gate rows, up rows and
down columns. The output of an expert is the sum over its tiles, so a record can be split between processors at any
tile boundary, and one processor reads each tile front to back.

For F32 and BF16 the down projection is stored transposed (``[tile_columns, hidden]``), so that every field of a tile
is ``[tile_columns, hidden]`` row-major and reading is sequential. Formats whose blocks run along the intermediate
dimension keep ``[hidden, tile_columns]``; a field says which by its ``axes``.

The layout is data: it is written into the checkpoint index and handed to kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from freetoken.errors import CheckpointError
from freetoken.units import align_up

RECORD_ALIGNMENT_BYTES = 4096
TILE_ALIGNMENT_BYTES = 64
DTYPE_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class RecordField:
    """One matrix of a tile. ``axes`` is ``"IH"`` (intermediate rows, hidden contiguous) or ``"HI"``."""

    name: str
    dtype: str
    axes: str
    shape: tuple[int, int]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Geometry of one kind of record. ``stride_bytes`` is the padded size of a record."""

    format: str
    hidden: int
    intermediate: int
    tile_columns: int
    num_tiles: int
    tile_stride_bytes: int
    stride_bytes: int
    fields: tuple[RecordField, ...]

    def field(self, name: str) -> RecordField:
        """The field of that name; ``KeyError`` when the layout has none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a record before padding."""
        return self.num_tiles * self.tile_stride_bytes

    def to_json(self) -> dict[str, Any]:
        """As it stands in the checkpoint index."""
        return {
            "format": self.format,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "tile_columns": self.tile_columns,
            "num_tiles": self.num_tiles,
            "tile_stride_bytes": self.tile_stride_bytes,
            "stride_bytes": self.stride_bytes,
            "fields": [
                {
                    "name": f.name,
                    "dtype": f.dtype,
                    "axes": f.axes,
                    "shape": list(f.shape),
                    "offset_bytes": f.offset_bytes,
                    "size_bytes": f.size_bytes,
                }
                for f in self.fields
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecordLayout:
        """The inverse of ``to_json``; ``CheckpointError`` when a key is missing or sizes contradict each other."""
        try:
            fields = tuple(
                RecordField(
                    str(f["name"]),
                    str(f["dtype"]),
                    str(f["axes"]),
                    (int(f["shape"][0]), int(f["shape"][1])),
                    int(f["offset_bytes"]),
                    int(f["size_bytes"]),
                )
                for f in data["fields"]
            )
            layout = cls(
                format=str(data["format"]),
                hidden=int(data["hidden"]),
                intermediate=int(data["intermediate"]),
                tile_columns=int(data["tile_columns"]),
                num_tiles=int(data["num_tiles"]),
                tile_stride_bytes=int(data["tile_stride_bytes"]),
                stride_bytes=int(data["stride_bytes"]),
                fields=fields,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"record layout is malformed: {error!r}") from error
        if layout.tile_columns * layout.num_tiles != layout.intermediate:
            raise CheckpointError(
                f"record layout: {layout.num_tiles} tiles of {layout.tile_columns} columns do not make "
                f"{layout.intermediate} intermediate columns"
            )
        if any(f.offset_bytes + f.size_bytes > layout.tile_stride_bytes for f in fields):
            raise CheckpointError("record layout: a field reaches beyond its tile")
        if layout.stride_bytes % RECORD_ALIGNMENT_BYTES or layout.stride_bytes < layout.payload_bytes:
            raise CheckpointError(
                f"record layout: stride {layout.stride_bytes} is not a multiple of {RECORD_ALIGNMENT_BYTES} "
                f"that holds {layout.payload_bytes} payload bytes"
            )
        return layout


def plan_record_layout(dtype: str, hidden: int, intermediate: int, tile_columns: int | None = None) -> RecordLayout:
    """Layout of unquantised (``"f32"`` or ``"bf16"``) gated experts.

    ``tile_columns`` defaults to the largest divisor of ``intermediate`` not above 64 (a 768-column BF16 expert with
    hidden 2048 then has 12 tiles of 768 KiB). Raises ``CheckpointError`` for other dtypes or a non-divisor.
    """
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"record dtype {dtype!r} is not one of {sorted(DTYPE_BYTES)}")
    if tile_columns is None:
        tile_columns = max(d for d in range(1, min(64, intermediate) + 1) if intermediate % d == 0)
    if tile_columns < 1 or intermediate % tile_columns:
        raise CheckpointError(f"tile_columns {tile_columns} does not divide intermediate size {intermediate}")
    size = tile_columns * hidden * DTYPE_BYTES[dtype]
    pitch = align_up(size, TILE_ALIGNMENT_BYTES)
    fields = tuple(
        RecordField(name, dtype, "IH", (tile_columns, hidden), i * pitch, size)
        for i, name in enumerate(("gate", "up", "down"))
    )
    num_tiles = intermediate // tile_columns
    return RecordLayout(
        format=dtype,
        hidden=hidden,
        intermediate=intermediate,
        tile_columns=tile_columns,
        num_tiles=num_tiles,
        tile_stride_bytes=3 * pitch,
        stride_bytes=align_up(3 * pitch * num_tiles, RECORD_ALIGNMENT_BYTES),
        fields=fields,
    )
