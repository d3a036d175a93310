"""GpuExecutor's CUDA side with its data plane in one process: on a GPU, or on the CPU in Triton's interpreter.

Without a GPU, kernels run one after the other on this thread, so a kernel that waits for a server would wait for ever:
the ``HostPlane`` waits before it, and "device" addresses are host addresses. What is left untested then is only what a
GPU does differently: memory ordering, graphs, streams, speed.
"""

from __future__ import annotations

import ctypes
import time
from types import TracebackType

import numpy as np
import torch

from freetoken._native import CacheServer, CpuServer, Mailbox, SharedSegment, SlotTable, WorkerPool
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.costs import assumed_costs
from freetoken.execution.cuda.arena import CudaArena
from freetoken.execution.cuda.data_plane import DataPlane, ExpertRecords, LookaheadBuffers
from freetoken.execution.cuda.driver import CudaDriver, HostMemoryDriver
from freetoken.execution.cuda.executor import CudaStepExecutor
from freetoken.execution.cuda.report import ReportBuffers
from freetoken.execution.cuda.runtime import CudaRuntime, Progress
from freetoken.execution.cuda.staging import RecordCopier
from freetoken.experts.device_client import DEVICE_SPIN_US, fetchable_records, plan_mailbox
from freetoken.experts.split import native_costs
from freetoken.kernels.triton.plan import DevicePlan
from freetoken.launch_spec import LaunchSpec


class HostDriver:
    """``HostMemoryDriver`` where the device is the host. ``limit_bytes``: how much can be registered, ``largest_bytes``
    of it at once."""

    def __init__(self, limit_bytes: int | None = None, largest_bytes: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.most_bytes = 0
        self._limit_bytes = limit_bytes
        self._largest_bytes = largest_bytes

    def register(self, address: int, size_bytes: int) -> str | None:
        if self._limit_bytes is not None and sum(self.ranges.values()) + size_bytes > self._limit_bytes:
            return "out of memory to register"
        if self._largest_bytes is not None and size_bytes > self._largest_bytes:
            return "too much at once"
        self.ranges[address] = size_bytes
        self.most_bytes = max(self.most_bytes, sum(self.ranges.values()))
        return None

    def unregister(self, address: int) -> None:
        del self.ranges[address]

    def device_address(self, address: int) -> int:
        return address


class LimitedDriver(CudaDriver):
    """As if no more than ``limit_bytes`` of host memory could be pinned by it."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.ranges: dict[int, int] = {}
        self._limit_bytes = limit_bytes

    def register(self, address: int, size_bytes: int) -> str | None:
        if sum(self.ranges.values()) + size_bytes > self._limit_bytes:
            return "out of memory to register"
        refusal = super().register(address, size_bytes)
        if refusal is None:
            self.ranges[address] = size_bytes
        return refusal

    def unregister(self, address: int) -> None:
        super().unregister(address)
        del self.ranges[address]


def limited_driver(limit_bytes: int) -> HostDriver | LimitedDriver:
    """Of a machine where so much can be pinned, with a GPU or not."""
    return LimitedDriver(limit_bytes) if torch.cuda.is_available() else HostDriver(limit_bytes)


class HostPlane(DataPlane):
    """Waits on the host for what the kernels would find answered."""

    def await_plan(self, ordinal: int, plan: DevicePlan, one_token: bool = False) -> None:
        self._wait("plan")
        super().await_plan(ordinal, plan, one_token)
        if int(plan.counts[3]) > 0:
            self._wait("part")

    def await_placed_plan(
        self,
        ordinal: int,
        plan: DevicePlan,
        copies: torch.Tensor,
        num_routes: int,
        staged: torch.Tensor,
        spares: tuple[int, int, int],
    ) -> None:
        self._wait("plan")
        super().await_placed_plan(ordinal, plan, copies, num_routes, staged, spares)
        if int(plan.counts[3]) > 0:
            self._wait("part")

    def _take_answer(self, ordinal: int, ahead: LookaheadBuffers) -> None:
        self._wait("ahead", ahead.seq)
        super()._take_answer(ordinal, ahead)

    def _wait(self, name: str, seq: torch.Tensor | None = None) -> None:
        assert self._layout is not None
        words = np.frombuffer(memoryview(self._segment), np.int32)
        at, abort = self._layout[f"{name}_offset"] // 4, self._layout["abort_offset"] // 4
        wanted = int(self.seq if seq is None else seq)
        end = time.monotonic() + self.limit_ns / 1e9
        while words[at] != wanted and not words[abort] and time.monotonic() < end:
            time.sleep(0)

    def attach(self, mailbox: Mailbox) -> None:
        super().attach(mailbox)
        self._segment = mailbox.segment


class HostCopier:
    """``RecordCopier`` where device memory is host memory: copies are made at once. Counts them."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, int, int]] = []

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)
        self.copied.append((destination, source, size_bytes))

    def move(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)

    def enter(self) -> None:
        pass

    def mark_buffer(self, number: int) -> None:
        pass

    def await_buffer(self, number: int) -> None:
        pass

    def begin(self, half: int) -> None:
        pass

    def end(self, half: int) -> None:
        pass

    def wait(self, half: int) -> None:
        pass

    def release(self, half: int) -> None:
        pass


class RigRuntime(CudaRuntime):
    """``CudaRuntime`` that also runs without a GPU."""

    def _build_copier(self, driver: HostMemoryDriver) -> RecordCopier:
        if self._arena.device.type == "cuda":
            return super()._build_copier(driver)
        return HostCopier()

    def _build_plane(self, records: ExpertRecords, report: ReportBuffers) -> DataPlane:
        if self._arena.device.type == "cuda":
            return super()._build_plane(records, report)
        router = self._launch.model.router
        assert router is not None and self._window is not None
        return HostPlane(
            self._window, records, self._arena, router, self._wait_limit_s, report.counts, self._looks_ahead
        )


def load_store(index: FtwIndex) -> HeldStore:
    """The checkpoint's data files in shared memory."""
    segments = []
    for file in index.files:
        segment = SharedSegment.create(file.name, file.size_bytes)
        with open(index.path / file.name, "rb") as stream:
            view = memoryview(segment)
            done = 0
            while done < file.size_bytes:
                done += stream.readinto(view[done : done + (64 << 20)])
        segments.append(segment)
    return HeldStore(str(index.path), index.fingerprint, segments)


class CudaRig:
    """Store, servers, arena and runtime of one launch; ``executor`` runs plans. Started on entry, stopped on exit."""

    def __init__(
        self,
        launch: LaunchSpec,
        *,
        store: HeldStore | None = None,
        capture: bool = True,
        fetch_fraction: float | None = None,
        spin_us: int | None = None,
        driver: HostMemoryDriver | None = None,
        on_progress: Progress = lambda done, total, what: None,
    ) -> None:
        self.launch = launch
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.index = FtwIndex.load(launch.checkpoint)
        self.store = store or load_store(self.index)
        self.arena = CudaArena.of(launch, self.device)
        if driver is None:
            driver = CudaDriver(0) if self.device.type == "cuda" else HostDriver()
        self.runtime = RigRuntime(launch, self.index, self.store, self.arena, driver, on_progress)
        self.mailbox: Mailbox | None = None
        self.slots: SlotTable | None = None
        self._servers: list[CacheServer | CpuServer] = []
        self._pool: WorkerPool | None = None
        self._spin_us = spin_us if spin_us is not None else (DEVICE_SPIN_US if self.device.type == "cuda" else 0)
        self._capture = capture
        fraction = launch.config.experts.fetch_fraction if fetch_fraction is None else fetch_fraction
        self._auto_split = fraction is None
        self._fetch_fraction = 1.0 if fraction is None else fraction
        self.executor: CudaStepExecutor

    def __enter__(self) -> CudaRig:
        if self.launch.model.is_moe:
            plan = self.launch.plan
            self._pool = WorkerPool(plan.cpu_threads, plan.cpu_core_ids, plan.spin_us)
            self._expert_store = self.store.build_expert_store(self.index)
        self.wire(first=True)
        return self

    def wire(self, first: bool = False) -> None:
        """A new epoch: fresh mailbox and servers; the slots keep their contents."""
        self._stop_servers()
        spec, plan = self.launch.model, self.launch.plan
        if spec.is_moe:
            geometry = plan_mailbox(self.launch)
            segment = SharedSegment.create("rig-mailbox", Mailbox.required_bytes(*geometry))
            self.mailbox = Mailbox.create(segment, 1, *geometry)
            if self.slots is None:
                experts, num_slots = self.launch.config.experts, self.arena.num_slots
                self.slots = SlotTable(
                    len(spec.moe_layers),
                    spec.num_experts,
                    num_slots,
                    experts.policy,
                    experts.half_life_tokens,
                    experts.long_half_life_tokens,
                    experts.admission_margin,
                    experts.admission_floor,
                )
        if first:
            self.runtime.prepare(self._capture)
        if self.mailbox is not None and self.slots is not None and self._pool is not None:
            assert self.runtime.fetchable is not None
            readable = fetchable_records(self.index, self.runtime.fetchable)
            fetchable = None if readable.all() else readable
            layouts = [self.index.layout_of(layer) for layer in range(len(spec.moe_layers))]
            strides = [layout.stride_bytes for layout in layouts]
            split = self.launch.config.experts.split_records
            tiles = [layout.num_tiles for layout in layouts] if split else []
            self.cache_server = CacheServer(
                self.mailbox, self.slots, self._fetch_fraction, self.arena.num_slots == 0, self._spin_us, strides, True,
                fetchable, tiles,
            )  # fmt: skip
            if self._auto_split:
                costs = plan.costs or assumed_costs(self.launch.config.device)
                self.cache_server.set_auto_split(native_costs(costs))
            self.cpu_server = CpuServer(self.mailbox, self._expert_store, self._pool, self._spin_us, True)
            self._servers = [self.cache_server, self.cpu_server]
            self.cache_server.set_lookahead(self.launch.config.experts.lookahead)
            for server in self._servers:
                server.start()
                server.notice()
        self.executor = self.runtime.build_executor(self.mailbox)

    def _stop_servers(self) -> None:
        for server in self._servers:
            server.stop()
        self._servers = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mailbox is not None:
            self.mailbox.abort()
        self.runtime.close()
        self._stop_servers()
        if self._pool is not None:
            self._pool.close()
        if self.slots is not None and kind is None:
            self.slots.check_integrity()
        self.store.close()
