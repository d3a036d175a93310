"""The forward pass of pre-norm decoders (Llama, Mistral, Qwen3, Mixtral, Qwen3-MoE), driven by a ModelSpec.

The decoder knows the order of operations and which weight goes where; how an operation is carried out, and on which
device, is the business of a ``DecoderOps``. Activations are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from freetoken.errors import CheckpointError
from freetoken.models.registry import dense_tensor_names
from freetoken.models.rope import rope_tables
from freetoken.models.spec import ModelSpec, RouterSpec

Array = Any
"""An activation, weight or index array of the kind that the ops in use work with (NumPy, torch on some device)."""

ADMIT_ROW = 1
"""Flag of a token whose experts may fill slots: the one token of its row."""
ADMIT_RUN = 2
"""The same, of one of a prompt's last tokens, which follow each other."""


@dataclass(slots=True)
class DecoderBatch:
    """A ragged batch: row r owns tokens ``row_starts[r]:row_starts[r + 1]``; T tokens, R rows, S rows that sample.

    ``positions`` [T] int32; ``token_ids`` [T] int64; ``slot_mapping`` [T] int64 (block * block_size + offset, -1 writes
    no KV); ``row_starts`` [R + 1] int32; ``block_tables`` [R, max_blocks] int32 padded with -1; ``admit`` [T] uint8 (0
    keeps a token's experts out of the slots, ``ADMIT_ROW`` is a decode row, ``ADMIT_RUN`` one of a prompt's last
    tokens); ``logit_tokens`` [S] int64, the token indices whose logits are wanted.
    NumPy arrays until ``DecoderOps.upload``.
    """

    token_ids: Array
    positions: Array
    slot_mapping: Array
    row_starts: Array
    block_tables: Array
    admit: Array
    logit_tokens: Array


class QuantizedWeight(Protocol):
    """A matrix in a format of its own, which only ops look into (Q4_0 planes, say)."""

    @property
    def format(self) -> str:
        """The format's name in the checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        ...


Weight = Tensor | QuantizedWeight
"""A tensor of the checkpoint: float32 or bfloat16; projections and embeddings may be quantised."""


class DecoderOps(Protocol):
    """What a device must be able to do, on arrays of its own kind. Called from one thread.

    Arrays have ``len``, ``reshape`` and row indexing. Activations are contiguous float32, weights as stored (float32,
    bfloat16, or quantised and then only for ``embed`` and ``linear``), norm weights and biases float32.
    """

    def prepare(self, weight: Weight) -> Array:
        """A weight or table as this device wants it, once per model; on the CPU a view. Raises ``CheckpointError`` for
        a quantised format that the device has no kernels for."""
        ...

    def upload(self, batch: DecoderBatch) -> DecoderBatch:
        """The batch as this device wants it, once per step."""
        ...

    def embed(self, token_ids: Array, weight: Array) -> Array:
        """[T] int64, [V, H] -> [T, H], a fresh array."""
        ...

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x [T, I] @ weight[O, I].T (+ bias [O]) -> [T, O]."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Over the last dimension of x [N, D] -> [N, D]."""
        ...

    def add_rms_norm(self, residual: Array, delta: Array, weight: Array, eps: float) -> Array:
        """``residual += delta`` in place, then its norm as a fresh array."""
        ...

    def rotary(self, x: Array, positions: Array, cos: Array, sin: Array) -> None:
        """Rotate x [T, heads, D] in place; cos/sin [max_position, R/2], half-split pairs in the first R dimensions."""
        ...

    def silu_and_mul(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up."""
        ...

    def router(self, hidden: Array, weight: Array, router: RouterSpec) -> tuple[Array, Array]:
        """[T, H], [E, H] -> ids [T, K] int32 and weights [T, K] float32, by descending probability.

        The logits are computed in float32 whatever the batch size: a rounded activation here is another expert there.
        """
        ...

    def kv_store(self, layer: int, keys: Array, values: Array, slot_mapping: Array) -> None:
        """Write keys and values [T, KVH, D] of ``layer`` at their token slots."""
        ...

    def attention(self, layer: int, queries: Array, batch: DecoderBatch, scale: float, sliding_window: int) -> Array:
        """Causal attention over paged KV: queries [T, QH, D] -> [T, QH * D]; ``sliding_window`` 0 sees all."""
        ...

    def experts(self, ordinal: int, hidden: Array, ids: Array, weights: Array, admit: Array) -> Array:
        """The routed experts' weighted sum for expert layer ``ordinal``: [T, H] -> [T, H]."""
        ...


@dataclass(slots=True)
class _Linear:
    weight: Array
    bias: Array | None


@dataclass(slots=True)
class _Layer:
    index: int
    input_norm: Array
    post_norm: Array
    q: _Linear
    k: _Linear
    v: _Linear
    o: _Linear
    q_norm: Array | None
    k_norm: Array | None
    sliding_window: int
    expert_ordinal: int
    router: Array | None
    gate: _Linear | None
    up: _Linear | None
    down: _Linear | None


class Decoder:
    """One model's weights in forward order, prepared for one kind of ops. Immutable."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        max_positions: int,
        prepare: Callable[[Weight], Array],
    ) -> None:
        """``weights`` are named and shaped as ``registry.dense_tensor_names`` says, see ``check_dense_weights``. Raises
        ``CheckpointError`` naming a tensor that is missing or has another shape or dtype."""
        self.spec = spec
        self.max_positions = max_positions
        check_dense_weights(spec, weights)
        self._cos, self._sin = (prepare(torch.from_numpy(table)) for table in rope_tables(spec.rope, max_positions))
        self._embedding = prepare(weights["model.embed_tokens.weight"])
        self._lm_head = self._embedding if spec.tie_word_embeddings else prepare(weights["lm_head.weight"])
        self._final_norm = prepare(_float(weights["model.norm.weight"]))
        self._layers = [_build_layer(spec, weights, index, prepare) for index in range(spec.num_layers)]

    def forward(self, batch: DecoderBatch, ops: DecoderOps) -> Array:
        """Logits [S, V] float32 of ``batch.logit_tokens``; writes the KV of all tokens. Nothing else is mutated."""
        return next(logits for logits in self.layers(batch, ops) if logits is not None)

    def layers(self, batch: DecoderBatch, ops: DecoderOps) -> Iterator[Array | None]:
        """``forward`` a layer at a time: yields None after each layer but the last, and then the logits. Other batches
        may use ``ops`` between two layers."""
        spec, eps = self.spec, self.spec.rms_norm_eps
        batch = ops.upload(batch)
        residual = ops.embed(batch.token_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        delta = hidden
        for layer in self._layers:
            if layer.index:
                yield None
                hidden = ops.add_rms_norm(residual, delta, layer.input_norm, eps)
            delta = self._attention(layer, hidden, batch, ops)
            hidden = ops.add_rms_norm(residual, delta, layer.post_norm, eps)
            delta = self._mlp(layer, hidden, batch, ops)
        residual, delta = residual[batch.logit_tokens], delta[batch.logit_tokens]
        if len(residual):
            yield ops.linear(ops.add_rms_norm(residual, delta, self._final_norm, eps), self._lm_head)
        else:
            yield residual.reshape(0, spec.vocab_size)

    def _attention(self, layer: _Layer, hidden: Array, batch: DecoderBatch, ops: DecoderOps) -> Array:
        spec = self.spec
        queries = ops.linear(hidden, layer.q.weight, layer.q.bias)
        keys = ops.linear(hidden, layer.k.weight, layer.k.bias)
        values = ops.linear(hidden, layer.v.weight, layer.v.bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = ops.rms_norm(queries.reshape(-1, spec.head_dim), layer.q_norm, spec.rms_norm_eps)
            keys = ops.rms_norm(keys.reshape(-1, spec.head_dim), layer.k_norm, spec.rms_norm_eps)
        queries = queries.reshape(-1, spec.num_heads, spec.head_dim)
        keys = keys.reshape(-1, spec.num_kv_heads, spec.head_dim)
        values = values.reshape(-1, spec.num_kv_heads, spec.head_dim)
        ops.rotary(queries, batch.positions, self._cos, self._sin)
        ops.rotary(keys, batch.positions, self._cos, self._sin)
        ops.kv_store(layer.index, keys, values, batch.slot_mapping)
        mixed = ops.attention(layer.index, queries, batch, spec.head_dim**-0.5, layer.sliding_window)
        return ops.linear(mixed, layer.o.weight, layer.o.bias)

    def _mlp(self, layer: _Layer, hidden: Array, batch: DecoderBatch, ops: DecoderOps) -> Array:
        if layer.router is not None and self.spec.router is not None:
            ids, weights = ops.router(hidden, layer.router, self.spec.router)
            return ops.experts(layer.expert_ordinal, hidden, ids, weights, batch.admit)
        assert layer.gate is not None and layer.up is not None and layer.down is not None
        gate = ops.linear(hidden, layer.gate.weight, layer.gate.bias)
        up = ops.linear(hidden, layer.up.weight, layer.up.bias)
        return ops.linear(ops.silu_and_mul(gate, up), layer.down.weight, layer.down.bias)


def check_dense_weights(spec: ModelSpec, weights: Mapping[str, Weight]) -> None:
    """Raises ``CheckpointError`` for a missing tensor, a wrong shape, a dtype other than float32 and bfloat16, or a
    quantised norm, bias or router."""
    expected = dense_tensor_names(spec)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} dense tensors are missing, the first is {missing[0]!r}")
    for name, shape in expected.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}")
        if not isinstance(tensor, Tensor):
            if len(shape) != 2 or name.endswith(".mlp.gate.weight"):
                raise CheckpointError(f"tensor {name!r} is quantised ({tensor.format}); it must be float32 or bfloat16")
        elif tensor.dtype not in (torch.float32, torch.bfloat16):
            raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, supported are float32 and bfloat16")


def _build_layer(
    spec: ModelSpec, weights: Mapping[str, Weight], index: int, prepare: Callable[[Weight], Array]
) -> _Layer:
    prefix = f"model.layers.{index}."
    wanted = dense_tensor_names(spec)

    def linear(name: str) -> _Linear:
        bias = weights[prefix + name + ".bias"] if prefix + name + ".bias" in wanted else None
        return _Linear(prepare(weights[prefix + name + ".weight"]), None if bias is None else prepare(_float(bias)))

    def norm(name: str) -> Array:
        return prepare(_float(weights[prefix + name + ".weight"]))

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
        router=prepare(weights[prefix + "mlp.gate.weight"]) if moe else None,
        gate=gate,
        up=up,
        down=down,
    )


def _float(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)  # check_dense_weights
    return weight.float()


def _triple(items: Sequence[_Linear]) -> tuple[_Linear, _Linear, _Linear]:
    first, second, third = items
    return first, second, third
