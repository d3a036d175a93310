"""What a model's tensors are called in Hugging Face checkpoints and in GGUF files."""

from __future__ import annotations

import re

from freetoken.models.spec import ModelSpec

PARTS = ("gate", "up", "down")
_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def huggingface_name(spec: ModelSpec, name: str) -> str:
    """Of a dense tensor, from its canonical name."""
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if spec.family == "mixtral" else name


def huggingface_expert_name(spec: ModelSpec, layer: int, expert: int, part: str) -> str:
    """Of an expert's matrix in model layer ``layer``."""
    if spec.family == "mixtral":
        return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL_PARTS[part]}.weight"
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def gguf_name(name: str) -> str:
    """Of a dense tensor, from its canonical name."""
    if (match := _LAYER.fullmatch(name)) is None:
        return _GGUF_OUTER[name]
    return f"blk.{match[1]}.{_GGUF_INNER[match[2]]}.{match[3]}"


def gguf_experts_name(layer: int, part: str) -> str:
    """Of the stacked experts' matrices of model layer ``layer``."""
    return f"blk.{layer}.ffn_{part}_exps.weight"
