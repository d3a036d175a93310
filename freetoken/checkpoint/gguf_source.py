"""A GGUF file (or a split series of them) as a source of Hugging Face tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.fingerprint import fingerprint_files
from freetoken.checkpoint.gguf_config import GgufHyperparameters, build_config
from freetoken.checkpoint.gguf_file import MAGIC, GgufFile
from freetoken.checkpoint.gguf_tokenizer import write_tokenizer
from freetoken.checkpoint.source import SourceTensor, TensorSource
from freetoken.errors import CheckpointError
from freetoken.quant import bf16, q4_0
from freetoken.quant.gguf_types import GGUF_TYPES, GgufType

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)(?:\.(\d+))?\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERT_PARTS = {"gate": ("w1", "gate_proj"), "up": ("w3", "up_proj"), "down": ("w2", "down_proj")}
_DECODE_BYTES = 8 * 1024**2  # of float32 at a time, so that temporaries stay small


@dataclass(frozen=True, slots=True)
class _Origin:
    """Rows ``first_row`` onward of a GGUF tensor; ``order`` rearranges them (row i of the result is ``order[i]``)."""

    file: GgufFile
    name: str
    first_row: int = 0
    order: NDArray[np.int64] | None = None


def is_gguf(path: Path) -> bool:
    """Whether the file begins like a GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def gguf_series(path: Path) -> list[Path]:
    """All files of a split checkpoint in order, given any of them; just ``path`` when it is not split."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = match["count"]
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]


class GgufSource(TensorSource):
    """Quantised tensors appear as F32 with their exact values, Q4_0 matrices as blocks too, BF16 as BF16.

    Experts that a GGUF stacks in one tensor appear one by one. Rows of Llama's query and key projections, which GGUF
    stores for interleaved rotary pairs, come in the order for half-split pairs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        series = gguf_series(self.path)
        self._files: list[GgufFile] = []
        try:
            for part in series:
                self._files.append(GgufFile(part))
            self._check_split()
            self.fingerprint = fingerprint_files(series, self.path.parent)
            self.description = {"kind": "gguf", "path": str(self.path.resolve())}
            self._metadata = self._files[0].metadata
            where = str(self.path)
            parameters = GgufHyperparameters(self._metadata, where)
            raw = {name: file for file in self._files for name in file.tensors}
            if len(raw) != sum(len(file.tensors) for file in self._files):
                raise CheckpointError(f"{where}: a tensor appears in more than one file of the series")
            factors = None
            if (file := raw.pop(_ROPE_FACTORS, None)) is not None:
                factors = _decode(file.rows(_ROPE_FACTORS), GGUF_TYPES[file.tensors[_ROPE_FACTORS].type_id])[0]
            shapes = {name: file.tensors[name].shape for name, file in raw.items()}
            try:
                self.config = build_config(parameters, self._metadata, shapes, factors, where)
            except (TypeError, ValueError, ZeroDivisionError) as error:
                raise CheckpointError(f"{where}: malformed metadata: {error!r}") from error
            self.tensors: dict[str, SourceTensor] = {}
            self._origins: dict[str, _Origin] = {}
            for name, file in raw.items():
                self._expose(parameters.architecture, file, name)
        except BaseException:
            self.close()
            raise

    def _check_split(self) -> None:
        for number, file in enumerate(self._files):
            count = file.metadata.get("split.count", 1)
            if count not in (0, 1, len(self._files)) or file.metadata.get("split.no", number) != number:
                raise CheckpointError(
                    f"{file.path}: part {file.metadata.get('split.no')} of {count} by its metadata, "
                    f"{number} of {len(self._files)} by its name"
                )

    def _expose(self, architecture: str, file: GgufFile, name: str) -> None:
        shape = file.tensors[name].shape
        match = _BLOCK.fullmatch(name)
        if match is None:
            self._add(_WHOLE.get(name, name), _Origin(file, name), shape)
            return
        prefix = f"model.layers.{match[1]}."
        part, expert, leaf = match[2], match[3], match[4]
        mixtral = architecture == "llama"
        mlp = prefix + ("block_sparse_moe." if mixtral else "mlp.")
        stacked = re.fullmatch(r"ffn_(gate|up|down)_exps", part)
        single = re.fullmatch(r"ffn_(gate|up|down)", part) if expert is not None else None
        if stacked and expert is None and len(shape) == 3:
            spelling = _EXPERT_PARTS[stacked[1]][0 if mixtral else 1]
            for i in range(shape[0]):
                self._add(f"{mlp}experts.{i}.{spelling}.{leaf}", _Origin(file, name, i * shape[1]), shape[1:])
        elif single:
            spelling = _EXPERT_PARTS[single[1]][0 if mixtral else 1]
            self._add(f"{mlp}experts.{expert}.{spelling}.{leaf}", _Origin(file, name), shape)
        elif part == "ffn_gate_inp" and expert is None:
            self._add(f"{mlp}gate.{leaf}", _Origin(file, name), shape)
        elif part in _PARTS and expert is None:
            order = None
            if mixtral and part in ("attn_q", "attn_k"):
                order = half_split_order(shape[0], int(self.config["head_dim"]))
            self._add(f"{prefix}{_PARTS[part]}.{leaf}", _Origin(file, name, 0, order), shape)
        else:
            self._add(name, _Origin(file, name), shape)

    def _add(self, name: str, origin: _Origin, shape: tuple[int, ...]) -> None:
        kind = GGUF_TYPES[origin.file.tensors[origin.name].type_id]
        dtype = "bf16" if kind.type_id == bf16.TYPE_ID else "f32"
        self.tensors[name] = SourceTensor(shape, dtype, "" if kind.name.lower() == dtype else kind.name.lower())
        self._origins[name] = origin

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """See ``TensorSource.read``."""
        origin, tensor = self._origins[name], self.tensors[name]
        kind = GGUF_TYPES[origin.file.tensors[origin.name].type_id]
        if len(tensor.shape) == 1:  # one row holds all of it
            begin, end, _ = slice(start, stop).indices(tensor.shape[0])
            values = _decode(origin.file.rows(origin.name), kind)[0]
            return values[begin:end] if origin.order is None else values[origin.order[begin:end]]
        return _decode(self._rows(name, start, stop), kind)

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """See ``TensorSource.read_blocks``."""
        tensor = self.tensors[name]
        if tensor.format != q4_0.NAME.lower() or len(tensor.shape) != 2:
            return super().read_blocks(name, start, stop)
        rows = self._rows(name, start, stop)
        return rows.reshape(rows.shape[0], -1, q4_0.BLOCK_BYTES)

    def _rows(self, name: str, start: int, stop: int | None) -> NDArray[np.uint8]:
        """Bytes of whole rows of a matrix; a view unless rows are rearranged."""
        origin = self._origins[name]
        begin, end, _ = slice(start, stop).indices(self.tensors[name].shape[0])
        rows = origin.file.rows(origin.name)
        if origin.order is not None:
            return rows[origin.order[begin:end]]
        return rows[origin.first_row + begin : origin.first_row + end]

    def write_companions(self, directory: Path) -> None:
        """Tokenizer and chat template from the metadata, and ``generation_config.json`` with the special token ids."""
        write_tokenizer(self._metadata, directory, str(self.path), int(self.config["max_position_embeddings"]))
        ids = {k: self.config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in self.config}
        if ids:
            (directory / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")

    def release(self) -> None:
        """See ``TensorSource.release``."""
        for file in self._files:
            file.release()

    def close(self) -> None:
        """See ``TensorSource.close``."""
        for file in self._files:
            file.close()


def half_split_order(num_rows: int, head_dim: int) -> NDArray[np.int64]:
    """Where row i of a projection for half-split rotary pairs lies in one for interleaved pairs.

    Within a head, element ``s * head_dim / 2 + j`` (half s, pair j) is stored at ``2 j + s``.
    """
    within = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    heads = np.arange(num_rows // head_dim) * head_dim
    return (heads[:, None] + within[None, :]).reshape(-1)


def _decode(rows: NDArray[np.uint8], kind: GgufType) -> NDArray[Any]:
    """``[n, row bytes]`` to ``[n, elements]``: uint16 for BF16, float32 for all other types."""
    if kind.type_id == bf16.TYPE_ID:
        return np.ascontiguousarray(rows).view(np.uint16)
    blocks_per_row = rows.shape[1] // kind.block_bytes
    columns = blocks_per_row * kind.block_elements
    out = np.empty((rows.shape[0], columns), np.float32)
    for part in _slices(rows.shape[0], max(1, _DECODE_BYTES // (4 * columns))):
        blocks = rows[part].reshape(-1, kind.block_bytes)
        out[part] = kind.dequantize(blocks).reshape(-1, columns)
    return out


def _slices(count: int, step: int) -> Iterable[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
