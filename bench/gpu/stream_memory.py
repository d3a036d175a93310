"""What stream memory operations (cuStreamWaitValue32, cuStreamWriteValue32) cost in a captured graph, beside kernels.

    python bench/gpu/stream_memory.py --out stream_memory.json

A graph of one small kernel a layer, and the same with a write of a word and a wait for one that is there already: what
a layer would pay for waiting by the stream instead of by a kernel that polls, without any time of the host's. Says so
where the driver does not offer them, or refuses them in a capture.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result

LAYERS = 48
_WAIT_EQUAL, _WRITE_DEFAULT = 1, 0


def time_graph(work: Callable[[], None], stream: torch.cuda.Stream, replays: int = 200) -> float:
    """Median microseconds a layer."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(LAYERS):
            work()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (JSON)")
    arguments = parser.parse_args()
    driver = ctypes.CDLL("libcuda.so.1")
    words = torch.zeros(64, dtype=torch.int32).pin_memory()
    x = torch.zeros(64, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def call(name: str, word: int, value: int, flags: int) -> None:
        code = getattr(driver, name)(
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(words.data_ptr() + 64 * word), ctypes.c_uint32(value),
            ctypes.c_uint(flags),
        )  # fmt: skip
        if code != 0:
            raise RuntimeError(f"{name}: CUDA driver error {code}")

    def kernel() -> None:
        x.add_(1)

    def write() -> None:
        kernel()
        call("cuStreamWriteValue32_v2", 1, 1, _WRITE_DEFAULT)

    def wait() -> None:
        kernel()
        call("cuStreamWaitValue32_v2", 2, 0, _WAIT_EQUAL)

    def both() -> None:
        write()
        call("cuStreamWaitValue32_v2", 2, 0, _WAIT_EQUAL)

    figures: dict[str, Any] = {"layers": LAYERS, "us_per_layer": {}}
    for name, work in (("kernel", kernel), ("and a write", write), ("and a wait", wait), ("and both", both)):
        try:
            figures["us_per_layer"][name] = round(time_graph(work, stream), 3)
        except (RuntimeError, AttributeError) as error:
            figures["us_per_layer"][name] = f"not possible: {error}"
    write_result(arguments.out, "stream_memory", figures)


if __name__ == "__main__":
    main()
