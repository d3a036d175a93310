"""Tiny models taken apart for tests: ModelSpec, dense tensors, expert matrices, and the `transformers` oracle."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freetoken import _native
from freetoken.models.registry import DenseRole, ExpertRole, classify_tensor, parse_model_config
from freetoken.models.spec import ModelSpec
from freetoken.quant.native_layout import native_layout
from freetoken.quant.pack import pack_expert
from freetoken.quant.record import RecordLayout, plan_record_layout
from freetoken.testing.tiny_models import write_tiny_checkpoint

ExpertMatrices = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TinyCheckpoint:
    """``dense`` by canonical name, ``experts`` by expert layer ordinal (gate [E, I, H], up, down [E, H, I]), all in the
    dtype of the files. ``oracle`` is the `transformers` model, computing in float32 on the very same weights."""

    name: str
    dtype: str
    path: Path
    spec: ModelSpec
    dense: dict[str, Tensor]
    experts: dict[int, ExpertMatrices]
    oracle: Any

    @torch.no_grad()
    def oracle_logits(self, token_ids: list[int]) -> Tensor:
        """[T, V] of the whole sequence at once."""
        logits: Tensor = self.oracle(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits

    def oracle_greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation, recomputed from scratch for every token."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.oracle_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@functools.cache
def load_tiny_checkpoint(name: str, dtype: str = "float32", seed: int = 0) -> TinyCheckpoint:
    """Build, save and take apart one model; cached for the process, its directory lives as long."""
    import transformers
    from safetensors.torch import load_file

    path = _directory() / f"{name}-{dtype}-{seed}"
    write_tiny_checkpoint(name, path, seed=seed, dtype=dtype)
    spec = parse_model_config(json.loads((path / "config.json").read_text()))
    dense: dict[str, Tensor] = {}
    parts: dict[tuple[int, str], dict[int, Tensor]] = {}
    for tensor_name, tensor in load_file(path / "model.safetensors").items():
        role = classify_tensor(spec, tensor_name)
        if isinstance(role, DenseRole):
            dense[role.name] = tensor
        elif isinstance(role, ExpertRole):
            parts.setdefault((spec.moe_layers.index(role.layer), role.part), {})[role.expert] = tensor
    stacked = {key: torch.stack([by_expert[e] for e in range(spec.num_experts)]) for key, by_expert in parts.items()}
    experts = {
        ordinal: (stacked[ordinal, "gate"], stacked[ordinal, "up"], stacked[ordinal, "down"])
        for ordinal in range(len(spec.moe_layers))
    }
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return TinyCheckpoint(name, dtype, path, spec, dense, experts, oracle)


def pack_expert_store(
    tiny: TinyCheckpoint, tile_columns: int | None = None
) -> tuple[_native.ExpertStore, RecordLayout]:
    """All records of the model in one segment, layer by layer."""
    spec = tiny.spec
    dtype = {"float32": "f32", "bfloat16": "bf16"}[tiny.dtype]
    layout = plan_record_layout(dtype, spec.hidden_size, spec.moe_intermediate_size, tile_columns)
    num_layers, num_experts = len(spec.moe_layers), spec.num_experts
    segment = _native.SharedSegment.create("tiny-store", num_layers * num_experts * layout.stride_bytes)
    records = np.frombuffer(memoryview(segment), dtype=np.uint8).reshape(num_layers, num_experts, layout.stride_bytes)
    for ordinal, matrices in tiny.experts.items():
        for expert in range(num_experts):
            gate, up, down = (_storage(matrix[expert]) for matrix in matrices)
            pack_expert(layout, gate, up, down, records[ordinal, expert])
    offsets = np.arange(num_layers * num_experts, dtype=np.int64).reshape(num_layers, num_experts)
    store = _native.ExpertStore(
        [segment],
        [native_layout(layout)],
        [0] * num_layers,
        np.zeros((num_layers, num_experts), dtype=np.int32),
        offsets * layout.stride_bytes,
    )
    return store, layout


def _storage(matrix: Tensor) -> Any:
    if matrix.dtype == torch.bfloat16:
        return matrix.contiguous().view(torch.int16).numpy().view(np.uint16)
    return matrix.contiguous().numpy()


@functools.cache
def _directory() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="freetoken-tiny-")
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []
