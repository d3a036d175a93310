"""How fast the store is filled, against reading the same files with O_DIRECT and throwing the bytes away.

    python bench/micro/load.py [--bytes 2GiB] [--rounds 5] [--checkpoint DIR] [--directory DIR] [--out FILE]

Without ``--checkpoint`` a synthetic Mixture-of-Experts checkpoint of random BF16 bits is written to a temporary
directory first. Every measurement runs in a process of its own, the two kinds take turns, and nothing of the files lies
in the page cache (both bypass it; it is emptied before the first round and checked after the last). The load includes
allocating the store's pages and comparing every checksum; the plain read reuses its buffers and compares nothing.
``peak_rss_ratio`` is the peak resident memory of a loading process (interpreter and index included) over the bank.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from freetoken.checkpoint.convert import convert_source
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.source import SourceTensor, TensorSource
from freetoken.checkpoint.store_loader import StoreLoader
from freetoken.config.schema import LoaderConfig
from freetoken.models.registry import dense_tensor_names, parse_model_config
from freetoken.units import parse_bytes

HIDDEN, INNER, LAYERS, VOCAB = 2048, 768, 4, 32768


class RandomSource(TensorSource):
    """A Mixtral of random BF16 bits whose experts take ``num_bytes`` in all; no tensor exists before it is read."""

    def __init__(self, num_bytes: int) -> None:
        experts = max(2, round(num_bytes / LAYERS / (3 * HIDDEN * INNER * 2)))
        self.config = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": VOCAB,
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
        self.description = {"kind": "random"}
        self.fingerprint = f"random-{num_bytes}"
        self.tensors: dict[str, SourceTensor] = {}
        for name, shape in dense_tensor_names(parse_model_config(self.config)).items():
            self.tensors[name] = SourceTensor(shape, "bf16")
        for layer in range(LAYERS):
            for expert in range(experts):
                prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                for part, shape in (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER))):
                    self.tensors[f"{prefix}.{part}.weight"] = SourceTensor(shape, "bf16")
        self._random = np.random.default_rng(0)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """Fresh bits at every call."""
        shape = self.tensors[name].shape
        rows = len(range(shape[0])[start:stop])
        return self._random.integers(0, 2**16, (rows, *shape[1:]), dtype=np.uint16)


def plain_read(index: FtwIndex, depth: int, chunk_bytes: int) -> dict[str, Any]:
    """Read every data file in chunks with ``depth`` threads, O_DIRECT, each thread into one buffer of its own."""
    fds = [os.open(index.path / file.name, os.O_RDONLY | os.O_DIRECT) for file in index.files]
    chunks = iter(
        (fd, offset)
        for fd, file in zip(fds, index.files, strict=True)
        for offset in range(0, file.size_bytes, chunk_bytes)
    )
    lock = threading.Lock()
    total = [0] * depth

    def work(number: int) -> None:
        buffer = mmap.mmap(-1, chunk_bytes)
        buffer.write(bytes(chunk_bytes))
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            total[number] += os.preadv(chunk[0], [buffer], chunk[1])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(depth)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    assert sum(total) == index.store_bytes
    return {"seconds": seconds, "gbps": index.store_bytes / seconds / 1e9}


def load(index: FtwIndex, settings: LoaderConfig) -> dict[str, Any]:
    """What WeightStreamer does."""
    loader = StoreLoader(
        index,
        threads=settings.threads,
        chunk_bytes=settings.chunk_bytes,
        direct=settings.direct,
        verify=settings.verify,
    )
    segments = loader.run()
    assert loader.figures is not None and len(segments) == len(index.files)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "seconds": loader.figures.seconds,
        "gbps": loader.figures.gbps,
        "direct": loader.figures.used_direct,
        "checked": loader.figures.num_checked,
        "peak_rss_bytes": int(status["VmHWM"].split()[0]) * 1024,
    }


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=2) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), resident) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return mmap.PAGESIZE * sum(byte & 1 for byte in bytes(resident))


def empty_cache(index: FtwIndex) -> None:
    """Write back and drop whatever of the files is in the page cache."""
    for file in index.files:
        fd = os.open(index.path / file.name, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(what: str, index: FtwIndex, *more: str) -> dict[str, Any]:
    """Run one measurement in a fresh process."""
    command = [sys.executable, __file__, "--measure", what, "--checkpoint", str(index.path), *more]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def compare(index: FtwIndex, rounds: int, settings: LoaderConfig) -> dict[str, Any]:
    """Alternate plain reads at two queue depths with loads; medians, and the better of the two depths counts."""
    empty_cache(index)
    depths = (settings.threads, 2 * settings.threads)
    plain: dict[int, list[float]] = {depth: [] for depth in depths}
    loads = []
    for _ in range(rounds):
        for depth in depths:
            plain[depth].append(measure("plain", index, "--depth", str(depth))["gbps"])
        loads.append(measure("load", index))
    best = max(depths, key=lambda depth: statistics.median(plain[depth]))
    plain_gbps = statistics.median(plain[best])
    load_gbps = statistics.median(run["gbps"] for run in loads)
    peak = max(run["peak_rss_bytes"] for run in loads)
    return {
        "bank_bytes": index.store_bytes,
        "records": index.num_records,
        "files": len(index.files),
        "threads": settings.threads,
        "chunk_bytes": settings.chunk_bytes,
        "plain_gbps": round(plain_gbps, 3),
        "plain_depth": best,
        "load_gbps": round(load_gbps, 3),
        "load_ratio": round(load_gbps / plain_gbps, 3),
        "direct": all(run["direct"] for run in loads),
        "checked": loads[0]["checked"],
        "peak_rss_bytes": peak,
        "peak_rss_ratio": round(peak / index.store_bytes, 4),
        "page_cache_bytes_after": sum(cached_bytes(index.path / file.name) for file in index.files),
        "plain_runs_gbps": {str(depth): [round(rate, 3) for rate in rates] for depth, rates in plain.items()},
        "load_runs_gbps": [round(run["gbps"], 3) for run in loads],
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bytes", type=parse_bytes, default=2 * 1024**3, help="size of the synthetic bank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint", help="measure this FTW directory instead")
    parser.add_argument("--directory", help="where to write the synthetic one (default: the temporary directory)")
    parser.add_argument("--out", help="write the result there as JSON")
    parser.add_argument("--measure", choices=("plain", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = LoaderConfig()
    if args.measure:
        index = FtwIndex.load(args.checkpoint)
        plain = args.measure == "plain"
        print(json.dumps(plain_read(index, args.depth, settings.chunk_bytes) if plain else load(index, settings)))
        return
    if args.checkpoint:
        write_result(args.out, "load", compare(FtwIndex.load(args.checkpoint), args.rounds, settings))
        return
    with tempfile.TemporaryDirectory(prefix="freetoken-load-", dir=args.directory) as directory:
        index = convert_source(RandomSource(args.bytes), Path(directory) / "bank")
        write_result(args.out, "load", compare(index, args.rounds, settings))


if __name__ == "__main__":
    main()
