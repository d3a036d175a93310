"""Every argument of a native kernel that does not fit is a ValueError naming it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freetoken import _native

POOL = _native.WorkerPool(2)
KV = _native.SharedSegment.create("kv", 4 * 2 * 4 * 2 * 8 * 4)  # 4 blocks of one layer: 4 slots, 2 heads, dim 8
KV_STRIDE = 2 * 4 * 2 * 8 * 4


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def i32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def i64(values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def linear(**changes: Any) -> None:
    _native.linear(POOL, **({"x": f32(3, 8), "weight": f32(5, 8), "bias": f32(5), "out": f32(3, 5)} | changes))


def rms_norm(**changes: Any) -> None:
    _native.rms_norm(POOL, **({"x": f32(3, 8), "weight": f32(8), "eps": 1e-6, "out": f32(3, 8)} | changes))


def add_rms_norm(**changes: Any) -> None:
    arguments = {"residual": f32(3, 8), "delta": f32(3, 8), "weight": f32(8), "eps": 1e-6, "out": f32(3, 8)}
    _native.add_rms_norm(POOL, **(arguments | changes))


def rotary(**changes: Any) -> None:
    arguments = {"x": f32(2, 3, 8), "positions": i32([0, 9]), "cos": f32(10, 4), "sin": f32(10, 4)}
    _native.rotary(POOL, **(arguments | changes))


def silu_and_mul(**changes: Any) -> None:
    _native.silu_and_mul(POOL, **({"gate": f32(3, 8), "up": f32(3, 8), "out": f32(3, 8)} | changes))


def router_topk(**changes: Any) -> None:
    arguments = {
        "logits": f32(3, 8),
        "top_k": 2,
        "renormalize": True,
        "scaling": 1.0,
        "ids": i32([[0, 0]] * 3),
        "weights": f32(3, 2),
    }
    _native.router_topk(POOL, **(arguments | changes))


def kv_store(**changes: Any) -> None:
    arguments = {
        "keys": f32(3, 2, 8),
        "values": f32(3, 2, 8),
        "slot_mapping": i64([0, 15, -1]),
        "kv": KV,
        "layer_offset_bytes": 0,
        "block_stride_bytes": KV_STRIDE,
        "block_size": 4,
        "kv_dtype": "f32",
    }
    _native.kv_store(POOL, **(arguments | changes))


def paged_attention(**changes: Any) -> None:
    arguments = {
        "queries": f32(3, 4, 8),
        "row_starts": i32([0, 2, 3]),
        "positions": i32([4, 5, 0]),
        "block_tables": i32([[0, 1], [3, -1]]),
        "kv": KV,
        "layer_offset_bytes": 0,
        "block_stride_bytes": KV_STRIDE,
        "block_size": 4,
        "num_kv_heads": 2,
        "kv_dtype": "f32",
        "scale": 1.0,
        "sliding_window": 0,
        "out": f32(3, 32),
    }
    _native.paged_attention(POOL, **(arguments | changes))


def layout(**changes: Any) -> _native.NativeLayout:
    arguments = {
        "dtype": "f32",
        "hidden": 16,
        "intermediate": 8,
        "tile_columns": 4,
        "num_tiles": 2,
        "tile_stride_bytes": 768,
        "stride_bytes": 4096,
        "gate_offset": 0,
        "up_offset": 256,
        "down_offset": 512,
    }
    return _native.NativeLayout(**(arguments | changes))


RECORDS = _native.SharedSegment.create("records", 4 * 4096)


def store(**changes: Any) -> _native.ExpertStore:
    arguments = {
        "segments": [RECORDS],
        "layouts": [layout()],
        "layer_layout": [0, 0],
        "record_segment": i32([[0, 0], [0, 0]]),
        "record_offset": i64([[0, 4096], [8192, 12288]]),
    }
    return _native.ExpertStore(**(arguments | changes))


STORE = store()


def expert_ffn(**changes: Any) -> None:
    arguments = {
        "store": STORE,
        "layer": 1,
        "hidden": f32(3, 16),
        "ids": i32([[0, 1], [-1, 1], [0, -1]]),
        "weights": f32(3, 2),
        "out": f32(3, 16),
    }
    _native.expert_ffn(POOL, **(arguments | changes))


def crc32c_ranges(**changes: Any) -> None:
    arguments = {"segment": RECORDS, "offsets": i64([0, 100]), "sizes": i64([100, 16284]), "num_threads": 2}
    _native.crc32c_ranges(**(arguments | changes))


def worker_pool(**changes: Any) -> None:
    _native.WorkerPool(**({"num_threads": 1} | changes)).close()


def direct_reader(**changes: Any) -> None:
    _native.DirectReader(**({"num_threads": 1, "chunk_bytes": 4096} | changes))


def submit(**changes: Any) -> None:
    reader = _native.DirectReader(1, 4096)
    arguments = {"path": "/dev/null", "size_bytes": 0, "destination": RECORDS, "destination_offset": 0}
    reader.submit(**(arguments | changes))
    reader.wait()


def segment(**changes: Any) -> None:
    _native.SharedSegment.create(**({"name": "s", "size_bytes": 4096} | changes))


CASES: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (linear, "x", [f32(3), f32(3, 8).astype(np.float64), f32(8, 3).T, [[1.0] * 8] * 3, None]),
    (linear, "weight", [f32(5, 7), f32(5, 8).astype(np.float16), f32(8, 5).T, f32(8)]),
    (linear, "bias", [f32(4), f32(1, 5), np.ones(5)]),
    (linear, "out", [f32(3, 4), f32(2, 5), np.ones((3, 5)), read_only(f32(3, 5))]),
    (rms_norm, "x", [f32(8), np.ones((3, 8))]),
    (rms_norm, "weight", [f32(7), np.ones(8, np.uint16)]),
    (rms_norm, "out", [f32(3, 7), f32(4, 8), read_only(f32(3, 8))]),
    (add_rms_norm, "residual", [f32(24), read_only(f32(3, 8))]),
    (add_rms_norm, "delta", [f32(2, 8), f32(3, 9)]),
    (add_rms_norm, "weight", [f32(9)]),
    (add_rms_norm, "out", [f32(3, 9)]),
    (rotary, "x", [f32(2, 24), read_only(f32(2, 3, 8))]),
    (rotary, "positions", [i32([0]), i32([0, 10]), i32([-1, 0]), i64([0, 0])]),
    (rotary, "cos", [f32(10, 5), f32(10)]),
    (rotary, "sin", [f32(9, 4), f32(10, 3)]),
    (silu_and_mul, "gate", [f32(8)]),
    (silu_and_mul, "up", [f32(3, 7), f32(2, 8)]),
    (silu_and_mul, "out", [f32(2, 8), f32(3, 9)]),
    (router_topk, "logits", [f32(8)]),
    (router_topk, "top_k", [0, 9, -1]),
    (router_topk, "ids", [i32([[0, 0]] * 2), i32([[0]] * 3), i64([[0, 0]] * 3)]),
    (router_topk, "weights", [f32(3, 3), f32(2, 2)]),
    (kv_store, "keys", [f32(3, 16)]),
    (kv_store, "values", [f32(3, 2, 7), f32(2, 2, 8)]),
    (kv_store, "slot_mapping", [i64([0, 1]), i64([0, 16, 1]), i64([-2, 0, 1]), i32([0, 1, 2])]),
    (kv_store, "layer_offset_bytes", [-4, 2, 1 << 40]),
    (kv_store, "block_stride_bytes", [KV_STRIDE - 4, KV_STRIDE + 2]),
    (kv_store, "block_size", [0]),
    (kv_store, "kv_dtype", ["f16"]),
    (paged_attention, "queries", [f32(3, 32)]),
    (paged_attention, "row_starts", [i32([0, 3]), i32([1, 2, 3]), i32([0, 2, 2]), i32([0, 4, 3]), i32([0, -1, 3])]),
    (paged_attention, "positions", [i32([0, 1]), i32([4, 8, 0]), i32([-1, 0, 0])]),
    (paged_attention, "block_tables", [i32([0, 1]), i32([[0, 4], [3, -1]]), i32([[0, -1], [3, -1]])]),
    (paged_attention, "layer_offset_bytes", [-4]),
    (paged_attention, "block_stride_bytes", [4]),
    (paged_attention, "block_size", [0, -1]),
    (paged_attention, "num_kv_heads", [0, 3]),
    (paged_attention, "kv_dtype", ["fp8"]),
    (paged_attention, "sliding_window", [-1]),
    (paged_attention, "out", [f32(3, 31), f32(3, 4, 8)]),
    (layout, "dtype", ["q4"]),
    (layout, "hidden", [0]),
    (layout, "intermediate", [0]),
    (layout, "tile_columns", [0]),
    (layout, "num_tiles", [3, 0]),
    (layout, "tile_stride_bytes", [764, 770]),
    (layout, "stride_bytes", [1024, -1]),
    (layout, "gate_offset", [-4, 516, 2]),
    (layout, "up_offset", [516]),
    (layout, "down_offset", [516]),
    (store, "segments", [[None]]),
    (store, "layer_layout", [[0, 1], [-1, 0]]),
    (store, "record_segment", [i32([[0, 1], [0, 0]]), i32([[0, -1], [0, 0]]), i32([[0, 0]]), i64([[0, 0], [0, 0]])]),
    (
        store,
        "record_offset",
        [i64([[0, 0], [0, 12289]]), i64([[0, -64], [0, 0]]), i64([[0], [0]]), i64([[0, 4], [0, 0]])],
    ),
    (expert_ffn, "layer", [-1, 2]),
    (expert_ffn, "hidden", [f32(3, 15), f32(48)]),
    (expert_ffn, "ids", [i32([[0, 1]] * 2), i32([[0, 2]] * 3), i32([[0, -2]] * 3), i64([[0, 1]] * 3)]),
    (expert_ffn, "weights", [f32(3, 1), f32(2, 2)]),
    (expert_ffn, "out", [f32(3, 15), f32(2, 16), read_only(f32(3, 16))]),
    (crc32c_ranges, "offsets", [i64([0, 16385]), i64([-1, 0]), i32([0, 1])]),
    (crc32c_ranges, "sizes", [i64([0, 16285]), i64([-1, 0]), i64([0])]),
    (crc32c_ranges, "num_threads", [0]),
    (worker_pool, "num_threads", [0, -1, 100000]),
    (worker_pool, "spin_us", [-1]),
    (worker_pool, "isa", ["mmx", ""]),
    (direct_reader, "num_threads", [0, 1000]),
    (direct_reader, "chunk_bytes", [0, 4095, 6000]),
    (submit, "size_bytes", [5 * 4096]),
    (submit, "destination_offset", [5 * 4096]),
    (segment, "size_bytes", [0]),
]


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        pytest.param(call, name, value, id=f"{call.__name__}-{name}-{i}")
        for call, name, values in CASES
        for i, value in enumerate(values)
    ],
)
def test_an_unfit_argument_is_named(call, name, value):
    call()
    with pytest.raises(ValueError, match=name):
        call(**{name: value})


def test_too_few_cores_are_named():
    with pytest.raises(ValueError, match="core_ids"):
        _native.WorkerPool(2, core_ids=[0])


def test_bias_may_be_missing():
    linear(bias=None)
