"""What a checkpoint must offer to be converted: a configuration and tensors under their Hugging Face names."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError
from freetoken.models.registry import parse_model_config
from freetoken.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """``dtype`` is the narrowest of ``f32`` and ``bf16`` that holds the tensor's values exactly; ``read`` gives it.

    ``format`` is how the source stores it, when that is neither (``q4_0``, ``q6_k``, ``f16`` ...), else empty.
    """

    shape: tuple[int, ...]
    dtype: str
    format: str = ""

    @property
    def own_format(self) -> str:
        """``format``, or ``dtype`` when that is how the source stores it."""
        return self.format or self.dtype


def parse_source_config(config: dict[str, Any]) -> ModelSpec:
    """Like ``parse_model_config``, with ``CheckpointError`` for values that are missing or of a wrong kind."""
    try:
        return parse_model_config(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"the model's configuration is malformed: {error!r}") from error


class TensorSource(abc.ABC):
    """A checkpoint of a foreign format. Reads lazily; not thread-safe."""

    description: dict[str, Any]
    """Kind and whereabouts, for the index."""
    fingerprint: str
    """Identity of the source files; see ``resolve.fingerprint_files``."""
    config: dict[str, Any]
    """The content of a Hugging Face ``config.json``."""
    tensors: Mapping[str, SourceTensor]

    @abc.abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """Rows ``start:stop`` (first axis) in the tensor's dtype: float32, or uint16 holding BF16."""

    def read_blocks(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """Rows of a matrix whose format is ``q4_0`` as GGUF blocks ``[rows, columns / 32, 18]``, bit for bit."""
        raise CheckpointError(f"tensor {name!r} has no quantised blocks")

    def write_companions(self, directory: Path) -> None:
        """Copy or produce tokenizer, chat template and generation defaults in ``directory``, as far as known."""
        return

    def release(self) -> None:
        """Let go of cached pages; called between parts of a conversion."""
        return

    def close(self) -> None:
        """Release files. Idempotent."""
        return


class ArraySource(TensorSource):
    """A checkpoint in memory: ``config.json`` content and arrays by Hugging Face name (float32, or uint16 for BF16)."""

    def __init__(self, config: dict[str, Any], arrays: Mapping[str, NDArray[Any]], fingerprint: str = "memory") -> None:
        for name, array in arrays.items():
            if array.dtype not in (np.float32, np.uint16):
                raise TypeError(f"tensor {name!r} is {array.dtype}; float32 or uint16 (BF16) is needed")
        self.config = dict(config)
        self.description = {"kind": "memory"}
        self.fingerprint = fingerprint
        self._arrays = arrays
        self.tensors = {
            name: SourceTensor(tuple(array.shape), "f32" if array.dtype == np.float32 else "bf16")
            for name, array in arrays.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """See ``TensorSource.read``."""
        rows: NDArray[np.generic] = self._arrays[name][start:stop]
        return rows
