"""A model ready to run on this process's device: the decoder over the store's weights, its operations, its arena."""

from __future__ import annotations

import threading
from typing import ClassVar

import numpy as np

from freetoken import _native
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.errors import CheckpointError
from freetoken.execution.arena import Arena
from freetoken.execution.constraints import Grammars
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.dense_weights import map_dense_weights
from freetoken.execution.experts import ExpertRunner, MailboxExperts, NoExperts
from freetoken.execution.step_executor import StepExecutor, StepLimits
from freetoken.launch_spec import LaunchSpec
from freetoken.models.decoder import Decoder, DecoderBatch

_WARM_UP_TOKENS = (1, 64)


class ModelRuntime:
    """Lives as long as the store and the arena it was built on; executors are made anew for each epoch."""

    executor_class: ClassVar[type[StepExecutor]] = StepExecutor

    def __init__(
        self, launch: LaunchSpec, index: FtwIndex, store: HeldStore, arena: Arena, pool: _native.WorkerPool
    ) -> None:
        """Maps the weights. Raises ``CheckpointError`` when store and index do not belong together."""
        for what, found in (("the store", store.fingerprint), (str(index.path), index.fingerprint)):
            if found != launch.fingerprint:
                raise CheckpointError(
                    f"{what} has fingerprint {found}, the launch was planned for {launch.fingerprint}; "
                    "was the checkpoint replaced? Launch again"
                )
        self._launch = launch
        self._arena = arena
        self._pool = pool
        weights = map_dense_weights(index, store.segments)
        self._decoder = Decoder(launch.model, weights, launch.plan.max_context_tokens, CpuOps.prepare)
        self._grammars = Grammars(launch.checkpoint, launch.model.vocab_size, launch.model.eos_token_ids)
        self._expert_store = store.build_expert_store(index) if launch.model.is_moe else None

    @property
    def fetchable(self) -> tuple[int, ...] | None:
        """The CPU device can read every record."""
        return None

    @property
    def graphs_captured(self) -> int:
        """The CPU device has none."""
        return 0

    def prepare(self) -> None:
        """What is done once, before the first executor: ``warm_up``."""
        self.warm_up()

    def release_arena(self) -> None:
        """Executors hold the arena's segments, and nothing else does."""

    def follow_arena(self) -> None:
        """The next executor takes the arena as it is then."""

    def close(self) -> None:
        """End the helper threads; the weights are views of the store, and there is nothing to give back."""
        self._grammars.close()

    def build_executor(self, mailbox: _native.Mailbox | None) -> StepExecutor:
        """An executor without requests. ``mailbox`` is needed by models with routed experts."""
        launch, plan = self._launch, self._launch.plan
        experts: ExpertRunner = NoExperts()
        if self._expert_store is not None:
            assert mailbox is not None
            client = _native.DeviceClient(
                mailbox,
                self._expert_store,
                self._arena.slot_segment,
                plan.slot_stride_bytes,
                self._pool,
                plan.spin_us,
                launch.config.executor.wait_timeout_s,
                launch.config.deterministic,
            )
            client.set_num_slots(self._arena.num_slots)
            experts = MailboxExperts(client)
        limits = StepLimits(
            block_size=plan.kv_block_size,
            num_blocks=self._arena.num_blocks,
            max_context_tokens=plan.max_context_tokens,
            max_batch_tokens=plan.max_batch_tokens,
            seed_tail_tokens=launch.config.experts.seed_tail_tokens,
        )
        abort = threading.Event()
        return self.executor_class(self._decoder, self._ops(experts, abort), experts, limits, abort, self._grammars)

    def warm_up(self) -> None:
        """Run a few shapes without experts and without writing KV, so that the first request does not pay for it."""
        plan = self._launch.plan
        largest = min(plan.max_batch_tokens, plan.max_context_tokens, self._arena.num_blocks * plan.kv_block_size)
        ops = self._ops(NoExperts(), threading.Event())
        for count in _WARM_UP_TOKENS:
            count = min(count, largest)
            num_blocks = -(-count // plan.kv_block_size)
            batch = DecoderBatch(
                token_ids=np.zeros(count, dtype=np.int64),
                positions=np.arange(count, dtype=np.int32),
                slot_mapping=np.full(count, -1, dtype=np.int64),
                row_starts=np.array([0, count], dtype=np.int32),
                block_tables=np.arange(num_blocks, dtype=np.int32)[None],
                admit=np.zeros(count, dtype=np.uint8),
                logit_tokens=np.array([count - 1], dtype=np.int64),
            )
            self._decoder.forward(batch, ops)

    def _ops(self, experts: ExpertRunner, abort: threading.Event) -> CpuOps:
        return CpuOps(self._pool, self._arena, experts, self._launch.config.deterministic, abort)
