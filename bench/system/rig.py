"""An engine without actors and HTTP for benchmarks: store, servers, device and a driver that plays the scheduler.

``open_rig`` gives the CPU device or the CUDA device over one store that stays loaded; ``Driver`` runs requests on it,
with two steps under way where the device takes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from freetoken._native import CacheServer, CpuServer, Mailbox, SharedSegment, SlotTable, WorkerPool
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.cli.process import EngineProcess
from freetoken.config import EngineConfig
from freetoken.config.loader import merge, settings_from_flags
from freetoken.elastic.boot_plan import CheckpointSizes, plan_boot
from freetoken.elastic.machine import read_machine
from freetoken.engine.prepare import plan_launch
from freetoken.errors import CapacityError
from freetoken.experts.device_client import plan_mailbox
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ExpertCounters, RequestInit, SamplingParams, StepFailed, StepPlan, StepResult, StepRow
from freetoken.units import parse_bytes

_PLENTY = 1 << 46
_PIECE_BYTES = 64 << 20


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What decode and prefill have in common: which model, which device, how much of it is resident."""
    parser.add_argument("--model", help="an FTW directory (or anything that `freetoken launch` takes)")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="made with `freetoken synth` when no --model is given")
    parser.add_argument("--dtype", default="q4_0", choices=("q4_0", "bf16", "f32"), help="of the synthetic model")
    parser.add_argument("--layers", type=int, help="other number of layers than the shape's")
    parser.add_argument("--scratch", default="/dev/shm", help="where the synthetic model is made")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--url", help="a running server; nothing is launched")
    parser.add_argument("--in-process", action="store_true", help="without actors and HTTP")
    parser.add_argument("--runtime", type=names, default=("ray",), help="ray, local or both (HTTP mode)")
    parser.add_argument(
        "--residency",
        type=residencies,
        default=(1.0, 0.25),
        help="shares of the expert records that fit the slots, such as 1.0,0.25; `none`: no budget (CPU device)",
    )
    parser.add_argument("--kv-tokens", type=int, default=16384, help="capacity of the KV cache")
    parser.add_argument("--cpu-threads", type=int, help="workers of CpuExecutor")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="any setting")
    parser.add_argument(
        "--ready-timeout", type=float, default=600.0, help="seconds until a launched server must be ready"
    )
    parser.add_argument("--fill-tokens", type=int, default=32, help="of the prompts that make every record resident")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--pin-limit", type=parse_bytes, help="as if so much host memory could be pinned (in process)")
    parser.add_argument("--out", help="result file (JSON)")


def end_on_sigterm() -> None:
    """Leave in order, so that a launched server is stopped too."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def names(text: str) -> tuple[str, ...]:
    """Comma-separated words."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers."""
    return tuple(int(word) for word in names(text))


def shares(text: str) -> tuple[float, ...]:
    """Comma-separated numbers from 0 to 1."""
    values = tuple(float(word) for word in names(text))
    if not all(0.0 <= value <= 1.0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a number that is not between 0 and 1")
    return values


def residencies(text: str) -> tuple[float | None, ...]:
    """Comma-separated shares, or ``none``."""
    return tuple(None if word == "none" else shares(word)[0] for word in names(text))


def provide_model(arguments: argparse.Namespace) -> Path:
    """The FTW directory to measure: given, converted, or made up in the scratch directory (and kept there)."""
    from freetoken.checkpoint.resolve import resolve_checkpoint

    if arguments.model:
        return resolve_checkpoint(arguments.model)
    from freetoken.checkpoint.synthetic import SynthOptions, synthesize

    layers = {"layers": arguments.layers} if arguments.layers else {}
    name = "-".join(["synth", arguments.shape, arguments.dtype, *map(str, layers.values())])
    directory = Path(arguments.scratch) / name
    if not (directory / "ftw.json").exists():
        started = time.monotonic()
        synthesize(arguments.shape, directory, SynthOptions(dtype=arguments.dtype, overrides=layers, measure_tokens=64))
        print(f"made {directory} in {time.monotonic() - started:.1f} s", flush=True)
    return directory


def settings_of(arguments: argparse.Namespace, **sections: dict[str, Any]) -> dict[str, Any]:
    """Nested settings from the command line over ``sections``."""
    settings: dict[str, Any] = {"device": arguments.device, "kv": {"num_tokens": arguments.kv_tokens}}
    if arguments.cpu_threads:
        settings["executor"] = {"cpu_threads": arguments.cpu_threads}
    return merge(merge(settings, sections), settings_from_flags(arguments.settings))


def serve(arguments: argparse.Namespace, checkpoint: Path, flags: Sequence[str]) -> EngineProcess:
    """A context manager: ``freetoken launch`` with these flags."""
    limit_s = arguments.ready_timeout
    stop_s = min(60.0, max(5.0, limit_s / 5))
    return EngineProcess(str(checkpoint), *flags, ready_timeout_s=limit_s, stop_timeout_s=stop_s)


def vram_for(index: FtwIndex, model: str, settings: dict[str, Any], residency: float) -> int:
    """The smallest VRAM budget with which the boot plan gives ``residency`` of all records a slot.

    Raises ``CapacityError`` when no budget does.
    """
    machine = dataclasses.replace(read_machine(), available_bytes=_PLENTY)
    sizes = CheckpointSizes(index.dense_bytes, index.expert_bytes)
    wanted = round(residency * index.num_records) if index.spec.is_moe else 0

    def slots(vram: int) -> int:
        config = EngineConfig(**merge({"model": model, "vram": vram}, settings))
        try:
            return plan_boot(config, index.spec, index.layouts, sizes, machine).num_slots
        except CapacityError:
            return -1

    low, high = 0, _PLENTY >> 3
    if slots(high) < wanted:
        raise CapacityError(f"no VRAM budget gives {wanted} slots with these settings: {settings}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if slots(middle) >= wanted else (middle, high)
    return high


def plan_rig(checkpoint: Path, settings: dict[str, Any], residency: float | None) -> LaunchSpec:
    """The launch of an engine of that residency on this machine, whatever its free memory says."""
    index = FtwIndex.load(checkpoint)
    vram = None if residency is None else vram_for(index, str(checkpoint), settings, residency)
    config = EngineConfig(**merge({"model": str(checkpoint), "vram": vram}, settings))
    machine = dataclasses.replace(read_machine(), available_bytes=_PLENTY)
    if vram is None:
        machine = read_machine(config.device)
    spec = plan_launch(config, checkpoint, machine)
    plan = spec.plan
    threads = config.executor.cpu_threads
    if threads and config.executor.pin and threads < len(machine.physical_cores):
        plan = dataclasses.replace(plan, cpu_threads=threads, cpu_core_ids=tuple(machine.physical_cores[:threads]))
    return dataclasses.replace(spec, plan=plan)


class LoadedStore:
    """A checkpoint's files in shared memory, for as many rigs as want them."""

    def __init__(self, checkpoint: Path) -> None:
        self.index = FtwIndex.load(checkpoint)
        self.segments = [SharedSegment.create(file.name, file.size_bytes) for file in self.index.files]
        started = time.monotonic()
        jobs = [
            (number, offset, min(_PIECE_BYTES, file.size_bytes - offset))
            for number, file in enumerate(self.index.files)
            for offset in range(0, file.size_bytes, _PIECE_BYTES)
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda job: self._read(*job), jobs))
        print(f"store: {self.index.store_bytes / 1e9:.2f} GB in {time.monotonic() - started:.1f} s", flush=True)

    def _read(self, number: int, offset: int, size: int) -> None:
        path = self.index.path / self.index.files[number].name
        view = memoryview(self.segments[number])[offset : offset + size]
        with open(path, "rb", buffering=0) as stream:
            stream.seek(offset)
            done = 0
            while done < size:
                count = stream.readinto(view[done:])
                if not count:
                    raise OSError(f"{path} ends before byte {offset + size}")
                done += count

    def share(self) -> HeldStore:
        """Mappings of its own for one rig, which closes them."""
        segments = [SharedSegment.attach(s.fd, s.size_bytes, s.name) for s in self.segments]
        return HeldStore(str(self.index.path), self.index.fingerprint, segments)


class CpuRig:
    """GpuExecutor's CPU side with its data plane in one process, like ``freetoken.testing.cuda_rig.CudaRig``."""

    def __init__(self, launch: LaunchSpec, store: HeldStore, fetch_fraction: float) -> None:
        self.launch = launch
        self.index = FtwIndex.load(launch.checkpoint)
        self.store = store
        self._fetch_fraction = fetch_fraction
        self._servers: list[CacheServer | CpuServer] = []
        self._pools: list[WorkerPool] = []
        self._mailbox: Mailbox | None = None
        self.executor: Any = None

    def __enter__(self) -> CpuRig:
        import torch

        from freetoken.execution.arena import Arena
        from freetoken.execution.model_runtime import ModelRuntime

        plan, spec = self.launch.plan, self.launch.model
        torch.set_num_threads(plan.device_threads)
        isa = self.launch.config.executor.isa
        device_pool = WorkerPool(plan.device_threads, plan.device_core_ids, plan.spin_us, isa)
        self._pools.append(device_pool)
        self.arena = Arena.of(self.launch)
        runtime = ModelRuntime(self.launch, self.index, self.store, self.arena, device_pool)
        runtime.prepare()
        if spec.is_moe:
            cpu_pool = WorkerPool(plan.cpu_threads, plan.cpu_core_ids, plan.spin_us, isa)
            self._pools.append(cpu_pool)
            geometry = plan_mailbox(self.launch)
            segment = SharedSegment.create("rig-mailbox", Mailbox.required_bytes(*geometry))
            self._mailbox = Mailbox.create(segment, 1, *geometry)
            experts = self.launch.config.experts
            slots = SlotTable(
                len(spec.moe_layers),
                spec.num_experts,
                self.arena.num_slots,
                experts.policy,
                experts.half_life_tokens,
                experts.long_half_life_tokens,
                experts.admission_margin,
                experts.admission_floor,
            )
            strides = [self.index.layout_of(layer).stride_bytes for layer in range(len(spec.moe_layers))]
            expert_store = self.store.build_expert_store(self.index)
            self.cache_server = CacheServer(
                self._mailbox, slots, self._fetch_fraction, plan.in_place, plan.spin_us, strides
            )
            self.cpu_server = CpuServer(self._mailbox, expert_store, cpu_pool, plan.spin_us)
            self._servers = [self.cache_server, self.cpu_server]
            for server in self._servers:
                server.start()
        self.executor = runtime.build_executor(self._mailbox)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mailbox is not None:
            self._mailbox.abort()
        for server in self._servers:
            server.stop()
        for pool in self._pools:
            pool.close()
        self.executor = None
        self.store.close()


def open_rig(
    store: LoadedStore,
    settings: dict[str, Any],
    residency: float | None,
    fetch_fraction: float,
    capture: bool = True,
    pin_limit: int | None = None,
) -> Any:
    """A context manager: ``CudaRig`` or ``CpuRig`` by the settings' device."""
    launch = plan_rig(store.index.path, settings, residency)
    plan = launch.plan
    print(
        f"rig: {launch.config.device}, {plan.num_slots} slots for {store.index.num_records} records, "
        f"{plan.cpu_threads} CPU threads, {plan.num_kv_blocks} KV blocks",
        flush=True,
    )
    if launch.config.device == "cpu":
        return CpuRig(launch, store.share(), fetch_fraction)
    from freetoken.testing.cuda_rig import CudaRig, limited_driver

    driver = limited_driver(pin_limit) if pin_limit is not None else None
    return CudaRig(launch, store=store.share(), fetch_fraction=fetch_fraction, capture=capture, driver=driver)


@dataclass(slots=True)
class Span:
    """What a number of steps did: seconds, expert uses, tokens by request."""

    seconds: float = 0.0
    steps: int = 0
    experts: ExpertCounters = field(default_factory=ExpertCounters)
    tokens: dict[str, list[int | None]] = field(default_factory=dict)


class Driver:
    """Plays the scheduler on a rig. ``lengths``: tokens computed, by running request. Prefill is never batched."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.lengths: dict[str, int] = {}
        self._free = list(range(rig.arena.num_blocks))
        self._blocks: dict[str, list[int]] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        self._step = 0

    def start(self, name: str, tokens: Sequence[int], room: int, cached: int = 0) -> Span:
        """Compute ``tokens`` of a new request, whose KV has space for ``room`` more, and sample. The time is that of
        the tokens after the first ``cached``."""
        plan = self.rig.launch.plan
        count = -(-(len(tokens) + room) // plan.kv_block_size)
        if count > len(self._free):
            raise CapacityError(
                f"{count} KV blocks for {name} exceed the {len(self._free)} free ones; raise --kv-tokens"
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._blocks[name] = blocks
        init = RequestInit(SamplingParams(temperature=0.0, seed=0), tuple(map(int, tokens)), len(tokens))
        span = Span(tokens={name: []})
        first = True
        for begin, end in ((0, cached), (cached, len(tokens))):
            started = time.perf_counter()
            experts, steps = ExpertCounters(), 0
            for start in range(begin, end, plan.max_batch_tokens):
                length = min(plan.max_batch_tokens, end - start)
                last = start + length == len(tokens)
                row = StepRow(name, start, length, last, False, tuple(blocks) if first else (), init if first else None)
                first = False
                result = self._check(self.rig.executor.execute(self._plan((row,))))
                experts, steps = experts + result.experts, steps + 1
                if last:
                    span.tokens[name].append(result.rows[0].token_id)
            span.seconds, span.experts, span.steps = time.perf_counter() - started, experts, steps
        self.lengths[name] = len(tokens)
        return span

    def start_known(self, name: str, tokens: Sequence[int], prefilled: int) -> None:
        """A request all of whose tokens are known: the first ``prefilled`` are computed now, the others by
        ``decode(..., known=True)``, whatever was sampled."""
        plan = self.rig.launch.plan
        count = -(-len(tokens) // plan.kv_block_size)
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks for {name} exceed the {len(self._free)} free ones")
        self._blocks[name] = [self._free.pop() for _ in range(count)]
        self._known[name] = tuple(map(int, tokens))
        init = RequestInit(SamplingParams(temperature=0.0, seed=0), self._known[name], len(tokens))
        row = StepRow(name, 0, prefilled, False, False, tuple(self._blocks[name]), init)
        self._check(self.rig.executor.execute(self._plan((row,))))
        self.lengths[name] = prefilled

    def decode(self, steps: int, known: bool = False) -> Span:
        """``steps`` steps of all running requests; up to two under way where the device takes them. ``known``: their
        inputs are not what was sampled."""
        executor = self.rig.executor
        span = Span(steps=steps, tokens={name: [] for name in self.lengths})
        depth = getattr(executor, "depth", 1)
        under_way: list[Any] = []
        started = time.perf_counter()
        for number in range(steps + depth - 1):
            if number < steps:
                rows = tuple(self._decode_row(name, known) for name in self.lengths)
                plan = self._plan(rows)
                under_way.append(executor.enqueue(plan) if depth > 1 else executor.execute(plan))
                for name in self.lengths:
                    self.lengths[name] += 1
            if len(under_way) == depth or number >= steps:
                oldest = under_way.pop(0)
                result = self._check(executor.finish(oldest) if depth > 1 else oldest)
                span.experts = span.experts + result.experts
                for row in result.rows:
                    span.tokens[row.request_id].append(row.token_id)
        span.seconds = time.perf_counter() - started
        return span

    def _decode_row(self, name: str, known: bool) -> StepRow:
        length = self.lengths[name]
        if not known:
            return StepRow(name, length, 1, True, True)
        # As after a preemption, because a row samples only after the last token that is known.
        init = RequestInit(SamplingParams(temperature=0.0, seed=0), self._known[name][: length + 1], length + 1)
        return StepRow(name, length, 1, True, False, tuple(self._blocks[name]), init)

    def retire(self, *finished: str) -> None:
        """End requests and give their blocks back."""
        self._check(self.rig.executor.execute(self._plan((), finished)))
        for name in finished:
            self._free += self._blocks.pop(name)
            self.lengths.pop(name, None)

    def fill(self, prompts: Sequence[Sequence[int]]) -> int:
        """Run prompts until every record is resident, or they are used up; resident records. All misses are fetched,
        from here on."""
        resident, grown = 0, 0
        self.rig.cache_server.set_fetch_fraction(1.0)
        wanted = min(self.rig.index.num_records, self.rig.arena.num_slots)
        for number, prompt in enumerate(prompts):
            self.start(f"fill{number}", prompt, 0)
            self.retire(f"fill{number}")
            before, resident = resident, self.rig.cache_server.counters()["resident"]
            grown = number if resident > before else grown
            if resident >= wanted or number - grown >= 8:  # those of a step's last layer may be on their way for ever
                break
        return resident

    def _plan(self, rows: tuple[StepRow, ...], retired: tuple[str, ...] = ()) -> StepPlan:
        self._step += 1
        for server in ("cache_server", "cpu_server"):
            if hasattr(self.rig, server):
                getattr(self.rig, server).notice()
        return StepPlan(self._step, 1, rows, retired)

    @staticmethod
    def _check(result: StepResult | StepFailed) -> StepResult:
        if isinstance(result, StepFailed):
            raise RuntimeError(f"step failed: {result.message}")
        failures = [row.failure for row in result.rows if row.failure]
        if failures:
            raise RuntimeError(f"rows failed: {failures}")
        return result


def prompts(index: FtwIndex, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of independent tokens: their routing is as diverse as the model's."""
    from freetoken.checkpoint.synthetic import benchmark_prompt

    return [benchmark_prompt(index.spec, length, seed=seed * 10_007 + i).tolist() for i in range(count)]
