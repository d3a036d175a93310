"""Reader of the GGUF container, versions 2 and 3 (little-endian).

A file is a header, metadata (typed key-value pairs), the tensor table, padding, and the tensors' bytes.
The table stores dimensions innermost first; here shapes are row-major, as numpy has them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.mapped_file import MappedFile
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.quant.gguf_types import GGUF_TYPES, describe_type
from freetoken.units import align_up

MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NESTING = 8
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """``offset_bytes`` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int
    size_bytes: int


class GgufFile:
    """One file, mapped; metadata and tensor table are parsed and checked at once.

    Raises ``CheckpointError`` naming file and key or tensor for a foreign, truncated or inconsistent file, and
    ``UnsupportedModelError`` for a tensor type that cannot be decoded.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = MappedFile(path)
        try:
            cursor = _Cursor(self._file)
            num_tensors, num_keys = _read_header(cursor)
            self.metadata = _read_metadata(cursor, num_keys)
            self.tensors = self._read_table(cursor, num_tensors)
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._file.path

    def _read_table(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment {alignment!r} is not a power of two")
        raw = [_read_table_entry(cursor) for _ in range(count)]
        start = align_up(cursor.position, alignment)
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in raw:
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} appears twice")
            tensors[name] = self._check_tensor(name, shape, type_id, start, offset, alignment)
        end, previous = start, "the tensor table"
        for tensor in sorted(tensors.values(), key=lambda t: (t.offset_bytes, t.size_bytes)):
            if tensor.offset_bytes < end:
                raise CheckpointError(f"{self.path}: tensor {tensor.name!r} overlaps {previous}")
            end, previous = tensor.offset_bytes + tensor.size_bytes, f"tensor {tensor.name!r}"
            if end > self._file.size_bytes:
                raise CheckpointError(
                    f"{self.path}: truncated: tensor {tensor.name!r} ends at byte {end}, "
                    f"the file has {self._file.size_bytes} bytes"
                )
        return tensors

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, start: int, offset: int, alignment: int
    ) -> GgufTensor:
        what = f"{self.path}: tensor {name!r}"
        if type_id not in GGUF_TYPES:
            supported = ", ".join(t.name for t in GGUF_TYPES.values())
            raise UnsupportedModelError(
                f"{what} has {describe_type(type_id)}, which is not supported ({supported} are)"
            )
        kind = GGUF_TYPES[type_id]
        if min(shape) < 1 or shape[-1] % kind.block_elements:
            raise CheckpointError(
                f"{what}: shape {list(shape)} is not made of {kind.name} blocks of {kind.block_elements}"
            )
        if offset % alignment:
            raise CheckpointError(f"{what}: offset {offset} is not a multiple of the alignment {alignment}")
        size = math.prod(shape) // kind.block_elements * kind.block_bytes
        return GgufTensor(name, shape, type_id, start + offset, size)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as ``[rows, bytes per row]`` without a copy; a row is one run along the last axis."""
        tensor = self.tensors[name]
        raw = self._file.data[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        return raw.reshape(math.prod(tensor.shape[:-1]), -1)

    def release(self) -> None:
        """See ``MappedFile.release``."""
        self._file.release()

    def close(self) -> None:
        """See ``MappedFile.close``."""
        self._file.close()


class _Cursor:
    """Sequential reads that never leave the file."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.position = 0
        self._file = file

    def take(self, size: int, what: str) -> bytes:
        if size > self._file.size_bytes - self.position:
            raise CheckpointError(
                f"{self.path}: truncated or damaged: {what} at byte {self.position} needs {size} bytes, "
                f"{self._file.size_bytes - self.position} are left"
            )
        data = self._file.bytes_at(self.position, size)
        self.position += size
        return data

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0])

    def string(self, what: str) -> str:
        data = self.take(self.number("Q", what), what)
        return data.decode("utf-8", errors="surrogateescape")


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    if (magic := cursor.take(4, "the magic")) != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file (it begins with {magic!r})")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        reason = "it is big-endian" if version & 0xFFFF == 0 and version else "versions 2 and 3 are"
        raise CheckpointError(f"{cursor.path}: GGUF version {version} is not supported; {reason}")
    return cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        what = f"metadata key {key!r}"
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: {what} appears twice")
        metadata[key] = _read_value(cursor, cursor.number("I", what), what, 0)
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str, depth: int) -> Any:
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(cursor.take(dtype.itemsize, what), dtype)[0].item()
    if kind == _BOOL:
        return cursor.take(1, what) != b"\0"
    if kind == _STRING:
        return cursor.string(what)
    if kind != _ARRAY or depth >= _MAX_NESTING:
        raise CheckpointError(f"{cursor.path}: {what} has the unknown value type {kind}")
    element, count = cursor.number("I", what), cursor.number("Q", what)
    if element in _SCALARS:
        dtype = np.dtype(_SCALARS[element])
        return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype).tolist()
    return [_read_value(cursor, element, what, depth + 1) for _ in range(count)]


def _read_table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name")
    what = f"the table entry of tensor {name!r}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are")
    shape = tuple(cursor.number("Q", what) for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I", what), cursor.number("Q", what)
