"""The decoder's operations on the CPU device: native kernels, and PyTorch's matrix products for large batches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from freetoken import _native
from freetoken.errors import CheckpointError
from freetoken.execution.arena import Arena
from freetoken.execution.experts import ExpertRunner
from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.models.decoder import DecoderBatch, Weight
from freetoken.models.spec import RouterSpec
from freetoken.quant import bf16
from freetoken.quant.q4_0_matrix import Q4_0Matrix

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Floats = NDArray[Any]  # float32, or uint16 holding bfloat16
Weights = Floats | Q4_0Matrix

# Tokens up to which the native product is the faster one. Measured on two Zen 4 cores, 2048 x 2048 to 32000 x 1024:
# float32 draws level with PyTorch at about 128 tokens, bfloat16 (whose products PyTorch does on the dot-product
# instructions, rounding the activations) at about 12.
_NATIVE_MAX_TOKENS_F32, _NATIVE_MAX_TOKENS_BF16 = 96, 12


class CpuOps:
    """Implements ``DecoderOps`` on NumPy arrays over an arena's KV segment. Called from one thread.

    Products of few tokens use the native kernel, as do all with ``deterministic``: it is batch-invariant, and float32
    but for the weights. Larger ones use PyTorch where that is faster: float32 in float32; bfloat16 weights with
    activations rounded to bfloat16 and float32 accumulation, on machines with instructions for that. Q4_0 weights
    always use the native kernel, which is batch-invariant and rounds activations to 8 bits in blocks of 32.

    ``attention`` raises ``RuntimeError("aborted")`` once ``abort`` is set: a long step ends within a layer's time.
    """

    def __init__(
        self,
        pool: _native.WorkerPool,
        arena: Arena,
        experts: ExpertRunner,
        deterministic: bool = False,
        abort: threading.Event | None = None,
    ) -> None:
        self.expert_runner = experts
        self._abort = abort or threading.Event()
        self._pool = pool
        self._kv = arena.kv
        self._segment = arena.kv_segment
        self._deterministic = deterministic
        features = _native.cpu_features()
        self._bf16_products = features.get("avx512_bf16", False) or features.get("amx_bf16", False)

    @staticmethod
    def prepare(weight: Weight) -> Weights:
        """A view; bfloat16 as uint16. Raises ``CheckpointError`` for a quantised format other than Q4_0."""
        if isinstance(weight, Q4_0Weight):
            return Q4_0Matrix(weight.nibbles.numpy(), weight.scales.numpy())
        if not isinstance(weight, Tensor):
            raise CheckpointError(f"the CPU device has no kernels for weights in the format {weight.format!r}")
        if weight.dtype == torch.bfloat16:
            return weight.view(torch.int16).numpy().view(np.uint16)
        array: F32 = weight.numpy()
        return array

    def upload(self, batch: DecoderBatch) -> DecoderBatch:
        return batch

    def embed(self, token_ids: I64, weight: Weights) -> F32:
        if isinstance(weight, Q4_0Matrix):
            return weight.rows(token_ids)
        rows = weight[token_ids]
        return rows if rows.dtype == np.float32 else bf16.to_f32(rows)

    def linear(self, x: F32, weight: Weights, bias: F32 | None = None) -> F32:
        if isinstance(weight, Q4_0Matrix):
            out: F32 = np.empty((len(x), weight.shape[0]), dtype=np.float32)
            _native.linear_q4_0(self._pool, x, weight.nibbles, weight.scales, bias, out)
            return out
        is_bf16 = weight.dtype == np.uint16
        small = len(x) <= (_NATIVE_MAX_TOKENS_BF16 if is_bf16 else _NATIVE_MAX_TOKENS_F32)
        if small or self._deterministic or (is_bf16 and not self._bf16_products):
            return self._native_linear(x, weight, bias)
        if is_bf16:
            matrix = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
            out = F.linear(torch.from_numpy(x).bfloat16(), matrix).float().numpy()
        else:
            out = F.linear(torch.from_numpy(x), torch.from_numpy(weight)).numpy()
        if bias is not None:
            out += bias
        return out

    def _native_linear(self, x: F32, weight: Floats, bias: F32 | None) -> F32:
        out = np.empty((len(x), weight.shape[0]), dtype=np.float32)
        _native.linear(self._pool, x, weight, bias, out)
        return out

    def rms_norm(self, x: F32, weight: Floats, eps: float) -> F32:
        out = np.empty_like(x)
        _native.rms_norm(self._pool, x, weight, eps, out)
        return out

    def add_rms_norm(self, residual: F32, delta: F32, weight: Floats, eps: float) -> F32:
        out = np.empty_like(residual)
        _native.add_rms_norm(self._pool, residual, delta, weight, eps, out)
        return out

    def rotary(self, x: F32, positions: I32, cos: F32, sin: F32) -> None:
        _native.rotary(self._pool, x, positions, cos, sin)

    def silu_and_mul(self, gate: F32, up: F32) -> F32:
        out = np.empty_like(gate)
        _native.silu_and_mul(self._pool, gate, up, out)
        return out

    def router(self, hidden: F32, weight: Floats, router: RouterSpec) -> tuple[I32, F32]:
        logits = self._native_linear(hidden, weight, None)
        shape = (len(hidden), router.num_experts_per_tok)
        ids, weights = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)
        _native.router_topk(
            self._pool,
            logits,
            router.num_experts_per_tok,
            router.renormalize,
            router.scaling,
            ids,
            weights,
        )
        return ids, weights

    def kv_store(self, layer: int, keys: F32, values: F32, slot_mapping: I64) -> None:
        kv = self._kv
        _native.kv_store(
            self._pool,
            keys,
            values,
            slot_mapping,
            self._segment,
            layer * kv.layer_bytes,
            kv.block_bytes,
            kv.block_size,
            kv.dtype,
        )

    def attention(self, layer: int, queries: F32, batch: DecoderBatch, scale: float, sliding_window: int) -> F32:
        if self._abort.is_set():
            raise RuntimeError("aborted")
        kv = self._kv
        out = np.empty((len(queries), queries.shape[1] * queries.shape[2]), dtype=np.float32)
        _native.paged_attention(
            self._pool,
            queries,
            batch.row_starts,
            batch.positions,
            batch.block_tables,
            self._segment,
            layer * kv.layer_bytes,
            kv.block_bytes,
            kv.block_size,
            kv.num_kv_heads,
            kv.dtype,
            scale,
            sliding_window,
            out,
        )
        return out

    def experts(self, ordinal: int, hidden: F32, ids: I32, weights: F32, admit: U8) -> F32:
        return self.expert_runner.run(ordinal, hidden, ids, weights, admit)
