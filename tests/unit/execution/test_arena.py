"""The arena's memory, and dense weights over store segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken._native import SharedSegment
from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.errors import CapacityError, CheckpointError
from freetoken.execution.arena import Arena
from freetoken.execution.dense_weights import map_dense_weights
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint


def test_geometry() -> None:
    kv = KVGeometry(num_blocks=3, num_layers=5, block_size=16, num_kv_heads=2, head_dim=8, dtype="bf16")
    assert kv.layer_bytes == 2 * 16 * 2 * 8 * 2
    assert kv.block_bytes == 5 * kv.layer_bytes and kv.size_bytes == 3 * kv.block_bytes


def test_an_arena_has_an_identity_of_its_own() -> None:
    kv = KVGeometry(2, 1, 4, 1, 8, "f32")
    first, second = Arena(kv, 3, 4096), Arena(kv, 0, 4096)
    assert first.arena_id != second.arena_id
    assert first.kv_segment.size_bytes == kv.size_bytes == 512
    assert first.slot_segment is not None and first.slot_segment.size_bytes == 3 * 4096
    assert second.slot_segment is None
    assert (first.size_bytes, second.size_bytes) == (512 + 3 * 4096, 512)
    assert not np.frombuffer(memoryview(first.kv_segment), np.uint8).any()


def test_memory_that_is_not_there_names_the_flag() -> None:
    with pytest.raises(CapacityError, match=r"for slots are not available.*--vram"):
        Arena(KVGeometry(1, 1, 4, 1, 8, "f32"), 1 << 20, 1 << 40)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_weights_lie_in_the_segments(tmp_path: Path, dtype: str) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe_mixed", dtype)
    index = convert(tiny.path, tmp_path / "ftw", ConvertOptions(max_file_bytes=200_000))
    assert sum(file.kind == "dense" for file in index.files) > 1
    segments = load_segments(index)
    weights = map_dense_weights(index, segments)
    assert weights.keys() == tiny.dense.keys()
    for name, expected in tiny.dense.items():
        assert weights[name].dtype == expected.dtype and torch.equal(weights[name], expected), name
    # The same memory: what changes in the segment changes in the tensor.
    tensor = index.tensors["model.norm.weight"]
    np.frombuffer(memoryview(segments[tensor.file_index]), np.uint8)[tensor.offset_bytes :][: tensor.size_bytes] = 0
    assert not weights["model.norm.weight"].any()


def test_segments_must_be_those_of_the_index(tmp_path: Path) -> None:
    index = convert(load_tiny_checkpoint("llama").path, tmp_path / "ftw")
    segments = load_segments(index)
    with pytest.raises(CheckpointError, match="1 data files, but 2 store segments"):
        map_dense_weights(index, [*segments, segments[0]])
    with pytest.raises(CheckpointError, match="its segment has 4096"):
        map_dense_weights(index, [SharedSegment.create("short", 4096)])


def load_segments(index: FtwIndex) -> list[SharedSegment]:
    segments = []
    for file in index.files:
        segment = SharedSegment.create(file.name, file.size_bytes)
        memoryview(segment)[:] = (index.path / file.name).read_bytes()
        segments.append(segment)
    return segments
