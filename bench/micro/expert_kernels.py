"""Bandwidth of the CPU expert kernels against a plain read of the same memory by the same threads.

The store holds records of one shape (default: BF16 Qwen3-30B-A3B, hidden 2048, intermediate 768, 8 of 128 experts
a layer) and is larger than the caches. A step runs one layer after the other, each with other experts, so weights come
from memory. The read and the kernels alternate, and the ratio of their best rounds is reported: memory on a shared
machine is not the same from one second to the next.

    python bench/micro/expert_kernels.py --threads 1 2 --tokens 1 4 16 --out bench/results/expert_kernels.json
    python bench/micro/expert_kernels.py --dtype q4_0 --out bench/results/expert_kernels_q4_0.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.common import write_result
from freetoken import _native
from freetoken.quant.formats import Q4_0, plan_layout
from freetoken.quant.native_layout import native_layout
from freetoken.quant.q4_0_record import pack_q4_0_expert, quantize_blocks
from freetoken.quant.record import RecordLayout


def build_store(layout: RecordLayout, layers: int, experts: int) -> tuple[_native.SharedSegment, _native.ExpertStore]:
    """A populated segment of random weights and the store over it."""
    segment = _native.SharedSegment.create("bench", layers * experts * layout.stride_bytes)
    segment.populate()
    if layout.format == Q4_0:
        filling = _q4_0_record(layout)
    else:
        weights = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
        filling = weights if layout.format == "f32" else (weights.view(np.uint32) >> 16).astype(np.uint16)
    words = np.frombuffer(memoryview(segment), filling.dtype)
    for start in range(0, len(words), len(filling)):
        part = words[start : start + len(filling)]
        part[:] = filling[: len(part)]
    offsets = np.arange(layers * experts, dtype=np.int64).reshape(layers, experts) * layout.stride_bytes
    store = _native.ExpertStore(
        [segment], [native_layout(layout)], [0] * layers, np.zeros((layers, experts), np.int32), offsets
    )
    return segment, store


def _q4_0_record(layout: RecordLayout) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """One expert of random weights; every record holds the same bits."""
    rng = np.random.default_rng(0)
    shapes = [(layout.intermediate, layout.hidden)] * 2 + [(layout.hidden, layout.intermediate)]
    gate, up, down = (quantize_blocks(rng.normal(0, 0.02, shape).astype(np.float32)) for shape in shapes)
    return pack_q4_0_expert(layout, gate, up, down)


def measure(
    pool: _native.WorkerPool,
    segment: _native.SharedSegment,
    store: _native.ExpertStore,
    layout: RecordLayout,
    tokens: int,
    top_k: int,
    rounds: int,
) -> dict[str, float]:
    """Best rates over the rounds, in 10^9 bytes (of distinct experts' weights) and 10^9 operations per second."""
    rng = np.random.default_rng(tokens)
    hidden = rng.normal(size=(tokens, layout.hidden)).astype(np.float32)
    weights = np.full((tokens, top_k), 1 / top_k, np.float32)
    out = np.empty_like(hidden)
    stream = kernel = seconds = 0.0
    passes = max(1, 24 // (store.num_layers * max(1, tokens // 4)))
    for _ in range(rounds):
        stream = max(stream, _native.stream_read_gbps(pool, segment, 1))
        steps = []
        for _ in range(passes):
            for layer in range(store.num_layers):
                ids = np.stack([rng.permutation(store.num_experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
                steps.append((layer, ids, len(np.unique(ids))))
        begin = time.perf_counter()
        for layer, ids, _ in steps:
            _native.expert_ffn(pool, store, layer, hidden, ids, weights, out)
        elapsed = time.perf_counter() - begin
        rate = sum(distinct for _, _, distinct in steps) * layout.payload_bytes / elapsed / 1e9
        if rate > kernel:
            kernel, seconds = rate, elapsed / len(steps)
    operations = 2 * 3 * layout.hidden * layout.intermediate * tokens * top_k
    return {
        "threads": pool.num_threads,
        "tokens": tokens,
        "stream_read_gbps": round(stream, 2),
        "kernel_gbps": round(kernel, 2),
        "ratio": round(kernel / stream, 3),
        "layer_us": round(seconds * 1e6, 1),
        "gflops": round(operations / seconds / 1e9, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", choices=["bf16", "f32", "q4_0"], default="bf16")
    parser.add_argument("--store-mib", type=int, default=1200)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write the result as JSON")
    args = parser.parse_args()

    layout = plan_layout(args.dtype, args.hidden, args.intermediate)
    layers = max(1, (args.store_mib << 20) // (args.experts * layout.stride_bytes))
    segment, store = build_store(layout, layers, args.experts)
    cores = _native.physical_cores()
    results = []
    for threads in args.threads:
        if threads > len(cores):
            print(f"skipped: {threads} threads on {len(cores)} cores", file=sys.stderr)
            continue
        pool = _native.WorkerPool(threads, cores[:threads], spin_us=100, isa=args.isa)
        results += [measure(pool, segment, store, layout, t, args.top_k, args.rounds) for t in args.tokens]
        pool.close()
    figures = {
        "isa": _native.WorkerPool(1, isa=args.isa).isa,
        "shape": {
            "hidden": args.hidden,
            "intermediate": args.intermediate,
            "experts": args.experts,
            "top_k": args.top_k,
            "dtype": args.dtype,
            "store_bytes": segment.size_bytes,
        },
        "results": results,
    }
    write_result(args.out, "expert_kernels", figures)


if __name__ == "__main__":
    main()
