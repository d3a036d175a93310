"""The decoder's operations in plain PyTorch, float32 throughout: the truth that other implementations must meet.

Slow on purpose: keys and values are gathered from their pages into contiguous tensors, and every query row is computed
by the textbook formula. Experts come as whole matrices, not as records.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.execution.kv_geometry import KVGeometry
from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.models.decoder import DecoderBatch, Weight
from freetoken.models.spec import RouterSpec

ExpertMatrices = tuple[Tensor, Tensor, Tensor]  # gate [E, I, H], up [E, I, H], down [E, H, I]


class ReferenceOps:
    """Implements ``DecoderOps``. Owns its KV, as a tensor [num_blocks, L, 2, block_size, KVH, D]."""

    def __init__(self, kv: KVGeometry, experts: Mapping[int, ExpertMatrices] | None = None) -> None:
        """``experts`` maps expert layer ordinals to their matrices."""
        self._geometry = kv
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kv.dtype]
        shape = (kv.num_blocks, kv.num_layers, 2, kv.block_size, kv.num_kv_heads, kv.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype)
        self._experts = experts or {}

    @staticmethod
    def prepare(weight: Weight) -> Tensor:
        if isinstance(weight, Q4_0Weight):
            return weight.dequantize()
        assert isinstance(weight, Tensor)
        return weight

    def upload(self, batch: DecoderBatch) -> DecoderBatch:
        return DecoderBatch(*(torch.as_tensor(getattr(batch, field.name)) for field in dataclasses.fields(batch)))

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return weight[token_ids].float()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x @ weight.float().T
        return out if bias is None else out + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += delta
        return self.rms_norm(residual, weight, eps)

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[1]
        first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
        c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
        x[..., :half] = first * c - second * s
        x[..., half : 2 * half] = second * c + first * s

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(gate) * up

    def router(self, hidden: Tensor, weight: Tensor, router: RouterSpec) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(self.linear(hidden, weight), dim=-1)
        # A stable sort prefers the lower id among equals, which topk does not promise.
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, ids = ordered[:, : router.num_experts_per_tok], ids[:, : router.num_experts_per_tok]
        if router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32).contiguous(), (weights * router.scaling).contiguous()

    def kv_store(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        kept = slot_mapping >= 0
        blocks = slot_mapping[kept] // self._geometry.block_size
        offsets = slot_mapping[kept] % self._geometry.block_size
        self.kv[blocks, layer, 0, offsets] = keys[kept].to(self.kv.dtype)
        self.kv[blocks, layer, 1, offsets] = values[kept].to(self.kv.dtype)

    def attention(self, layer: int, queries: Tensor, batch: DecoderBatch, scale: float, sliding_window: int) -> Tensor:
        geometry = self._geometry
        group = queries.shape[1] // geometry.num_kv_heads
        out = torch.empty_like(queries)
        starts = batch.row_starts.tolist()
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            if begin == end:
                continue
            positions = batch.positions[begin:end].long()
            length = int(positions.max()) + 1
            blocks = batch.block_tables[row, : -(-length // geometry.block_size)].long()
            pages = self.kv[blocks, layer].float()  # [blocks, 2, block_size, KVH, D]
            keys, values = (pages[:, i].reshape(-1, geometry.num_kv_heads, geometry.head_dim)[:length] for i in (0, 1))
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", queries[begin:end], keys) * scale
            distance = positions[:, None] - torch.arange(length)[None, :]
            visible = distance >= 0
            if sliding_window > 0:
                visible &= distance < sliding_window
            scores = scores.masked_fill(~visible, float("-inf"))
            out[begin:end] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), values)
        return out.reshape(len(out), -1)

    def experts(self, ordinal: int, hidden: Tensor, ids: Tensor, weights: Tensor, admit: Tensor) -> Tensor:
        gate, up, down = self._experts[ordinal]
        out = torch.zeros_like(hidden)
        for token in range(len(hidden)):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                x = hidden[token]
                inner = F.silu(gate[expert].float() @ x) * (up[expert].float() @ x)
                out[token] += weight * (down[expert].float() @ inner)
        return out
