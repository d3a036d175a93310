"""Tiny models as GGUF files in Q4_0, what they are in FTW, and `transformers` computing in float32 on the same weights.

Like ``tiny_models`` in the size of their numbers: logits have a standard deviation of about one, and every norm and
router matters. `gguf` and `transformers` are imported when something is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken import _native
from freetoken.checkpoint.convert import convert
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.execution.dense_weights import map_dense_weights
from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.models.spec import ModelSpec
from freetoken.testing.checkpoint_files import tiny_arrays, write_hf_checkpoint
from freetoken.testing.gguf_files import gguf_tensors, write_gguf
from freetoken.testing.tiny_models import VOCAB_SIZE, write_tiny_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama_tied": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


@dataclass(frozen=True)
class Q4_0Model:
    """``oracle`` computes in float32 on the dequantised weights. Keep the object while anything made from it lives."""

    spec: ModelSpec
    index: FtwIndex
    dense: dict[str, Tensor | Q4_0Weight]
    store: HeldStore
    oracle: Any

    @torch.no_grad()
    def oracle_logits(self, token_ids: list[int]) -> Tensor:
        """[T, V] of the whole sequence at once."""
        logits: Tensor = self.oracle(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def model_arrays(name: str, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random tensors by Hugging Face name; they depend on ``name`` and ``seed`` alone."""
    rng = np.random.default_rng(seed)
    config = CONFIGS[name]
    arrays = {}
    for tensor, like in tiny_arrays(config).items():
        noise = rng.standard_normal(like.shape, np.float32)
        if tensor.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        elif "embed_tokens" in tensor:
            noise *= 0.1 if config.get("tie_word_embeddings") else 0.7
        else:
            noise *= (2 if tensor.endswith("mlp.gate.weight") else 1) / math.sqrt(like.shape[-1])
        arrays[tensor] = noise.astype(np.float32)
    return arrays


def is_quantized(tensor: str) -> bool:
    """Whether ``write_q4_0_gguf`` stores the tensor of this Hugging Face name in Q4_0."""
    return not ("norm" in tensor or tensor.endswith("mlp.gate.weight"))


def write_q4_0_gguf(name: str, path: Path, seed: int = 0) -> Path:
    """The model as a file, all matrices but routers in Q4_0. It has no tokenizer."""
    config = CONFIGS[name]

    def choose_type(tensor: str) -> str:
        return "F32" if "norm" in tensor or "gate_inp" in tensor else "Q4_0"

    tensors = gguf_tensors(config, model_arrays(name, seed))
    return write_gguf(path, config, tensors, choose_type=choose_type)


def write_q4_0_ftw(name: str, directory: Path) -> FtwIndex:
    """The model converted from its GGUF file, with a tokenizer: ready to be launched from ``directory``."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    index = convert(write_q4_0_gguf(name, directory.with_suffix(".gguf")), directory)
    write_tiny_tokenizer(directory)
    return index


def load_q4_0_model(name: str, directory: Path) -> Q4_0Model:
    """Write, convert and map the model; ``directory`` gets the files."""
    import gguf
    import transformers

    index = write_q4_0_ftw(name, directory / "ftw")
    segments = []
    for file in index.files:
        segment = _native.SharedSegment.create(file.name, file.size_bytes)
        np.frombuffer(memoryview(segment), np.uint8)[:] = np.fromfile(index.path / file.name, np.uint8)
        segments.append(segment)
    kind = gguf.GGMLQuantizationType.Q4_0
    exact = {
        tensor: gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind) if is_quantized(tensor) else array
        for tensor, array in model_arrays(name).items()
    }
    write_hf_checkpoint(directory / "hf", CONFIGS[name], exact)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    store = HeldStore(str(index.path), index.fingerprint, segments)
    return Q4_0Model(index.spec, index, map_dense_weights(index, segments), store, oracle)
