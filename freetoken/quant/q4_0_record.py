"""Q4_0 experts as records: the planes that both a CPU and a GPU kernel stream front to back.

GGUF's Q4_0 holds 32 weights in 18 bytes: a float16 scale d and 16 bytes, where byte j has weight j in its low and
weight j + 16 in its high nibble, each stored as q in 0..15 and meaning (q - 8) * d. Records keep exactly these bits
(4.5 bits a weight, nothing is quantised again) but put scales and nibbles into planes of their own, so that both are
aligned and vector loads carry weights only. A tile of ``tile_columns`` intermediate columns (a multiple of 32) has

    gate_q  u4  [tc, H]        row-major, blocks along H
    up_q    u4  [tc, H]
    gate_d  f16 [tc, H / 32]
    up_d    f16 [tc, H / 32]
    down_q  u4  [H, tc]        blocks along the intermediate dimension, as in the checkpoint
    down_d  f16 [H, tc / 32]

in this order: what the first half of an expert needs comes first. Byte j of block b of a row lies at ``16 * b + j``.

Why rows stay whole, instead of being interleaved for one vector width: 16 consecutive bytes are one block of one row
with one scale, so a GPU thread that loads a 16-byte vector, or a CPU lane group that loads 16 bytes, multiplies by the
scale once per 32 weights; a warp reads 512 consecutive bytes, which is what a read through PCIe needs to be efficient;
and with 32 columns a row of ``down_q`` is one such vector, so a thread computes whole outputs with no exchange.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError
from freetoken.quant.q4_0 import BLOCK_BYTES, BLOCK_ELEMENTS, dequantize
from freetoken.quant.record import RECORD_ALIGNMENT_BYTES, TILE_ALIGNMENT_BYTES, RecordField, RecordLayout
from freetoken.units import align_up

FORMAT = "q4_0"
_NIBBLE_BYTES = BLOCK_ELEMENTS // 2

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]


def plan_q4_0_layout(hidden: int, intermediate: int, tile_columns: int = BLOCK_ELEMENTS) -> RecordLayout:
    """Layout of Q4_0 gated experts. Raises ``CheckpointError`` for sizes that blocks of 32 do not divide."""
    if hidden < BLOCK_ELEMENTS or hidden % BLOCK_ELEMENTS:
        raise CheckpointError(f"q4_0 record: hidden size {hidden} is not a positive multiple of {BLOCK_ELEMENTS}")
    if tile_columns < BLOCK_ELEMENTS or tile_columns % BLOCK_ELEMENTS:
        raise CheckpointError(
            f"q4_0 record: tile_columns {tile_columns} is not a positive multiple of {BLOCK_ELEMENTS}"
        )
    if intermediate < tile_columns or intermediate % tile_columns:
        raise CheckpointError(
            f"q4_0 record: tile_columns {tile_columns} does not divide intermediate size {intermediate}"
        )
    scales_per_row, scales_per_column = hidden // BLOCK_ELEMENTS, tile_columns // BLOCK_ELEMENTS
    fields = []
    offset = 0
    for name, dtype, axes, shape in (
        ("gate_q", "u4", "IH", (tile_columns, hidden)),
        ("up_q", "u4", "IH", (tile_columns, hidden)),
        ("gate_d", "f16", "IH", (tile_columns, scales_per_row)),
        ("up_d", "f16", "IH", (tile_columns, scales_per_row)),
        ("down_q", "u4", "HI", (hidden, tile_columns)),
        ("down_d", "f16", "HI", (hidden, scales_per_column)),
    ):
        count = shape[0] * shape[1]
        size = count // 2 if dtype == "u4" else count * 2
        fields.append(RecordField(name, dtype, axes, shape, offset, size))
        offset = align_up(offset + size, TILE_ALIGNMENT_BYTES)
    num_tiles = intermediate // tile_columns
    return RecordLayout(
        format=FORMAT,
        hidden=hidden,
        intermediate=intermediate,
        tile_columns=tile_columns,
        num_tiles=num_tiles,
        tile_stride_bytes=offset,
        stride_bytes=align_up(offset * num_tiles, RECORD_ALIGNMENT_BYTES),
        fields=tuple(fields),
    )


# ------------------------------------------------------------------------------------------------ blocks and planes


def quantize_blocks(values: F32) -> U8:
    """Float32 ``[..., n]`` (n a multiple of 32) to GGUF blocks ``[..., n / 32, 18]``.

    The scale is the value of largest magnitude divided by -8, so that it becomes exactly q = 0. Raises
    ``CheckpointError`` when n is not a multiple of 32.
    """
    if values.shape[-1] % BLOCK_ELEMENTS:
        raise CheckpointError(f"q4_0: row length {values.shape[-1]} is not a multiple of {BLOCK_ELEMENTS}")
    groups = np.ascontiguousarray(values, np.float32).reshape(*values.shape[:-1], -1, BLOCK_ELEMENTS)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scale = peak / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    q = np.minimum((groups * inverse + np.float32(8.5)).astype(np.int32), 15).astype(np.uint8)
    blocks = np.empty((*groups.shape[:-1], BLOCK_BYTES), np.uint8)
    blocks[..., :2] = scale.astype(np.float16).view(np.uint8)
    blocks[..., 2:] = q[..., :_NIBBLE_BYTES] | (q[..., _NIBBLE_BYTES:] << 4)
    return blocks


def split_blocks(blocks: U8) -> tuple[U8, F16]:
    """GGUF blocks ``[..., n, 18]`` to planes: nibbles ``[..., n * 16]`` and scales ``[..., n]``, fresh arrays."""
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != BLOCK_BYTES:
        raise CheckpointError(
            f"q4_0 blocks are {blocks.dtype} {list(blocks.shape)}; needed: uint8 [..., n, {BLOCK_BYTES}]"
        )
    nibbles = np.ascontiguousarray(blocks[..., 2:]).reshape(*blocks.shape[:-2], -1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return nibbles, scales


def join_blocks(nibbles: U8, scales: F16) -> U8:
    """The inverse of ``split_blocks``."""
    blocks = np.empty((*scales.shape, BLOCK_BYTES), np.uint8)
    blocks[..., :2] = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    blocks[..., 2:] = nibbles.reshape(*scales.shape, _NIBBLE_BYTES)
    return blocks


def dequantize_blocks(blocks: U8) -> F32:
    """GGUF blocks ``[..., n, 18]`` to float32 ``[..., n * 32]``: (q - 8) * d, exact."""
    return dequantize(blocks.reshape(-1, BLOCK_BYTES)).reshape(*blocks.shape[:-2], -1)


# ---------------------------------------------------------------------------------------------------------- records


def _planes(layout: RecordLayout, record: U8, part: str) -> tuple[U8, F16]:
    """Views of nibbles ``[num_tiles, rows, bytes]`` and scales ``[num_tiles, rows, blocks]`` of all tiles."""
    tiles = record[: layout.payload_bytes].reshape(layout.num_tiles, layout.tile_stride_bytes)
    q, d = layout.field(f"{part}_q"), layout.field(f"{part}_d")
    nibbles = tiles[:, q.offset_bytes : q.offset_bytes + q.size_bytes].reshape(layout.num_tiles, q.shape[0], -1)
    scales = tiles[:, d.offset_bytes : d.offset_bytes + d.size_bytes].view(np.float16)
    return nibbles, scales.reshape(layout.num_tiles, *d.shape)


def _check_layout(layout: RecordLayout) -> None:
    if layout.format != FORMAT:
        raise CheckpointError(f"record layout has format {layout.format!r}, needed: {FORMAT!r}")


def pack_q4_0_expert(layout: RecordLayout, gate: U8, up: U8, down: U8, out: U8 | None = None) -> U8:
    """One record of ``layout.stride_bytes`` bytes from GGUF blocks.

    gate and up are ``[I, H / 32, 18]``, down is ``[H, I / 32, 18]``, as the checkpoint has them. ``out`` (uint8,
    at least 2-byte aligned) is filled when given; padding is zeroed. Raises ``CheckpointError`` on a wrong shape.
    """
    _check_layout(layout)
    if out is None:
        out = np.zeros(layout.stride_bytes, np.uint8)
    else:
        out[...] = 0
    tiles, columns = layout.num_tiles, layout.tile_columns
    shapes = {
        "gate": (layout.intermediate, layout.hidden // BLOCK_ELEMENTS, BLOCK_BYTES),
        "up": (layout.intermediate, layout.hidden // BLOCK_ELEMENTS, BLOCK_BYTES),
        "down": (layout.hidden, layout.intermediate // BLOCK_ELEMENTS, BLOCK_BYTES),
    }
    for part, blocks in (("gate", gate), ("up", up), ("down", down)):
        if blocks.shape != shapes[part]:
            raise CheckpointError(f"q4_0 {part} blocks are {list(blocks.shape)}; the record needs {list(shapes[part])}")
        nibbles, scales = split_blocks(blocks)
        nibble_view, scale_view = _planes(layout, out, part)
        if part == "down":
            nibble_view[...] = nibbles.reshape(layout.hidden, tiles, columns // 2).transpose(1, 0, 2)
            scale_view[...] = scales.reshape(layout.hidden, tiles, columns // BLOCK_ELEMENTS).transpose(1, 0, 2)
        else:
            nibble_view[...] = nibbles.reshape(tiles, columns, -1)
            scale_view[...] = scales.reshape(tiles, columns, -1)
    return out


def unpack_q4_0_expert(layout: RecordLayout, record: U8) -> tuple[U8, U8, U8]:
    """The inverse of ``pack_q4_0_expert``: fresh GGUF blocks of gate, up and down."""
    _check_layout(layout)
    parts = []
    for part in ("gate", "up", "down"):
        nibbles, scales = _planes(layout, record, part)
        if part == "down":
            nibbles = nibbles.transpose(1, 0, 2).reshape(layout.hidden, -1)
            scales = scales.transpose(1, 0, 2).reshape(layout.hidden, -1)
        else:
            nibbles = nibbles.reshape(layout.intermediate, -1)
            scales = scales.reshape(layout.intermediate, -1)
        parts.append(join_blocks(np.ascontiguousarray(nibbles), np.ascontiguousarray(scales)))
    return parts[0], parts[1], parts[2]


def dequantize_q4_0_expert(layout: RecordLayout, record: U8) -> tuple[F32, F32, F32]:
    """Float32 gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]`` of a record."""
    gate, up, down = unpack_q4_0_expert(layout, record)
    return dequantize_blocks(gate), dequantize_blocks(up), dequantize_blocks(down)
