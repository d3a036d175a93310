"""Records: geometry, packing and unpacking."""

import numpy as np
import pytest

from freetoken.errors import CheckpointError
from freetoken.quant.pack import STORAGE_DTYPES, pack_expert, unpack_expert
from freetoken.quant.record import RecordField, RecordLayout, plan_record_layout


def random_expert(layout, seed=0):
    rng = np.random.default_rng(seed)
    dtype = STORAGE_DTYPES[layout.format]
    shapes = ((layout.intermediate, layout.hidden),) * 2 + ((layout.hidden, layout.intermediate),)
    return [rng.integers(0, 2**16, shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "hidden,intermediate,tile", [(32, 48, None), (64, 96, 8), (24, 7, 7), (10, 6, 1), (576, 192, 64)]
)
def test_unpack_is_the_inverse_of_pack(dtype, hidden, intermediate, tile):
    layout = plan_record_layout(dtype, hidden, intermediate, tile)
    expert = random_expert(layout)
    record = pack_expert(layout, *expert)
    assert record.nbytes == layout.stride_bytes and record.nbytes % 4096 == 0
    assert not record[layout.payload_bytes :].any()
    for original, back in zip(expert, unpack_expert(layout, record), strict=True):
        np.testing.assert_array_equal(original, back)


def test_a_tile_holds_gate_rows_up_rows_and_down_columns():
    layout = plan_record_layout("f32", 16, 12, 4)
    gate, up, down = random_expert(layout)
    record = pack_expert(layout, gate, up, down)
    for tile in range(layout.num_tiles):
        columns = slice(tile * 4, tile * 4 + 4)
        for name, expected in (("gate", gate[columns]), ("up", up[columns]), ("down", down[:, columns].T)):
            start = tile * layout.tile_stride_bytes + layout.field(name).offset_bytes
            found = record[start : start + layout.field(name).size_bytes].view(np.float32).reshape(4, 16)
            np.testing.assert_array_equal(found, expected)


def test_a_field_may_keep_the_hidden_dimension_outside():
    plain = plan_record_layout("f32", 16, 12, 4)
    fields = tuple(
        RecordField(f.name, f.dtype, "HI", f.shape[::-1], f.offset_bytes, f.size_bytes) if f.name == "down" else f
        for f in plain.fields
    )
    layout = RecordLayout(*(getattr(plain, name) for name in plain.__dataclass_fields__ if name != "fields"), fields)
    expert = random_expert(layout)
    for original, back in zip(expert, unpack_expert(layout, pack_expert(layout, *expert)), strict=True):
        np.testing.assert_array_equal(original, back)


def test_packing_reuses_a_dirty_buffer():
    layout = plan_record_layout("bf16", 10, 6, 3)
    expert = random_expert(layout)
    buffer = np.full(layout.stride_bytes, 0xAA, np.uint8)
    np.testing.assert_array_equal(pack_expert(layout, *expert, buffer), pack_expert(layout, *expert))


def test_wrong_shapes_and_dtypes_are_refused():
    layout = plan_record_layout("f32", 16, 12)
    gate, up, down = random_expert(layout)
    with pytest.raises(CheckpointError, match=r"'down' is float32 \[12, 16\].*needs f32 \[16, 12\]"):
        pack_expert(layout, gate, up, down.T)
    with pytest.raises(CheckpointError, match="'gate' is float64"):
        pack_expert(layout, gate.astype(np.float64), up, down)
    with pytest.raises(CheckpointError, match="does not divide"):
        plan_record_layout("f32", 16, 12, 5)
    with pytest.raises(CheckpointError, match="'f16' is not one of"):
        plan_record_layout("f16", 16, 12)


def test_layout_json_round_trip_and_damage():
    layout = plan_record_layout("bf16", 64, 96)
    assert RecordLayout.from_json(layout.to_json()) == layout
    for key, value, match in (
        ("num_tiles", 3, "do not make"),
        ("stride_bytes", 4096, "stride 4096"),
        ("tile_stride_bytes", 64, "beyond its tile"),
        ("fields", [{}], "malformed"),
    ):
        with pytest.raises(CheckpointError, match=match):
            RecordLayout.from_json({**layout.to_json(), key: value})
