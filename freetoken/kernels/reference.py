"""The truth that other implementations must meet: plain PyTorch, float32, slow and clear.

Nothing is fused, paged keys are gathered one by one, and experts are unpacked from their records.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from freetoken.kernels.interface import ExpertBank, PagedKv
from freetoken.quant.formats import unpack_record

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class ReferenceKernels:
    """Implements ``Kernels``. Stateless."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x @ weight.float().T
        return out if bias is None else out + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + eps) * weight

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += delta
        return self.rms_norm(residual, weight, eps)

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[1]
        for token, position in enumerate(positions.tolist()):
            low, high = x[token, :, :half].clone(), x[token, :, half : 2 * half].clone()
            x[token, :, :half] = low * cos[position] - high * sin[position]
            x[token, :, half : 2 * half] = high * cos[position] + low * sin[position]

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate / (1.0 + torch.exp(-gate)) * up

    def router_topk(self, logits: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, dim=-1)
        # A stable sort keeps the lower id first among equals.
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = torch.gather(probabilities, 1, order)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return order.to(torch.int32), weights * scaling

    def kv_store(self, keys: Tensor, values: Tensor, slot_mapping: Tensor, kv: PagedKv) -> None:
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            layer = _layer_of_block(kv, slot // kv.block_size)
            layer[0, slot % kv.block_size] = keys[token]
            layer[1, slot % kv.block_size] = values[token]

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
        num_tokens, num_heads, head_dim = queries.shape
        out = torch.zeros(num_tokens, num_heads, head_dim)
        for row in range(block_tables.shape[0]):
            table = block_tables[row].tolist()
            for token in range(int(row_starts[row]), int(row_starts[row + 1])):
                end = int(positions[token]) + 1
                begin = max(0, end - sliding_window) if sliding_window > 0 else 0
                seen = [_layer_of_block(kv, table[p // kv.block_size])[:, p % kv.block_size] for p in range(begin, end)]
                keys, values = torch.stack(seen).float().unbind(dim=1)  # [keys, KVH, D] each
                for head in range(num_heads):
                    kv_head = head // (num_heads // kv.num_kv_heads)
                    scores = keys[:, kv_head] @ queries[token, head] * scale
                    out[token, head] = torch.softmax(scores, dim=0) @ values[:, kv_head]
        return out.reshape(num_tokens, num_heads * head_dim)

    def expert_ffn(self, bank: ExpertBank, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        layout = bank.layouts[bank.layer_layout[layer]]
        out = torch.zeros_like(hidden)
        for expert in sorted(set(ids.flatten().tolist()) - {-1}):
            matrices = unpack_record(layout, bank.record(layer, expert))
            gate, up, down = (_widen(matrix) for matrix in matrices)
            tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
            activation = self.silu_and_mul(hidden[tokens] @ gate.T, hidden[tokens] @ up.T)
            out.index_add_(0, tokens, weights[tokens, slots].unsqueeze(1) * (activation @ down.T))
        return out


def _layer_of_block(kv: PagedKv, block: int) -> Tensor:
    """A view ``[2, block_size, KVH, D]`` of one layer of one block."""
    shape = (2, kv.block_size, kv.num_kv_heads, kv.head_dim)
    return torch.frombuffer(
        memoryview(kv.segment),
        dtype=TORCH_DTYPES[kv.dtype],
        count=math.prod(shape),
        offset=block * kv.block_stride_bytes + kv.layer_offset_bytes,
    ).reshape(shape)


def _widen(matrix: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    if matrix.dtype == np.uint16:
        return torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(matrix)
