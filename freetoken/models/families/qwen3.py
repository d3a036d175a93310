"""Qwen3 and Qwen3-MoE: per-head RMSNorm on queries and keys before the rotary embedding."""

from __future__ import annotations

import re
from typing import Any

from freetoken.errors import UnsupportedModelError
from freetoken.models.families.common import classify_llama_tensor, parse_decoder
from freetoken.models.spec import ModelSpec, RouterSpec

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_DEFAULTS: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096}
_MOE_DEFAULTS: dict[str, Any] = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}


def parse_config(config: dict[str, Any], architecture: str) -> ModelSpec:
    """See ``models.registry.parse_model_config``."""
    moe = architecture == "Qwen3MoeForCausalLM"
    # Qwen3-MoE derives the head size from the hidden size where the configuration leaves it out; Qwen3 does not.
    defaults = {**_DEFAULTS, **_MOE_DEFAULTS, "head_dim": None} if moe else _DEFAULTS
    config = {**defaults, **config}
    bias = bool(config.get("attention_bias", False))
    num_layers = int(config.get("num_hidden_layers") or 0)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    router = None
    moe_layers: tuple[int, ...] = ()
    if moe:
        num_experts = config.get("num_experts") or config.get("num_local_experts")
        if num_experts is None:
            raise UnsupportedModelError("config.json has neither 'num_experts' nor 'num_local_experts'")
        router = RouterSpec(
            num_experts=int(num_experts),
            num_experts_per_tok=int(config["num_experts_per_tok"]),
            renormalize=bool(config.get("norm_topk_prob", False)),
        )
        step = int(config.get("decoder_sparse_step") or 1)
        dense = set(config.get("mlp_only_layers") or ())
        moe_layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    sliding = _sliding_layers(config, num_layers, moe) if window else ()
    return parse_decoder(
        config,
        "qwen3",
        architecture,
        qk_norm=True,
        attention_bias=bias,
        attention_out_bias=bias,
        moe_layers=moe_layers,
        moe_intermediate_size=int(config.get("moe_intermediate_size") or 0),
        router=router,
        sliding_window=window,
        sliding_layers=sliding,
    )


def _sliding_layers(config: dict[str, Any], num_layers: int, moe: bool) -> tuple[int, ...]:
    if moe:  # one mask for all layers, whatever max_window_layers says
        return tuple(range(num_layers))
    if types := config.get("layer_types"):
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    return tuple(range(int(config.get("max_window_layers", 28)), num_layers))


def classify_tensor(spec: ModelSpec, name: str) -> tuple[Any, ...] | None:
    """See ``models.registry.classify_tensor``."""
    if match := _EXPERT.fullmatch(name):
        return ("expert", int(match.group(1)), int(match.group(2)), match.group(3))
    return classify_llama_tensor(spec, name)
