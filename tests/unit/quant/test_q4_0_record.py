"""Q4_0 records: the same bits as GGUF blocks, in planes, and back."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from freetoken.errors import CheckpointError
from freetoken.quant.q4_0_record import (
    dequantize_blocks,
    dequantize_q4_0_expert,
    join_blocks,
    pack_q4_0_expert,
    plan_q4_0_layout,
    quantize_blocks,
    split_blocks,
    unpack_q4_0_expert,
)
from freetoken.quant.record import RecordLayout


def random_blocks(rng, rows, columns):
    return quantize_blocks(rng.standard_normal((rows, columns)).astype(np.float32))


@pytest.mark.parametrize(("hidden", "intermediate", "columns"), [(64, 96, 32), (32, 32, 32), (160, 128, 64)])
def test_pack_and_unpack_keep_every_bit(hidden, intermediate, columns):
    rng = np.random.default_rng(hidden)
    layout = plan_q4_0_layout(hidden, intermediate, columns)
    gate, up = random_blocks(rng, intermediate, hidden), random_blocks(rng, intermediate, hidden)
    down = random_blocks(rng, hidden, intermediate)
    record = pack_q4_0_expert(layout, gate, up, down)
    assert record.shape == (layout.stride_bytes,)
    for actual, expected in zip(unpack_q4_0_expert(layout, record), (gate, up, down), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for actual, expected in zip(dequantize_q4_0_expert(layout, record), (gate, up, down), strict=True):
        reference = quants.dequantize(expected.reshape(-1, 18), GGMLQuantizationType.Q4_0)
        np.testing.assert_array_equal(actual.ravel(), reference.ravel())
    again = np.full(layout.stride_bytes, 255, np.uint8)
    np.testing.assert_array_equal(pack_q4_0_expert(layout, gate, up, down, again), record)


def test_a_weight_lies_where_the_layout_says():
    """The address arithmetic that kernels use, spelled out for single weights."""
    rng = np.random.default_rng(3)
    hidden, intermediate, columns = 64, 128, 64
    layout = plan_q4_0_layout(hidden, intermediate, columns)
    blocks = [
        random_blocks(rng, *shape) for shape in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    ]
    record = pack_q4_0_expert(layout, *blocks)
    down = dequantize_blocks(blocks[2])
    gate = dequantize_blocks(blocks[0])

    def weight(nibble_plane, scale_plane, tile, row, column):
        q, d = layout.field(nibble_plane), layout.field(scale_plane)
        row_bytes, block, j = q.shape[1] // 2, column // 32, column % 32
        start = tile * layout.tile_stride_bytes
        byte = record[start + q.offset_bytes + row * row_bytes + 16 * block + j % 16]
        scale_at = start + d.offset_bytes + 2 * (row * d.shape[1] + block)
        scale = np.frombuffer(record[scale_at : scale_at + 2].tobytes(), np.float16)[0]
        return np.float32((int(byte) >> (4 * (j // 16)) & 15) - 8) * np.float32(scale)

    for column, h in ((0, 0), (5, 17), (63, 63), (64, 31), (127, 40)):
        tile, inner = divmod(column, columns)
        assert weight("gate_q", "gate_d", tile, inner, h) == gate[column, h]
        assert weight("down_q", "down_d", tile, h, inner) == down[h, column]


def test_quantizing_agrees_with_the_gguf_package():
    values = np.random.default_rng(5).standard_normal((40, 256)).astype(np.float32)
    values[0, :32] = 0
    expected = quants.quantize(values, GGMLQuantizationType.Q4_0).reshape(40, 8, 18)
    np.testing.assert_array_equal(quantize_blocks(values), expected)
    np.testing.assert_array_equal(join_blocks(*split_blocks(expected)), expected)


def test_geometry_of_the_benchmark_model():
    layout = plan_q4_0_layout(2048, 768)
    assert (layout.num_tiles, layout.tile_stride_bytes) == (24, 110592)
    assert layout.payload_bytes * 8 == 3 * 2048 * 768 * 4.5
    assert RecordLayout.from_json(layout.to_json()) == layout


def test_refusals_name_the_value():
    with pytest.raises(CheckpointError, match="hidden size 100"):
        plan_q4_0_layout(100, 64)
    with pytest.raises(CheckpointError, match="tile_columns 48"):
        plan_q4_0_layout(64, 96, 48)
    with pytest.raises(CheckpointError, match="does not divide intermediate size 96"):
        plan_q4_0_layout(64, 96, 64)
    with pytest.raises(CheckpointError, match="row length 33"):
        quantize_blocks(np.zeros((1, 33), np.float32))
    layout = plan_q4_0_layout(64, 64)
    with pytest.raises(CheckpointError, match="up blocks"):
        pack_q4_0_expert(
            layout, np.zeros((64, 2, 18), np.uint8), np.zeros((64, 1, 18), np.uint8), np.zeros((64, 2, 18), np.uint8)
        )
