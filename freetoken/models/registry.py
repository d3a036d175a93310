"""From a checkpoint's ``config.json`` to a ModelSpec, and from its tensor names to roles. No torch here.

A family is one file in ``families/`` with ``ARCHITECTURES``, ``parse_config`` and ``classify_tensor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from freetoken.errors import UnsupportedModelError
from freetoken.models.families import llama, mixtral, qwen3
from freetoken.models.spec import ModelSpec

FAMILIES: tuple[ModuleType, ...] = (llama, mixtral, qwen3)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.ARCHITECTURES}


@dataclass(frozen=True, slots=True)
class DenseRole:
    """A tensor kept whole, under its canonical name (the Llama spelling of Hugging Face)."""

    name: str


@dataclass(frozen=True, slots=True)
class ExpertRole:
    """A routed expert's matrix: ``part`` of expert ``expert`` in model layer ``layer`` (not the ordinal)."""

    layer: int
    expert: int
    part: Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class SkippedRole:
    """A tensor that this engine has no use for, and why."""

    reason: str


TensorRole = DenseRole | ExpertRole | SkippedRole


def parse_model_config(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a Hugging Face ``config.json``. Raises ``UnsupportedModelError`` naming what is not supported."""
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in _BY_ARCHITECTURE:
            spec: ModelSpec = _BY_ARCHITECTURE[architecture].parse_config(config, architecture)
            return spec
    raise UnsupportedModelError(
        f"architecture {architectures or '(none named)'} is not supported; supported: {sorted(_BY_ARCHITECTURE)}"
    )


def classify_tensor(spec: ModelSpec, name: str) -> TensorRole:
    """What the checkpoint tensor ``name`` is. Raises ``UnsupportedModelError`` for a name the family does not know."""
    role = _BY_ARCHITECTURE[spec.architecture].classify_tensor(spec, name)
    if role is None:
        raise UnsupportedModelError(f"tensor {name!r} is not known in {spec.architecture}")
    kind, *rest = role
    if kind == "dense":
        return DenseRole(*rest)
    if kind == "expert":
        return ExpertRole(*rest)
    return SkippedRole(*rest)


def dense_tensor_names(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every dense tensor the model must have; a checkpoint with more or fewer is refused."""
    hidden, dim = spec.hidden_size, spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = (hidden,)
        shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
            shapes[p + f"self_attn.{part}_proj.weight"] = (heads * dim, hidden)
            if spec.attention_bias:
                shapes[p + f"self_attn.{part}_proj.bias"] = (heads * dim,)
        shapes[p + "self_attn.o_proj.weight"] = (hidden, spec.num_heads * dim)
        if spec.attention_out_bias:
            shapes[p + "self_attn.o_proj.bias"] = (hidden,)
        if spec.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = (dim,)
            shapes[p + "self_attn.k_norm.weight"] = (dim,)
        if i in spec.moe_layers:
            shapes[p + "mlp.gate.weight"] = (spec.num_experts, hidden)
        else:
            inner = spec.intermediate_size
            for part, shape in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            ):
                shapes[p + f"mlp.{part}_proj.weight"] = shape
                if spec.mlp_bias:
                    shapes[p + f"mlp.{part}_proj.bias"] = (shape[0],)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes
