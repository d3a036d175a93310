"""Dense weights over store segments, tensors or Q4_0 planes: nothing is copied, and each keeps its segment mapped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken import _native
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.errors import CheckpointError
from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.quant.formats import Q4_0
from freetoken.quant.q4_0_matrix import scales_offset_bytes

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def map_dense_weights(index: FtwIndex, segments: Sequence[_native.SharedSegment]) -> dict[str, Tensor | Q4_0Weight]:
    """Canonical name -> weight. ``segments`` mirror ``index.files``, in order; ``CheckpointError`` if they cannot."""
    if len(segments) != len(index.files):
        raise CheckpointError(f"{index.path}: {len(index.files)} data files, but {len(segments)} store segments")
    for file, segment in zip(index.files, segments, strict=True):
        if segment.size_bytes < file.size_bytes:
            raise CheckpointError(
                f"{index.path / file.name}: {file.size_bytes} bytes, but its segment has {segment.size_bytes}"
            )
    weights: dict[str, Tensor | Q4_0Weight] = {}
    for name, tensor in index.tensors.items():
        segment = segments[tensor.file_index]
        if tensor.dtype == Q4_0:
            outputs, inputs = tensor.shape
            scales = tensor.offset_bytes + scales_offset_bytes(tensor.shape)
            weights[name] = Q4_0Weight(
                _view(segment, torch.uint8, tensor.offset_bytes, (outputs, inputs // 2)),
                _view(segment, torch.float16, scales, (outputs, inputs // 32)),
            )
        else:
            weights[name] = _view(segment, _DTYPES[tensor.dtype], tensor.offset_bytes, tensor.shape)
    return weights


def _view(segment: _native.SharedSegment, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(memoryview(segment), dtype=dtype, count=math.prod(shape), offset=offset)
    return flat.view(shape)
