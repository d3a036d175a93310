"""Conversion of a checkpoint (Hugging Face directory, GGUF file, or any ``TensorSource``) into an FTW directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.ftw import FtwIndex, may_be_q4_0
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
from freetoken.quant.formats import FORMATS, Q4_0
from freetoken.quant.pack import pack_expert
from freetoken.quant.q4_0_record import pack_q4_0_expert
from freetoken.quant.record import DTYPE_BYTES

logger = logging.getLogger(__name__)

PARTS = ("gate", "up", "down")

_CHUNK_BYTES = 64 * 1024**2
_RELEASE_BYTES = 256 * 1024**2  # of records between two releases of the source's pages
_CONFIG_DTYPES = {"f32": "float32", "bf16": "bfloat16", Q4_0: "bfloat16"}

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is being written)."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """``dtype`` ``keep`` stores BF16, F32 and Q4_0 as they are (Q4_0 where the engine computes with it: projections,
    embeddings and experts). Other formats become ``fallback_dtype``: ``f32`` keeps every value, ``bf16`` rounds them.

    ``split_dense_into_experts`` turns a dense Llama-shaped model into a Mixtral-shaped one; see ``split_experts``.
    """

    dtype: Literal["keep", "f32", "bf16"] = "keep"
    fallback_dtype: Literal["f32", "bf16"] = "f32"
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
    spec, names, dense_dtypes, layer_dtypes, config, plan = _plan(source, options, destination)
    report = progress or (lambda done, total, what: None)
    total = plan.dense_bytes + plan.expert_bytes
    with FtwWriter(destination, plan, source.fingerprint, overwrite=options.overwrite) as writer:
        done, unreleased = writer.resumed_bytes, 0
        report(done, total, "")
        for name, origin in names.dense.items():
            if writer.has_tensor(name):
                continue
            report(done, total, name)
            writer.write_tensor(name, _read_in_slices(source, origin, dense_dtypes[name]))
            done += plan.tensors[name].size_bytes
            source.release()
        for layer, dtype in enumerate(layer_dtypes):
            layout = plan.layout_of(layer)
            record = np.zeros(layout.stride_bytes, np.uint8)
            for expert in range(spec.num_experts):
                if writer.has_record(layer, expert):
                    continue
                report(done, total, f"layer {spec.moe_layers[layer]} expert {expert}")
                gate, up, down = (_read(source, names.experts[layer, expert, part], dtype) for part in PARTS)
                pack = pack_q4_0_expert if dtype == Q4_0 else pack_expert
                writer.write_record(layer, expert, pack(layout, gate, up, down, record))
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


def plan_conversion(source: TensorSource, options: ConvertOptions = ConvertOptions()) -> FtwIndex:
    """What ``convert_source`` would write: an index without checksums. Reads headers only; raises the same errors."""
    return _plan(source, options, "").planned


class _Plan(NamedTuple):
    spec: ModelSpec
    names: _TensorMap
    dense_dtypes: dict[str, str]
    layer_dtypes: list[str]
    config: dict[str, Any]
    planned: FtwIndex


def _plan(source: TensorSource, options: ConvertOptions, destination: str | Path) -> _Plan:
    spec = parse_source_config(source.config)
    names = _map_tensors(source, spec)
    dense_dtypes = {
        name: _target_dtype(options, {source.tensors[origin].own_format}, may_be_q4_0(name))
        for name, origin in names.dense.items()
    }
    layer_dtypes = _choose_layer_dtypes(options, source, spec, names)
    config = _stored_config(source.config, spec, dense_dtypes)
    index = plan_index(
        config,
        dense_dtypes,
        layer_dtypes,
        tile_columns=options.tile_columns,
        max_file_bytes=options.max_file_bytes,
        path=destination,
    )
    return _Plan(spec, names, dense_dtypes, layer_dtypes, config, index)


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
        for part in PARTS
        if (i, expert, part) not in experts
    ]
    if missing:
        raise CheckpointError(f"the source lacks {missing[0]!r} ({len(missing)} tensors missing in all)")
    return _TensorMap({name: dense[name] for name in wanted}, experts)


def _target_dtype(options: ConvertOptions, formats: set[str], may_be_q4_0: bool) -> str:
    """How tensors of these formats are stored together."""
    if options.dtype != "keep":
        return options.dtype
    if formats == {Q4_0} and may_be_q4_0:
        return Q4_0
    if formats <= set(DTYPE_BYTES):
        return "bf16" if formats == {"bf16"} else "f32"
    return "f32" if "f32" in formats else options.fallback_dtype


def _choose_layer_dtypes(
    options: ConvertOptions, source: TensorSource, spec: ModelSpec, names: _TensorMap
) -> list[str]:
    """The format of each expert layer's records. A layer whose experts are partly Q4_0 cannot keep it: a record has one
    format."""
    formats: list[dict[str, str]] = [{} for _ in spec.moe_layers]  # format -> one tensor that has it
    for (layer, _, _), name in names.experts.items():
        formats[layer].setdefault(source.tensors[name].own_format, name)
    dtypes = [_target_dtype(options, set(found), True) for found in formats]
    kept = Q4_0 in dtypes
    for layer, (found, dtype) in enumerate(zip(formats, dtypes, strict=True)):
        if options.dtype == "keep" and dtype != Q4_0 and (kept or Q4_0 in found):
            other = next(name for name in found if name != Q4_0)
            logger.warning(
                "event=experts_widened layer=%d dtype=%s tensor=%r format=%s detail=%r",
                spec.moe_layers[layer], dtype, found[other], other,
                "a layer keeps Q4_0 only when all its experts are Q4_0; its records, and with them all slots, grow",
            )  # fmt: skip
    return dtypes


def _stored_config(config: dict[str, Any], spec: ModelSpec, dense_dtypes: dict[str, str]) -> dict[str, Any]:
    """The configuration with the dtype that most dense weights really have. Quantised ones count as BF16, which is more
    than precise enough for what is computed from them (``kv.dtype=auto`` follows this)."""
    weight = dict.fromkeys(FORMATS, 0)
    for name, shape in dense_tensor_names(spec).items():
        weight[dense_dtypes[name]] += int(np.prod(shape, dtype=np.int64))
    stored = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    stored["dtype"] = _CONFIG_DTYPES[max(weight, key=lambda dtype: weight[dtype])]
    return stored


def _read(source: TensorSource, name: str, dtype: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Rows as they are stored in ``dtype``: float32, uint16 (BF16), or GGUF blocks (Q4_0)."""
    if dtype == Q4_0:
        return source.read_blocks(name, start, stop)
    values: NDArray[Any] = source.read(name, start, stop)
    if dtype == "f32":
        return bf16.to_f32(values) if values.dtype == np.uint16 else values
    return values if values.dtype == np.uint16 else bf16.from_f32(values)


def _read_in_slices(source: TensorSource, name: str, dtype: str) -> Iterator[NDArray[Any]]:
    """The tensor in slices of whole rows that fit ``_CHUNK_BYTES`` as float32."""
    shape = source.tensors[name].shape
    row_bytes = 4 * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield _read(source, name, dtype, start, min(start + step, shape[0]))


def _write_companions(source: TensorSource, config: dict[str, Any], directory: Path) -> None:
    source.write_companions(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
