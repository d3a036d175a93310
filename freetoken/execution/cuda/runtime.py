"""A model ready to run on the GPU: registered store, uploaded weights, captured graphs. The CUDA side of
``ModelRuntime``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch

from freetoken._native import Mailbox, SharedSegment
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.costs import assumed_costs
from freetoken.elastic.machine import pinnable_bytes, read_machine
from freetoken.errors import CapacityError, CheckpointError, FreeTokenError
from freetoken.execution.constraints import Grammars
from freetoken.execution.cuda import bounce
from freetoken.execution.cuda.arena import TORCH_DTYPES, CudaArena
from freetoken.execution.cuda.bounce import Bounce
from freetoken.execution.cuda.data_plane import DataPlane, ExpertRecords
from freetoken.execution.cuda.device_model import DECODE_BATCHES, DeviceLimits, DeviceModel, StepBuffers
from freetoken.execution.cuda.driver import CudaDriver, HostMemoryDriver
from freetoken.execution.cuda.executor import CudaStepExecutor
from freetoken.execution.cuda.handshake import check_handshake, settle
from freetoken.execution.cuda.host_memory import MailboxWindow, PinnedRing, RegisteredStore
from freetoken.execution.cuda.prefill_costs import PrefillCosts
from freetoken.execution.cuda.report import ReportBuffers
from freetoken.execution.cuda.staging import RecordCopier, RecordSources, Stager
from freetoken.execution.cuda.watchdog import Watchdog
from freetoken.execution.cuda.weights import DenseWeights, HostWeight
from freetoken.execution.dense_weights import map_dense_weights
from freetoken.execution.step_executor import StepLimits
from freetoken.experts.device_client import plan_mailbox
from freetoken.launch_spec import LaunchSpec

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]

# Beyond the layer's own limit, which the device keeps: the host only steps in when the device cannot.
_WATCHDOG_SLACK_S = 2.0
KERNEL_TIME_S = 1.0
"""Longest wait of a kernel where the driver limits them: Windows ends a kernel after 2 s, an X server after about 5."""


class CudaRuntime:
    """Lives as long as the store and the arena it was built on; executors are made anew for each epoch.

    ``close`` before the store's segments are unmapped.
    """

    def __init__(
        self,
        launch: LaunchSpec,
        index: FtwIndex,
        store: HeldStore,
        arena: CudaArena,
        driver: HostMemoryDriver,
        on_progress: Progress = lambda done, total, what: None,
    ) -> None:
        """Pins what steps need, then as much of the store as can be. Raises ``CheckpointError`` when store and index do
        not belong together, ``FreeTokenError`` when not even the mailbox can be registered."""
        for what, found in (("the store", store.fingerprint), (str(index.path), index.fingerprint)):
            if found != launch.fingerprint:
                raise CheckpointError(
                    f"{what} has fingerprint {found}, the launch was planned for {launch.fingerprint}; "
                    "was the checkpoint replaced? Launch again"
                )
        self._launch = launch
        self._index = index
        self._store = store
        self._arena = arena
        self._on_progress = on_progress
        self._wait_limit_s = wait_limit_s(launch.config.executor.wait_timeout_s, driver)
        spec = launch.model
        self._registered: RegisteredStore | None = None
        self._stager: Stager | None = None
        self._window: MailboxWindow | None = None
        self._ring: PinnedRing | None = None
        self._warm_mailbox: Mailbox | None = None
        self._watchdog: Watchdog | None = None
        self._limits = self._device_limits()
        self._buffers = self._pin_buffers()
        self._plane: DataPlane | None = None
        self._model: DeviceModel | None = None
        self._mailbox: Mailbox | None = None
        self._grammars = Grammars(launch.checkpoint, spec.vocab_size, spec.eos_token_ids)
        if spec.is_moe:
            try:
                self._plane = self._open_plane(driver)
            except BaseException:
                self.close()
                raise

    def _device_limits(self) -> DeviceLimits:
        plan = self._launch.plan
        max_samples = max(self._launch.config.scheduler.max_num_running, 1)
        return DeviceLimits(
            max_requests=4 * max_samples + 64,
            max_samples=max_samples,
            max_tokens=plan.max_batch_tokens,
            max_context_tokens=plan.max_context_tokens,
            block_size=plan.kv_block_size,
            decode_batches=decode_batch_sizes(max_samples),
        )

    def _pin_buffers(self) -> StepBuffers:
        try:
            return StepBuffers(self._launch.model, self._limits, self._arena.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CapacityError(
                f"host memory for steps of up to {self._limits.max_tokens} tokens cannot be pinned ({error}); lower "
                f"scheduler.max_num_batched_tokens"
            ) from error

    def _open_plane(self, driver: HostMemoryDriver) -> DataPlane:
        launch, index, store = self._launch, self._index, self._store
        self._on_progress(0, 0, "registering the store with the GPU")
        geometry = plan_mailbox(launch)
        segment = SharedSegment.create("freetoken-warm-up", Mailbox.required_bytes(*geometry))
        self._warm_mailbox = Mailbox.create(segment, 0, *geometry)
        self._warm_mailbox.abort()
        # Nothing works without the mailbox. What can be pinned beyond it and the steps' buffers is the store's.
        self._window = MailboxWindow(driver, segment.size_bytes)
        self._window.attach(segment)
        layouts = tuple(index.layout_of(layer) for layer in range(len(launch.model.moe_layers)))
        strides = tuple(layout.stride_bytes for layout in layouts)
        self._stager = self._build_stager(driver, strides)
        if self._stager is not None:
            try:
                self._ring = PinnedRing(driver, bounce.BUFFER_BYTES, bounce.NUM_BUFFERS)
            except FreeTokenError as error:
                logger.warning("event=no_bounce_buffers detail=%r", str(error))
        self._registered = RegisteredStore(
            driver,
            store.segments,
            _record_cuts(index),
            wanted=[file.kind == "experts" for file in index.files],
            limit_bytes=pinnable_bytes(read_machine().total_bytes),
        )
        table = self._registered.record_addresses(index.record_file, index.record_offset, strides)
        if self._stager is not None:
            self._tell_stager(
                self._stager,
                RecordSources(*self._registered.record_sources(index.record_file, index.record_offset, strides)),
            )
        records = ExpertRecords(torch.from_numpy(table).to(self._arena.device), layouts, bool((table != 0).all()))
        return self._build_plane(records, self._buffers.report)

    def _build_plane(self, records: ExpertRecords, report: ReportBuffers) -> DataPlane:
        router = self._launch.model.router
        assert router is not None and self._window is not None
        return DataPlane(
            self._window,
            records,
            self._arena,
            router,
            self._wait_limit_s,
            report.counts,
            self._looks_ahead,
        )

    @property
    def _looks_ahead(self) -> bool:
        """Not where every expert has a slot at launch: decode would pay for hints that are of no use."""
        spec = self._launch.model
        records = spec.num_experts * len(spec.moe_layers)
        return self._launch.config.experts.lookahead and 0 < self._arena.num_slots < records

    def _build_stager(self, driver: HostMemoryDriver, strides: tuple[int, ...]) -> Stager | None:
        arena = self._arena
        if arena.staging.numel() < 4 * max(strides):
            return None
        return Stager(
            self._build_copier(driver),
            strides,
            self._launch.model.num_experts,
            arena.staging_address,
            arena.staging.numel(),
            arena.device,
        )

    def _tell_stager(self, stager: Stager, sources: RecordSources) -> None:
        if self._ring is not None and sources.most_unpinned:
            stager.reads(sources, Bounce(stager.copier, self._ring))
            return
        stager.reads(sources)
        if self._ring is not None:
            self._ring.close()

    def _build_copier(self, driver: HostMemoryDriver) -> RecordCopier:
        from freetoken.execution.cuda.copier import CudaCopier

        assert isinstance(driver, CudaDriver)
        return CudaCopier(driver, self._arena.device)

    def _prefill_costs(self) -> PrefillCosts | None:
        spec, stager, plane = self._launch.model, self._stager, self._plane
        if stager is None or plane is None:
            return None
        return PrefillCosts(
            num_experts=spec.num_experts,
            top_k=spec.num_experts_per_tok,
            record_bytes=np.array(plane.records.strides, np.float64),
            fetch_fraction=self._launch.config.experts.fetch_fraction,
            costs=self._launch.plan.costs or assumed_costs(self._launch.config.device),
            unpinned=stager.unpinned,
            capacity=stager.capacity,
            overlaps=stager.num_halves > 1,
        )

    def _upload(self) -> DeviceModel:
        spec, plan = self._launch.model, self._launch.plan
        self._on_progress(0, 0, "uploading the dense weights")
        weights = DenseWeights.upload(
            spec,
            _host_weights(self._index, self._store.segments),
            plan.max_context_tokens,
            TORCH_DTYPES[plan.kv_dtype],
            self._arena.device,
        )
        return DeviceModel(
            weights, self._arena, self._plane, self._buffers, self._limits, self._stager, self._prefill_costs()
        )

    @property
    def fetchable(self) -> tuple[int, ...] | None:
        """Per store segment, the leading bytes that the device can read; None for models without experts."""
        return tuple(self._registered.fetchable) if self._registered is not None else None

    @property
    def graphs_captured(self) -> int:
        """Since the start: moving memory within the arena adds none, allocating it anew as many as there are."""
        return self._model.graphs_captured if self._model is not None else 0

    @property
    def model(self) -> DeviceModel:
        """The model; there since ``prepare``."""
        assert self._model is not None
        return self._model

    def prepare(self, capture: bool = True) -> None:
        """Upload the weights, compile kernels and capture graphs, against a mailbox that nobody serves. Raises
        ``CapacityError`` when device memory is short."""
        self._model = self._upload()
        self._arena.stream = self._model.stream
        if capture:
            self._arena.warm_up()
        self._check_handshake()
        self.model.attach(self._warm_mailbox)
        self.model.prepare(self._on_progress, capture)

    def _check_handshake(self) -> None:
        """Raises ``FreeTokenError`` where GPU and CPU cannot work on the same memory at once."""
        if self._plane is None:
            return
        self._on_progress(0, 0, "trying the mailbox with the GPU")
        geometry = plan_mailbox(self._launch)
        mailbox = Mailbox.create(
            SharedSegment.create("freetoken-handshake", Mailbox.required_bytes(*geometry)), 0, *geometry
        )
        self.model.attach(mailbox)
        with self.model.on_stream():
            check_handshake(self._plane, mailbox)
            settle(self._plane)

    def release_arena(self) -> None:
        """See ``ArenaUser``. Store, weights and buffers stay."""
        self.model.release_arena()

    def follow_arena(self) -> None:
        """See ``ArenaUser``. Captures graphs as ``prepare`` does; the next executor attaches a living mailbox again."""
        self.model.attach(self._warm_mailbox)
        self.model.follow_arena()

    def build_executor(self, mailbox: Mailbox | None) -> CudaStepExecutor:
        """An executor without requests, on ``mailbox`` (needed by models with routed experts). No step may be
        running."""
        plan, config = self._launch.plan, self._launch.config
        self.model.attach(mailbox)
        self._mailbox = mailbox
        if self._watchdog is None:
            self._watchdog = Watchdog(self._wait_limit_s + _WATCHDOG_SLACK_S, self._progress_of_words, self._on_late)
        limits = StepLimits(
            block_size=plan.kv_block_size,
            num_blocks=self._arena.num_blocks,
            max_context_tokens=plan.max_context_tokens,
            max_batch_tokens=plan.max_batch_tokens,
            seed_tail_tokens=config.experts.seed_tail_tokens,
        )
        return CudaStepExecutor(self.model, mailbox, limits, self._watchdog, self._grammars)

    def close(self) -> None:
        """Unregister host memory; idempotent. No step may be running, and none will run any more."""
        self._grammars.close()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._stager is not None:
            self._stager.close()
        if self._arena.device.type == "cuda":
            torch.cuda.synchronize(self._arena.device)
        if self._ring is not None:
            self._ring.close()
        if self._window is not None:
            self._window.close()
        if self._registered is not None:
            self._registered.close()

    def _progress_of_words(self) -> Hashable:
        mailbox = self._mailbox
        if mailbox is None:
            return None
        layout = mailbox.layout()
        words = np.frombuffer(memoryview(mailbox.segment), np.uint32)
        return tuple(int(words[layout[f"{name}_offset"] // 4]) for name in ("req", "plan", "part"))

    def _on_late(self) -> None:
        mailbox = self._mailbox
        if mailbox is None:
            return
        reason = {"ExpertCache": "plan_late", "CpuExecutor": "partial_late"}.get(mailbox.overdue, "client_failed")
        logger.error("event=mailbox_aborted reason=%s", reason)
        mailbox.abort(reason)


def wait_limit_s(configured_s: float, driver: HostMemoryDriver) -> float:
    """How long a kernel may wait for the host: where the driver ends kernels after some seconds, well below that, so
    that a late answer fails one step with a reason instead of the device with none."""
    if configured_s > KERNEL_TIME_S and isinstance(driver, CudaDriver) and driver.limits_kernel_time():
        logger.warning(
            "event=kernel_time_limited wait_limit_s=%g configured_s=%g detail=%r",
            KERNEL_TIME_S,
            configured_s,
            "this GPU drives a display, so its driver ends long kernels: executor.wait_timeout_s is lowered",
        )
        return KERNEL_TIME_S
    return configured_s


def decode_batch_sizes(max_running: int) -> tuple[int, ...]:
    """The graph sizes that serve up to ``max_running`` requests (more run eagerly)."""
    sizes = [size for size in DECODE_BATCHES if size <= max_running]
    if sizes[-1] < max_running and sizes[-1] < DECODE_BATCHES[-1]:
        sizes.append(max_running)
    return tuple(sizes)


def _record_cuts(index: FtwIndex) -> list[list[int]]:
    return [np.sort(index.record_offset[index.record_file == number]).tolist() for number in range(len(index.files))]


def _host_weights(index: FtwIndex, segments: Sequence[SharedSegment]) -> Mapping[str, HostWeight]:
    return map_dense_weights(index, segments)
