"""The forward pass of pre-norm decoders (Llama, Mistral, Qwen3, Mixtral, Qwen3-MoE), driven by a ModelSpec.

The decoder knows the order of operations and which weight goes where; how an operation is carried out, and on which
device, is the business of a ``DecoderOps``. Activations are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freetoken.errors import CheckpointError
from freetoken.models.registry import dense_tensor_names
from freetoken.models.rope import rope_tables
from freetoken.models.spec import ModelSpec, RouterSpec


@dataclass(slots=True)
class DecoderBatch:
    """A ragged batch: row r owns tokens ``row_starts[r]:row_starts[r + 1]``; T tokens, R rows, S rows that sample.

    ``positions`` [T] int32; ``token_ids`` [T] int64; ``slot_mapping`` [T] int64 (block * block_size + offset, -1 writes
    no KV); ``row_starts`` [R + 1] int32; ``block_tables`` [R, max_blocks] int32 padded with -1; ``admit`` [T] uint8 (0
    keeps a token's experts out of the slots); ``logit_tokens`` [S] int64, the token indices whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    row_starts: Tensor
    block_tables: Tensor
    admit: Tensor
    logit_tokens: Tensor


class DecoderOps(Protocol):
    """What a device must be able to do. Activations are contiguous float32; weights are as stored (float32 or
    bfloat16), norm weights and biases float32. Called from one thread."""

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """[T] int64, [V, H] -> [T, H], a fresh tensor."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, I] @ weight[O, I].T (+ bias [O]) -> [T, O]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension of x [N, D] -> [N, D]."""
        ...

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += delta`` in place, then its norm as a fresh tensor."""
        ...

    def rotary(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate x [T, heads, D] in place; cos/sin [max_position, R/2], half-split pairs in the first R dimensions."""
        ...

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ...

    def router(self, hidden: Tensor, weight: Tensor, router: RouterSpec) -> tuple[Tensor, Tensor]:
        """[T, H], [E, H] -> ids [T, K] int32 and weights [T, K] float32, by descending probability.

        The logits are computed in float32 whatever the batch size: a rounded activation here is another expert there.
        """
        ...

    def kv_store(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Write keys and values [T, KVH, D] of ``layer`` at their token slots."""
        ...

    def attention(self, layer: int, queries: Tensor, batch: DecoderBatch, scale: float, sliding_window: int) -> Tensor:
        """Causal attention over paged KV: queries [T, QH, D] -> [T, QH * D]; ``sliding_window`` 0 sees all."""
        ...

    def experts(self, ordinal: int, hidden: Tensor, ids: Tensor, weights: Tensor, admit: Tensor) -> Tensor:
        """The routed experts' weighted sum for expert layer ``ordinal``: [T, H] -> [T, H]."""
        ...


@dataclass(slots=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class _Layer:
    index: int
    input_norm: Tensor
    post_norm: Tensor
    q: _Linear
    k: _Linear
    v: _Linear
    o: _Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sliding_window: int
    expert_ordinal: int
    router: Tensor | None
    gate: _Linear | None
    up: _Linear | None
    down: _Linear | None


class Decoder:
    """One model's weights in forward order. Immutable; ``forward`` may be called from one thread at a time."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], max_positions: int) -> None:
        """``weights`` are named and shaped as ``registry.dense_tensor_names`` says, float32 or bfloat16; matrices are
        used where they lie. Raises ``CheckpointError`` naming a tensor that is missing or has another shape or dtype.
        """
        self.spec = spec
        self.max_positions = max_positions
        check_dense_weights(spec, weights)
        weights = {name: weights[name] for name in dense_tensor_names(spec)}
        cos, sin = rope_tables(spec.rope, max_positions)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)
        self._embedding = weights["model.embed_tokens.weight"]
        self._lm_head = self._embedding if spec.tie_word_embeddings else weights["lm_head.weight"]
        self._final_norm = weights["model.norm.weight"].float()
        self._layers = [_build_layer(spec, weights, index) for index in range(spec.num_layers)]

    @torch.inference_mode()
    def forward(self, batch: DecoderBatch, ops: DecoderOps) -> Tensor:
        """Logits [S, V] float32 of ``batch.logit_tokens``; writes the KV of all tokens. Nothing else is mutated."""
        spec, eps = self.spec, self.spec.rms_norm_eps
        residual = ops.embed(batch.token_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for layer in self._layers:
            delta = self._attention(layer, hidden, batch, ops)
            hidden = ops.add_rms_norm(residual, delta, layer.post_norm, eps)
            delta = self._mlp(layer, hidden, batch, ops)
            if layer.index + 1 < spec.num_layers:
                hidden = ops.add_rms_norm(residual, delta, self._layers[layer.index + 1].input_norm, eps)
        if batch.logit_tokens.numel() == 0:
            return torch.empty((0, spec.vocab_size), dtype=torch.float32)
        residual, delta = residual[batch.logit_tokens], delta[batch.logit_tokens]
        return ops.linear(ops.add_rms_norm(residual, delta, self._final_norm, eps), self._lm_head)

    def _attention(self, layer: _Layer, hidden: Tensor, batch: DecoderBatch, ops: DecoderOps) -> Tensor:
        spec = self.spec
        queries = ops.linear(hidden, layer.q.weight, layer.q.bias)
        keys = ops.linear(hidden, layer.k.weight, layer.k.bias)
        values = ops.linear(hidden, layer.v.weight, layer.v.bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = ops.rms_norm(queries.view(-1, spec.head_dim), layer.q_norm, spec.rms_norm_eps)
            keys = ops.rms_norm(keys.view(-1, spec.head_dim), layer.k_norm, spec.rms_norm_eps)
        queries = queries.view(-1, spec.num_heads, spec.head_dim)
        keys = keys.view(-1, spec.num_kv_heads, spec.head_dim)
        values = values.view(-1, spec.num_kv_heads, spec.head_dim)
        ops.rotary(queries, batch.positions, self._cos, self._sin)
        ops.rotary(keys, batch.positions, self._cos, self._sin)
        ops.kv_store(layer.index, keys, values, batch.slot_mapping)
        mixed = ops.attention(layer.index, queries, batch, spec.head_dim**-0.5, layer.sliding_window)
        return ops.linear(mixed, layer.o.weight, layer.o.bias)

    def _mlp(self, layer: _Layer, hidden: Tensor, batch: DecoderBatch, ops: DecoderOps) -> Tensor:
        if layer.router is not None and self.spec.router is not None:
            ids, weights = ops.router(hidden, layer.router, self.spec.router)
            return ops.experts(layer.expert_ordinal, hidden, ids, weights, batch.admit)
        assert layer.gate is not None and layer.up is not None and layer.down is not None
        gate = ops.linear(hidden, layer.gate.weight, layer.gate.bias)
        up = ops.linear(hidden, layer.up.weight, layer.up.bias)
        return ops.linear(ops.silu_and_mul(gate, up), layer.down.weight, layer.down.bias)


def check_dense_weights(spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
    """Raises ``CheckpointError`` for a missing tensor, a wrong shape, or a dtype other than float32 and bfloat16."""
    expected = dense_tensor_names(spec)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} dense tensors are missing, the first is {missing[0]!r}")
    for name, shape in expected.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}")
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, supported are float32 and bfloat16")


def _build_layer(spec: ModelSpec, weights: Mapping[str, Tensor], index: int) -> _Layer:
    prefix = f"model.layers.{index}."

    def linear(name: str) -> _Linear:
        bias = weights.get(prefix + name + ".bias")
        return _Linear(weights[prefix + name + ".weight"], None if bias is None else bias.float())

    def norm(name: str) -> Tensor:
        return weights[prefix + name + ".weight"].float().contiguous()

    moe = index in spec.moe_layers
    gate, up, down = (None, None, None) if moe else _triple([linear(f"mlp.{p}_proj") for p in ("gate", "up", "down")])
    return _Layer(
        index=index,
        input_norm=norm("input_layernorm"),
        post_norm=norm("post_attention_layernorm"),
        q=linear("self_attn.q_proj"),
        k=linear("self_attn.k_proj"),
        v=linear("self_attn.v_proj"),
        o=linear("self_attn.o_proj"),
        q_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        sliding_window=(spec.sliding_window or 0) if index in spec.sliding_layers else 0,
        expert_ordinal=spec.moe_layers.index(index) if moe else -1,
        router=weights[prefix + "mlp.gate.weight"] if moe else None,
        gate=gate,
        up=up,
        down=down,
    )


def _triple(items: Sequence[_Linear]) -> tuple[_Linear, _Linear, _Linear]:
    first, second, third = items
    return first, second, third
