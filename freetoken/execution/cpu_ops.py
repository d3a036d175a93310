"""The decoder's operations on the CPU device: native kernels, and PyTorch's matrix products for large batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from freetoken import _native
from freetoken.execution.arena import Arena
from freetoken.execution.experts import ExpertRunner
from freetoken.models.decoder import DecoderBatch
from freetoken.models.spec import RouterSpec

# Tokens up to which the native product is the faster one. Measured on two Zen 4 cores, 2048 x 2048 to 32000 x 1024:
# float32 draws level with PyTorch at about 128 tokens, bfloat16 (whose products PyTorch does on the dot-product
# instructions, rounding the activations) at about 12.
_NATIVE_MAX_TOKENS = {torch.float32: 96, torch.bfloat16: 12}


class CpuOps:
    """Implements ``DecoderOps`` over an arena's KV segment. Called from one thread.

    Products of few tokens use the native kernel, as do all with ``deterministic``: it is batch-invariant, and float32
    but for the weights. Larger ones use PyTorch where that is faster: float32 in float32; bfloat16 weights with
    activations rounded to bfloat16 and float32 accumulation, on machines with instructions for that.
    """

    def __init__(
        self,
        pool: _native.WorkerPool,
        arena: Arena,
        experts: ExpertRunner,
        deterministic: bool = False,
    ) -> None:
        self.expert_runner = experts
        self._pool = pool
        self._kv = arena.kv
        self._segment = arena.kv_segment
        self._deterministic = deterministic
        features = _native.cpu_features()
        self._bf16_products = features.get("avx512_bf16", False) or features.get("amx_bf16", False)

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        rows = F.embedding(token_ids, weight)
        return rows if rows.dtype == torch.float32 else rows.float()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        small = x.shape[0] <= _NATIVE_MAX_TOKENS[weight.dtype]
        if small or self._deterministic or (weight.dtype == torch.bfloat16 and not self._bf16_products):
            return self._native_linear(x, weight, bias)
        if weight.dtype == torch.float32:
            return F.linear(x, weight, bias)
        out = F.linear(x.bfloat16(), weight).float()
        return out if bias is None else out.add_(bias)

    def _native_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
        _native.linear(self._pool, x.numpy(), _array(weight), None if bias is None else bias.numpy(), out.numpy())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        _native.rms_norm(self._pool, x.numpy(), weight.numpy(), eps, out.numpy())
        return out

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        _native.add_rms_norm(self._pool, residual.numpy(), delta.numpy(), weight.numpy(), eps, out.numpy())
        return out

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        _native.rotary(self._pool, x.numpy(), positions.numpy(), cos.numpy(), sin.numpy())

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        _native.silu_and_mul(self._pool, gate.numpy(), up.numpy(), out.numpy())
        return out

    def router(self, hidden: Tensor, weight: Tensor, router: RouterSpec) -> tuple[Tensor, Tensor]:
        logits = self._native_linear(hidden, weight, None)
        shape = (hidden.shape[0], router.num_experts_per_tok)
        ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32)
        _native.router_topk(
            self._pool,
            logits.numpy(),
            router.num_experts_per_tok,
            router.renormalize,
            router.scaling,
            ids.numpy(),
            weights.numpy(),
        )
        return ids, weights

    def kv_store(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        kv = self._kv
        _native.kv_store(
            self._pool,
            keys.numpy(),
            values.numpy(),
            slot_mapping.numpy(),
            self._segment,
            layer * kv.layer_bytes,
            kv.block_bytes,
            kv.block_size,
            kv.dtype,
        )

    def attention(self, layer: int, queries: Tensor, batch: DecoderBatch, scale: float, sliding_window: int) -> Tensor:
        kv = self._kv
        out = torch.empty((queries.shape[0], queries.shape[1] * queries.shape[2]), dtype=torch.float32)
        _native.paged_attention(
            self._pool,
            queries.numpy(),
            batch.row_starts.numpy(),
            batch.positions.numpy(),
            batch.block_tables.numpy(),
            self._segment,
            layer * kv.layer_bytes,
            kv.block_bytes,
            kv.block_size,
            kv.num_kv_heads,
            kv.dtype,
            scale,
            sliding_window,
            out.numpy(),
        )
        return out

    def experts(self, ordinal: int, hidden: Tensor, ids: Tensor, weights: Tensor, admit: Tensor) -> Tensor:
        return self.expert_runner.run(ordinal, hidden, ids, weights, admit)


def _array(weight: Tensor) -> NDArray[Any]:
    """A NumPy view; bfloat16 as uint16."""
    view: NDArray[Any] = (weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight).numpy()
    return view.view(np.uint16) if view.dtype == np.int16 else view
