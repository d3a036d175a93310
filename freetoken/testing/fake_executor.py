"""A GpuExecutor without a model: it checks every plan and computes tokens that depend on nothing but the sequence.

The KV of a token is a digest of the sequence up to it, kept in the block that the plan names. A sampled token is a
function of the digest that is read back from the blocks, so a wrong block table, a block written by two requests, a
prefix that was not valid or a lost row shows in the tokens, and any order of scheduling must give the same ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from freetoken.config import EngineConfig
from freetoken.config.schema import KVConfig, SchedulerConfig
from freetoken.errors import PeerLostError
from freetoken.launch_spec import LaunchSpec, ResolvedPlan
from freetoken.messages import (
    ActorName,
    ArenaReady,
    FinishReason,
    LogprobEntry,
    RequestInit,
    RowResult,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepResult,
    StepRow,
    TokenBatch,
    TokenDelta,
    Wiring,
)
from freetoken.models.spec import ModelSpec, RopeSpec
from freetoken.service import Service
from freetoken.transport import Endpoint

_NO_KV = -1


class PlanError(AssertionError):
    """A plan breaks the contract of ``StepPlan``."""


def extend_digest(digest: int, token_id: int) -> int:
    """Digest of a sequence extended by one token."""
    return hash((digest, token_id)) & 0x7FFFFFFFFFFFFFFF


def sample_token(
    digest: int, sampling: SamplingParams, num_generated: int, masked: Iterable[int], vocab_size: int
) -> int:
    """The token that follows a sequence with this digest."""
    seed = sampling.seed if sampling.temperature > 0 else 0
    token_id = hash((digest, seed)) % vocab_size
    if num_generated < sampling.min_tokens:
        while token_id in masked:
            token_id = (token_id + 1) % vocab_size
    return token_id


def expected_answer(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_context_tokens: int,
    eos_token_ids: tuple[int, ...] = (),
) -> tuple[list[int], FinishReason]:
    """What a request alone on a fresh engine must give, computed without blocks, steps or scheduler. A seed must be set
    unless the request is greedy."""
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    digest = 0
    for token_id in prompt:
        digest = extend_digest(digest, token_id)
    tokens: list[int] = []
    while True:
        token_id = sample_token(digest, sampling, len(tokens), stops, vocab_size)
        tokens.append(token_id)
        digest = extend_digest(digest, token_id)
        if token_id in stops and len(tokens) > sampling.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) >= sampling.max_tokens or len(prompt) + len(tokens) >= max_context_tokens:
            return tokens, FinishReason.LENGTH


class _Sequence:
    """Device-side state of one request. ``void`` after a failed step: nothing about it can be checked any more."""

    def __init__(self, init: RequestInit) -> None:
        self.init = init
        self.tokens = list(init.token_ids)
        self.table: list[int] = []
        self.num_computed = 0
        self.digests: list[int] = []
        self.void = False
        self.placed: StepRow | None = None  # the last row whose blocks were taken


class FakeDevice:
    """Executes plans in order, synchronously. ``audit`` re-reads the whole KV of every row's sequence (O(tokens))."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, audit: bool = True) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.audit = audit
        self.numeric_faults: set[str] = set()
        """Requests whose next sampled row comes back as a numeric failure."""
        self.stuck: dict[str, int] = {}
        """Requests that sample nothing but this token."""
        self.num_steps = 0
        self.max_step_tokens = 0
        self._sequences: dict[str, _Sequence] = {}
        self._kv = [[_NO_KV] * block_size for _ in range(num_blocks)]
        self._holders: list[set[str]] = [set() for _ in range(num_blocks)]
        self._last_step_id = 0
        self._epoch = 0
        self._background: StepPlan | None = None

    @property
    def num_requests(self) -> int:
        """Requests with device-side state."""
        return len(self._sequences)

    def run(self, plan: StepPlan) -> StepResult:
        """The plan's result. Raises ``PlanError`` naming the first rule it breaks."""
        started = time.monotonic_ns()
        self._enter(plan)
        rows = [self._run_row(row) for row in plan.rows]
        return StepResult(plan.step_id, plan.epoch, tuple(rows), started, time.monotonic_ns(), busy_ns=plan.background)

    def begin(self, plan: StepPlan) -> None:
        """The background plan starts: its requests take their blocks now, ``run`` or ``fail`` comes later. Raises
        ``PlanError``."""
        _require(self._background is None, f"step {plan.step_id} is a second background step")
        _require(plan.background, f"step {plan.step_id} is no background step")
        self._enter(plan)
        for row in plan.rows:
            _require(not row.use_last_sampled, f"{row.request_id} decodes in a background step")
            self._place(row)
        self._background = plan

    def fail(self, plan: StepPlan, message: str) -> StepFailed:
        """The plan fails: its KV is garbage, and what its requests do next has no meaning."""
        self._enter(plan)
        for row in plan.rows:
            sequence = self._place(row)
            sequence.void = True
            for block_id in sequence.table[row.start // self.block_size :]:
                self._kv[block_id] = [_NO_KV] * self.block_size
        return StepFailed(plan.step_id, plan.epoch, message)

    def resize(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        """Between steps: blocks move, and there are ``num_blocks`` from now on. What lay beyond is gone. Requests whose
        end has not been told yet may have had blocks that go, or those that others move to."""
        _require(not moved.keys() & set(moved.values()), "a block moves twice")
        self._kv += [[_NO_KV] * self.block_size for _ in range(num_blocks - len(self._kv))]
        self._holders += [set() for _ in range(num_blocks - len(self._holders))]
        for source, target in moved.items():
            _require(target < num_blocks <= source, f"block {source} moves to {target} of {num_blocks}")
            self._kv[target], self._holders[target] = list(self._kv[source]), self._holders[source]
        for who, sequence in self._sequences.items():
            sequence.table = [moved.get(block_id, block_id) for block_id in sequence.table]
            if max(sequence.table, default=0) >= num_blocks:  # it has ended, or the next row fails
                for block_id in sequence.table:
                    self._holders[block_id].discard(who)
                sequence.table = []
        del self._kv[num_blocks:], self._holders[num_blocks:]

    def reset(self) -> None:
        """A new epoch: no requests; the KV stays."""
        self._sequences.clear()
        self._background = None
        self._holders = [set() for _ in self._kv]

    def _enter(self, plan: StepPlan) -> None:
        if self._background is not None:
            if plan is self._background:  # it entered when it began
                self._background = None
                return
            alone = {row.request_id for row in self._background.rows}
            both = alone & {*plan.retired, *(row.request_id for row in plan.rows)}
            _require(not both, f"{both} of the background step are in step {plan.step_id} too")
        _require(plan.epoch >= self._epoch, f"step {plan.step_id} is of epoch {plan.epoch} after {self._epoch}")
        _require(plan.step_id > self._last_step_id, f"step {plan.step_id} after step {self._last_step_id}")
        self._last_step_id, self._epoch = plan.step_id, plan.epoch
        for request_id in plan.retired:
            sequence = self._sequences.pop(request_id, None)
            _require(sequence is not None, f"{request_id} is retired but not known")
            assert sequence is not None
            for block_id in sequence.table:
                self._holders[block_id].discard(request_id)
        _require(len({row.request_id for row in plan.rows}) == len(plan.rows), "a request has two rows")
        self.num_steps += 1
        self.max_step_tokens = max(self.max_step_tokens, sum(row.num_tokens for row in plan.rows))

    def _place(self, row: StepRow) -> _Sequence:
        known = self._sequences.get(row.request_id)
        if known is not None and known.placed is row:
            return known
        if row.init is not None:
            _require(row.request_id not in self._sequences, f"{row.request_id} is introduced twice")
            _require(row.init.sampling.seed is not None, f"{row.request_id} has no seed")
            self._sequences[row.request_id] = _Sequence(row.init)
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            raise PlanError(f"{row.request_id} was never introduced")
        for block_id in row.new_block_ids:
            _require(block_id not in sequence.table, f"{row.request_id} gets block {block_id} twice")
            sequence.table.append(block_id)
            self._holders[block_id].add(row.request_id)
        sequence.placed = row
        return sequence

    def _run_row(self, row: StepRow) -> RowResult:
        who, end, size = row.request_id, row.start + row.num_tokens, self.block_size
        sequence = self._place(row)
        if sequence.void:
            return RowResult(who, 0 if row.sample else None)
        _require(row.num_tokens >= 1, f"{who}: a row of {row.num_tokens} tokens")
        _require(end <= len(sequence.table) * size, f"{who}: {end} tokens in {len(sequence.table)} blocks of {size}")
        if row.init is not None:
            self._adopt_prefix(row, sequence)
        _require(row.start == sequence.num_computed, f"{who}: row at {row.start}, computed {sequence.num_computed}")
        num_init = len(sequence.init.token_ids)
        if row.use_last_sampled:
            _require(row.num_tokens == 1 and row.sample, f"{who}: a decode row has one token and samples")
            _require(row.start >= num_init, f"{who}: decode at {row.start} before the end of {num_init} known tokens")
            _require(len(sequence.tokens) == end, f"{who}: no token was sampled for position {row.start}")
        else:
            _require(end <= num_init, f"{who}: prefill up to {end} of {num_init} known tokens")
            _require(row.sample == (end == num_init), f"{who}: only the last prefill row samples")
        for block_id in sequence.table[row.start // size : -(-end // size)]:
            others = self._holders[block_id] - {who}
            _require(not others, f"{who} writes block {block_id}, which {others} use")
        digest = self._read(sequence, row.start - 1) if row.start else 0
        for position in range(row.start, end):
            digest = extend_digest(digest, sequence.tokens[position])
            self._kv[sequence.table[position // size]][position % size] = digest
            sequence.digests.append(digest)
        sequence.num_computed = end
        if self.audit:
            self._audit(who, sequence)
        if not row.sample:
            return RowResult(who)
        if who in self.numeric_faults:
            self.numeric_faults.discard(who)
            sequence.void = True
            return RowResult(who, failure="the logits are not finite")
        init = sequence.init
        num_generated = len(sequence.tokens) - init.num_prompt_tokens
        token_id = self.stuck.get(who)
        if token_id is None:
            token_id = sample_token(
                self._read(sequence, end - 1), init.sampling, num_generated, init.eos_token_ids, self.vocab_size
            )
        sequence.tokens.append(token_id)
        logprob = LogprobEntry(token_id, -0.5) if init.sampling.top_logprobs >= 0 else None
        return RowResult(who, token_id, logprob)

    def _adopt_prefix(self, row: StepRow, sequence: _Sequence) -> None:
        """The first row starts behind a cached prefix, whose KV must be that of the request's own tokens."""
        _require(row.start % self.block_size == 0, f"{row.request_id} starts within a block, at {row.start}")
        digest = 0
        for token_id in sequence.tokens[: row.start]:
            digest = extend_digest(digest, token_id)
            sequence.digests.append(digest)
        sequence.num_computed = row.start
        self._audit(row.request_id, sequence)

    def _read(self, sequence: _Sequence, position: int) -> int:
        return self._kv[sequence.table[position // self.block_size]][position % self.block_size]

    def _audit(self, who: str, sequence: _Sequence) -> None:
        size = self.block_size
        for index in range(-(-sequence.num_computed // size)):
            expected = sequence.digests[index * size : (index + 1) * size]
            found = self._kv[sequence.table[index]][: len(expected)]
            _require(found == expected, f"{who}: block {index} of its table ({sequence.table[index]}) has foreign KV")


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise PlanError(complaint)


class FakeGpuExecutorService(Service):
    """The GpuExecutor actor around a ``FakeDevice``: one plan per turn of the loop, or only when told to.

    ``held`` keeps plans queued until ``release``; ``fault`` may name, for a plan, the message it fails with. Broken
    plans are kept in ``errors`` and fail.
    """

    name: ClassVar[ActorName] = ActorName.GPU_EXECUTOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint, audit: bool = True) -> None:
        super().__init__(spec, endpoint)
        self.device = FakeDevice(spec.plan.num_kv_blocks, spec.plan.kv_block_size, spec.model.vocab_size, audit)
        self.arena_id = "arena-1"
        self.fault: Callable[[StepPlan], str | None] = lambda plan: None
        self.held = False
        self.plans: deque[StepPlan] = deque()
        self.max_queued = 0
        self.errors: list[str] = []
        self._turn: asyncio.Handle | None = None
        endpoint.on(StepPlan, self._on_plan)

    async def wire(self, wiring: Wiring) -> None:
        self.plans.clear()
        await super().wire(wiring)
        self.device.reset()
        plan = self.spec.plan
        for peer in (ActorName.KV_ALLOCATOR, ActorName.EXPERT_CACHE):
            if peer in wiring.addresses:
                self.endpoint.send(peer, ArenaReady(self.epoch, self.arena_id, plan.num_slots, plan.num_kv_blocks))

    async def pause(self, reason: str) -> None:
        self.plans.clear()
        await super().pause(reason)

    def release(self) -> None:
        """Run what is queued, and from now on everything at once."""
        self.held = False
        self._schedule()

    def run_one(self) -> None:
        """Run the oldest queued plan now and send its answer."""
        plan = self.plans.popleft()
        message = self.fault(plan)
        try:
            answer = self.device.run(plan) if message is None else self.device.fail(plan, message)
        except PlanError as error:
            self.errors.append(str(error))
            answer = StepFailed(plan.step_id, plan.epoch, f"broken plan: {error}")
        try:
            self.endpoint.send(ActorName.SCHEDULER, answer)
        except PeerLostError:
            pass

    def _on_plan(self, plan: StepPlan, fds: tuple[int, ...]) -> None:
        self.plans.append(plan)
        self.max_queued = max(self.max_queued, len(self.plans))
        self._schedule()

    def _schedule(self) -> None:
        if self._turn is None and self.plans and not self.held:
            self._turn = asyncio.get_running_loop().call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._turn = None
        if self.plans and not self.held:
            self.run_one()
        self._schedule()


def fake_launch_spec(
    *,
    num_kv_blocks: int = 64,
    block_size: int = 4,
    max_context_tokens: int = 200,
    vocab_size: int = 50,
    eos_token_ids: tuple[int, ...] = (),
    prefix_cache: bool = True,
    **scheduler: float,
) -> LaunchSpec:
    """A launch of no model in particular; ``scheduler`` are settings of that section."""
    config = EngineConfig(
        model="fake", scheduler=SchedulerConfig.model_validate(scheduler), kv=KVConfig(prefix_cache=prefix_cache)
    )
    model = ModelSpec(
        family="fake", architecture="Fake", vocab_size=vocab_size, hidden_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, intermediate_size=8, max_position_embeddings=max_context_tokens,
        rms_norm_eps=1e-6, rope=RopeSpec(10000.0), dtype="f32", eos_token_ids=eos_token_ids,
    )  # fmt: skip
    plan = ResolvedPlan(
        kv_block_size=block_size, num_kv_blocks=num_kv_blocks, kv_dtype="f32", max_context_tokens=max_context_tokens,
        num_slots=0, slot_stride_bytes=0, dense_bytes=0, workspace_bytes=0, store_bytes=0, cpu_threads=1,
        device_threads=1, cpu_core_ids=(), device_core_ids=(), spin_us=0,
        max_batch_tokens=config.scheduler.max_num_batched_tokens or 512,
    )  # fmt: skip
    return LaunchSpec(config, model, plan, checkpoint="", fingerprint="", served_model_name="fake")


class RecordingFront(Service):
    """An ApiFront that only keeps what it is told."""

    name: ClassVar[ActorName] = ActorName.API_FRONT

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.batches: list[TokenBatch] = []
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, TokenDelta] = {}
        endpoint.on(TokenBatch, self._on_batch)

    def _on_batch(self, batch: TokenBatch, fds: tuple[int, ...]) -> None:
        self.batches.append(batch)
        for delta in batch.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.endings[delta.request_id] = delta
