"""Record layouts as the native kernels want them."""

from __future__ import annotations

from freetoken._native import NativeLayout
from freetoken.quant.q4_0_record import FORMAT as Q4_0
from freetoken.quant.record import RecordLayout


def native_layout(layout: RecordLayout) -> NativeLayout:
    """``KeyError`` when the layout lacks a field of its format, ``ValueError`` for one that the kernels do not know."""
    nibbles, scales = ("_q", "_d") if layout.format == Q4_0 else ("", None)

    def offset(part: str, suffix: str | None) -> int:
        return -1 if suffix is None else layout.field(part + suffix).offset_bytes

    return NativeLayout(
        layout.format,
        layout.hidden,
        layout.intermediate,
        layout.tile_columns,
        layout.num_tiles,
        layout.tile_stride_bytes,
        layout.stride_bytes,
        offset("gate", nibbles),
        offset("up", nibbles),
        offset("down", nibbles),
        offset("gate", scales),
        offset("up", scales),
        offset("down", scales),
    )
