"""Small checkpoints made with numpy alone, and damage done to them on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.ftw import INDEX_NAME
from freetoken.checkpoint.integrity import digest_json
from freetoken.models.registry import dense_tensor_names, parse_model_config
from freetoken.quant import bf16

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mixtral": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def tiny_arrays(config: Mapping[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random tensors of the model by Hugging Face name; every value is exact in BF16 and in F16."""
    spec = parse_model_config(dict(config))
    mixtral = spec.family == "mixtral"
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in dense_tensor_names(spec).items():
        shapes[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else name] = shape
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    for layer in spec.moe_layers:
        mlp = f"model.layers.{layer}." + ("block_sparse_moe" if mixtral else "mlp")
        for expert in range(spec.num_experts):
            for part, short in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                name = f"{mlp}.experts.{expert}.{short if mixtral else part + '_proj'}.weight"
                shapes[name] = (hidden, inner) if part == "down" else (inner, hidden)
    rng = np.random.default_rng(seed)
    return {name: (rng.integers(-64, 65, shape) / 64).astype(np.float32) for name, shape in shapes.items()}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, NDArray[Any]]],
    metadata: Mapping[str, str] | None = None,
    edit_header: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """``tensors`` maps a name to its format dtype and its raw storage. ``edit_header`` may damage the header."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    if edit_header:
        edit_header(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def stored(array: NDArray[np.float32], dtype: str) -> tuple[str, NDArray[Any]]:
    """The array in the storage of the safetensors dtype F32, F16 or BF16."""
    if dtype == "BF16":
        return dtype, bf16.from_f32(array)
    return dtype, array.astype({"F32": np.float32, "F16": np.float16}[dtype])


def write_hf_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    arrays: Mapping[str, NDArray[np.float32]],
    *,
    dtype: str | Callable[[str], str] = "F32",
    num_shards: int = 1,
) -> Path:
    """A Hugging Face directory. ``dtype`` F32, F16 or BF16, or a function of the tensor name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    choose = dtype if callable(dtype) else (lambda _: dtype)
    tensors = {name: stored(array, choose(name)) for name, array in arrays.items()}
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
        return directory
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        write_safetensors(directory / file, {name: tensors[name] for name in mine}, {"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    index = {"metadata": {"total_size": sum(a.nbytes for _, a in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change ``ftw.json`` and give it the fingerprint of its new content: only the deeper checks can notice."""
    path = directory / INDEX_NAME
    data = json.loads(path.read_text())
    edit(data)
    data["fingerprint"] = digest_json({k: v for k, v in data.items() if k not in ("fingerprint", "source")})
    path.write_text(json.dumps(data))


def flip_byte(path: Path, offset: int) -> None:
    """Invert one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0xFF]))
