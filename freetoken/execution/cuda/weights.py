"""Dense weights on the device. A projection has a format: a float matrix or Q4_0 planes; both have the same users.

Projections that read the same activations are one matrix (q, k, v; gate, up): one kernel then reads them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.kernels.triton.linear import Q4_0Weight
from freetoken.models.registry import dense_tensor_names
from freetoken.models.rope import rope_tables
from freetoken.models.spec import ModelSpec

HostWeight = Tensor | Q4_0Weight


@dataclass(frozen=True)
class Linear:
    """``weight`` [O, I] in the compute dtype, or Q4_0; ``bias`` float32 [O]."""

    weight: Tensor | Q4_0Weight
    bias: Tensor | None

    @property
    def size_bytes(self) -> int:
        """What a pass over it reads."""
        planes = [self.weight.nibbles, self.weight.scales] if isinstance(self.weight, Q4_0Weight) else [self.weight]
        return sum(plane.numel() * plane.element_size() for plane in planes)


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``router`` float32 [E, H] and ``ordinal`` for expert layers; ``gate_up`` and ``down`` for the
    others."""

    index: int
    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sliding_window: int
    ordinal: int
    router: Tensor | None
    gate_up: Linear | None
    down: Linear | None


@dataclass(frozen=True)
class DenseWeights:
    """A model's dense part in forward order. Norms, biases and rotary tables are float32."""

    spec: ModelSpec
    compute_dtype: torch.dtype
    cos: Tensor
    sin: Tensor
    embedding: Tensor | Q4_0Weight
    lm_head: Linear
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]

    @classmethod
    def upload(
        cls,
        spec: ModelSpec,
        weights: Mapping[str, HostWeight],
        max_positions: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> DenseWeights:
        """Copy ``weights`` (named and shaped as ``registry.dense_tensor_names`` says) to ``device``."""
        up = _Uploader(spec, weights, compute_dtype, device)
        cos, sin = rope_tables(spec.rope, max_positions)
        embedding = up.matrix(["model.embed_tokens.weight"])
        lm_head = embedding if spec.tie_word_embeddings else up.matrix(["lm_head.weight"])
        return cls(
            spec=spec,
            compute_dtype=compute_dtype,
            cos=torch.from_numpy(np.ascontiguousarray(cos)).to(device),
            sin=torch.from_numpy(np.ascontiguousarray(sin)).to(device),
            embedding=embedding,
            lm_head=Linear(lm_head, None),
            final_norm=up.vector("model.norm.weight"),
            layers=tuple(up.layer(index) for index in range(spec.num_layers)),
        )


class _Uploader:
    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, HostWeight], compute_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = compute_dtype
        self._device = device
        self._shapes = dense_tensor_names(spec)

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{index}."
        moe = index in spec.moe_layers
        attention = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        return LayerWeights(
            index=index,
            input_norm=self.vector(prefix + "input_layernorm.weight"),
            post_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            qkv=self.linear(attention),
            output=self.linear([prefix + "self_attn.o_proj"]),
            q_norm=self.vector(prefix + "self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=self.vector(prefix + "self_attn.k_norm.weight") if spec.qk_norm else None,
            sliding_window=(spec.sliding_window or 0) if index in spec.sliding_layers else 0,
            ordinal=spec.moe_layers.index(index) if moe else -1,
            router=self.vector(prefix + "mlp.gate.weight") if moe else None,
            gate_up=None if moe else self.linear([f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]),
            down=None if moe else self.linear([prefix + "mlp.down_proj"]),
        )

    def vector(self, name: str) -> Tensor:
        """Float32."""
        return self._float(name).float().to(self._device)

    def linear(self, names: Sequence[str]) -> Linear:
        """One projection from several, rows one after the other."""
        biases = [name + ".bias" for name in names]
        present = [bias for bias in biases if bias in self._weights]
        bias = None
        if present:
            parts = [
                self._float(bias).float() if bias in self._weights else torch.zeros(self._shapes[name + ".weight"][0])
                for name, bias in zip(names, biases, strict=True)
            ]
            bias = torch.cat(parts).to(self._device)
        return Linear(self.matrix([name + ".weight" for name in names]), bias)

    def matrix(self, names: Sequence[str]) -> Tensor | Q4_0Weight:
        """Q4_0 when all parts are, else the compute dtype."""
        parts = [self._weights[name] for name in names]
        if all(isinstance(part, Q4_0Weight) for part in parts):
            planes = [part for part in parts if isinstance(part, Q4_0Weight)]
            return Q4_0Weight(
                torch.cat([part.nibbles for part in planes]).contiguous().to(self._device),
                torch.cat([part.scales for part in planes]).contiguous().to(self._device),
            )
        floats = [self._float(name) for name in names]
        whole = torch.empty(
            (sum(part.shape[0] for part in floats), floats[0].shape[1]), dtype=self._dtype, device=self._device
        )
        row = 0
        for part in floats:
            whole[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return whole

    def _float(self, name: str) -> Tensor:
        weight = self._weights[name]
        return dequantize(weight) if isinstance(weight, Q4_0Weight) else weight


def dequantize(weight: Q4_0Weight) -> Tensor:
    """Float32 [O, I] of Q4_0 planes, exact."""
    outputs, inputs = weight.shape
    q = weight.nibbles.view(outputs, inputs // 32, 16)
    values = torch.cat([q & 15, q >> 4], dim=2).to(torch.float32) - 8.0
    return (values * weight.scales.float()[:, :, None]).view(outputs, inputs)
