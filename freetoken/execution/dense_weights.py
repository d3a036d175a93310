"""Dense weights as tensors over store segments: nothing is copied, and a tensor keeps its segment mapped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken import _native
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.errors import CheckpointError

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def map_dense_weights(index: FtwIndex, segments: Sequence[_native.SharedSegment]) -> dict[str, Tensor]:
    """Canonical name -> tensor. ``segments`` mirror ``index.files``, in order; ``CheckpointError`` if they cannot."""
    if len(segments) != len(index.files):
        raise CheckpointError(f"{index.path}: {len(index.files)} data files, but {len(segments)} store segments")
    for file, segment in zip(index.files, segments, strict=True):
        if segment.size_bytes < file.size_bytes:
            raise CheckpointError(
                f"{index.path / file.name}: {file.size_bytes} bytes, but its segment has {segment.size_bytes}"
            )
    weights = {}
    for name, tensor in index.tensors.items():
        dtype = _DTYPES[tensor.dtype]
        flat = torch.frombuffer(
            memoryview(segments[tensor.file_index]),
            dtype=dtype,
            count=tensor.size_bytes // dtype.itemsize,
            offset=tensor.offset_bytes,
        )
        weights[name] = flat.view(tensor.shape)
    return weights
