"""Writing FTW: placement of everything first, then part by part, then one rename.

A conversion works in ``.<name>.partial`` beside its destination. A part is one dense tensor or one record; each
finished part is a line in the journal ``progress.jsonl`` with its checksum. An interrupted conversion that is started
again with the same source and options re-reads the finished parts, keeps those whose checksum holds, and goes on with
the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.ftw import (
    FILE_ALIGNMENT_BYTES,
    INDEX_NAME,
    TENSOR_ALIGNMENT_BYTES,
    VERSION,
    FileKind,
    FtwFile,
    FtwIndex,
    FtwTensor,
)
from freetoken.checkpoint.integrity import crc32c, digest_json
from freetoken.errors import CheckpointError
from freetoken.models.registry import dense_tensor_names, parse_model_config
from freetoken.quant.formats import Q4_0, plan_layout, tensor_bytes
from freetoken.quant.q4_0_matrix import scales_offset_bytes
from freetoken.quant.q4_0_record import split_blocks
from freetoken.quant.record import RECORD_ALIGNMENT_BYTES
from freetoken.units import align_up, format_bytes

MAX_FILE_BYTES = 8 * 1024**3
_SMALLEST_FULL_FILE_BYTES = 256 * 1024**2
JOURNAL_NAME = "progress.jsonl"
_READ_CHUNK_BYTES = 16 * 1024**2


def plan_index(
    model_config: dict[str, Any],
    dense_dtypes: Mapping[str, str],
    layer_dtypes: Sequence[str],
    *,
    tile_columns: int | None = None,
    max_file_bytes: int | None = None,
    path: str | Path = "",
) -> FtwIndex:
    """Where everything will lie: an index without checksums and fingerprint.

    ``dense_dtypes`` has the dtype of each canonical tensor, ``layer_dtypes`` that of each expert layer's records, both
    of ``quant.formats.FORMATS``.
    ``max_file_bytes`` None chooses a size that makes some tens of files, so that a loader can check one file while it
    reads the next; never above ``MAX_FILE_BYTES``. Raises ``CheckpointError`` when a tensor or record is larger than a
    file may be.
    """
    spec = parse_model_config(model_config)
    sizes = {name: tensor_bytes(dense_dtypes[name], shape) for name, shape in dense_tensor_names(spec).items()}
    layer_layouts = [
        plan_layout(dtype, spec.hidden_size, spec.moe_intermediate_size, tile_columns) for dtype in layer_dtypes
    ]
    layouts = tuple(dict.fromkeys(layer_layouts))
    if max_file_bytes is None:
        total = sum(sizes.values()) + spec.num_experts * sum(layout.stride_bytes for layout in layer_layouts)
        largest = max(*sizes.values(), *(layout.stride_bytes for layout in layouts))
        max_file_bytes = min(MAX_FILE_BYTES, align_up(max(_SMALLEST_FULL_FILE_BYTES, total // 64, largest), 4096))
    packer = _FilePacker(max_file_bytes)
    tensors = {}
    for name, shape in dense_tensor_names(spec).items():
        number, offset = packer.place("dense", sizes[name], TENSOR_ALIGNMENT_BYTES, f"tensor {name!r}")
        tensors[name] = FtwTensor(name, dense_dtypes[name], shape, number, offset, sizes[name], 0)
    shape = (len(spec.moe_layers), spec.num_experts)
    record_file, record_offset = np.zeros(shape, np.int32), np.zeros(shape, np.int64)
    for layer, layout in enumerate(layer_layouts):
        for expert in range(spec.num_experts):
            what = f"record of layer {spec.moe_layers[layer]} expert {expert}"
            number, offset = packer.place("experts", layout.stride_bytes, RECORD_ALIGNMENT_BYTES, what)
            record_file[layer, expert], record_offset[layer, expert] = number, offset
    return FtwIndex(
        path=Path(path),
        version=VERSION,
        fingerprint="",
        source={},
        model_config=model_config,
        spec=spec,
        layouts=layouts,
        layer_layout=tuple(layouts.index(layout) for layout in layer_layouts),
        files=packer.files(),
        tensors=tensors,
        record_file=record_file,
        record_offset=record_offset,
        record_crc32c=np.zeros(shape, np.uint32),
    )


class _FilePacker:
    """Fills files in order; kinds do not mix."""

    def __init__(self, max_file_bytes: int) -> None:
        self._limit = max_file_bytes // FILE_ALIGNMENT_BYTES * FILE_ALIGNMENT_BYTES
        self._ends: list[tuple[FileKind, int]] = []

    def place(self, kind: FileKind, size: int, alignment: int, what: str) -> tuple[int, int]:
        if size > self._limit:
            raise CheckpointError(f"{what} has {size} bytes; a data file holds at most {self._limit}")
        offset = align_up(self._ends[-1][1], alignment) if self._ends and self._ends[-1][0] == kind else 0
        if not self._ends or self._ends[-1][0] != kind or offset + size > self._limit:
            offset = 0
            self._ends.append((kind, 0))
        self._ends[-1] = (kind, offset + size)
        return len(self._ends) - 1, offset

    def files(self) -> tuple[FtwFile, ...]:
        counts: dict[str, int] = {}
        files = []
        for kind, end in self._ends:
            number = counts.setdefault(kind, 0)
            counts[kind] += 1
            files.append(FtwFile(f"{kind}-{number:05d}.ftw", align_up(end, FILE_ALIGNMENT_BYTES), kind))
        return tuple(files)


class FtwWriter:
    """One conversion's output. Use as a context manager; leaving it without ``finish`` keeps the finished parts.

    ``identity`` stands for the source: a partial directory of another identity or plan is discarded. Every method
    raises ``CheckpointError``; an operating system's refusal (disk full, quota, I/O error) is one that says how to
    go on.
    """

    def __init__(self, destination: str | Path, plan: FtwIndex, identity: str, *, overwrite: bool = False) -> None:
        self.destination = Path(destination).resolve()
        self.partial = self.destination.with_name(f".{self.destination.name}.partial")
        self._plan = plan
        self._identity = digest_json([identity, plan.content_json()])
        self._overwrite = overwrite
        self._directory_fd = -1
        self._fds: list[int] = []
        self._journal_fd = -1
        self._tensor_crc: dict[str, int] = {}
        self._record_crc: dict[tuple[int, int], int] = {}
        self.resumed_bytes = 0

    def __enter__(self) -> FtwWriter:
        try:
            check_destination(self.destination, self._overwrite)
            with self._translate("prepare"):
                self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close files and drop the lock. Idempotent."""
        for fd in (*self._fds, self._journal_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._fds, self._journal_fd, self._directory_fd = [], -1, -1

    # ------------------------------------------------------------------------------------------ resuming

    def _open(self) -> None:
        self.destination.parent.mkdir(parents=True, exist_ok=True)
        self._lock()
        done = self._read_journal()
        if done is None:
            for entry in self.partial.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self._check_space()
        for file in self._plan.files:
            fd = os.open(self.partial / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._fds.append(fd)
            os.ftruncate(fd, file.size_bytes)
        if done is not None:
            self._keep_sound_parts(*done)
        self._write_journal()

    def _lock(self) -> None:
        """Hold the partial directory for this process; a directory renamed away meanwhile is not ours."""
        while True:
            self.partial.mkdir(exist_ok=True)
            fd = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self.partial.stat()):
                    self._directory_fd = fd
                    return
            except BlockingIOError:
                os.close(fd)
                raise CheckpointError(f"{self.destination}: another process is converting into it right now") from None
            except FileNotFoundError:
                pass
            os.close(fd)

    def _check_space(self) -> None:
        held = sum(f.stat().st_blocks * 512 for f in self.partial.iterdir() if f.is_file())
        needed = self._plan.store_bytes - held
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise CheckpointError(
                f"{self.destination}: conversion needs {format_bytes(needed)} more on this file system, "
                f"{format_bytes(free)} are free"
            )

    def _read_journal(self) -> tuple[dict[str, int], dict[tuple[int, int], int]] | None:
        """Finished parts of a journal of this identity; None when there is none. A torn last line is ignored."""
        try:
            lines = (self.partial / JOURNAL_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return None
        tensors: dict[str, int] = {}
        records: dict[tuple[int, int], int] = {}
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                if number == 0:
                    if entry["identity"] != self._identity:
                        return None
                elif "tensor" in entry:
                    tensors[str(entry["tensor"])] = int(entry["crc32c"])
                else:
                    layer, expert = entry["record"]
                    records[int(layer), int(expert)] = int(entry["crc32c"])
            except (ValueError, KeyError, TypeError):
                if number == 0:
                    return None
                break
        return (tensors, records) if lines else None

    def _keep_sound_parts(self, tensors: dict[str, int], records: dict[tuple[int, int], int]) -> None:
        plan = self._plan
        for name, crc in tensors.items():
            if (tensor := plan.tensors.get(name)) is None:
                continue
            if self._file_crc(tensor.file_index, tensor.offset_bytes, tensor.size_bytes) == crc:
                self._tensor_crc[name] = crc
                self.resumed_bytes += tensor.size_bytes
        for (layer, expert), crc in records.items():
            if not (0 <= layer < plan.record_file.shape[0] and 0 <= expert < plan.record_file.shape[1]):
                continue
            number, offset = int(plan.record_file[layer, expert]), int(plan.record_offset[layer, expert])
            size = plan.layout_of(layer).stride_bytes
            if self._file_crc(number, offset, size) == crc:
                self._record_crc[layer, expert] = crc
                self.resumed_bytes += size

    def _file_crc(self, number: int, offset: int, size: int) -> int:
        crc = 0
        while size:
            data = os.pread(self._fds[number], min(size, _READ_CHUNK_BYTES), offset)
            if not data:
                return -1
            crc = crc32c(data, crc)
            offset += len(data)
            size -= len(data)
        return crc

    def _write_journal(self) -> None:
        """Start the journal anew with the parts that were kept (replaced in one go)."""
        lines = [json.dumps({"identity": self._identity})]
        lines += [json.dumps({"tensor": name, "crc32c": crc}) for name, crc in self._tensor_crc.items()]
        lines += [json.dumps({"record": list(key), "crc32c": crc}) for key, crc in self._record_crc.items()]
        fresh = self.partial / (JOURNAL_NAME + ".new")
        fresh.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        fresh.replace(self.partial / JOURNAL_NAME)
        self._journal_fd = os.open(self.partial / JOURNAL_NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _note(self, entry: dict[str, Any]) -> None:
        os.write(self._journal_fd, (json.dumps(entry) + "\n").encode())

    # ------------------------------------------------------------------------------------------ parts

    def has_tensor(self, name: str) -> bool:
        """Whether this tensor is written already."""
        return name in self._tensor_crc

    def has_record(self, layer: int, expert: int) -> bool:
        """Whether this record (expert layer ordinal, expert) is written already."""
        return (layer, expert) in self._record_crc

    def write_tensor(self, name: str, chunks: Iterable[NDArray[np.generic]]) -> None:
        """The tensor's elements in row-major order, in pieces; their dtype is the planned one's storage dtype, or GGUF
        blocks ``[rows, I / 32, 18]`` for ``q4_0``."""
        tensor = self._plan.tensors[name]
        done, crc = 0, 0
        with self._translate(f"write tensor {name!r} to {self._plan.files[tensor.file_index].name}"):
            for chunk in _planes(chunks, tensor.shape) if tensor.dtype == Q4_0 else chunks:
                data = np.ascontiguousarray(chunk).data.cast("B")
                if done + len(data) > tensor.size_bytes:
                    raise CheckpointError(f"tensor {name!r} has more than its {tensor.size_bytes} bytes")
                self._write(tensor.file_index, data, tensor.offset_bytes + done)
                crc = crc32c(data, crc)
                done += len(data)
            if done != tensor.size_bytes:
                raise CheckpointError(f"tensor {name!r} has {done} of {tensor.size_bytes} bytes")
            self._tensor_crc[name] = crc
            self._note({"tensor": name, "crc32c": crc})

    def write_record(self, layer: int, expert: int, record: NDArray[np.uint8]) -> None:
        """One whole record of ``layout_of(layer).stride_bytes`` bytes."""
        plan = self._plan
        if record.nbytes != plan.layout_of(layer).stride_bytes:
            raise CheckpointError(f"record ({layer}, {expert}) has {record.nbytes} bytes, not its layout's stride")
        number, offset = int(plan.record_file[layer, expert]), int(plan.record_offset[layer, expert])
        what = f"the record of layer {plan.spec.moe_layers[layer]} expert {expert} to {plan.files[number].name}"
        with self._translate(f"write {what}"):
            data = record.data
            self._write(number, data, offset)
            self._record_crc[layer, expert] = crc = crc32c(data)
            self._note({"record": [layer, expert], "crc32c": crc})

    def _write(self, number: int, data: memoryview, offset: int) -> None:
        while len(data):
            written = os.pwrite(self._fds[number], data, offset)
            data, offset = data[written:], offset + written

    @contextlib.contextmanager
    def _translate(self, action: str) -> Any:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            hint = " Free some space and run the same command again to go on." if error.errno in _FULL else ""
            raise CheckpointError(
                f"{self.destination}: cannot {action}: {reason}. Finished parts are kept in {self.partial}.{hint}"
            ) from error

    # ------------------------------------------------------------------------------------------ end

    def finish(self, source: dict[str, Any], companions: Callable[[Path], None] = lambda _: None) -> FtwIndex:
        """Write companions and index, make everything durable, and move the directory to its destination.

        Raises ``CheckpointError`` when a part is missing. ``companions(directory)`` writes the files beside the data.
        """
        plan = self._plan
        for name in plan.tensors:
            if name not in self._tensor_crc:
                raise CheckpointError(f"{self.destination}: tensor {name!r} was not written")
        record_crc32c = np.zeros_like(plan.record_crc32c)
        for layer, expert in np.ndindex(*plan.record_file.shape):
            if (layer, expert) not in self._record_crc:
                raise CheckpointError(f"{self.destination}: record of expert layer {layer} expert {expert} is missing")
            record_crc32c[layer, expert] = self._record_crc[layer, expert]
        index = dataclasses.replace(
            plan,
            path=self.destination,
            source=source,
            tensors={t.name: dataclasses.replace(t, crc32c=self._tensor_crc[t.name]) for t in plan.tensors.values()},
            record_crc32c=record_crc32c,
        )
        index = dataclasses.replace(index, fingerprint=digest_json(index.content_json()))
        with self._translate("finish"):
            companions(self.partial)
            (self.partial / INDEX_NAME).write_text(json.dumps(index.to_json(), separators=(",", ":")), encoding="utf-8")
            self._make_durable()
            self._move_into_place()
        return index

    def _make_durable(self) -> None:
        for fd in self._fds:
            os.fsync(fd)
        for entry in self.partial.iterdir():
            if entry.is_file() and entry.suffix != ".ftw":
                _fsync_path(entry)
        _fsync_path(self.partial)

    def _move_into_place(self) -> None:
        """The journal goes after the rename: up to there an interruption can still be resumed."""
        check_destination(self.destination, self._overwrite)
        old = self.destination.with_name(f".{self.destination.name}.old")
        if self.destination.exists():
            if old.exists():
                shutil.rmtree(old)
            self.destination.rename(old)
        self.partial.rename(self.destination)
        (self.destination / JOURNAL_NAME).unlink()
        _fsync_path(self.destination.parent)
        if old.exists():
            shutil.rmtree(old)


def _planes(chunks: Iterable[NDArray[Any]], shape: tuple[int, ...]) -> Iterator[NDArray[np.generic]]:
    """Blocks of rows to the bytes of ``quant.q4_0_matrix``. The scales, an eighth of the whole, wait in memory."""
    all_scales = []
    for blocks in chunks:
        nibbles, scales = split_blocks(blocks)
        all_scales.append(scales)
        yield nibbles
    yield np.zeros(scales_offset_bytes(shape) - shape[0] * shape[1] // 2, np.uint8)
    yield from all_scales


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_destination(destination: Path, overwrite: bool) -> None:
    """Raises ``CheckpointError`` unless ``destination`` is free, empty, or an FTW checkpoint that may be replaced."""
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise CheckpointError(f"{destination} exists and is not a directory")
    if not any(destination.iterdir()):
        return
    if not (destination / INDEX_NAME).exists():
        raise CheckpointError(f"{destination} exists and holds other files than a checkpoint; choose another name")
    if not overwrite:
        raise CheckpointError(f"{destination} exists; use --overwrite to replace it")


def _fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
