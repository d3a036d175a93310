"""Llama and Mistral (dense). Mistral adds a sliding window on every layer."""

from __future__ import annotations

from typing import Any

from freetoken.models.families.common import classify_llama_tensor, parse_decoder
from freetoken.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
# What a configuration means when it leaves a key out; a key given as null is not left out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def parse_config(config: dict[str, Any], architecture: str) -> ModelSpec:
    """See ``models.registry.parse_model_config``."""
    config = {**_DEFAULTS[architecture], **config}
    mistral = architecture == "MistralForCausalLM"
    bias = bool(config.get("attention_bias", False)) and not mistral
    window = config.get("sliding_window") if mistral else None
    layers = tuple(range(int(config.get("num_hidden_layers") or 0))) if window else ()
    return parse_decoder(
        config,
        "llama",
        architecture,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and not mistral,
        sliding_window=window,
        sliding_layers=layers,
    )


classify_tensor = classify_llama_tensor
