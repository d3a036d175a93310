"""Reader of the safetensors container.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes. The header maps each name to
dtype, shape and the half-open byte range in the data part; ranges cover the data part exactly, without overlap or hole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from freetoken.checkpoint.mapped_file import MappedFile
from freetoken.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
INDEX_SUFFIX = ".safetensors.index.json"
_INDEX_NAME = "model" + INDEX_SUFFIX

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_NUMPY_DTYPES = {
    "BOOL": "?", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """``offset_bytes`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class SafetensorsFile:
    """One file, mapped. Raises ``CheckpointError`` naming file and tensor when anything does not add up."""

    def __init__(self, path: str | Path) -> None:
        self._file = MappedFile(path)
        try:
            self.metadata, self.entries = _parse_header(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._file.path

    def view(self, name: str) -> NDArray[Any]:
        """The tensor without a copy. BF16 comes as uint16, 8-bit floats as uint8; types narrower than a byte as their
        packed bytes, flat."""
        entry = self.entries[name]
        raw = self._file.data[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        if DTYPE_BITS[entry.dtype] < 8:
            return raw
        return raw.view(_NUMPY_DTYPES.get(entry.dtype, "u1")).reshape(entry.shape)

    def release(self) -> None:
        """See ``MappedFile.release``."""
        self._file.release()

    def close(self) -> None:
        """See ``MappedFile.close``."""
        self._file.close()


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _parse_header(file: MappedFile) -> tuple[dict[str, str], dict[str, SafetensorsEntry]]:
    path = file.path
    if file.size_bytes < 8:
        raise CheckpointError(f"{path}: not a safetensors file: only {file.size_bytes} bytes long")
    header_bytes = int.from_bytes(file.bytes_at(0, 8), "little")
    if header_bytes > MAX_HEADER_BYTES or file.bytes_at(8, 1) != b"{":
        raise CheckpointError(f"{path}: not a safetensors file (its first bytes are no header)")
    start = 8 + header_bytes
    if start > file.size_bytes:
        raise CheckpointError(
            f"{path}: truncated: the header alone needs {start} bytes, the file has {file.size_bytes}"
        )
    try:
        header = json.loads(file.bytes_at(8, header_bytes), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header: {error}") from error
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: damaged safetensors header: __metadata__ is not an object")
    entries = {name: _parse_entry(path, name, value, start) for name, value in header.items()}
    end, previous = start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset_bytes, e.size_bytes)):
        if entry.offset_bytes != end:
            kind = "overlaps" if entry.offset_bytes < end else "leaves a hole after"
            raise CheckpointError(f"{path}: tensor {entry.name!r} {kind} {previous}")
        end, previous = entry.offset_bytes + entry.size_bytes, f"tensor {entry.name!r}"
        if end > file.size_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {entry.name!r} ends at byte {end}, the file has {file.size_bytes} bytes"
            )
    if end != file.size_bytes:
        raise CheckpointError(f"{path}: {file.size_bytes - end} bytes after the last tensor belong to no tensor")
    return {str(k): str(v) for k, v in metadata.items()}, entries


def _parse_entry(path: Path, name: str, value: Any, start: int) -> SafetensorsEntry:
    try:
        dtype = str(value["dtype"])
        shape = tuple(int(n) for n in value["shape"])
        begin, end = (int(n) for n in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r}: damaged header entry: {error!r}") from error
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if min((*shape, begin), default=0) < 0 or bits % 8 or end - begin != bits // 8:
        raise CheckpointError(
            f"{path}: tensor {name!r}: bytes {begin} to {end} do not hold {dtype} values of shape {list(shape)}"
        )
    return SafetensorsEntry(name, dtype, shape, start + begin, end - begin)


class SafetensorsDirectory:
    """All tensors of a checkpoint directory: a single file, or shards with ``model.safetensors.index.json``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, SafetensorsFile] = {}
        self._where: dict[str, SafetensorsFile] = {}
        try:
            index = self.path / _INDEX_NAME
            if index.exists():
                self._open_shards(index)
            else:
                self._add(find_single_file(self.path))
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> SafetensorsFile:
        file = self._files[name] = SafetensorsFile(self.path / name)
        for tensor in file.entries:
            if tensor in self._where:
                raise CheckpointError(f"{file.path}: tensor {tensor!r} is also in {self._where[tensor].path.name}")
            self._where[tensor] = file
        return file

    def _open_shards(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            pairs = [(str(tensor), str(name)) for tensor, name in weight_map.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: damaged or foreign shard index: {error!r}") from error
        for name in sorted({name for _, name in pairs}):
            if Path(name).name != name:
                raise CheckpointError(f"{index}: shard name {name!r} leaves the directory")
            self._add(name)
        for tensor, name in pairs:
            if tensor not in self._files[name].entries:
                raise CheckpointError(f"{self.path / name}: tensor {tensor!r} is missing, though {index.name} lists it")
        if unlisted := sorted(set(self._where) - set(weight_map)):
            raise CheckpointError(f"{self._where[unlisted[0]].path}: tensor {unlisted[0]!r} is not in {index.name}")

    @property
    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._where.keys()

    def entry(self, name: str) -> SafetensorsEntry:
        """Dtype, shape and place of a tensor."""
        return self._where[name].entries[name]

    def describe(self, name: str) -> str:
        """For messages: file and tensor."""
        return f"{self._where[name].path}: tensor {name!r}"

    def view(self, name: str) -> NDArray[Any]:
        """See ``SafetensorsFile.view``."""
        return self._where[name].view(name)

    def release(self) -> None:
        """See ``MappedFile.release``."""
        for file in self._files.values():
            file.release()

    def close(self) -> None:
        """See ``MappedFile.close``."""
        for file in self._files.values():
            file.close()


def find_single_file(directory: Path) -> str:
    """Name of the only safetensors file of a directory without a shard index; ``CheckpointError`` otherwise."""
    names = sorted(p.name for p in directory.glob("*.safetensors"))
    if "model.safetensors" in names:
        return "model.safetensors"
    if len(names) == 1:
        return names[0]
    if names:
        raise CheckpointError(f"{directory}: {len(names)} safetensors files but no {_INDEX_NAME} that joins them")
    pickled = sorted(p.name for p in directory.glob("*.bin"))
    hint = f"; {pickled[0]} is a pickled checkpoint, convert it to safetensors first" if pickled else ""
    raise CheckpointError(f"{directory}: no safetensors file{hint}")
