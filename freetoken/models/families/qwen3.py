"""Qwen3 and Qwen3-MoE: per-head RMSNorm on queries and keys before the rotary embedding."""

from __future__ import annotations

import re
from typing import Any

from freetoken.models.families.common import classify_llama_tensor, parse_decoder
from freetoken.models.spec import ModelSpec, RouterSpec

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def parse_config(config: dict[str, Any], architecture: str) -> ModelSpec:
    """See ``models.registry.parse_model_config``."""
    bias = bool(config.get("attention_bias", False))
    num_layers = int(config.get("num_hidden_layers", 0))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first_sliding = int(config.get("max_window_layers") or 0)
    sliding = tuple(range(first_sliding, num_layers)) if window else ()
    router = None
    moe_layers: tuple[int, ...] = ()
    if architecture == "Qwen3MoeForCausalLM":
        router = RouterSpec(
            num_experts=int(config.get("num_experts") or config["num_local_experts"]),
            num_experts_per_tok=int(config["num_experts_per_tok"]),
            renormalize=bool(config.get("norm_topk_prob", False)),
        )
        step = int(config.get("decoder_sparse_step") or 1)
        dense = set(config.get("mlp_only_layers") or ())
        moe_layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
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


def classify_tensor(spec: ModelSpec, name: str) -> tuple[Any, ...] | None:
    """See ``models.registry.classify_tensor``."""
    if match := _EXPERT.fullmatch(name):
        return ("expert", int(match.group(1)), int(match.group(2)), match.group(3))
    return classify_llama_tensor(spec, name)
