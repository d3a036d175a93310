"""Small GGUF files from Hugging Face tensors, through the ``gguf`` package (a development dependency)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama"}
_ARCHITECTURES |= {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe"}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_OUTER |= {"lm_head.weight": "output.weight"}
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def interleave_pairs(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Llama's query and key rows as GGUF has them: rotary pairs side by side instead of half a head apart."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_tensors(
    config: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float32]], stacked: bool = True
) -> dict[str, NDArray[np.float32]]:
    """The tensors under their GGUF names; experts stacked in one tensor, or one by one as in old Mixtral files."""
    architecture = _ARCHITECTURES[config["architectures"][0]]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, array in arrays.items():
        expert = re.fullmatch(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if expert:
            part = _EXPERT_PARTS[expert[3]]
            if stacked:
                experts.setdefault(f"blk.{expert[1]}.ffn_{part}_exps.weight", {})[int(expert[2])] = array
            else:
                found[f"blk.{expert[1]}.ffn_{part}.{expert[2]}.weight"] = array
        elif inner:
            short = _NAMES[inner[2]]
            permuted = architecture == "llama" and short in heads
            found[f"blk.{inner[1]}.{short}.{inner[3]}"] = interleave_pairs(array, heads[short]) if permuted else array
        else:
            found[_OUTER[name]] = array
    for name, by_expert in experts.items():
        found[name] = np.stack([by_expert[i] for i in range(len(by_expert))])
    return found


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    choose_type: Callable[[str], str] = lambda name: "F32",
    add_metadata: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """``tensors`` by GGUF name; ``choose_type`` names the type of each; ``add_metadata`` gets the package's writer."""
    import gguf

    architecture = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    add_metadata(writer)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType[choose_type(name)]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
