"""A made-up model as one GGUF file that llama.cpp and this engine's converter read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from freetoken.checkpoint.gguf_source import half_split_order
from freetoken.checkpoint.gguf_writer import GgufPlan, plan_gguf
from freetoken.checkpoint.synthetic.names import PARTS, gguf_experts_name, gguf_name
from freetoken.checkpoint.synthetic.parts import Part, Progress, write_files
from freetoken.checkpoint.synthetic.vocabulary import tokenizer_metadata
from freetoken.checkpoint.synthetic.weights import Stored, SyntheticWeights, to_f32
from freetoken.quant import bf16, f32, q4_0

_TYPE_IDS = {"f32": f32.TYPE_ID, "bf16": bf16.TYPE_ID, "q4_0": q4_0.TYPE_ID}
_FILE_TYPES = {"f32": 0, "bf16": 32, "q4_0": 2}  # llama.cpp's numbers for what most of a file is
_ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_QUANTIZATION_VERSION = 2


def write_gguf(
    weights: SyntheticWeights,
    path: Path,
    name: str,
    description: str,
    num_threads: int,
    progress: Progress | None = None,
) -> None:
    """Write the file ``path``, which the caller moves to its place. Name and description go into its metadata."""
    spec = weights.spec
    tensors = [(gguf_name(n), shape, _TYPE_IDS[_dtype_of(weights, n)]) for n, shape in weights.shapes.items()]
    inner, hidden = spec.moe_intermediate_size, spec.hidden_size
    for layer in spec.moe_layers:
        for part in PARTS:
            rows, columns = (hidden, inner) if part == "down" else (inner, hidden)
            shape = (spec.num_experts, rows, columns)
            tensors.append((gguf_experts_name(layer, part), shape, _TYPE_IDS[weights.dtype]))
    plan = plan_gguf(_metadata(weights, name, description), tensors)
    write_files(path.parent, {path.name: plan.size_bytes}, _parts(weights, plan, path.name), num_threads, progress)


def _dtype_of(weights: SyntheticWeights, name: str) -> str:
    """Readers of BF16 files expect norms and routers in F32."""
    small = len(weights.shapes[name]) == 1 or name.endswith(".mlp.gate.weight")
    return "f32" if small else weights.dtype_of(name)


def _parts(weights: SyntheticWeights, plan: GgufPlan, file: str) -> Iterator[Part]:
    header = np.frombuffer(plan.header, np.uint8)
    yield Part(file, 0, len(plan.header), "header", lambda: header)
    for name, shape in weights.shapes.items():
        tensor = plan.tensors[gguf_name(name)]
        if (heads := _paired_heads(weights, name)) is not None:
            make = functools.partial(_paired, weights, name, heads)
            yield Part(file, tensor.offset_bytes, tensor.size_bytes, tensor.name, make)
            continue
        row_bytes = tensor.size_bytes // shape[0]
        for start, stop in weights.chunks(name):
            offset = tensor.offset_bytes + start * row_bytes
            make = functools.partial(_rows, weights, name, start, stop)
            yield Part(file, offset, (stop - start) * row_bytes, tensor.name, make)
    for ordinal, layer in enumerate(weights.spec.moe_layers):
        for part in PARTS:
            tensor = plan.tensors[gguf_experts_name(layer, part)]
            size = tensor.size_bytes // weights.spec.num_experts
            for expert in range(weights.spec.num_experts):
                make = functools.partial(weights.expert, ordinal, expert, part)
                yield Part(file, tensor.offset_bytes + expert * size, size, tensor.name, make)


def _rows(weights: SyntheticWeights, name: str, start: int, stop: int) -> Stored:
    rows = weights.rows(name, start, stop)
    return to_f32(rows) if _dtype_of(weights, name) == "f32" else rows


def _paired_heads(weights: SyntheticWeights, name: str) -> int | None:
    """Heads of a projection whose rows GGUF's ``llama`` architecture wants in another order; None for all others."""
    if _ARCHITECTURES[weights.config["model_type"]] != "llama":
        return None
    counts = {".q_proj.weight": weights.spec.num_heads, ".k_proj.weight": weights.spec.num_kv_heads}
    return next((count for ending, count in counts.items() if name.endswith(ending)), None)


def _paired(weights: SyntheticWeights, name: str, heads: int) -> Stored:
    """Rotary pairs side by side instead of half a head apart."""
    rows = weights.rows(name)
    paired = np.empty_like(rows)
    paired[half_split_order(len(rows), len(rows) // heads)] = rows
    return paired


def _metadata(weights: SyntheticWeights, name: str, description: str) -> dict[str, Any]:
    spec, config = weights.spec, weights.config
    architecture = _ARCHITECTURES[config["model_type"]]
    numbers: dict[str, Any] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size or spec.moe_intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "rope.freq_base": float(spec.rope.theta),
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
    }
    if spec.is_moe:
        numbers |= {
            "expert_count": spec.num_experts,
            "expert_used_count": spec.num_experts_per_tok,
            "expert_feed_forward_length": spec.moe_intermediate_size,
        }
    general: dict[str, Any] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.description": description,
        "general.file_type": _FILE_TYPES[weights.dtype],
    }
    if weights.dtype == "q4_0":
        general["general.quantization_version"] = _QUANTIZATION_VERSION
    return {
        **general,
        **{f"{architecture}.{key}": value for key, value in numbers.items()},
        **tokenizer_metadata(spec.vocab_size),
    }
