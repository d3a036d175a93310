"""A Hugging Face checkpoint directory: ``config.json`` and safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.fingerprint import fingerprint_files
from freetoken.checkpoint.safetensors_file import SafetensorsDirectory
from freetoken.checkpoint.source import SourceTensor, TensorSource
from freetoken.errors import CheckpointError, UnsupportedModelError

_EXACT_DTYPES = {"F32": "f32", "F16": "f32", "BF16": "bf16"}
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_FINGERPRINTED = ("*.safetensors", "*.json", "*.jinja")


def fingerprint_directory(directory: Path) -> str:
    """Identity of all files that a conversion of ``directory`` may read."""
    paths = {path for pattern in _FINGERPRINTED for path in directory.glob(pattern) if path.is_file()}
    return fingerprint_files(paths, directory)


class HfSource(TensorSource):
    """Reads a directory with F32, F16 (as F32) and BF16 tensors; other dtypes and quantised models are refused."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.config = read_json(self.path / "config.json")
        if quantization := self.config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise UnsupportedModelError(
                f"{self.path}: weights quantised with {method!r} are not supported; "
                "use the F32, F16 or BF16 checkpoint or a GGUF file"
            )
        self.fingerprint = fingerprint_directory(self.path)
        self.description = {"kind": "huggingface", "path": str(self.path.resolve())}
        self._files = SafetensorsDirectory(self.path)
        self.tensors = {}
        for name in self._files.names:
            entry = self._files.entry(name)
            if entry.dtype not in _EXACT_DTYPES:
                self.close()
                raise UnsupportedModelError(
                    f"{self._files.describe(name)} has dtype {entry.dtype}; supported: {sorted(_EXACT_DTYPES)}"
                )
            own_format = "f16" if entry.dtype == "F16" else ""
            self.tensors[name] = SourceTensor(entry.shape, _EXACT_DTYPES[entry.dtype], own_format)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """See ``TensorSource.read``."""
        rows = self._files.view(name)[start:stop]
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows

    def write_companions(self, directory: Path) -> None:
        """Copies the tokenizer's files; a template that hides in ``tokenizer_config.json`` gets its own file."""
        for name in _COMPANIONS:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, directory / name)
        if (directory / "tokenizer_config.json").exists() and not (directory / "chat_template.jinja").exists():
            template = read_json(directory / "tokenizer_config.json").get("chat_template")
            if isinstance(template, list):  # several named ones
                named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
                template = named.get("default")
            if isinstance(template, str):
                (directory / "chat_template.jinja").write_text(template, encoding="utf-8")

    def release(self) -> None:
        """See ``TensorSource.release``."""
        self._files.release()

    def close(self) -> None:
        """See ``TensorSource.close``."""
        self._files.close()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``CheckpointError`` naming the file otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
