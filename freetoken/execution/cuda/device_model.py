"""A model on the device: weights, programs, graphs and buffers. Lives as long as the arena; executors come and go.

All its work goes to one stream. The mailbox window is bound to a mailbox of our own until the first epoch brings one,
so that kernels can be compiled and graphs captured while the engine still loads: that mailbox is aborted, so every
wait falls through and no expert runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freetoken._native import Mailbox
from freetoken.execution.cuda.arena import CudaArena
from freetoken.execution.cuda.buffers import TokenBuffers, attention_shape, attention_workspace
from freetoken.execution.cuda.data_plane import DataPlane
from freetoken.execution.cuda.expert_kernels import GEMV_EXPERT_TOKENS
from freetoken.execution.cuda.inputs import NUM_REAL_STRIDE, RequestTable, StepInputs, StepShape
from freetoken.execution.cuda.pieces import PIECE_BUCKETS, PIECE_TOKENS, bucket_for
from freetoken.execution.cuda.prefill_costs import PrefillCosts
from freetoken.execution.cuda.program import LayerProgram
from freetoken.execution.cuda.report import ReportBuffers
from freetoken.execution.cuda.sampler import DeviceSampler, TokenMasks
from freetoken.execution.cuda.staging import NothingMissing, StagedStep, Stager
from freetoken.execution.cuda.weights import DenseWeights
from freetoken.kernels.triton.attention import AttentionShape, QueryBlocks, query_block_tokens
from freetoken.models.spec import ModelSpec

logger = logging.getLogger(__name__)

DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Query blocks of prefill use the split kernel only where few programs would read many keys. (16 tokens at 4096 keys on
# an H200: 98 us whole, 21 us in 8 splits, 13 us in 32.)
_PREFILL_SPLIT_CONTEXT = 512
# Of query blocks of 128 rows: with 4 warps the accumulators spill (368 bytes a thread on sm_90, 424 on sm_86).
_PREFILL_ATTENTION_WARPS = 8
LONG_TOKENS = PIECE_TOKENS
"""Prefill of more tokens runs in one piece, by the device alone."""
LONG_STEP = 128
"""Long pieces are padded to a multiple of this."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """``max_requests``: request slots. ``max_samples``: rows sampled in one step. ``max_tokens`` of one step."""

    max_requests: int
    max_samples: int
    max_tokens: int
    max_context_tokens: int
    block_size: int
    decode_batches: tuple[int, ...] = DECODE_BATCHES

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_context_tokens // self.block_size)


class StepBuffers:
    """What steps have in pinned host memory, and its counterpart on the device. Allocated before the store takes what
    can be pinned; the background ones are for steps whose layers alternate with other steps."""

    def __init__(self, spec: ModelSpec, limits: DeviceLimits, device: torch.device) -> None:
        padded = max(limits.max_tokens, limits.max_samples) + PIECE_TOKENS
        pieces = limits.max_tokens // PIECE_TOKENS + 2
        largest = StepShape(padded, limits.max_samples, padded + 4 * pieces, pieces)
        layers = len(spec.moe_layers)
        self.inputs = self.background_inputs = StepInputs(largest, device)
        self.report = self.background_report = ReportBuffers(layers, limits.max_samples, device)
        self.masks = TokenMasks(limits.max_samples, spec.vocab_size, device)
        if limits.max_tokens > LONG_TOKENS:
            self.background_inputs = StepInputs(largest, device)
            self.background_report = ReportBuffers(layers, limits.max_samples, device)


class DecodeBatch:
    """Decoding ``size`` rows: from inputs at fixed addresses to ``logits`` [size, V]."""

    def __init__(self, model: DeviceModel, size: int) -> None:
        self._model = model
        self.size = size
        self.shape = StepShape(size, size)
        self.inputs = model.inputs.device_views(self.shape)
        self.buffers = model.buffers_for(size)
        spec, limits = model.weights.spec, model.limits
        one = torch.ones(size, dtype=torch.int32, device=model.device)
        first = torch.arange(size, dtype=torch.int32, device=model.device)
        self._blocks = QueryBlocks(self.inputs["request_slot"], first, one, 1)
        self._attention = attention_shape(size, spec.num_kv_heads, model.num_multiprocessors, limits.max_context_tokens)
        self._work = attention_workspace(spec, size, self._attention, model.device)
        self.logits = model.logits[:size]
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Launch everything. Capturable."""
        model = self._model
        model.report.counts.zero_()
        model.program.run(self.buffers, self.inputs, self._blocks, self._attention, self._work)
        model.program.logits(self.buffers.residual, self.buffers.hidden, self.logits)

    def capture(self, pool: Any) -> None:
        """Record ``run`` as a graph; it must have run before, so that every kernel is compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._model.stream, capture_error_mode="thread_local"):
            self.run()
        self.graph = graph
        self._model.graphs_captured += 1

    def forget_graph(self) -> None:
        """Its addresses are going. ``run`` and ``capture`` stay possible."""
        if self.graph is not None:
            self.graph.reset()
            self.graph = None

    def launch(self) -> None:
        """Replay the graph, or run eagerly: while there is none, and where it would put records into places of the
        staging buffer that a background step uses."""
        in_the_way = self._model.program.reserved is not None and self.buffers.placed is not None
        if self.graph is not None and not in_the_way:
            self.graph.replay()
        else:
            self.run()


class PieceBatch:
    """Prefill of up to ``bucket`` tokens, run eagerly on the step's inputs from a token offset on."""

    def __init__(self, model: DeviceModel, bucket: int) -> None:
        self._model = model
        self.bucket = bucket
        self.buffers = model.buffers_for(bucket)
        spec = model.weights.spec
        self.tokens_per_block = query_block_tokens(spec.num_heads, spec.num_kv_heads)
        self._whole = AttentionShape(num_warps=_PREFILL_ATTENTION_WARPS)
        blocks = -(-bucket // self.tokens_per_block)
        split = attention_shape(blocks, spec.num_kv_heads, model.num_multiprocessors, model.limits.max_context_tokens)
        self._split = replace(split, num_warps=_PREFILL_ATTENTION_WARPS)
        self._work = attention_workspace(spec, bucket, self._split, model.device)

    def run(
        self,
        inputs: Mapping[str, Tensor],
        number: int,
        offset: int,
        blocks: tuple[int, int],
        max_context: int,
        tokens: int | None = None,
        staged: StagedStep | None = None,
    ) -> None:
        """Run piece ``number``, whose tokens start at ``offset`` and whose query blocks are ``blocks[0]:blocks[1]``.
        ``max_context``: keys that its last token sees. ``tokens`` of the bucket; default all."""
        for _ in self.layers(inputs, number, offset, blocks, max_context, tokens, staged):
            pass

    def layers(
        self,
        inputs: Mapping[str, Tensor],
        number: int,
        offset: int,
        blocks: tuple[int, int],
        max_context: int,
        tokens: int | None = None,
        staged: StagedStep | None = None,
        counts: Tensor | None = None,
    ) -> Iterator[None]:
        """``run`` a layer at a time, see ``LayerProgram.layers``."""
        spec, model = self._model.weights.spec, self._model
        count = self.bucket if tokens is None else tokens
        cells = slice(offset, offset + count)
        mine = dict(inputs)
        for name in ("token", "position", "request_slot", "slot_mapping", "admit"):
            mine[name] = inputs[name][cells]
        at = number * NUM_REAL_STRIDE
        mine["num_real"] = inputs["num_real"][at : at + 1]
        few = (blocks[1] - blocks[0]) * spec.num_kv_heads * 2 <= model.num_multiprocessors
        shape = self._split if few and max_context > _PREFILL_SPLIT_CONTEXT else self._whole
        part = slice(*blocks)
        query_blocks = QueryBlocks(
            inputs["block_row"][part], inputs["block_first"][part], inputs["block_count"][part], self.tokens_per_block
        )
        buffers = self.buffers if count == self.bucket else self.buffers.rows(count)
        return model.program.layers(buffers, mine, query_blocks, shape, self._work, staged, counts)


class DeviceModel:
    """See the module docstring. Not thread-safe: used by the step thread, and by the loader before it."""

    def __init__(
        self,
        weights: DenseWeights,
        arena: CudaArena,
        plane: DataPlane | None,
        buffers: StepBuffers,
        limits: DeviceLimits,
        stager: Stager | None = None,
        costs: PrefillCosts | None = None,
    ) -> None:
        """``stager`` and ``costs``: how prefill gets at records; without them kernels read them in host memory."""
        self.stager = stager
        self.costs = costs
        self.weights = weights
        self.arena = arena
        self.plane = plane
        self.inputs, self.report = buffers.inputs, buffers.report
        self.background_inputs, self.background_report = buffers.background_inputs, buffers.background_report
        self.masks = buffers.masks
        self.limits = limits
        self.device = arena.device
        self._is_captured = False
        self.on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        properties = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        self.num_multiprocessors: int = properties.multi_processor_count if properties else 4
        spec = weights.spec
        self.table = RequestTable(limits.max_requests, limits.max_blocks, self.device)
        self.logits = torch.zeros((limits.max_samples, spec.vocab_size), dtype=torch.float32, device=self.device)
        self.sampled_rows = torch.zeros((limits.max_samples, spec.hidden_size), dtype=torch.float32, device=self.device)
        self.normed_rows = torch.zeros(
            (limits.max_samples, spec.hidden_size), dtype=weights.compute_dtype, device=self.device
        )
        self.sampler = DeviceSampler(limits.max_samples, spec.vocab_size, self.device)
        self.program = LayerProgram(weights, arena, self.table, plane)
        self.decode_batches: dict[int, DecodeBatch] = {}
        self.graphs_captured = 0
        self._pieces: dict[int, PieceBatch] = {}
        self._long: PieceBatch | None = None

    def attach(self, mailbox: Mailbox | None) -> None:
        """Serve this mailbox from the next step on. No step may be running."""
        self.settle()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.plane is not None:
            assert mailbox is not None
            with self.on_stream():
                self.plane.attach(mailbox)
        self.table.clear()
        self.program.reserved = None

    def settle(self) -> None:
        """Nothing is enqueued any more for a step that goes no further."""
        if self.stager is not None:
            self.stager.settle()

    def on_stream(self) -> torch.cuda.StreamContext:
        """Context in which launches go to this model's stream."""
        return torch.cuda.stream(self.stream)

    def prepare(self, on_progress: Callable[[int, int, str], None], capture: bool = True) -> None:
        """Compile every kernel and capture a graph for each decode batch size, smallest first; without ``capture``
        kernels are compiled when first used and nothing is captured. The attached mailbox must be aborted: nothing
        serves it."""
        sizes = [size for size in self.limits.decode_batches if size <= self.limits.max_samples]
        self.allocate_long_piece()
        if not (capture and self.on_gpu):
            self.decode_batches = {size: DecodeBatch(self, size) for size in sizes}
            return
        buckets = PIECE_BUCKETS
        long_sizes = [] if self._long is None else self._long_warm_up_sizes(self._long.bucket)
        total = len(sizes) + len(buckets) + len(long_sizes)
        done = 0
        with self.on_stream():
            for size in long_sizes:
                on_progress(done, total, f"compiling kernels for {size} tokens")
                self._warm_up_long(size)
                done += 1
            for bucket in buckets:
                on_progress(done, total, f"compiling kernels for {bucket} tokens")
                self._warm_up_piece(bucket)
                done += 1
            pool = torch.cuda.graph_pool_handle()
            for size in sizes:
                on_progress(done, total, f"capturing a graph for {size} requests")
                batch = self.decode_batches[size] = DecodeBatch(self, size)
                self._fill_padding(batch.shape)
                batch.run()
                torch.cuda.synchronize(self.device)
                batch.capture(pool)
                torch.cuda.synchronize(self.device)
                for greedy in (True, False):
                    self.sampler.run(batch.logits, batch.inputs, greedy, self.report, self.table)
                done += 1
            self.masks.warm_up(self.logits)
            torch.cuda.synchronize(self.device)
        self._is_captured = True
        on_progress(total, total, "")

    def release_arena(self) -> None:
        """Forget graphs and addresses of the arena; buffers, weights and compiled kernels stay. No step is under way,
        and none comes before ``follow_arena``."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        for batch in self.decode_batches.values():
            batch.forget_graph()
        self.program.release_arena()

    def follow_arena(self) -> None:
        """The arena was allocated anew: take its addresses, and capture graphs again where there were any. The attached
        mailbox must be aborted, as for ``prepare``."""
        self.program.follow_arena()
        if self._is_captured:
            with self.on_stream():
                pool = torch.cuda.graph_pool_handle()
                for batch in self.decode_batches.values():
                    batch.capture(pool)
            torch.cuda.synchronize(self.device)

    def piece(self, bucket: int) -> PieceBatch:
        """The batch for prefill pieces of ``bucket`` tokens."""
        if bucket not in self._pieces:
            self._pieces[bucket] = PieceBatch(self, bucket)
        return self._pieces[bucket]

    def buffers_for(self, tokens: int) -> TokenBuffers:
        """Activations of ``tokens`` tokens, with the experts' kernels that fit their number."""
        spares = None
        if tokens > GEMV_EXPERT_TOKENS and self.plane is not None:
            if self.stager is not None:
                spares = self.stager.all_places
            elif tokens > LONG_TOKENS:
                spares = (0, 0, 0)
        weights = self.weights
        return TokenBuffers.allocate(
            weights.spec, tokens, weights.compute_dtype, self.plane, self.device, spares=spares
        )

    def long_tokens(self, num_tokens: int) -> int:
        """Padded size of a step of ``num_tokens`` tokens that should run in one long piece, by the records that are in
        slots now; 0 when it should run in short ones."""
        if self._long is None or not self.streams:
            return 0
        plane, costs = self.plane, self.costs
        long = num_tokens > LONG_TOKENS
        if costs is not None and plane is not None and self.stager is not None and self.stager.reaches_all:
            long = costs.prefers_streaming(costs.missing(plane.slot_of), num_tokens)
        return self.background_tokens(num_tokens) if long else 0

    def stages_background(self, num_tokens: int) -> bool:
        """Whether the one piece of a background step is staged: always when it is too long for the CPU to share it."""
        return self.background_tokens(num_tokens) > LONG_TOKENS or self.long_tokens(num_tokens) > 0

    def background_tokens(self, num_tokens: int) -> int:
        """Padded size of a background step of ``num_tokens`` tokens, one piece of any length; 0 when there is no room
        for any beside other steps."""
        if self._long is None:
            return 0
        size = -(-num_tokens // LONG_STEP) * LONG_STEP
        if not self.streams and size > LONG_TOKENS:
            return 0  # the CPU has no share in so many
        return size if size <= self._long.bucket else 0

    @property
    def streams(self) -> bool:
        """Whether the device gets at all records by itself: it reads them where they are, or they are staged."""
        if self.plane is None or self.plane.records.complete:
            return True
        return self.stager is not None and self.stager.reaches_all

    @property
    def long_piece(self) -> PieceBatch:
        """The batch for long pieces, of any ``long_tokens``."""
        assert self._long is not None
        return self._long

    def staged_step(self, step_id: int) -> StagedStep | None:
        """How a long piece of this step gets its records ahead of time; None when there is no buffer for that."""
        if self.plane is None or self.stager is None or not self.stager.reaches_all:
            return None
        return StagedStep(self.stager, self.plane, step_id)

    def allocate_long_piece(self) -> None:
        """Make room for long pieces. When device memory is short, prefill stays in short ones."""
        size = -(-self.limits.max_tokens // LONG_STEP) * LONG_STEP
        if self.limits.max_tokens <= LONG_TOKENS or self._long is not None:
            return
        if not self.streams:
            logger.warning(
                "event=long_prefill_off detail=%r",
                "some experts are in memory that is not pinned, and staging has no room for those of a layer",
            )
            size = LONG_TOKENS
        try:
            self._long = PieceBatch(self, size)
        except torch.OutOfMemoryError:
            logger.warning("event=long_prefill_off tokens=%d detail='device memory is short'", size)

    def decode_batch(self, rows: int) -> DecodeBatch | None:
        """The smallest batch that holds ``rows``; None when none does."""
        sizes = sorted(self.decode_batches)
        if not sizes or rows > sizes[-1]:
            return None
        return self.decode_batches[bucket_for(rows, sizes)]

    def _warm_up_piece(self, bucket: int) -> None:
        batch = self.piece(bucket)
        shape = StepShape(bucket, 1, 1)
        self._fill_padding(shape)
        inputs = self.inputs.device_views(shape)
        for context in (1, _PREFILL_SPLIT_CONTEXT + 1):
            batch.run(inputs, 0, 0, (0, 1), context)

    @staticmethod
    def _long_warm_up_sizes(largest: int) -> list[int]:
        sizes = [size for size in (LONG_STEP, 2 * LONG_STEP, 4 * LONG_STEP, 8 * LONG_STEP) if size < largest]
        return [*sizes, largest]

    def _warm_up_long(self, size: int) -> None:
        batch = self.long_piece
        shape = StepShape(size, 1, 1)
        self._fill_padding(shape)
        inputs = self.inputs.device_views(shape)
        layers, experts = len(self.weights.spec.moe_layers), self.weights.spec.num_experts
        ways: list[StagedStep | None] = [None]
        if self.stager is not None and self.stager.reaches_all:
            ways.append(StagedStep(self.stager, NothingMissing(layers, experts), 0))
        for staged in ways:
            batch.run(inputs, 0, 0, (0, 1), 1, size, staged)
        torch.cuda.synchronize(self.device)

    def _fill_padding(self, shape: StepShape) -> None:
        """A step in which nothing is real. Query blocks cover one padding token."""
        views = self.inputs.host_views(shape)
        for view in views.values():
            view[...] = 0
        views["position"][...] = -1
        views["slot_mapping"][...] = -1
        views["block_count"][...] = 1
        views["temperature"][...] = 1.0
        views["top_p"][...] = 1.0
        self.inputs.upload(shape)
        torch.cuda.synchronize(self.device)
