"""FTW version 1: the checkpoint as the engine reads it.

A directory with ``ftw.json`` (the index), data files ``dense-NNNNN.ftw`` and ``experts-NNNNN.ftw``, and beside them the
companions of the model: ``config.json``, ``generation_config.json``, ``tokenizer.json``, ``tokenizer_config.json``,
``chat_template.jinja``. Data files are a multiple of 4,096 bytes long and are read whole, straight into the store.
Records (one routed expert of one layer each) start at multiples of 4,096 bytes, dense tensors at multiples of 64.
The index carries a CRC-32C of every record (its whole stride) and of every tensor, and a fingerprint of itself.

Reading an index checks all that can be checked without reading the data: see ``FtwIndex.load``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.integrity import digest_json
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.models.registry import dense_tensor_names, parse_model_config
from freetoken.models.spec import ModelSpec
from freetoken.quant.formats import FORMATS, Q4_0, plan_layout, tensor_bytes, unpack_record
from freetoken.quant.pack import STORAGE_DTYPES
from freetoken.quant.q4_0_matrix import Q4_0Matrix, matrix_view
from freetoken.quant.record import RECORD_ALIGNMENT_BYTES, RecordLayout

INDEX_NAME = "ftw.json"
FORMAT = "ftw"
VERSION = 1
FILE_ALIGNMENT_BYTES = 4096
TENSOR_ALIGNMENT_BYTES = 64
_FILE_NAME = re.compile(r"(?:dense|experts)-\d{5}\.ftw")
_Q4_0_NAME = re.compile(r"model\.embed_tokens\.weight|lm_head\.weight|model\.layers\.\d+\.\w+\.\w+_proj\.weight")

FileKind = Literal["dense", "experts"]


@dataclass(frozen=True, slots=True)
class FtwFile:
    """A data file. ``kind`` is ``dense`` (tensors) or ``experts`` (records)."""

    name: str
    size_bytes: int
    kind: FileKind


@dataclass(frozen=True, slots=True)
class FtwTensor:
    """A dense tensor, row-major; ``file_index`` is an index into ``FtwIndex.files``.

    ``dtype`` is ``f32``, ``bf16``, or ``q4_0``: then ``shape`` is [O, I] and the bytes are as in ``quant.q4_0_matrix``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_index: int
    offset_bytes: int
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, eq=False)
class FtwIndex:
    """The contents of ``ftw.json``. ``record_*`` are ``[L, E]``, by expert layer ordinal and expert; read-only."""

    path: Path
    version: int
    fingerprint: str
    source: dict[str, Any]
    model_config: dict[str, Any]
    spec: ModelSpec
    layouts: tuple[RecordLayout, ...]
    layer_layout: tuple[int, ...]
    files: tuple[FtwFile, ...]
    tensors: dict[str, FtwTensor]
    record_file: NDArray[np.int32]
    record_offset: NDArray[np.int64]
    record_crc32c: NDArray[np.uint32]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all dense tensors."""
        return sum(t.size_bytes for t in self.tensors.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of all records, padding included."""
        return self.spec.num_experts * sum(self.layouts[i].stride_bytes for i in self.layer_layout)

    @property
    def store_bytes(self) -> int:
        """Bytes of all data files: what the store occupies in memory."""
        return sum(f.size_bytes for f in self.files)

    @property
    def num_records(self) -> int:
        """Expert layers times experts."""
        return int(self.record_file.size)

    def layout_of(self, layer: int) -> RecordLayout:
        """The layout of expert layer ordinal ``layer``."""
        return self.layouts[self.layer_layout[layer]]

    def describe_record(self, layer: int, expert: int) -> str:
        """For messages: file, model layer and expert of a record."""
        name = self.files[int(self.record_file[layer, expert])].name
        return f"{self.path / name}: record of layer {self.spec.moe_layers[layer]} expert {expert}"

    def describe_tensor(self, name: str) -> str:
        """For messages: file and name of a dense tensor."""
        return f"{self.path / self.files[self.tensors[name].file_index].name}: tensor {name!r}"

    def content_json(self) -> dict[str, Any]:
        """What the fingerprint covers: all of the index but its source and the fingerprint itself."""
        return {
            "format": FORMAT,
            "version": self.version,
            "model_config": self.model_config,
            "record_layouts": [layout.to_json() for layout in self.layouts],
            "layer_layout": list(self.layer_layout),
            "files": [{"name": f.name, "size_bytes": f.size_bytes, "kind": f.kind} for f in self.files],
            "tensors": {
                t.name: {
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "file": t.file_index,
                    "offset_bytes": t.offset_bytes,
                    "size_bytes": t.size_bytes,
                    "crc32c": t.crc32c,
                }
                for t in self.tensors.values()
            },
            "records": {
                "file": self.record_file.tolist(),
                "offset_bytes": self.record_offset.tolist(),
                "crc32c": self.record_crc32c.tolist(),
            },
        }

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``ftw.json``."""
        content = self.content_json()
        head = {key: content.pop(key) for key in ("format", "version")}
        return {**head, "fingerprint": self.fingerprint, "source": self.source, **content}

    @classmethod
    def load(cls, path: str | Path) -> FtwIndex:
        """Read and check the index of the directory ``path``.

        Checked: format and version, fingerprint, every file's size on disk, that tensors are exactly those the model
        needs and have its shapes, that records have the model's geometry, alignment, ranges and overlaps. Raises
        ``CheckpointError`` naming file and tensor or record, ``UnsupportedModelError`` for a model or record format
        of another version.
        """
        directory = Path(path)
        index_path = directory / INDEX_NAME
        try:
            data = json.loads(index_path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{directory} is not an FTW checkpoint: it has no {INDEX_NAME}") from None
        except OSError as error:
            raise CheckpointError(f"{index_path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(f"{index_path}: not valid JSON (truncated or damaged): {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{index_path}: not an FTW index (its 'format' is not {FORMAT!r})")
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{index_path}: FTW version {data.get('version')!r} is not supported (this build reads version "
                f"{VERSION}); convert the checkpoint again"
            )
        try:
            index = cls._from_json(directory, data)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{index_path}: malformed index: {error!r}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{index_path}: {error}") from error
        if digest_json(index.content_json()) != index.fingerprint:
            raise CheckpointError(
                f"{index_path}: the index does not match its own fingerprint; it was edited or damaged. Convert again"
            )
        index.validate()
        return index

    @classmethod
    def _from_json(cls, directory: Path, data: dict[str, Any]) -> FtwIndex:
        config = dict(data["model_config"])
        records = data["records"]
        tensors = {
            str(name): FtwTensor(
                str(name),
                str(t["dtype"]),
                tuple(int(n) for n in t["shape"]),
                int(t["file"]),
                int(t["offset_bytes"]),
                int(t["size_bytes"]),
                int(t["crc32c"]),
            )
            for name, t in data["tensors"].items()
        }
        spec = parse_model_config(config)
        shape = (len(spec.moe_layers), spec.num_experts)
        return cls(
            path=directory,
            version=VERSION,
            fingerprint=str(data["fingerprint"]),
            source=dict(data["source"]),
            model_config=config,
            spec=spec,
            layouts=tuple(RecordLayout.from_json(layout) for layout in data["record_layouts"]),
            layer_layout=tuple(int(i) for i in data["layer_layout"]),
            files=tuple(
                FtwFile(str(f["name"]), int(f["size_bytes"]), cast(FileKind, str(f["kind"]))) for f in data["files"]
            ),
            tensors=tensors,
            record_file=_matrix(records["file"], shape, np.int32, "record files"),
            record_offset=_matrix(records["offset_bytes"], shape, np.int64, "record offsets"),
            record_crc32c=_matrix(records["crc32c"], shape, np.uint32, "record checksums"),
        )

    def validate(self) -> None:
        """The checks of ``load`` on the parsed index and the files beside it."""
        self._validate_files()
        self._validate_tensors()
        self._validate_layouts()
        self._validate_placement()

    def _fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path / INDEX_NAME}: {message}")

    def _validate_files(self) -> None:
        seen: set[str] = set()
        for file in self.files:
            if not _FILE_NAME.fullmatch(file.name) or file.name in seen or not file.name.startswith(f"{file.kind}-"):
                raise self._fail(f"data file name {file.name!r} of kind {file.kind!r} is not allowed or repeated")
            seen.add(file.name)
            if file.size_bytes <= 0 or file.size_bytes % FILE_ALIGNMENT_BYTES:
                raise self._fail(f"{file.name}: size {file.size_bytes} is not a positive multiple of 4096")
            path = self.path / file.name
            try:
                actual = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path}: data file cannot be opened: {error.strerror or error}") from error
            if actual != file.size_bytes:
                kind = "truncated" if actual < file.size_bytes else "longer than it should be"
                raise CheckpointError(
                    f"{path}: {kind}: {actual} bytes on disk, {file.size_bytes} in the index"
                    + self._first_lost(file, actual)
                )

    def _first_lost(self, file: FtwFile, actual_bytes: int) -> str:
        """Names the first tensor or record that a truncated file lost."""
        number = self.files.index(file)
        lost = [
            (t.offset_bytes, f"tensor {t.name!r}")
            for t in self.tensors.values()
            if t.file_index == number and t.offset_bytes + t.size_bytes > actual_bytes
        ]
        for layer, expert in np.argwhere(self.record_file == number).tolist():
            offset = int(self.record_offset[layer, expert])
            known = layer < len(self.layer_layout) and 0 <= self.layer_layout[layer] < len(self.layouts)
            if known and offset + self.layout_of(layer).stride_bytes > actual_bytes:
                lost.append((offset, f"the record of layer {self.spec.moe_layers[layer]} expert {expert}"))
        return f"; the first loss is {min(lost)[1]}" if lost else ""

    def _validate_tensors(self) -> None:
        wanted = dense_tensor_names(self.spec)
        if missing := [name for name in wanted if name not in self.tensors]:
            raise self._fail(f"tensor {missing[0]!r} is missing ({len(missing)} missing in all)")
        if extra := [name for name in self.tensors if name not in wanted]:
            raise self._fail(f"tensor {extra[0]!r} does not belong to the model ({len(extra)} such in all)")
        for tensor in self.tensors.values():
            if tensor.shape != wanted[tensor.name]:
                raise self._fail(
                    f"tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                    f"the model needs {list(wanted[tensor.name])}"
                )
            if tensor.dtype not in FORMATS:
                raise UnsupportedModelError(
                    f"{self.path / INDEX_NAME}: tensor {tensor.name!r} has dtype {tensor.dtype!r}; "
                    f"supported: {sorted(FORMATS)}"
                )
            if tensor.dtype == Q4_0 and not may_be_q4_0(tensor.name):
                raise self._fail(f"tensor {tensor.name!r} has dtype q4_0; only embeddings and projections can")
            if tensor.size_bytes != tensor_bytes(tensor.dtype, tensor.shape):
                raise self._fail(f"tensor {tensor.name!r}: {tensor.size_bytes} bytes contradict its dtype and shape")

    def _validate_layouts(self) -> None:
        if len(self.layer_layout) != len(self.spec.moe_layers):
            raise self._fail(
                f"layer_layout names {len(self.layer_layout)} expert layers, the model has {len(self.spec.moe_layers)}"
            )
        if bad := [i for i in self.layer_layout if not 0 <= i < len(self.layouts)]:
            raise self._fail(f"layer_layout names record layout {bad[0]}, there are {len(self.layouts)}")
        for layout in self.layouts:
            if layout.format not in FORMATS:
                raise UnsupportedModelError(
                    f"{self.path / INDEX_NAME}: record format {layout.format!r} is not supported; "
                    f"supported: {sorted(FORMATS)}"
                )
            if (layout.hidden, layout.intermediate) != (self.spec.hidden_size, self.spec.moe_intermediate_size):
                raise self._fail(
                    f"record layout of {layout.intermediate}x{layout.hidden} does not fit the model's "
                    f"{self.spec.moe_intermediate_size}x{self.spec.hidden_size} experts"
                )
            if layout != plan_layout(layout.format, layout.hidden, layout.intermediate, layout.tile_columns):
                raise self._fail(f"record layout {layout.format!r} is not the version {VERSION} layout of its sizes")

    def _validate_placement(self) -> None:
        """Ranges, alignment and overlaps of tensors and records in their files."""
        used: list[list[tuple[int, int, str]]] = [[] for _ in self.files]

        def place(kind: FileKind, number: int, offset: int, size: int, alignment: int, what: str) -> None:
            if not 0 <= number < len(self.files) or self.files[number].kind != kind:
                raise self._fail(f"{what} lies in file {number}, which is no {kind} file")
            file = self.files[number]
            if offset < 0 or offset % alignment or offset + size > file.size_bytes:
                raise CheckpointError(
                    f"{self.path / file.name}: {what} at offset {offset} with {size} bytes is misaligned or leaves the "
                    f"file of {file.size_bytes} bytes"
                )
            used[number].append((offset, size, what))

        for t in self.tensors.values():
            what = f"tensor {t.name!r}"
            place("dense", t.file_index, t.offset_bytes, t.size_bytes, TENSOR_ALIGNMENT_BYTES, what)
        for layer in range(len(self.layer_layout)):
            size = self.layout_of(layer).stride_bytes
            for expert in range(self.spec.num_experts):
                number, offset = int(self.record_file[layer, expert]), int(self.record_offset[layer, expert])
                what = f"record of layer {self.spec.moe_layers[layer]} expert {expert}"
                place("experts", number, offset, size, RECORD_ALIGNMENT_BYTES, what)
        for file, ranges in zip(self.files, used, strict=True):
            ranges.sort()
            for (offset, size, what), (next_offset, _, next_what) in itertools.pairwise(ranges):
                if offset + size > next_offset:
                    raise CheckpointError(f"{self.path / file.name}: {what} and {next_what} overlap")

    def read_tensor(self, name: str) -> NDArray[np.generic]:
        """A dense tensor from disk (float32, which Q4_0 becomes exactly, or uint16 holding BF16). For tools and tests;
        no checksum."""
        tensor = self.tensors[name]
        raw = self._read(tensor.file_index, tensor.offset_bytes, tensor.size_bytes)
        if tensor.dtype == Q4_0:
            return matrix_view(raw, tensor.shape).dequantize()
        return raw.view(STORAGE_DTYPES[tensor.dtype]).reshape(tensor.shape)

    def read_expert(
        self, layer: int, expert: int
    ) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
        """Gate ``[I, H]``, up ``[I, H]``, down ``[H, I]`` of a record from disk, in dtypes like ``read_tensor``'s. For
        tools and tests; no checksum."""
        layout = self.layout_of(layer)
        number, offset = int(self.record_file[layer, expert]), int(self.record_offset[layer, expert])
        return unpack_record(layout, self._read(number, offset, layout.stride_bytes))

    def _read(self, number: int, offset: int, size: int) -> NDArray[np.uint8]:
        path = self.path / self.files[number].name
        raw = np.fromfile(path, np.uint8, size, offset=offset)
        if raw.size != size:
            raise CheckpointError(f"{path}: truncated: {raw.size} of {size} bytes at offset {offset}")
        return raw


def _matrix(value: Any, shape: tuple[int, int], dtype: type[np.generic], what: str) -> NDArray[Any]:
    wide = np.asarray(value, np.int64).reshape(shape) if 0 in shape else np.asarray(value, np.int64)
    if wide.shape != shape:
        raise CheckpointError(f"{what} have shape {list(wide.shape)}, the model needs {list(shape)}")
    limits = np.iinfo(cast(Any, dtype))
    if wide.size and (wide.min() < limits.min or wide.max() > limits.max):
        raise CheckpointError(f"{what} hold a value outside {limits.dtype}")
    return wide.astype(dtype)


def may_be_q4_0(name: str) -> bool:
    """Whether the dense tensor of this canonical name can be stored in Q4_0: embeddings and projections. Norms, biases
    and routers stay floating-point numbers."""
    return _Q4_0_NAME.fullmatch(name) is not None


def open_dense_tensors(index: FtwIndex, segments: Sequence[Any]) -> dict[str, NDArray[Any] | Q4_0Matrix]:
    """Views of all dense tensors in the store, by canonical name (BF16 as uint16).

    ``segments[i]`` is a buffer with the bytes of ``index.files[i]``. The views share the segments' memory and keep them
    alive; nobody writes to them.
    """
    views: dict[str, NDArray[Any] | Q4_0Matrix] = {}
    for tensor in index.tensors.values():
        raw = np.frombuffer(segments[tensor.file_index], np.uint8, tensor.size_bytes, tensor.offset_bytes)
        if tensor.dtype == Q4_0:
            views[tensor.name] = matrix_view(raw, tensor.shape)
        else:
            views[tensor.name] = raw.view(STORAGE_DTYPES[tensor.dtype]).reshape(tensor.shape)
    return views
