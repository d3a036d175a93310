"""Does the CUDA device decode, correctly and how fast? One command on a machine with a GPU; every section stands alone.

    python bench/gpu/decode_smoke.py [--layers 12] [--dtype bf16] [--out result.json] [--sections a,b,...]

Makes a synthetic checkpoint of the Qwen3-30B-A3B shape with fewer layers on a memory file system, loads it into shared
memory once, and runs each section in a process of its own (a fault in one spoils no other), with a time limit and stack
dumps. The data plane's servers run in the section's process. Prints what is needed to understand a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PROMPT = [11, 97, 120, 45, 77, 31, 89, 64, 150, 2, 51, 99, 30, 40, 8, 77, 23]


# ---------------------------------------------------------------------------------------------------- child


def make_rig(arguments: argparse.Namespace, residency: float, **settings: Any) -> Any:
    """A started rig over the parent's store; ``residency`` is the share of records that fit the slots."""
    from freetoken._native import SharedSegment, physical_cores
    from freetoken.checkpoint.ftw import FtwIndex
    from freetoken.checkpoint.held_store import HeldStore
    from freetoken.config import EngineConfig
    from freetoken.elastic.machine import read_machine
    from freetoken.engine.prepare import plan_launch
    from freetoken.testing.cuda_rig import CudaRig

    started = time.monotonic()
    index = FtwIndex.load(arguments.checkpoint)
    segments = [
        SharedSegment.attach(fd, file.size_bytes, file.name)
        for fd, file in zip(arguments.fds, index.files, strict=True)
    ]
    store = HeldStore(str(index.path), index.fingerprint, segments)
    machine = dataclasses.replace(read_machine(), available_bytes=1 << 46)
    config = EngineConfig(
        model=str(arguments.checkpoint),
        device="cuda",
        vram="100GiB",
        kv={"num_tokens": arguments.kv_tokens, "dtype": "f32" if arguments.dtype == "f32" else "bf16"},
        scheduler={"max_num_running": 32, "max_num_batched_tokens": settings.pop("max_tokens", 1024)},
        executor={"wait_timeout_s": 5.0},
    )
    spec = plan_launch(config, Path(arguments.checkpoint), machine)
    records = index.num_records
    cores = physical_cores()
    workers = tuple(cores[: max(1, len(cores) - 3)])
    plan = dataclasses.replace(
        spec.plan,
        num_slots=max(8, int(records * residency)),
        cpu_threads=len(workers),
        cpu_core_ids=workers if len(cores) > 4 else (),
        spin_us=50 if len(cores) > 4 else 0,
        in_place=False,
    )

    def say(done: int, total: int, what: str) -> None:
        print(f"  {time.monotonic() - started:6.1f} s  {done}/{total} {what}", flush=True)

    rig = CudaRig(dataclasses.replace(spec, plan=plan), store=store, on_progress=say, **settings)
    rig.__enter__()
    print(f"rig: {time.monotonic() - started:.1f} s, slots {plan.num_slots} of {records} records", flush=True)
    return rig


class Driver:
    """Plays the scheduler for a few requests; pipelined like the step thread."""

    def __init__(self, rig: Any) -> None:
        from freetoken.messages import StepPlan, StepRow

        self.plan, self.row = StepPlan, StepRow
        self.rig = rig
        self.step = 0
        self.next_block = 0
        self.lengths: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.last: Any = None

    def prefill(self, name: str, prompt: list[int], sampling: Any = None, room: int = 256, chunk: int = 1024) -> int:
        """Runs the whole prompt; returns the first token."""
        from freetoken.messages import RequestInit, SamplingParams

        size = self.rig.launch.plan.kv_block_size
        count = -(-(len(prompt) + room) // size)
        ids = tuple(range(self.next_block, self.next_block + count))
        self.next_block += count
        sampling = sampling or SamplingParams(temperature=0.0, seed=0)
        token = None
        for start in range(0, len(prompt), chunk):
            length = min(chunk, len(prompt) - start)
            last = start + length == len(prompt)
            init = RequestInit(sampling, tuple(prompt), len(prompt)) if start == 0 else None
            row = self.row(name, start, length, last, False, ids if start == 0 else (), init)
            self.step += 1
            result = self.last = self.check(self.rig.executor.execute(self.plan(self.step, 1, (row,))))
            token = result.rows[0].token_id
        self.lengths[name] = len(prompt)
        return token  # type: ignore[return-value]

    def rows(self) -> tuple[Any, ...]:
        return tuple(self.row(name, length, 1, True, True) for name, length in self.lengths.items())

    def decode(self, steps: int) -> tuple[dict[str, list[int]], Any, float]:
        """(tokens by request, summed counters, seconds), two steps under way at a time."""
        from freetoken.messages import ExpertCounters

        executor = self.rig.executor
        tokens: dict[str, list[int]] = {name: [] for name in self.lengths}
        experts = ExpertCounters()
        under_way: list[Any] = []
        started = time.monotonic()
        for number in range(steps + 2):
            if number < steps:
                self.step += 1
                plan = self.plan(self.step, 1, self.rows())
                under_way.append(executor.enqueue(plan))
                for name in self.lengths:
                    self.lengths[name] += 1
            if len(under_way) == 2 or (number >= steps and under_way):
                result = self.check(executor.finish(under_way.pop(0)))
                experts = experts + result.experts
                for row in result.rows:
                    tokens[row.request_id].append(row.token_id)
        return tokens, experts, time.monotonic() - started

    @staticmethod
    def check(result: Any) -> Any:
        from freetoken.messages import StepFailed

        if isinstance(result, StepFailed):
            raise RuntimeError(f"step failed: {result}")
        bad = [row.failure for row in result.rows if row.failure]
        if bad:
            raise RuntimeError(f"rows failed: {bad}")
        return result


def describe(experts: Any, steps: int, seconds: float, rows: int) -> dict[str, Any]:
    layers = max(1, experts.layer_steps)
    return {
        "ms_per_step": round(seconds / steps * 1e3, 4),
        "tokens_per_s": round(rows * steps / seconds, 1),
        "hits_per_layer": round(experts.hits / layers, 3),
        "fetches_per_layer": round(experts.fetches / layers, 3),
        "cpu_per_layer": round(experts.cpu / layers, 3),
        "us_per_layer": round(seconds / layers * 1e6, 2),
        "fetch_gbps": round(experts.fetched_bytes / seconds / 1e9, 1),
        "cpu_gbps": round(experts.cpu_bytes / seconds / 1e9, 1),
        "admitted_per_layer": round(experts.admitted / layers, 3),
    }


def section_environment(arguments: argparse.Namespace) -> Any:
    import torch
    import triton

    from freetoken import _native

    properties = torch.cuda.get_device_properties(0)
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "free_bytes": torch.cuda.mem_get_info()[0],
        "cores": len(os.sched_getaffinity(0)),
        "cpu_features": [name for name, has in _native.cpu_features().items() if has],
        "native": _native.__file__,
    }


def section_eager(arguments: argparse.Namespace) -> Any:
    """The first thing to look at when something is wrong: no graph, everything synchronous where it can be."""
    rig = make_rig(arguments, 1.0, capture=False, fetch_fraction=1.0)
    driver = Driver(rig)
    first = driver.prefill("a", PROMPT)
    figures: dict[str, Any] = {"first_token": first}
    tokens, experts, seconds = driver.decode(8)
    figures["tokens"] = tokens["a"]
    figures.update(describe(experts, 8, seconds, 1))
    return figures


def section_all_hit(arguments: argparse.Namespace) -> Any:
    """Every record resident: what a step costs without any bus."""
    rig = make_rig(arguments, 1.0, fetch_fraction=1.0)
    fill_all(rig)
    driver = Driver(rig)
    driver.prefill("a", PROMPT, room=1024)
    driver.decode(20)
    figures = {}
    _, experts, seconds = driver.decode(200)
    figures["batch 1"] = describe(experts, 200, seconds, 1)
    figures["roofline"] = roofline(rig, figures["batch 1"])
    for batch in (2, 4, 8, 16, 32):
        for i in range(len(driver.lengths), batch):
            driver.prefill(f"r{i}", [t + i for t in PROMPT], room=512)
        driver.decode(4)
        _, experts, seconds = driver.decode(50)
        figures[f"batch {batch}"] = describe(experts, 50, seconds, batch)
    return figures


def fill_all(rig: Any) -> None:
    """Make every record resident (at residency 1): prompts touch them until nothing is fetched any more."""
    import random

    driver = Driver(rig)
    rng = random.Random(1)
    vocab = rig.launch.model.vocab_size
    blocks = rig.arena.num_blocks
    for number in range(40):
        name = f"fill{number}"
        driver.next_block = (number * 40) % (blocks - 80)
        prompt = [rng.randrange(vocab) for _ in range(32)]
        driver.prefill(name, prompt, room=1)
        rig.executor.execute(driver.plan(10_000 + number, 1, (), (name,)))
        counters = rig.cache_server.counters()
        if counters["resident"] >= rig.index.num_records * 0.999:
            break
    print(f"resident: {rig.cache_server.counters()['resident']} of {rig.index.num_records}", flush=True)
    driver.lengths.clear()


def roofline(rig: Any, figures: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a step of one token must read from device memory when all experts hit."""
    weights = rig.runtime.model.weights
    dense = sum(
        linear.size_bytes
        for layer in weights.layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if linear is not None
    )
    dense += weights.lm_head.size_bytes
    layouts = rig.runtime.model.plane.records.layouts
    experts = sum(layout.payload_bytes for layout in layouts) * rig.launch.model.num_experts_per_tok
    return {
        "dense_mb": round(dense / 1e6, 1),
        "expert_mb": round(experts / 1e6, 1),
        "achieved_gbps": round((dense + experts) / (figures["ms_per_step"] / 1e3) / 1e9, 1),
    }


def section_quarter(arguments: argparse.Namespace) -> Any:
    """A quarter of the records fit: fetches and CPU share."""
    figures = {}
    rig = make_rig(arguments, 0.25)
    driver = Driver(rig)
    driver.prefill("a", PROMPT, room=4096)
    driver.decode(100)
    for split in (0.0, 0.25, 0.5, 0.75, 1.0):
        rig.cache_server.set_fetch_fraction(split)
        driver.decode(20)
        before = rig.cpu_server.counters()
        _, experts, seconds = driver.decode(100)
        after = rig.cpu_server.counters()
        busy_s = (after["busy_ns"] - before["busy_ns"]) / 1e9
        figures[f"q={split}"] = {**describe(experts, 100, seconds, 1), "cpu_busy_share": round(busy_s / seconds, 3)}
    return figures


def section_compare(arguments: argparse.Namespace) -> Any:
    """The same prompt with everything resident, with a tiny cache and all misses fetched, and with all on the CPU."""
    import gc

    import torch

    outcomes: dict[str, Any] = {}
    logits: dict[str, Any] = {}
    for name, residency, fraction, capture in (
        ("resident", 1.0, 1.0, True),
        ("resident eager", 1.0, 1.0, False),
        ("fetch", 0.03, 1.0, True),
        ("cpu", 0.03, 0.0, True),
        ("mixed", 0.03, 0.5, True),
    ):
        rig = make_rig(arguments, residency, fetch_fraction=fraction, capture=capture)
        driver = Driver(rig)
        first = driver.prefill("a", PROMPT)
        prefill_logits = rig.runtime.model.logits[0].float().cpu().clone()
        tokens, experts, _ = driver.decode(24)
        outcomes[name] = {
            "tokens": [first, *tokens["a"]],
            "hits": experts.hits,
            "fetches": experts.fetches,
            "cpu": experts.cpu,
        }
        logits[name] = (prefill_logits, rig.runtime.model.logits[0].float().cpu().clone())
        rig.__exit__(None, None, None)
        del rig, driver
        gc.collect()
        torch.cuda.empty_cache()
    reference = logits["resident"]
    for name, (prefill_logits, last) in logits.items():
        same = outcomes[name]["tokens"] == outcomes["resident"]["tokens"]
        outcomes[name]["same_tokens"] = same
        outcomes[name]["prefill_max_error"] = float((prefill_logits - reference[0]).abs().max())
        if same:
            outcomes[name]["last_max_error"] = float((last - reference[1]).abs().max())
    outcomes["logit_std"] = float(reference[0].std())
    return outcomes


class Always:
    """Costs that make every chunk long, or none that the CPU may share."""

    def __init__(self, staging: bool) -> None:
        self._staging = staging

    def prefers_staging(self, tokens: int) -> bool:
        return self._staging


def time_prefill(rig: Any, driver: Driver, length: int, seed: int, repeats: int = 3) -> dict[str, Any]:
    """Best seconds of fresh prompts, then one more with events around every phase: milliseconds of each over all
    layers, and what the copy engine did."""
    import torch

    from freetoken.execution.cuda.trace import Trace

    model = rig.runtime.model
    steps, copy, outcome = Trace(), Trace(), None
    times = []
    for repeat in range(repeats + 1):
        traced = repeat == repeats
        driver.next_block = 64
        prompt = [(i * 7919 + repeat * 104729 + length * 31 + seed) % 150000 for i in range(length)]
        name = f"p{length}-{repeat}-{seed}"
        stager = model.stager
        copied = (stager.copied_bytes, stager.copied_runs) if stager is not None else (0, 0)
        if traced:
            torch.cuda.synchronize()
            model.program.trace = steps
            if stager is not None:
                stager._copier.trace = copy
        started = time.monotonic()
        driver.prefill(name, prompt, room=1, chunk=4096)
        seconds = time.monotonic() - started
        outcome = driver.last
        model.program.trace = None
        if stager is not None:
            stager._copier.trace = None
            copied = (stager.copied_bytes - copied[0], stager.copied_runs - copied[1])
        if not traced:
            times.append(seconds)
        driver.lengths.pop(name)
        driver.step += 1
        rig.executor.execute(driver.plan(driver.step, 1, (), (name,)))
    torch.cuda.synchronize()
    best = min(times)
    experts = outcome.experts
    layers = max(1, experts.layer_steps)
    return {
        "best_s": round(best, 5),
        "worst_s": round(max(times), 5),
        "tokens_per_s": round(length / best, 1),
        "ms_per_layer": round(best / len(model.weights.layers) * 1e3, 3),
        "traced_s": round(seconds, 5),
        "phases_ms": {name: round(ms, 3) for name, ms in steps.milliseconds().items()},
        "copy_ms": {name: round(ms, 3) for name, ms in copy.milliseconds().items()},
        "copied_gb": round(copied[0] / 1e9, 3),
        "copies": copied[1],
        "last_chunk_per_layer": {
            name: round(getattr(experts, name) / layers, 1)
            for name in ("hits", "fetches", "cpu", "admitted", "evicted")
        },
    }


def section_prefill(arguments: argparse.Namespace) -> Any:
    """Prompts of several lengths at 25 % residency; what lies near the border also the other way."""
    rig = make_rig(arguments, 0.25, max_tokens=4096)
    model = rig.runtime.model
    driver = Driver(rig)
    driver.prefill("warm", list(range(100, 700)), room=1, chunk=4096)
    driver.lengths.clear()
    stager = model.stager
    figures: dict[str, Any] = {
        "staging": None if stager is None else {"capacity": stager.capacity, "spares": stager.num_spares},
        "long": {str(n): model.long_tokens(n) for n in (16, 32, 64, 128, 129, 512, 4096)},
    }
    print(figures, flush=True)
    own = model.costs
    for length in (16, 512, 4096, 64, 128, 256, 1024, 2048, 32):
        model.costs = own
        figures[f"{length} tokens"] = time_prefill(rig, driver, length, 0)
        print(length, figures[f"{length} tokens"], flush=True)
        for name, staging in (("staged", True), ("shared", False)):
            if length in (16, 32, 64, 128):
                model.costs = Always(staging)
                figures[f"{length} tokens {name}"] = time_prefill(rig, driver, length, 1, repeats=2)
                print(length, name, figures[f"{length} tokens {name}"], flush=True)
    model.costs = own
    for split in (0.3, 0.4, 0.6, 0.7, 1.0):
        rig.cache_server.set_fetch_fraction(split)
        for length in (16, 64, 128):
            model.costs = Always(False)
            timed = time_prefill(rig, driver, length, 2, repeats=2)
            figures[f"{length} tokens q={split}"] = timed
            print(length, split, timed["best_s"], timed["phases_ms"], flush=True)
    return figures


def section_prefill_hit(arguments: argparse.Namespace) -> Any:
    """The same with everything resident: what computing costs."""
    rig = make_rig(arguments, 1.0, max_tokens=4096, fetch_fraction=1.0)
    fill_all(rig)
    driver = Driver(rig)
    driver.step = 20_000
    figures: dict[str, Any] = {}
    for length in (4096, 512, 128, 16, 2048):
        figures[f"{length} tokens"] = time_prefill(rig, driver, length, 0)
        print(length, figures[f"{length} tokens"], flush=True)
    return figures


def section_prefill_compare(arguments: argparse.Namespace) -> Any:
    """One prompt in all ways: in short pieces, long and staged, long with wrong predictions of residency, long without
    staging. Logits and the tokens that follow must agree."""
    import numpy as np

    from freetoken.execution.cuda.staging import Stager

    rig = make_rig(arguments, 0.25, max_tokens=4096)
    model = rig.runtime.model
    driver = Driver(rig)
    long_piece, stager, stage = model._long, model.stager, Stager.stage
    prompt = [(i * 7919 + 17) % 150000 for i in range(700)]

    def outdated(self: Any, layer: int, slot_of: Any) -> None:
        stage(self, layer, np.where(np.arange(len(slot_of)) % 2 == 0, 3, -1).astype(np.int32))

    outcomes: dict[str, Any] = {}
    logits: dict[str, Any] = {}
    for number, name in enumerate(("pieces", "staged", "outdated", "unstaged", "staged again")):
        model._long = None if name == "pieces" else long_piece
        model.stager = None if name == "unstaged" else stager
        Stager.stage = outdated if name == "outdated" else stage  # type: ignore[method-assign]
        driver.next_block = 64 + number * 64
        driver.lengths.clear()
        started = time.monotonic()
        first = driver.prefill(name, prompt, room=64, chunk=4096)
        seconds = time.monotonic() - started
        logits[name] = model.logits[0].float().cpu().clone()
        tokens, _, _ = driver.decode(12)
        outcomes[name] = {
            "seconds": round(seconds, 4),
            "tokens": [first, *tokens[name]],
            "max_error": float((logits[name] - logits["pieces"]).abs().max()),
            "same_tokens": [first, *tokens[name]] == outcomes.get("pieces", {}).get("tokens", [first, *tokens[name]]),
        }
        print(name, outcomes[name], flush=True)
        driver.step += 1
        rig.executor.execute(driver.plan(driver.step, 1, (), (name,)))
    outcomes["logit_std"] = float(logits["pieces"].std())
    return outcomes


def section_kernels(arguments: argparse.Namespace) -> Any:
    """Where a decode step's microseconds go, from a profile of graph replays at batch 1, all resident."""
    import torch

    rig = make_rig(arguments, 1.0, fetch_fraction=1.0)
    fill_all(rig)
    driver = Driver(rig)
    driver.prefill("a", PROMPT, room=1024)
    driver.decode(20)
    steps = 10
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        driver.decode(steps)
        torch.cuda.synchronize()
    rows = []
    for event in profile.key_averages():
        total = getattr(event, "device_time_total", 0) or getattr(event, "cuda_time_total", 0)
        rows.append((total / steps, event.count / steps, event.key[:90]))
    rows.sort(reverse=True)
    for total, count, key in rows[:30]:
        print(f"{total:10.1f} us/step {count:7.1f} x {total / max(count, 1e-9):8.2f} us  {key}", flush=True)
    return {"us_per_step_in_kernels": round(sum(row[0] for row in rows), 1)}


def section_sampling(arguments: argparse.Namespace) -> Any:
    """Every way to sample, two requests at a time; host-sampled ones among them."""
    from freetoken.messages import SamplingParams

    rig = make_rig(arguments, 0.25)
    figures = {}
    for number, (name, params) in enumerate(
        {
            "temperature": {"temperature": 0.8},
            "top_k": {"temperature": 0.8, "top_k": 5},
            "top_p": {"temperature": 0.8, "top_p": 0.9},
            "min_p": {"temperature": 0.8, "min_p": 0.1},
            "penalty": {"temperature": 0.0, "repetition_penalty": 1.3},
            "logprobs": {"temperature": 0.0, "top_logprobs": 3},
        }.items()
    ):
        driver = Driver(rig)
        driver.step = 1000 * (number + 1)
        first = driver.prefill(f"s{number}", PROMPT, SamplingParams(seed=5, **params))
        tokens = [first]
        for _ in range(8):
            driver.step += 1
            result = driver.check(rig.executor.execute(driver.plan(driver.step, 1, driver.rows())))
            driver.lengths[f"s{number}"] += 1
            tokens.append(result.rows[0].token_id)
            if name == "logprobs":
                figures["logprob"] = str(result.rows[0].logprob)
        figures[name] = tokens
        rig.executor.execute(driver.plan(driver.step + 1, 1, (), (f"s{number}",)))
    return figures


def section_abort(arguments: argparse.Namespace) -> Any:
    """Servers that do not answer: the step must fail within the time limit and name the party."""
    rig = make_rig(arguments, 0.25)
    driver = Driver(rig)
    driver.prefill("a", PROMPT)
    rig._stop_servers()
    driver.step += 1
    started = time.monotonic()
    result = rig.executor.execute(driver.plan(driver.step, 1, driver.rows()))
    figures = {"seconds": round(time.monotonic() - started, 2), "outcome": repr(result)[:300]}
    rig.wire()
    driver = Driver(rig)
    driver.step = 50_000
    driver.prefill("b", PROMPT)
    tokens, _, _ = driver.decode(8)
    figures["after_rewiring"] = tokens["b"]
    return figures


SECTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "environment": section_environment,
    "eager": section_eager,
    "all_hit": section_all_hit,
    "quarter": section_quarter,
    "compare": section_compare,
    "kernels": section_kernels,
    "prefill_compare": section_prefill_compare,
    "prefill": section_prefill,
    "prefill_hit": section_prefill_hit,
    "sampling": section_sampling,
    "abort": section_abort,
}


def run_section(arguments: argparse.Namespace) -> int:
    faulthandler.enable()
    faulthandler.dump_traceback_later(arguments.limit - 5, exit=True)
    try:
        figures = SECTIONS[arguments.section](arguments)
    except BaseException:
        traceback.print_exc()
        print("RESULT " + json.dumps({"failed": traceback.format_exc()[-1500:]}), flush=True)
        os._exit(1)
    print("RESULT " + json.dumps(figures), flush=True)
    sys.stdout.flush()
    # A rig that is left open would be torn down in no particular order.
    os._exit(0)


# ---------------------------------------------------------------------------------------------------- parent


def build_checkpoint(arguments: argparse.Namespace) -> Path:
    directory = Path(arguments.scratch) / f"smoke-{arguments.dtype}-{arguments.layers}"
    if not (directory / "ftw.json").exists():
        command = [sys.executable, "-m", "freetoken.cli.main", "synth", arguments.shape, str(directory)]
        command += ["--layers", str(arguments.layers), "--dtype", arguments.dtype, "--measure-tokens", "64"]
        started = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=300)
        print(f"synth: {time.monotonic() - started:.1f} s", flush=True)
    return directory


def start_compiling(arguments: argparse.Namespace) -> subprocess.Popen[bytes] | None:
    """Fill Triton's cache on all cores while the checkpoint is made."""
    if arguments.arch == 0:
        return None
    command = [sys.executable, str(ROOT / "bench/gpu/compile_program.py"), "--arch", str(arguments.arch)]
    command += ["--shape", arguments.shape, "--dtype", arguments.dtype, "--jobs", str(min(10, os.cpu_count() or 1))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, env=environment, cwd=ROOT)


def load_segments(checkpoint: Path) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    from freetoken._native import SharedSegment
    from freetoken.checkpoint.ftw import FtwIndex

    index = FtwIndex.load(checkpoint)
    segments = [SharedSegment.create(file.name, file.size_bytes) for file in index.files]
    started = time.monotonic()

    def fill(job: tuple[int, int, int]) -> None:
        number, offset, size = job
        with open(index.path / index.files[number].name, "rb", buffering=0) as stream:
            stream.seek(offset)
            view = memoryview(segments[number])[offset : offset + size]
            done = 0
            while done < size:
                done += stream.readinto(view[done:])  # type: ignore[operator]

    piece = 64 << 20
    jobs = [
        (number, offset, min(piece, file.size_bytes - offset))
        for number, file in enumerate(index.files)
        for offset in range(0, file.size_bytes, piece)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, jobs))
    print(f"store: {index.store_bytes / 1e9:.1f} GB in {time.monotonic() - started:.1f} s", flush=True)
    return segments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "q4_0", "f32"))
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--scratch", default="/dev/shm", help="a memory file system with room for the checkpoint")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--arch", type=int, default=90, help="compile for this architecture beforehand; 0: do not")
    parser.add_argument("--kv-tokens", type=int, default=32768)
    parser.add_argument("--limit", type=int, default=240, help="seconds for one section")
    parser.add_argument("--total", type=int, default=560, help="seconds for everything")
    parser.add_argument("--out", default=None)
    parser.add_argument("--section", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", default=None, help="use this checkpoint instead of making one")
    parser.add_argument("--fds", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        return run_section(arguments)
    end = time.monotonic() + arguments.total
    compiling = start_compiling(arguments)
    checkpoint = Path(arguments.checkpoint) if arguments.checkpoint else build_checkpoint(arguments)
    segments = load_segments(checkpoint)
    if compiling is not None:
        started = time.monotonic()
        try:
            print(f"compiling ended with {compiling.wait(200)}, waited {time.monotonic() - started:.1f} s", flush=True)
        except subprocess.TimeoutExpired:
            compiling.kill()
            print("compiling did not end within 200 s", flush=True)
    fds = [segment.fd for segment in segments]
    results: dict[str, Any] = {}
    for name in arguments.sections.split(","):
        left = int(end - time.monotonic())
        if left < 20:
            results[name] = {"failed": "no time left"}
            continue
        limit = min(arguments.limit, left)
        print(f"==== {name} (at most {limit} s)", flush=True)
        command = [
            sys.executable,
            "-u",
            __file__,
            "--section",
            name,
            "--checkpoint",
            str(checkpoint),
            "--limit",
            str(limit),
        ]
        command += ["--dtype", arguments.dtype, "--kv-tokens", str(arguments.kv_tokens), "--fds", *map(str, fds)]
        try:
            done = subprocess.run(
                command,
                pass_fds=fds,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                check=False,
            )
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            output = (
                (error.stdout or b"").decode(errors="replace")
                if isinstance(error.stdout, bytes)
                else error.stdout or ""
            )
            output += f"\nRESULT {json.dumps({'failed': f'no end within {limit} s'})}"
        print(output[-9000:], flush=True)
        found = [line for line in output.splitlines() if line.startswith("RESULT ")]
        results[name] = json.loads(found[-1][7:]) if found else {"failed": output[-1500:]}
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))
    failed = [name for name, figures in results.items() if isinstance(figures, dict) and "failed" in figures]
    print(f"failed sections: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
