"""Mixtral: every layer routed; softmax over all experts, top-k, renormalised."""

from __future__ import annotations

import re
from typing import Any

from freetoken.models.families.common import classify_llama_tensor, parse_decoder
from freetoken.models.spec import ModelSpec, RouterSpec

ARCHITECTURES = ("MixtralForCausalLM",)
_EXPERT = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_ROUTER = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.gate\.weight")
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def parse_config(config: dict[str, Any], architecture: str) -> ModelSpec:
    """See ``models.registry.parse_model_config``."""
    config = {**_DEFAULTS, **config}
    num_layers = int(config.get("num_hidden_layers") or 0)
    window = config.get("sliding_window")
    return parse_decoder(
        config,
        "mixtral",
        architecture,
        moe_layers=tuple(range(num_layers)),
        moe_intermediate_size=int(config.get("intermediate_size") or 0),
        router=RouterSpec(
            num_experts=int(config.get("num_local_experts") or config.get("num_experts") or 8),
            num_experts_per_tok=int(config["num_experts_per_tok"]),
        ),
        sliding_window=window,
        sliding_layers=tuple(range(num_layers)) if window else (),
        default_theta=1000000.0,
    )


def classify_tensor(spec: ModelSpec, name: str) -> tuple[Any, ...] | None:
    """See ``models.registry.classify_tensor``."""
    if match := _EXPERT.fullmatch(name):
        return ("expert", int(match.group(1)), int(match.group(2)), _PARTS[match.group(3)])
    if match := _ROUTER.fullmatch(name):
        return ("dense", f"model.layers.{match.group(1)}.mlp.gate.weight")
    return classify_llama_tensor(spec, name)
