"""Correctness and speed of the CUDA device's kernels at the shapes of Qwen3-30B-A3B, in one unattended run.

    python bench/gpu/kernels.py --out bench/results/gpu_kernels.json [--sections NAME ...] [--compile-jobs 12]

Sections: baselines, checks, the families of ``selection.py``, PCIe, mailbox, decode step, prefill layer. A failure
prints its traceback and the next case goes on. Each timing replays a CUDA graph of several launches on different data
(more than the L2 cache holds, where the kernel reads that much) and takes the median; microseconds are per launch, in a
dependent chain, so they include what a graph pays between kernels. GB/s counts the bytes that must move at least; the
ratio is to the copy measured in the same run (reads and writes counted), for PCIe to the copy engine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu import cases, checks, layer, selection
from bench.gpu.cases import EXPERTS, HIDDEN, LAYERS, TOP_K, Bench, layout_of
from bench.gpu.responder import Responder
from freetoken.kernels.triton.mailbox import await_part, await_plan, publish
from freetoken.kernels.triton.plan import KIND_FETCH, STATUS, DevicePlan


class Report:
    """Prints lines as they come and keeps them for the result file, which is rewritten after each section."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.figures: dict[str, list[dict[str, Any]]] = {}
        self.failures: list[str] = []
        self.copy_gbps = self.h2d_gbps = 0.0
        self._section = ""

    def begin(self, section: str) -> None:
        self._section = section
        self.figures[section] = []
        print(f"\n== {section}", flush=True)

    def line(
        self, name: str, us: float, bytes_moved: float = 0, flops: float = 0, bus: str = "hbm", **more: Any
    ) -> None:
        """One timing."""
        gbps = bytes_moved / us / 1e3
        reference = self.copy_gbps if bus == "hbm" else self.h2d_gbps
        row = {"name": name, "us": round(us, 2), **more}
        text = f"{name:74s} {us:9.2f} us"
        if bytes_moved:
            row["gbps"] = round(gbps, 1)
            row["ratio"] = round(gbps / reference, 3) if reference else None
            text += f" {gbps:7.0f} GB/s {row['ratio'] or 0:5.2f}"
        if flops >= 1e9:
            row["tflops"] = round(flops / us / 1e6, 1)
            text += f" {row['tflops']:6.1f} TFLOP/s"
        text += "".join(f" {key}={value}" for key, value in more.items())
        self.figures[self._section].append(row)
        print(text, flush=True)

    def note(self, **values: Any) -> None:
        """Other figures."""
        self.figures[self._section].append(values)
        print("  ".join(f"{key}: {value}" for key, value in values.items()), flush=True)

    def failed(self, what: str) -> None:
        """An exception, with the end of its traceback."""
        lines = traceback.format_exc().strip().splitlines()
        self.failures.append(f"{what}: {lines[-1][:300]}")
        print(f"FAILED {what}\n" + "\n".join(line[:200] for line in lines[-8:]), flush=True)

    def write(self) -> None:
        """The result so far."""
        if not self.path:
            return
        result = {"benchmark": "gpu_kernels", **_provenance(), "figures": self.figures, "failures": self.failures}
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        Path(self.path).write_text(json.dumps(result, indent=1) + "\n")


def _provenance() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    try:
        from bench.common import provenance

        facts.update(provenance())
    except Exception as error:
        facts["provenance"] = repr(error)
    return facts


def time_graph(launches: list[Callable[[], None]], min_launches: int = 16, min_ms: float = 12.0) -> float:
    """Median microseconds per launch, of a captured graph that runs all of them, repeated to ``min_launches``."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    rounds = max(1, min_launches // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    count = rounds * len(launches)
    graph.replay()
    once = _elapsed_us(graph.replay, 1)
    repeats = max(1, min(200, int(min_ms * 1e3 / 5 / max(once, 1.0))))
    samples = [_elapsed_us(graph.replay, repeats) / repeats / count for _ in range(5)]
    return statistics.median(samples)


def _elapsed_us(run: Callable[[], None], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


# ---------------------------------------------------------------------------------------------------------- sections


def baselines(report: Report, bench: Bench) -> None:
    """Copies over both buses, a read, a matrix product, the smallest chain of launches."""
    a, b = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
    us = time_graph([lambda: b.copy_(a)], 4)
    report.copy_gbps = 2 * a.numel() / us / 1e3
    report.line("HBM copy of 2 GiB, bytes read and written", us, 2 * a.numel())
    words = a.view(torch.float32)
    words.zero_()
    report.line("HBM read of 2 GiB (sum)", time_graph([lambda: words.sum()], 4), a.numel())
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    us = min(_elapsed_us(lambda: a[: host.numel()].copy_(host, non_blocking=True), 1) for _ in range(5))
    report.h2d_gbps = host.numel() / us / 1e3
    report.line("PCIe host to device, 1 GiB pinned", us, host.numel(), bus="pcie")
    us = min(_elapsed_us(lambda: host.copy_(a[: host.numel()], non_blocking=True), 1) for _ in range(5))
    report.line("PCIe device to host, 1 GiB pinned", us, host.numel(), bus="pcie")
    size = layout_of("q4_0").stride_bytes
    for count in (1, 8):

        def copy_records(count: int = count) -> None:
            for i in range(count):
                a[i * size : (i + 1) * size].copy_(host[i * size : (i + 1) * size], non_blocking=True)

        us = min(_elapsed_us(copy_records, 10) / 10 for _ in range(5))
        report.line(f"PCIe {count} copies of a Q4_0 record", us, count * size, bus="pcie")
    x, y = (bench.randn(8192, 8192) for _ in range(2))
    report.line("matrix product 8192, bf16 (cuBLAS)", time_graph([lambda: x @ y], 4), flops=2 * 8192.0**3)
    small = next(iter(cases.small_cases(bench, 1)))
    report.line("smallest launch in a chain (norm of one row)", time_graph([small.run], 64))


def run_checks(report: Report, bench: Bench) -> None:
    """All of ``checks.py``."""
    bad = total = 0
    for check in checks.CHECKS:
        start = time.perf_counter()
        worst: list[tuple[str, float, float]] = []
        number = 0
        try:
            for what, error, limit in check(bench):
                number += 1
                if not error <= limit:
                    worst.append((what, error, limit))
        except Exception:
            report.failed(check.__name__)
        total += number
        bad += len(worst)
        for what, error, limit in worst:
            report.note(wrong=what, error=f"{error:.3e}", limit=limit)
        report.note(check=check.__name__, compared=number, wrong=len(worst), s=round(time.perf_counter() - start, 1))
    report.note(compared=total, outside_limits=bad)


def family(report: Report, bench: Bench, name: str) -> None:
    """Timings of one family of ``selection.py``."""
    for timing in selection.FAMILIES[name](bench):
        label = "?"
        try:
            made = [timing.make(i) for i in range(timing.copies)]
            label = made[0].name
            us = time_graph([case.run for case in made])
            count = len(made)
            report.line(label, us, sum(c.bytes_moved for c in made) / count, sum(c.flops for c in made) / count)
        except Exception:
            report.failed(f"{name}: {label}")
            torch.cuda.synchronize()
    bench.forget()


def pcie(report: Report, bench: Bench) -> None:
    """Experts read from host memory by the expert GEMV and by the copying kernel."""
    for fmt, records in (("q4_0", 512), ("bf16", 128)):
        layout = layout_of(fmt)
        host = bench.store(fmt, records, host=True)
        slots = torch.zeros(64, layout.stride_bytes, dtype=torch.uint8, device="cuda")
        for fill in (False, True):
            for experts in (1, 2, 4, 8):
                made = [
                    cases.gemv_case(
                        bench,
                        fmt,
                        1,
                        store=host,
                        slots=slots if fill else None,
                        kind=KIND_FETCH,
                        offset=37 * i,
                        experts=experts,
                        tag=f" from host x{experts}{' filling slots' if fill else ''}",
                    )
                    for i in range(8)
                ]
                us = time_graph([case.run for case in made], 8)
                report.line(made[0].name, us, sum(c.bytes_moved for c in made) / len(made), bus="pcie")
        for experts in (1, 8):
            for grid in (16, 32, 64, 132, 264):
                made = [cases.fetch_case(bench, fmt, experts, host, slots, grid, 37 * i) for i in range(4)]
                report.line(made[0].name, time_graph([c.run for c in made], 8), made[0].bytes_moved, bus="pcie")
    _registered_memfd(report, bench)
    bench.forget()


def _registered_memfd(report: Report, bench: Bench) -> None:
    # The store's real kind of memory: a memfd mapped shared and registered.
    layout, records = layout_of("q4_0"), 128
    size = records * layout.stride_bytes
    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, size)
    view = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    host = torch.from_numpy(view).view(records, layout.stride_bytes)
    host.copy_(bench.store("q4_0", 512, host=True)[:records])
    start = time.perf_counter()
    status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0)
    report.note(registering_memfd_gib_s=round(size / 2**30 / (time.perf_counter() - start), 2), status=str(status))
    for experts in (1, 8):
        made = [
            cases.gemv_case(bench, "q4_0", 1, store=host, kind=KIND_FETCH, offset=16 * i, experts=experts,
                            tag=f" from registered memfd x{experts}")
            for i in range(8)
        ]  # fmt: skip
        us = time_graph([case.run for case in made], 8)
        report.line(made[0].name, us, sum(c.bytes_moved for c in made) / len(made), bus="pcie")
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def mailbox(report: Report, bench: Bench) -> None:
    """Round trips of a step of 48 layers in a graph, answered by a thread that looks slots up."""
    _round_trips(report, bench, 1)
    _round_trips(report, bench, 1, choose=False)
    _round_trips(report, bench, 1, cpu_share=True)
    _round_trips(report, bench, 8)
    _round_trips(report, bench, 32)


def _round_trips(report: Report, bench: Bench, tokens: int, cpu_share: bool = False, choose: bool = True) -> None:
    slot_of = torch.arange(LAYERS * EXPERTS, dtype=torch.int32).view(LAYERS, EXPERTS)
    responder = Responder(tokens, TOP_K, HIDDEN, slot_of, cpu_share)
    plan = DevicePlan.empty(min(EXPERTS, tokens * TOP_K), tokens * TOP_K, "cuda")
    store = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
    seq = torch.zeros(1, dtype=torch.int32, device="cuda")
    step, real = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full_like(seq, tokens)
    hidden, logits = bench.randn(tokens, HIDDEN), bench.randn(tokens, EXPERTS, dtype=torch.float32)
    ids, weights = bench.expert_ids(tokens), torch.rand(tokens, TOP_K, device="cuda")
    admit = torch.ones(tokens, dtype=torch.uint8, device="cuda")
    box = responder.addresses

    def layers() -> None:
        for number in range(LAYERS):
            publish(
                box, seq, step, real, hidden, ids, weights, admit, number, flags=4, logits=logits if choose else None
            )  # fmt: skip
            await_plan(box, seq, store, 1 << 33, 8192, plan, 10**9)
            if cpu_share:
                await_part(box, seq, plan, 10**9)

    responder.start()
    try:
        us = time_graph([layers], 1) / LAYERS
        more = {"failed_waits": int(plan.counts[STATUS]), "answered": responder.answered}
    finally:
        responder.stop()
    what = ("publish (top-k inside)" if choose else "publish") + " + plan" + (" + part" if cpu_share else "")
    report.line(f"mailbox T={tokens}: {what}, per layer", us, **more)


def decode_step(report: Report, bench: Bench) -> None:
    """48 layers, head and greedy sampling in one graph, all experts resident."""
    slot_of = torch.arange(LAYERS * EXPERTS, dtype=torch.int32).view(LAYERS, EXPERTS)
    for batch, context in ((1, 512), (1, 8192), (2, 512), (8, 512), (32, 512)):
        model = layer.FakeModel(bench, LAYERS, batch, context)
        shape = selection.DECODE_ATTENTION if batch == 1 else selection.replace(selection.DECODE_ATTENTION, splits=8)
        for responder in (None, Responder(batch, TOP_K, HIDDEN, slot_of)):
            name = f"decode step T={batch} ctx={context} {'with mailbox' if responder else 'fixed plans'}"
            try:
                step = layer.DecodeStep(model, responder, shape)
                if responder:
                    responder.start()
                try:
                    us = time_graph([step.run], 1, 60.0)
                    layer_us = time_graph([lambda i=i, step=step: step.layer(i) for i in range(LAYERS)], LAYERS)
                    if batch == 1 and context == 512:
                        _breakdown(report, step.run)
                finally:
                    if responder:
                        responder.stop()
                failed = int(step.plan.counts[STATUS])
                report.line(
                    name, us, tokens_per_s=round(batch * 1e6 / us, 1), layer_us=round(layer_us, 2), failed_waits=failed
                )
            except Exception:
                report.failed(name)
                torch.cuda.synchronize()
        del model


def _breakdown(report: Report, run: Callable[[], None]) -> None:
    # Kernel times of one step, from the profiler; nothing when there is none on this machine.
    try:
        from torch.profiler import ProfilerActivity, profile

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            graph.replay()
            torch.cuda.synchronize()
        rows = sorted(trace.key_averages(), key=lambda row: -row.device_time_total)
        for row in rows[:14]:
            report.note(
                kernel=row.key[:60], launches=row.count, us_each=round(row.device_time_total / max(1, row.count), 2)
            )
    except Exception:
        report.failed("profiler")


def prefill_layer(report: Report, bench: Bench) -> None:
    """One layer over chunks, all its experts resident: what 48 of them allow, without head and streaming."""
    context = 4096
    model = layer.FakeModel(bench, 2, 1, context)
    for tokens in (16, 64, 512, 2048, 4096):
        try:
            shape = selection.PREFILL_ATTENTION
            if tokens <= 64:
                shape = selection.replace(shape, splits=16)
            chunk = layer.PrefillLayer(model, tokens, shape)
            us = time_graph([chunk.run], 1, 40.0)
            report.line(
                f"prefill layer, {tokens} new tokens at context {context}", us,
                tokens_per_s=round(tokens * 1e6 / us / LAYERS), ms_48_layers=round(us * LAYERS / 1e3, 1),
            )  # fmt: skip
        except Exception:
            report.failed(f"prefill layer {tokens}")
            torch.cuda.synchronize()
    bench.forget()


SECTIONS: dict[str, Callable[[Report, Bench], None]] = {
    "baselines": baselines,
    "checks": run_checks,
    "mailbox": mailbox,
    "decode step": decode_step,
    "prefill layer": prefill_layer,
    "PCIe": pcie,
    **{name: (lambda report, bench, name=name: family(report, bench, name)) for name in selection.FAMILIES},
}


def main() -> int:
    """Run the sections; 1 when a check is outside its limit or something failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="result file")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument(
        "--compile-jobs", type=int, default=0, help="compile the timed variants ahead, in so many processes"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 2
    major, minor = torch.cuda.get_device_capability()
    if options.compile_jobs:
        start = time.perf_counter()
        command = [sys.executable, str(Path(__file__).with_name("compile.py")), "--arch", str(10 * major + minor)]
        subprocess.run([*command, "--timed", "--jobs", str(options.compile_jobs)], check=False)
        print(f"compiled ahead in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(0)
    report, bench = Report(options.out), Bench("cuda")
    for name in options.sections:
        report.begin(name)
        start = time.perf_counter()
        try:
            SECTIONS[name](report, bench)
        except Exception:
            report.failed(name)
            try:
                torch.cuda.synchronize()
            except Exception:
                print("the device is lost; the remaining sections need a new process", flush=True)
                break
        finally:
            report.note(section_s=round(time.perf_counter() - start, 1))
            report.write()
    if report.failures:
        print("\nfailures:\n" + "\n".join(report.failures))
    wrong = any("wrong" in row and row["wrong"] for row in report.figures.get("checks", []))
    return 1 if report.failures or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
