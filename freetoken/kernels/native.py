"""The C++ kernels behind the common interface: PyTorch CPU tensors are passed on without a copy."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken import _native
from freetoken.kernels.interface import ExpertBank, PagedKv
from freetoken.quant.native_layout import native_layout


class NativeKernels:
    """Implements ``Kernels`` on a worker pool. Thread-safe; sections of one pool run one after the other.

    A row's bits depend neither on the other rows of a call nor on the pool's size.
    """

    def __init__(self, pool: _native.WorkerPool) -> None:
        self._pool = pool
        # A store is made once per bank and goes with it.
        self._stores: dict[int, _native.ExpertStore] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _empty(x, weight)
        _native.linear(
            self._pool,
            _array("x", x, torch.float32),
            _array("weight", weight, torch.float32, torch.bfloat16),
            None if bias is None else _array("bias", bias, torch.float32),
            out.numpy(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape)
        _native.rms_norm(
            self._pool, _array("x", x, torch.float32), _array("weight", weight, torch.float32), eps, out.numpy()
        )
        return out

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(residual.shape)
        _native.add_rms_norm(
            self._pool,
            _array("residual", residual, torch.float32),
            _array("delta", delta, torch.float32),
            _array("weight", weight, torch.float32),
            eps,
            out.numpy(),
        )
        return out

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        _native.rotary(
            self._pool,
            _array("x", x, torch.float32),
            _array("positions", positions, torch.int32),
            _array("cos", cos, torch.float32),
            _array("sin", sin, torch.float32),
        )

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty(gate.shape)
        _native.silu_and_mul(
            self._pool, _array("gate", gate, torch.float32), _array("up", up, torch.float32), out.numpy()
        )
        return out

    def router_topk(self, logits: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
        array = _array("logits", logits, torch.float32)
        shape = (logits.shape[0], max(top_k, 0))
        ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        _native.router_topk(self._pool, array, top_k, renormalize, scaling, ids.numpy(), weights.numpy())
        return ids, weights

    def kv_store(self, keys: Tensor, values: Tensor, slot_mapping: Tensor, kv: PagedKv) -> None:
        _native.kv_store(
            self._pool,
            _array("keys", keys, torch.float32),
            _array("values", values, torch.float32),
            _array("slot_mapping", slot_mapping, torch.int64),
            kv.segment,
            kv.layer_offset_bytes,
            kv.block_stride_bytes,
            kv.block_size,
            kv.dtype,
        )

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
        array = _array("queries", queries, torch.float32)
        out = torch.empty(queries.shape[0], queries.shape[1:].numel())
        _native.paged_attention(
            self._pool,
            array,
            _array("row_starts", row_starts, torch.int32),
            _array("positions", positions, torch.int32),
            _array("block_tables", block_tables, torch.int32),
            kv.segment,
            kv.layer_offset_bytes,
            kv.block_stride_bytes,
            kv.block_size,
            kv.num_kv_heads,
            kv.dtype,
            scale,
            sliding_window,
            out.numpy(),
        )
        return out

    def expert_ffn(self, bank: ExpertBank, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty(hidden.shape)
        _native.expert_ffn(
            self._pool,
            self._store(bank),
            layer,
            _array("hidden", hidden, torch.float32),
            _array("ids", ids, torch.int32),
            _array("weights", weights, torch.float32),
            out.numpy(),
            True,
        )
        return out

    def _store(self, bank: ExpertBank) -> _native.ExpertStore:
        store = self._stores.get(id(bank))
        if store is None:
            store = _native.ExpertStore(
                bank.segments,
                [native_layout(layout) for layout in bank.layouts],
                bank.layer_layout,
                bank.record_segment,
                bank.record_offset,
            )
            self._stores[id(bank)] = store
            weakref.finalize(bank, self._stores.pop, id(bank), None)
        return store


def _array(name: str, tensor: Tensor, *dtypes: torch.dtype) -> NDArray[Any]:
    """A NumPy view of a CPU tensor, bfloat16 as uint16. Rank, shape and contiguity are checked by the extension."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    plain = tensor.detach()
    view: NDArray[Any] = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return view


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got {tensor.dim()}")
    return torch.empty(x.shape[0], weight.shape[0])
