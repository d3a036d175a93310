"""A small random bank of experts in shared memory, with a float64 reference of what it computes. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken._native import ExpertStore, SharedSegment
from freetoken.quant.native_layout import native_layout
from freetoken.quant.pack import pack_expert
from freetoken.quant.record import plan_record_layout


class ExpertBank:
    """Float32 experts in one segment, layer by layer. The same arguments give the same weights in every process."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        hidden: int,
        intermediate: int,
        seed: int = 0,
        segment: SharedSegment | None = None,
    ) -> None:
        """``segment``: records that another process has already written."""
        self.num_layers, self.num_experts, self.hidden = num_layers, num_experts, hidden
        self.layout = plan_record_layout("f32", hidden, intermediate)
        shape = (num_layers, num_experts)
        stride = self.layout.stride_bytes
        rng = np.random.default_rng(seed)
        self._matrices = rng.standard_normal((*shape, 3, intermediate, hidden), np.float32) * np.float32(0.3)
        self.segment = segment or SharedSegment.create("expert-bank", num_layers * num_experts * stride)
        if segment is None:
            records = np.frombuffer(memoryview(self.segment), np.uint8).reshape(*shape, stride)
            for layer, expert in np.ndindex(shape):
                gate, up, down = self._matrices[layer, expert]
                pack_expert(self.layout, gate, up, np.ascontiguousarray(down.T), records[layer, expert])
        self.store = ExpertStore(
            [self.segment],
            [native_layout(self.layout)],
            [0] * num_layers,
            np.zeros(shape, np.int32),
            np.arange(num_layers * num_experts, dtype=np.int64).reshape(shape) * stride,
        )

    def reference(
        self, layer: int, hidden: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """[T, H]: the sum over k of weights[t, k] * FFN(ids[t, k])(hidden[t]); ids of -1 add nothing."""
        out = np.zeros(hidden.shape, np.float64)
        for token, k in np.argwhere(ids >= 0):
            gate, up, down = self._matrices[layer, ids[token, k]].astype(np.float64)
            x = hidden[token].astype(np.float64)
            g = gate @ x
            out[token] += weights[token, k] * ((g / (1 + np.exp(-g)) * (up @ x)) @ down)
        return out

    def random_batch(self, rng: np.random.Generator, num_tokens: int, top_k: int, padding: float = 0.0) -> Batch:
        """Distinct experts per token; a share ``padding`` of the rows is padding."""
        ids = np.argsort(rng.random((num_tokens, self.num_experts)), axis=1)[:, :top_k].astype(np.int32)
        ids[rng.random(num_tokens) < padding] = -1
        return (
            rng.standard_normal((num_tokens, self.hidden), np.float32),
            ids,
            rng.random((num_tokens, top_k), np.float32),
            (rng.random(num_tokens) < 0.7).astype(np.uint8),
        )


Batch = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]
"""hidden [T, H], ids [T, K], weights [T, K], admit [T]."""


def as_settings(bank: ExpertBank) -> dict[str, Any]:
    """What another process needs beside the segment to build the same bank."""
    return {
        "num_layers": bank.num_layers,
        "num_experts": bank.num_experts,
        "hidden": bank.hidden,
        "intermediate": bank.layout.intermediate,
    }
