"""Conversion of a checkpoint (Hugging Face directory, GGUF file, or any ``TensorSource``) into an FTW directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.ftw_writer import FtwWriter, plan_index
from freetoken.checkpoint.gguf_source import GgufSource, is_gguf
from freetoken.checkpoint.hf_source import HfSource
from freetoken.checkpoint.source import TensorSource, parse_source_config
from freetoken.checkpoint.split_experts import SplitExpertsSource
from freetoken.errors import CheckpointError
from freetoken.models.registry import (
    DenseRole,
    ExpertRole,
    classify_tensor,
    dense_tensor_names,
)
from freetoken.models.spec import ModelSpec
from freetoken.quant import bf16
from freetoken.quant.pack import pack_expert
from freetoken.quant.record import DTYPE_BYTES

_CHUNK_BYTES = 64 * 1024**2
_RELEASE_BYTES = 256 * 1024**2  # of records between two releases of the source's pages
_CONFIG_DTYPES = {"f32": "float32", "bf16": "bfloat16"}

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is being written)."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """``dtype`` ``keep`` stores BF16 as BF16 and everything else as F32, so that no value changes.

    ``split_dense_into_experts`` turns a dense Llama-shaped model into a Mixtral-shaped one; see ``split_experts``.
    """

    dtype: Literal["keep", "f32", "bf16"] = "keep"
    split_dense_into_experts: int | None = None
    tile_columns: int | None = None
    max_file_bytes: int | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class _TensorMap:
    """Source names by destination: canonical dense name, and (expert layer ordinal, expert, part)."""

    dense: dict[str, str]
    experts: dict[tuple[int, int, str], str]


def open_source(path: str | Path) -> TensorSource:
    """The checkpoint at ``path``. Raises ``CheckpointError`` when it is of no known kind."""
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").exists():
            return HfSource(path)
        found = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; it holds {found[0]}, name that file" if found else ""
        raise CheckpointError(f"{path} is not a checkpoint directory: it has no config.json{hint}")
    if is_gguf(path):
        return GgufSource(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    raise CheckpointError(f"{path} is neither a Hugging Face checkpoint directory nor a GGUF file")


def convert(
    source: str | Path,
    destination: str | Path,
    options: ConvertOptions = ConvertOptions(),
    progress: Progress | None = None,
) -> FtwIndex:
    """Convert the checkpoint at ``source``; see ``convert_source``."""
    opened = open_source(source)
    try:
        if options.split_dense_into_experts is not None:
            opened = SplitExpertsSource(opened, options.split_dense_into_experts)
        return convert_source(opened, destination, options, progress)
    finally:
        opened.close()


def convert_source(
    source: TensorSource,
    destination: str | Path,
    options: ConvertOptions = ConvertOptions(),
    progress: Progress | None = None,
) -> FtwIndex:
    """Write ``source`` as FTW at ``destination``. Memory: one expert, or a slice of one tensor, at a time.

    Raises ``CheckpointError`` or ``UnsupportedModelError``; an interrupted run can be resumed by calling again.
    """
    spec = parse_source_config(source.config)
    names = _map_tensors(source, spec)
    dense_dtypes = {
        name: _target_dtype(options, [source.tensors[origin].dtype]) for name, origin in names.dense.items()
    }
    layer_dtypes = [
        _target_dtype(options, [source.tensors[o].dtype for (at, _, _), o in names.experts.items() if at == layer])
        for layer in range(len(spec.moe_layers))
    ]
    config = _stored_config(source.config, spec, dense_dtypes)
    plan = plan_index(
        config,
        dense_dtypes,
        layer_dtypes,
        tile_columns=options.tile_columns,
        max_file_bytes=options.max_file_bytes,
        path=destination,
    )
    report = progress or (lambda done, total, what: None)
    total = plan.dense_bytes + plan.expert_bytes
    with FtwWriter(destination, plan, source.fingerprint, overwrite=options.overwrite) as writer:
        done, unreleased = writer.resumed_bytes, 0
        report(done, total, "")
        for name, origin in names.dense.items():
            if writer.has_tensor(name):
                continue
            report(done, total, name)
            writer.write_tensor(name, _rows(source, origin, dense_dtypes[name]))
            done += plan.tensors[name].size_bytes
            source.release()
        for layer, dtype in enumerate(layer_dtypes):
            layout = plan.layout_of(layer)
            record = np.zeros(layout.stride_bytes, np.uint8)
            for expert in range(spec.num_experts):
                if writer.has_record(layer, expert):
                    continue
                report(done, total, f"layer {spec.moe_layers[layer]} expert {expert}")
                gate, up, down = (
                    _cast(source.read(names.experts[layer, expert, part]), dtype) for part in ("gate", "up", "down")
                )
                writer.write_record(layer, expert, pack_expert(layout, gate, up, down, record))
                done += layout.stride_bytes
                unreleased += layout.stride_bytes
                if unreleased >= _RELEASE_BYTES:
                    source.release()
                    unreleased = 0
        report(done, total, "finishing")
        return writer.finish(
            {**source.description, "fingerprint": source.fingerprint},
            lambda directory: _write_companions(source, config, directory),
        )


def _map_tensors(source: TensorSource, spec: ModelSpec) -> _TensorMap:
    """Every source tensor must be known, every needed one present, once, in the right shape."""
    wanted = dense_tensor_names(spec)
    ordinals = {layer: i for i, layer in enumerate(spec.moe_layers)}
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    dense: dict[str, str] = {}
    experts: dict[tuple[int, int, str], str] = {}

    def check(name: str, shape: tuple[int, ...], earlier: str | None) -> None:
        found = source.tensors[name].shape
        if found != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(found)}; the configuration asks for {list(shape)}")
        if earlier is not None:
            raise CheckpointError(f"tensors {earlier!r} and {name!r} are the same thing")

    for name in source.tensors:
        role = classify_tensor(spec, name)
        if isinstance(role, DenseRole):
            if role.name not in wanted:
                raise CheckpointError(f"tensor {name!r} does not belong to the model that the configuration describes")
            check(name, wanted[role.name], dense.get(role.name))
            dense[role.name] = name
        elif isinstance(role, ExpertRole):
            if role.layer not in ordinals or not 0 <= role.expert < spec.num_experts:
                raise CheckpointError(
                    f"tensor {name!r} names layer {role.layer} expert {role.expert}; the configuration has expert "
                    f"layers {list(spec.moe_layers)} with {spec.num_experts} experts"
                )
            key = (ordinals[role.layer], role.expert, role.part)
            check(name, (hidden, inner) if role.part == "down" else (inner, hidden), experts.get(key))
            experts[key] = name
    missing = [name for name in wanted if name not in dense]
    missing += [
        f"layer {layer} expert {expert} {part}"
        for layer, i in ordinals.items()
        for expert in range(spec.num_experts)
        for part in ("gate", "up", "down")
        if (i, expert, part) not in experts
    ]
    if missing:
        raise CheckpointError(f"the source lacks {missing[0]!r} ({len(missing)} tensors missing in all)")
    return _TensorMap({name: dense[name] for name in wanted}, experts)


def _target_dtype(options: ConvertOptions, dtypes: list[str]) -> str:
    if options.dtype != "keep":
        return options.dtype
    return "bf16" if all(dtype == "bf16" for dtype in dtypes) else "f32"


def _stored_config(config: dict[str, Any], spec: ModelSpec, dense_dtypes: dict[str, str]) -> dict[str, Any]:
    """The configuration with the dtype that most dense bytes really have."""
    weight = dict.fromkeys(DTYPE_BYTES, 0)
    for name, shape in dense_tensor_names(spec).items():
        weight[dense_dtypes[name]] += int(np.prod(shape, dtype=np.int64))
    stored = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    stored["dtype"] = _CONFIG_DTYPES[max(weight, key=lambda dtype: weight[dtype])]
    return stored


def _cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "f32":
        return bf16.to_f32(values) if values.dtype == np.uint16 else values
    return values if values.dtype == np.uint16 else bf16.from_f32(values)


def _rows(source: TensorSource, name: str, dtype: str) -> Iterator[NDArray[Any]]:
    """The tensor in slices of whole rows that fit ``_CHUNK_BYTES`` as float32."""
    shape = source.tensors[name].shape
    row_bytes = 4 * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield _cast(source.read(name, start, min(start + step, shape[0])), dtype)


def _write_companions(source: TensorSource, config: dict[str, Any], directory: Path) -> None:
    source.write_companions(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
