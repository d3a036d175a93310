"""Dimensions of the models that can be made up, as the content of their Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.checkpoint.synthetic.vocabulary import special_token_ids
from freetoken.errors import CheckpointError
from freetoken.models.registry import parse_model_config

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}


def _sizes(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }


def _qwen3_experts(experts: int, per_token: int, intermediate: int) -> dict[str, Any]:
    return {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": intermediate}


def _mixtral_experts(experts: int, per_token: int) -> dict[str, Any]:
    return {"num_local_experts": experts, "num_experts_per_tok": per_token}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {**_QWEN3_MOE, **_sizes(48, 2048, 32, 4, 128, 6144, 151936), **_qwen3_experts(128, 8, 768)},
    "qwen3-235b-a22b": {**_QWEN3_MOE, **_sizes(94, 4096, 64, 4, 128, 12288, 151936), **_qwen3_experts(128, 8, 1536)},
    "mixtral-8x7b": {**_MIXTRAL, **_sizes(32, 4096, 32, 8, 128, 14336, 32000), **_mixtral_experts(8, 2)},
    "llama-8b": {**_LLAMA, **_sizes(32, 4096, 32, 8, 128, 14336, 128256)},
    "qwen3-8b": {**_QWEN3, **_sizes(36, 4096, 32, 8, 128, 12288, 151936)},
    "qwen3-moe-small": {**_QWEN3_MOE, **_sizes(12, 512, 8, 2, 64, 1536, 8192), **_qwen3_experts(64, 8, 256)},
    "qwen3-moe-tiny": {**_QWEN3_MOE, **_sizes(3, 64, 4, 2, 32, 96, 512), **_qwen3_experts(16, 4, 64)},
    "mixtral-tiny": {**_MIXTRAL, **_sizes(2, 64, 4, 2, 16, 96, 512), **_mixtral_experts(8, 2)},
    "qwen3-tiny": {**_QWEN3, **_sizes(2, 64, 4, 2, 32, 96, 512)},
    "llama-tiny": {**_LLAMA, **_sizes(2, 64, 4, 2, 16, 96, 512)},
}
"""Name -> configuration without dtype and token ids. All have output embeddings apart from the input embeddings."""

OVERRIDES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size",),
    "experts": ("num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_intermediate": ("moe_intermediate_size", "intermediate_size"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings",),
}
"""What may be changed -> the configuration keys that may hold it, the first that the shape has."""


def shape_config(shape: str, overrides: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The configuration of ``shape`` with ``overrides`` (by the names in ``OVERRIDES``) and the vocabulary's token ids.

    Raises ``CheckpointError`` for an unknown name, an override that the shape has no place for or a value below 1, and
    ``UnsupportedModelError`` for dimensions that do not fit together.
    """
    if shape not in SHAPES:
        raise CheckpointError(f"shape {shape!r} is not known; known: {', '.join(SHAPES)}")
    config = dict(SHAPES[shape])
    for name, value in (overrides or {}).items():
        if name not in OVERRIDES:
            raise CheckpointError(f"override {name!r} is not known; known: {', '.join(OVERRIDES)}")
        routed = name.startswith("expert")
        key = next((k for k in OVERRIDES[name] if k in config), None)
        if key is None or (routed and "num_experts_per_tok" not in config):
            raise CheckpointError(f"shape {shape!r} has no {name.replace('_', ' ')} to override")
        if value < 1:
            raise CheckpointError(f"{name} {value} is not a positive number")
        config[key] = int(value)
    start, _, end = special_token_ids(config["vocab_size"])
    config |= {"bos_token_id": start, "eos_token_id": [end, start], "pad_token_id": start}
    config |= {"tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu"}
    parse_model_config(config)
    return config
