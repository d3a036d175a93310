"""Llama and Mistral (dense). Mistral adds a sliding window on every layer."""

from __future__ import annotations

from typing import Any

from freetoken.models.families.common import classify_llama_tensor, parse_decoder
from freetoken.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def parse_config(config: dict[str, Any], architecture: str) -> ModelSpec:
    """See ``models.registry.parse_model_config``."""
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if architecture == "MistralForCausalLM" else None
    layers = tuple(range(int(config.get("num_hidden_layers", 0)))) if window else ()
    return parse_decoder(
        config,
        "llama",
        architecture,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=window,
        sliding_layers=layers,
    )


classify_tensor = classify_llama_tensor
