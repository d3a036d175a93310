"""What configurations mean: published spellings and saved ones, defaults of keys left out, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freetoken.errors import UnsupportedModelError
from freetoken.models.registry import (
    DenseRole,
    ExpertRole,
    SkippedRole,
    classify_tensor,
    dense_tensor_names,
    parse_model_config,
)
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.testing.tiny_models import TINY_MODELS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008, 128009],
    "bos_token_id": 128000,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "vocab_size": 32000,
}


def test_llama_with_the_old_spelling() -> None:
    spec = parse_model_config(LLAMA)
    assert (spec.family, spec.dtype, spec.num_kv_heads, spec.head_dim) == ("llama", "bf16", 8, 128)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.rotary_dim) == ("llama3", 500000.0, 128)
    assert dict(spec.rope.parameters)["original_max_position_embeddings"] == 8192
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert not spec.is_moe and spec.num_experts == 0 and spec.sliding_window is None


def test_qwen3_moe_as_published() -> None:
    spec = parse_model_config(QWEN3_MOE)
    assert spec.moe_layers == tuple(range(48))
    assert spec.router is not None and spec.router.renormalize
    assert (spec.num_experts, spec.num_experts_per_tok, spec.moe_intermediate_size) == (128, 8, 768)
    assert spec.qk_norm and not spec.attention_bias and spec.sliding_layers == ()
    assert spec.kv_bytes_per_token(2) == 2 * 48 * 4 * 128 * 2
    saved = {**QWEN3_MOE, "num_local_experts": QWEN3_MOE["num_experts"], "dtype": QWEN3_MOE["torch_dtype"]}
    del saved["num_experts"], saved["torch_dtype"]
    assert parse_model_config(saved) == spec


def test_keys_left_out_take_the_family_defaults() -> None:
    spec = parse_model_config(MIXTRAL)
    assert (spec.num_kv_heads, spec.rms_norm_eps, spec.num_experts_per_tok, spec.rope.theta) == (8, 1e-5, 2, 1e6)
    mistral = {**MIXTRAL, "architectures": ["MistralForCausalLM"]}
    assert parse_model_config(mistral).sliding_window == 4096
    assert parse_model_config(mistral).sliding_layers == tuple(range(32))
    assert parse_model_config({**mistral, "sliding_window": None}).sliding_layers == ()
    qwen3 = {**MIXTRAL, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_attention_heads": 16}
    assert parse_model_config({**qwen3, "num_key_value_heads": 8}).head_dim == 128


def test_sliding_layers() -> None:
    qwen3 = {
        **MIXTRAL,
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 100,
    }
    assert parse_model_config({**qwen3, "max_window_layers": 3}).sliding_layers == (3,)
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert parse_model_config({**qwen3, "layer_types": types}).sliding_layers == (0, 2)
    moe = {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 40}
    assert parse_model_config(moe).sliding_layers == tuple(range(48))


def test_routed_layers_of_a_mixed_model() -> None:
    mixed = {**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = parse_model_config(mixed)
    assert spec.moe_layers == (1, 5)
    names = dense_tensor_names(spec)
    assert names["model.layers.1.mlp.gate.weight"] == (128, 2048)
    assert names["model.layers.3.mlp.gate_proj.weight"] == (6144, 2048)
    assert classify_tensor(spec, "model.layers.5.mlp.experts.7.down_proj.weight") == ExpertRole(5, 7, "down")


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        (LLAMA, {"architectures": None}, "none named"),
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"hidden_act": "gelu"}, "gelu"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA, {"num_key_value_heads": 5}, "32 attention heads"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer types"),
        (LLAMA, {"partial_rotary_factor": 0.51}, "65 rotary"),
        (LLAMA, {"intermediate_size": None}, "intermediate_size"),
        (QWEN3_MOE, {"num_experts": None}, "num_experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "129"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, "intermediate size"),
    ],
)
def test_refusals_name_the_reason(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        parse_model_config({**base, **changes})


def test_unknown_and_skipped_tensors() -> None:
    spec = parse_model_config({**LLAMA, "tie_word_embeddings": True})
    assert isinstance(classify_tensor(spec, "lm_head.weight"), SkippedRole)
    assert isinstance(classify_tensor(spec, "model.layers.0.self_attn.rotary_emb.inv_freq"), SkippedRole)
    assert classify_tensor(spec, "model.norm.weight") == DenseRole("model.norm.weight")
    with pytest.raises(UnsupportedModelError, match="vision"):
        classify_tensor(spec, "vision.patch.weight")


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tensor_of_a_saved_model_has_its_place(name: str) -> None:
    tiny = load_tiny_checkpoint(name)
    assert {key: tuple(tensor.shape) for key, tensor in tiny.dense.items()} == dense_tensor_names(tiny.spec)
    assert sorted(tiny.experts) == list(range(len(tiny.spec.moe_layers)))
    config = json.loads((tiny.path / "config.json").read_text())
    assert parse_model_config(config) == tiny.spec
    assert tiny.spec.eos_token_ids == (2, 4)
