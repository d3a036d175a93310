"""From GGUF metadata to the content of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError, UnsupportedModelError

SUPPORTED_ARCHITECTURES = ("llama", "qwen3", "qwen3moe")
_LLAMA3_SHAPES = tuple((factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0, 16.0))


class GgufHyperparameters:
    """Access to ``{architecture}.*`` keys; everything missing or odd is a ``CheckpointError`` naming the key."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        architecture = metadata.get("general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{where}: GGUF architecture {architecture!r} is not supported; "
                f"supported: {list(SUPPORTED_ARCHITECTURES)}"
            )
        self.architecture: str = architecture

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{architecture}.{key}``; float32 values as the shortest decimal that means them."""
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # per-layer values that are all alike
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self._where}: {self.architecture}.{key} differs between layers: {value}")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """Like ``get``, for keys that must be there."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._where}: metadata has no {self.architecture}.{key}")
        return value


def build_config(
    parameters: GgufHyperparameters,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: NDArray[np.float32] | None,
    where: str,
) -> dict[str, Any]:
    """``shapes`` are the GGUF tensors' row-major shapes; ``rope_factors`` the content of ``rope_freqs.weight``."""
    p = parameters
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{where}: tensor 'token_embd.weight' is missing")
    hidden, heads = int(p.need("embedding_length")), int(p.need("attention.head_count"))
    head_dim = int(p.get("attention.key_length") or hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(p.get(key) or head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{where}: {p.architecture}.{key} {p.get(key)} differs from the head size {head_dim}"
            )
    num_layers = int(p.need("block_count"))
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(p.get("attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "intermediate_size": int(p.get("feed_forward_length") or 0),
        "max_position_embeddings": int(p.need("context_length")),
        "rms_norm_eps": p.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "hidden_act": "silu",
        "rope_theta": p.get("rope.freq_base", 10000.0),
        "dtype": "float32",
    }
    scaling = _rope_scaling(p, rope_factors, head_dim, config["rope_theta"], where)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config.update(_token_ids(metadata))
    config.update(_family(p, config, shapes, num_layers))
    return config


def _family(
    p: GgufHyperparameters, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> dict[str, Any]:
    experts = int(p.get("expert_count") or 0)
    routed = {"num_experts_per_tok": int(p.need("expert_used_count"))} if experts else {}
    if p.architecture == "llama":
        if experts:
            inner = int(p.get("expert_feed_forward_length") or config["intermediate_size"])
            routed |= {"num_local_experts": experts, "intermediate_size": inner}
            return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **routed}
        bias = {"mlp_bias": "blk.0.ffn_up.bias" in shapes}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **bias}
    if p.architecture == "qwen3":
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    dense = [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in shapes]
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "moe_intermediate_size": int(p.need("expert_feed_forward_length")),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        **routed,
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            found[name] = int(value)
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(int(e) for e in ends if e is not None))
    if unique:
        found["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return found


def _rope_scaling(
    p: GgufHyperparameters, factors: NDArray[np.float32] | None, head_dim: int, theta: float, where: str
) -> dict[str, Any] | None:
    kind = p.get("rope.scaling.type")
    if factors is not None:
        return _match_llama3(factors, head_dim, theta, where)
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": p.need("rope.scaling.factor")}
    original = p.get("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _match_llama3(factors: NDArray[np.float32], head_dim: int, theta: float, where: str) -> dict[str, Any]:
    """A GGUF of Llama 3.1 or later has the divisors of the rotary frequencies as a tensor; find the rule in them."""
    for shape in _LLAMA3_SHAPES:
        expected = llama3_factors(head_dim, theta, *shape)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            factor, low, high, original = shape
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(f"{where}: tensor 'rope_freqs.weight' follows no known rule of rotary scaling")


def llama3_factors(
    head_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> NDArray[np.float32]:
    """What each rotary frequency is divided by under the Llama 3 rule, ``[head_dim / 2]``.

    Wavelengths shorter than ``original / high`` stay, those longer than ``original / low`` are stretched by ``factor``,
    and between the two the stretched and the plain frequency are blended.
    """
    wavelength = 2 * math.pi * np.power(theta, np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    share = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = 1 / ((1 - share) / factor + share)
    stretched = np.where(wavelength > original / low_freq_factor, factor, blended)
    result = np.where(wavelength < original / high_freq_factor, 1.0, stretched)
    return result.astype(np.float32)
