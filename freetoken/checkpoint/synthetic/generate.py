"""Making a checkpoint of random weights: shape and options in, files in one of three formats out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from freetoken.checkpoint.ftw_writer import check_destination
from freetoken.checkpoint.gguf_source import is_gguf
from freetoken.checkpoint.gguf_tokenizer import write_tokenizer
from freetoken.checkpoint.synthetic.parts import Progress
from freetoken.checkpoint.synthetic.routing import RoutingReport, measure_routing
from freetoken.checkpoint.synthetic.shapes import shape_config
from freetoken.checkpoint.synthetic.streams import VERSION
from freetoken.checkpoint.synthetic.vocabulary import tokenizer_metadata
from freetoken.checkpoint.synthetic.weights import SyntheticWeights
from freetoken.checkpoint.synthetic.write_ftw import write_ftw
from freetoken.checkpoint.synthetic.write_gguf import write_gguf
from freetoken.checkpoint.synthetic.write_safetensors import MAX_SHARD_BYTES, write_safetensors
from freetoken.errors import CheckpointError
from freetoken.models.spec import ModelSpec

FORMATS = ("ftw", "safetensors", "gguf")
DESCRIPTION_NAME = "synthetic.json"
Format = Literal["ftw", "safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """``overrides`` by the names in ``shapes.OVERRIDES``; ``measure_tokens`` 0 measures no routing; ``num_threads``
    None takes the processors this process may use; ``max_file_bytes`` limits FTW data files and safetensors shards."""

    format: Format = "ftw"
    dtype: str = "bf16"
    overrides: Mapping[str, int] = field(default_factory=dict)
    locality: float = 0.0
    seed: int = 0
    num_threads: int | None = None
    measure_tokens: int = 128
    overwrite: bool = False
    max_file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SynthResult:
    """``size_bytes`` of all files; ``description`` is what the checkpoint says about its making."""

    path: Path
    spec: ModelSpec
    size_bytes: int
    description: dict[str, Any]
    routing: RoutingReport | None


def synthesize(
    shape: str,
    destination: str | Path,
    options: SynthOptions = SynthOptions(),
    progress: Progress | None = None,
    on_routing: Callable[[RoutingReport], None] | None = None,
) -> SynthResult:
    """Write a checkpoint of the named shape; ``destination`` is a directory, or for GGUF a file.

    The same shape, overrides, dtype, locality and seed give the same weights in every format. ``on_routing`` gets the
    measured routing before anything is written. Raises ``CheckpointError`` or ``UnsupportedModelError``.
    """
    if options.format not in FORMATS:
        raise CheckpointError(f"format {options.format!r} is not one of {', '.join(FORMATS)}")
    if options.seed < 0:
        raise CheckpointError(f"seed {options.seed} is negative")
    threads = len(os.sched_getaffinity(0)) if options.num_threads is None else options.num_threads
    if threads < 1:
        raise CheckpointError(f"{threads} threads are too few; at least 1 is needed")
    target = Path(destination).expanduser().resolve()
    _check_target(target, options)
    weights = SyntheticWeights(shape_config(shape, options.overrides), options.dtype, options.locality, options.seed)
    description: dict[str, Any] = {
        "kind": "synthetic",
        "generator": VERSION,
        "shape": shape,
        "overrides": dict(options.overrides),
        "dtype": options.dtype,
        "locality": options.locality,
        "embedding_cosine": round(weights.cosine, 6),
        "seed": options.seed,
    }
    routing = None
    if options.measure_tokens:
        routing = measure_routing(weights, options.measure_tokens, threads)
        description["routing"] = routing.to_json()
        if on_routing is not None:
            on_routing(routing)
    if options.format == "ftw":
        index = write_ftw(
            weights,
            target,
            description,
            _write_companions,
            threads,
            progress,
            overwrite=options.overwrite,
            max_file_bytes=options.max_file_bytes,
        )
        return SynthResult(target, weights.spec, index.store_bytes, description, routing)
    size = _write_foreign(weights, target, shape, description, options, threads, progress)
    return SynthResult(target, weights.spec, size, description, routing)


def _write_foreign(
    weights: SyntheticWeights,
    target: Path,
    shape: str,
    description: dict[str, Any],
    options: SynthOptions,
    num_threads: int,
    progress: Progress | None,
) -> int:
    """A GGUF file or a safetensors directory, beside its place and then moved there; returns its bytes."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
    except OSError as error:
        raise CheckpointError(f"{target.parent}: cannot be written to: {error.strerror or error}") from error
    try:
        if options.format == "gguf":
            write_gguf(weights, partial, shape, json.dumps(description), num_threads, progress)
            size = partial.stat().st_size
        else:
            partial.mkdir()
            write_safetensors(weights, partial, num_threads, progress, options.max_file_bytes or MAX_SHARD_BYTES)
            _write_companions(partial, weights.config)
            _write_json(partial / DESCRIPTION_NAME, description)
            size = sum(file.stat().st_size for file in partial.iterdir())
        _check_target(target, options)
        _remove(target)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot write: {error.strerror or error}") from error
    finally:
        _remove(partial)
    return size


def _write_companions(directory: Path, config: dict[str, Any]) -> None:
    """Configuration, tokenizer and generation defaults."""
    metadata = tokenizer_metadata(config["vocab_size"])
    write_tokenizer(metadata, directory, "the synthetic vocabulary", config["max_position_embeddings"])
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_target(target: Path, options: SynthOptions) -> None:
    """Only what this command could have written may be replaced, and only when asked."""
    if options.format == "ftw":
        check_destination(target, options.overwrite)
        return
    if not os.path.lexists(target) or (target.is_dir() and options.format == "safetensors" and _is_empty(target)):
        return
    if options.format == "gguf":
        ours = target.is_file() and is_gguf(target)
    else:
        ours = (target / DESCRIPTION_NAME).is_file()
    if not ours:
        raise CheckpointError(
            f"{target} exists and is not a synthetic {options.format} checkpoint; choose another name"
        )
    if not options.overwrite:
        raise CheckpointError(f"{target} exists; use --overwrite to replace it")


def _is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
