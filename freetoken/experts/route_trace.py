"""Route traces: which experts every publish of a running model named. The file is described in docs/route-trace.md."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FreeTokenError

MAGIC = b"FTROUTES"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
_RECORD = struct.Struct("<QIIHHI")
_NO_EXPERT = 0xFFFF
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 1 << 20
MAX_EXPERTS = _NO_EXPERT


class TraceError(FreeTokenError):
    """A trace that cannot be read, or does not hold what is asked of it."""


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What a trace is of. ``record_bytes`` [L], or empty where the source did not say."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    record_bytes: tuple[int, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name, limit in (("num_layers", 1 << 12), ("num_experts", MAX_EXPERTS), ("top_k", self.num_experts)):
            if not 1 <= getattr(self, name) <= limit:
                raise TraceError(f"route trace: {name} {getattr(self, name)} is not in 1..{limit}")
        if self.record_bytes and len(self.record_bytes) != self.num_layers:
            raise TraceError(f"route trace: {len(self.record_bytes)} record_bytes for {self.num_layers} layers")


@dataclass(frozen=True, eq=False, slots=True)
class RouteTrace:
    """N publishes in order, and their R tokens one after the other.

    ``layers``, ``token_counts`` int32 [N] and ``step_ids`` int64 [N]; ``ids`` int32 [R, K] (-1: none), ``weights``
    float32 [R, K], ``admit`` uint8 [R] (the mailbox's flags). ``truncated``: the file ended within a publish.
    """

    info: TraceInfo
    layers: NDArray[np.int32]
    token_counts: NDArray[np.int32]
    step_ids: NDArray[np.int64]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    admit: NDArray[np.uint8]
    truncated: bool = False

    @property
    def num_publishes(self) -> int:
        """N."""
        return len(self.layers)

    @property
    def num_tokens(self) -> float:
        """Tokens that passed through the model: tokens of all publishes by the number of layers."""
        return len(self.ids) / self.info.num_layers

    def uses(self) -> list[NDArray[np.int64]]:
        """The distinct records of each publish, as ``layer * E + expert``, ascending."""
        ends = np.cumsum(self.token_counts, dtype=np.int64)
        result = []
        for layer, begin, end in zip(self.layers, ends - self.token_counts, ends, strict=True):
            experts = np.unique(self.ids[begin:end]).astype(np.int64)
            result.append(int(layer) * self.info.num_experts + experts[experts >= 0])
        return result


def encode_header(info: TraceInfo) -> bytes:
    """The beginning of a file; records follow."""
    text = json.dumps(
        {
            "model": info.model,
            "num_layers": info.num_layers,
            "num_experts": info.num_experts,
            "top_k": info.top_k,
            "record_bytes": list(info.record_bytes),
            "source": info.source,
        }
    ).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def encode_record(
    step_id: int, layer: int, ids: NDArray[np.int32], weights: NDArray[np.float32], admit: NDArray[np.uint8]
) -> bytes:
    """One publish: ``ids`` and ``weights`` [T, K], ``admit`` [T]."""
    num_tokens, top_k = ids.shape
    bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    body = _RECORD.pack(step_id, layer, num_tokens, top_k, 0, 0)
    body += (ids & 0xFFFF).astype("<u2").tobytes() + halves.tobytes() + admit.astype(np.uint8).tobytes()
    return body + b"\0" * (-len(body) % _ALIGNMENT)


def write_trace(path: str | Path, trace: RouteTrace) -> None:
    """Write a whole trace."""
    ends = np.cumsum(trace.token_counts, dtype=np.int64)
    with open(path, "wb") as file:
        file.write(encode_header(trace.info))
        for i, end in enumerate(ends):
            rows = slice(int(end - trace.token_counts[i]), int(end))
            file.write(
                encode_record(
                    int(trace.step_ids[i]),
                    int(trace.layers[i]),
                    trace.ids[rows],
                    trace.weights[rows],
                    trace.admit[rows],
                )
            )


def read_trace(path: str | Path) -> RouteTrace:
    """Read a trace into memory. A file that ends within a publish (its writer was killed) is read up to there.

    Raises ``TraceError`` for anything that is not such a file or contradicts itself, ``OSError`` when it is not there.
    """
    data = Path(path).read_bytes()
    info, at = _decode_header(data, str(path))
    return decode_records(info, data[at:], str(path))


def _decode_header(data: bytes | mmap.mmap, name: str) -> tuple[TraceInfo, int]:
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{name}: not a route trace (it does not begin with {MAGIC.decode()})")
    _, version, size = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise TraceError(f"{name}: route trace of version {version}; this program reads version {VERSION}")
    if size > min(_MAX_HEADER_BYTES, len(data) - _PREFIX.size):
        raise TraceError(f"{name}: its header of {size} bytes is not complete")
    try:
        fields: dict[str, Any] = json.loads(data[_PREFIX.size : _PREFIX.size + size])
        info = TraceInfo(
            str(fields["model"]),
            int(fields["num_layers"]),
            int(fields["num_experts"]),
            int(fields["top_k"]),
            tuple(int(n) for n in fields.get("record_bytes", ())),
            str(fields.get("source", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{name}: its header is damaged: {error!r}") from None
    return info, _PREFIX.size + size


def decode_records(info: TraceInfo, data: bytes, name: str = "route records") -> RouteTrace:
    """Records as they lie in a file, without its header."""
    at, k = 0, info.top_k
    layers: list[int] = []
    counts: list[int] = []
    steps: list[int] = []
    ids: list[NDArray[np.int32]] = []
    weights: list[NDArray[np.float32]] = []
    admit: list[NDArray[np.uint8]] = []
    while len(data) - at >= _RECORD.size:
        step_id, layer, num_tokens, top_k, _, _ = _RECORD.unpack_from(data, at)
        if top_k != k or layer >= info.num_layers:
            raise TraceError(
                f"{name}: publish {len(layers)} is of layer {layer} of {info.num_layers}, with {top_k} experts of {k}"
            )
        routes, body = num_tokens * k, at + _RECORD.size
        end = body + 4 * routes + num_tokens
        if end > len(data):
            break
        chosen = np.frombuffer(data, "<u2", routes, body).astype(np.int32)
        chosen[chosen == _NO_EXPERT] = -1
        ids.append(chosen)
        weights.append((np.frombuffer(data, "<u2", routes, body + 2 * routes).astype(np.uint32) << 16).view(np.float32))
        admit.append(np.frombuffer(data, np.uint8, num_tokens, body + 4 * routes))
        layers.append(layer)
        counts.append(num_tokens)
        steps.append(step_id)
        at = end + -(end - at) % _ALIGNMENT
    trace = RouteTrace(
        info,
        np.array(layers, np.int32),
        np.array(counts, np.int32),
        np.array(steps, np.int64),
        _joined(ids, np.int32).reshape(-1, k),
        _joined(weights, np.float32).reshape(-1, k),
        _joined(admit, np.uint8),
        truncated=at < len(data),
    )
    if trace.ids.size and int(trace.ids.max()) >= info.num_experts:
        raise TraceError(f"{name}: it names expert {int(trace.ids.max())} of {info.num_experts}")
    return trace


def measure_records(data: bytes | memoryview, limit_bytes: int) -> tuple[int, int, int]:
    """Of the whole records at the beginning of ``data`` (without a header) that take at most ``limit_bytes``:
    (publishes, token rows, bytes)."""
    at = publishes = rows = 0
    limit_bytes = min(limit_bytes, len(data))
    while at + _RECORD.size <= limit_bytes:
        _, _, num_tokens, top_k, _, _ = _RECORD.unpack_from(data, at)
        size = _RECORD.size + 4 * num_tokens * top_k + num_tokens
        end = at + size + -size % _ALIGNMENT
        if end > limit_bytes:
            break
        at, publishes, rows = end, publishes + 1, rows + num_tokens
    return publishes, rows, at


def measure_trace(path: str | Path) -> tuple[TraceInfo, int, int, int]:
    """(what it is of, publishes, token rows, bytes) of a trace file up to its last whole publish, which stays on disk.
    Raises as ``read_trace``."""
    with Path(path).open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:  # cannot be mapped
            _decode_header(b"", str(path))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            info, begin = _decode_header(data, str(path))
            with memoryview(data) as whole, whole[begin:] as records:
                publishes, rows, size = measure_records(records, size_bytes)
    return info, publishes, rows, begin + size


def _joined(parts: Iterable[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    parts = list(parts)
    return np.concatenate(parts) if parts else np.empty(0, dtype)
