"""What every implementation of the kernels offers.

Tensors are contiguous and on one device; activations are float32, weights float32 or bfloat16. Shapes by letter: T
tokens, H hidden, I inputs (or an expert's intermediate size), O outputs, E experts, K experts per token, L layers, D
head dim. Outputs are new tensors unless a method says that it writes in place. ``ValueError`` names the argument that
does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from freetoken._native import SharedSegment
from freetoken.quant.record import RecordLayout


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's keys and values in block-major records: at ``layer_offset_bytes`` of each block record lies
    ``[2 (k, v), block_size, num_kv_heads, head_dim]`` of ``dtype`` (``"f32"`` or ``"bf16"``)."""

    segment: SharedSegment
    layer_offset_bytes: int
    block_stride_bytes: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, eq=False)
class ExpertBank:
    """The records of all expert layers. ``record_segment`` (int32) and ``record_offset`` (int64, bytes) are [L, E];
    ``layer_layout[l]`` indexes ``layouts``."""

    segments: Sequence[SharedSegment]
    layouts: Sequence[RecordLayout]
    layer_layout: Sequence[int]
    record_segment: NDArray[np.int32]
    record_offset: NDArray[np.int64]

    def record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The bytes of one record, a view."""
        segment = np.frombuffer(memoryview(self.segments[self.record_segment[layer, expert]]), np.uint8)
        offset = int(self.record_offset[layer, expert])
        return segment[offset : offset + self.layouts[self.layer_layout[layer]].stride_bytes]


class Kernels(Protocol):
    """The operations. Not thread-safe unless an implementation says so."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [T, I] @ weight [O, I].T (+ bias [O])``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x [T, H] / sqrt(mean(x^2) + eps) * weight [H]``."""
        ...

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual [T, H] += delta``, in place; then its ``rms_norm``."""
        ...

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``x [T, heads, D]`` in place; ``cos``, ``sin`` ``[max_position, R / 2]`` (float32), ``positions [T]``
        (int32). Element i of the first R pairs with i + R / 2."""
        ...

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """``gate * sigmoid(gate) * up``, over [T, I]."""
        ...

    def router_topk(self, logits: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
        """Softmax over ``logits [T, E]``; the ``top_k`` largest per row in descending order, ties to the lower id: ids
        (int32) and weights [T, K]."""
        ...

    def kv_store(self, keys: Tensor, values: Tensor, slot_mapping: Tensor, kv: PagedKv) -> None:
        """Write ``keys``, ``values`` ``[T, KVH, D]`` at slots (block * block_size + offset, int64 [T]; -1 skips)."""
        ...

    def paged_attention(
        self,
        queries: Tensor,
        row_starts: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        kv: PagedKv,
        scale: float,
        sliding_window: int = 0,
    ) -> Tensor:
        """Causal attention of a ragged batch over paged KV, which already holds the new tokens -> [T, QH * D].

        ``queries [T, QH, D]``; row r owns tokens ``row_starts[r]:row_starts[r + 1]`` (int32 [R + 1]); token t sees keys
        ``0..positions[t]`` (int32 [T]), the last ``sliding_window`` of them when that is positive; ``block_tables``
        (int32) is [R, max_blocks], padded with -1. Query head h reads KV head ``h // (QH // KVH)``.
        """
        ...

    def expert_ffn(self, bank: ExpertBank, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum over k of ``weights[t, k] * FFN(ids[t, k])(hidden[t])`` -> [T, H]; ``ids`` int32 [T, K], -1 skips."""
        ...
