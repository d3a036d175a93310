"""Every implementation of the kernels that this machine can run, and records to run them on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freetoken import _native
from freetoken.kernels import ExpertBank, Kernels, load_kernels
from freetoken.quant.pack import pack_expert
from freetoken.quant.record import plan_record_layout


def available_isas() -> list[str]:
    """The instruction sets of this CPU that have kernels of their own."""
    features = _native.cpu_features()
    isas = ["scalar"]
    if features["avx2"] and features["fma"] and features["f16c"]:
        isas.append("avx2")
        if features["avx512f"] and features["avx512bw"] and features["avx512vl"]:
            isas.append("avx512")
    return isas


IMPLEMENTATIONS = ["reference", *available_isas()]


def make_kernels(name: str, num_threads: int = 2) -> Kernels:
    """``"reference"`` or the native kernels of one instruction set."""
    if name == "reference":
        return load_kernels("reference")
    return load_kernels("native", _native.WorkerPool(num_threads, isa=name))


def to_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """``"f32"`` or ``"bf16"``."""
    return tensor.bfloat16() if dtype == "bf16" else tensor


def make_bank(
    dtype: str, hidden: int, intermediate: int, num_experts: int, tile_columns: int | None = None, num_layers: int = 1
) -> tuple[ExpertBank, list[tuple[Tensor, Tensor, Tensor]]]:
    """Random experts in records, and their matrices (gate, up [I, H], down [H, I]; float64) by layer * E + expert."""
    layout = plan_record_layout(dtype, hidden, intermediate, tile_columns)
    count = num_layers * num_experts
    # Records lie in two segments in turn, in descending order, to show that only the table says where.
    segments = [_native.SharedSegment.create(f"bank{i}", (count + 1) // 2 * layout.stride_bytes) for i in range(2)]
    segment_of = np.zeros((num_layers, num_experts), np.int32)
    offset_of = np.zeros((num_layers, num_experts), np.int64)
    matrices = []
    for index in range(count):
        gate, up = (to_dtype(torch.randn(intermediate, hidden) / hidden**0.5, dtype) for _ in range(2))
        down = to_dtype(torch.randn(hidden, intermediate) / intermediate**0.5, dtype)
        matrices.append((gate.double(), up.double(), down.double()))
        place = np.unravel_index(index, segment_of.shape)
        segment_of[place] = index % 2
        offset_of[place] = ((count + 1) // 2 - 1 - index // 2) * layout.stride_bytes
        record = np.frombuffer(memoryview(segments[index % 2]), np.uint8)[offset_of[place] :][: layout.stride_bytes]
        pack_expert(layout, _storage(gate), _storage(up), _storage(down), record)
    return ExpertBank(segments, [layout], [0] * num_layers, segment_of, offset_of), matrices


def _storage(tensor: Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
