"""Writer of the GGUF container (version 3, little-endian): everything before the tensors' bytes, and where those go."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.checkpoint.gguf_file import MAGIC, GgufTensor
from freetoken.errors import CheckpointError
from freetoken.quant.gguf_types import GGUF_TYPES
from freetoken.units import align_up

_VERSION = 3
_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """``header`` starts the file; each tensor's bytes lie at its offset; ``size_bytes`` is the file's length."""

    header: bytes
    tensors: dict[str, GgufTensor]
    size_bytes: int


def plan_gguf(metadata: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], int]]) -> GgufPlan:
    """A file with ``metadata`` and ``tensors`` (name, row-major shape, type number).

    Numbers become uint32 (int32 in lists and where negative) or float32. Raises ``CheckpointError``
    for a value that has no such type and for a shape that is not made of the type's blocks.
    """
    head = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        kind = _kind_of(key, value)
        head += _string(key) + struct.pack("<I", kind) + _value(key, kind, value)
    placed: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    end = 0
    for name, shape, type_id in tensors:
        kind_of_block = GGUF_TYPES[type_id]
        if shape[-1] % kind_of_block.block_elements or name in placed:
            raise CheckpointError(f"GGUF tensor {name!r} of shape {list(shape)} cannot be {kind_of_block.name}")
        size = math.prod(shape) // kind_of_block.block_elements * kind_of_block.block_bytes
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", type_id, end)
        placed[name] = (shape, type_id, end, size)
        end = align_up(end + size, _ALIGNMENT)
    head += bytes(align_up(len(head), _ALIGNMENT) - len(head))
    start = len(head)
    table = {
        name: GgufTensor(name, shape, type_id, start + offset, size)
        for name, (shape, type_id, offset, size) in placed.items()
    }
    return GgufPlan(bytes(head), table, start + end)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _kind_of(key: str, value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _U32 if value >= 0 else _I32
    if isinstance(value, float):
        return _F32
    if isinstance(value, str):
        return _STRING
    if isinstance(value, list) and value:
        return _ARRAY
    raise CheckpointError(f"GGUF metadata {key!r}: {value!r} has no GGUF type")


def _value(key: str, kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        kinds = {_kind_of(key, v) for v in value}
        kinds = {_I32 if kind == _U32 else kind for kind in kinds}  # what readers expect of token types
        element = kinds.pop()
        if kinds or element == _ARRAY:
            raise CheckpointError(f"GGUF metadata {key!r}: a list must have elements of one type")
        return struct.pack("<IQ", element, len(value)) + b"".join(_value(key, element, v) for v in value)
    if kind == _STRING:
        return _string(value)
    try:
        return struct.pack({_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"}[kind], value)
    except (struct.error, OverflowError) as error:
        raise CheckpointError(f"GGUF metadata {key!r}: {value!r} does not fit its GGUF type") from error
