"""A made-up model as a Hugging Face directory: sharded safetensors under the family's own names."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from freetoken.checkpoint.safetensors_file import INDEX_SUFFIX
from freetoken.checkpoint.synthetic.names import PARTS, huggingface_expert_name, huggingface_name
from freetoken.checkpoint.synthetic.parts import Part, Progress, interleave, write_files
from freetoken.checkpoint.synthetic.weights import Stored, SyntheticWeights, to_f32

MAX_SHARD_BYTES = 4 * 1024**3
_ELEMENT_BYTES = {"F32": 4, "BF16": 2}


@dataclass(slots=True)
class _Tensor:
    """``pieces`` are (first row, end, how to make them)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[int, int, Callable[[], Stored]]]
    offset_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES[self.dtype]


@dataclass(slots=True)
class _Shard:
    tensors: list[_Tensor] = field(default_factory=list)
    size_bytes: int = 0


def write_safetensors(
    weights: SyntheticWeights,
    directory: Path,
    num_threads: int,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Fill the existing ``directory`` with shards and their index. Q4_0 weights become F32 with the same values."""
    shards: list[_Shard] = []
    for tensor in _tensors(weights):
        if not shards or shards[-1].size_bytes + tensor.size_bytes > max_shard_bytes:
            shards.append(_Shard())
        tensor.offset_bytes = shards[-1].size_bytes
        shards[-1].tensors.append(tensor)
        shards[-1].size_bytes += tensor.size_bytes
    sizes: dict[str, int] = {}
    runs: list[list[Part]] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        header = _header(shard)
        sizes[file] = len(header) + shard.size_bytes
        head = Part(file, 0, len(header), "header", functools.partial(np.frombuffer, header, np.uint8))
        runs.append([head, *_parts(shard, file, len(header))])
        weight_map.update(dict.fromkeys((t.name for t in shard.tensors), file))
    write_files(directory, sizes, interleave(runs), num_threads, progress)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(s.size_bytes for s in shards)}, "weight_map": weight_map}
        (directory / f"model{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(weights: SyntheticWeights) -> Iterator[_Tensor]:
    spec = weights.spec
    for name, shape in weights.shapes.items():
        dtype = "BF16" if weights.dtype_of(name) == "bf16" else "F32"
        pieces = [(a, b, functools.partial(weights.rows, name, a, b)) for a, b in weights.chunks(name)]
        yield _Tensor(huggingface_name(spec, name), dtype, shape, pieces)
    dtype = "BF16" if weights.dtype == "bf16" else "F32"
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    for ordinal, layer in enumerate(spec.moe_layers):
        for expert in range(spec.num_experts):
            for part in PARTS:
                shape = (hidden, inner) if part == "down" else (inner, hidden)
                make = functools.partial(weights.expert, ordinal, expert, part)
                name = huggingface_expert_name(spec, layer, expert, part)
                yield _Tensor(name, dtype, shape, [(0, shape[0], make)])


def _header(shard: _Shard) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for t in shard.tensors:
        entries[t.name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [t.offset_bytes, t.offset_bytes + t.size_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(shard: _Shard, file: str, start: int) -> Iterator[Part]:
    for tensor in shard.tensors:
        row_bytes = tensor.size_bytes // tensor.shape[0]
        for first, end, make in tensor.pieces:
            exact = functools.partial(_unpacked, make)
            offset = start + tensor.offset_bytes + first * row_bytes
            yield Part(file, offset, (end - first) * row_bytes, tensor.name, exact)


def _unpacked(make: Callable[[], Stored]) -> Stored:
    rows = make()
    return to_f32(rows) if rows.dtype == np.uint8 else rows
