"""The kernels at the shapes of Qwen3-30B-A3B, as launchable cases: what ``kernels.py`` times and ``compile.py``
compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freetoken.kernels.triton.attention import (
    AttentionShape,
    QueryBlocks,
    attention,
    query_block_tokens,
    workspace,
)
from freetoken.kernels.triton.combine import combine
from freetoken.kernels.triton.expert_gemm import GemmShape, expert_gemm, fetch_records, gemm_shape
from freetoken.kernels.triton.expert_gemv import GemvShape, expert_gemv, partials_shape, scratch_shape
from freetoken.kernels.triton.linear import Q4_0Weight, linear, q4_0_gemm
from freetoken.kernels.triton.mailbox import MailboxAddresses, await_part, await_plan, publish
from freetoken.kernels.triton.norm import add_rms_norm, rms_norm, silu_and_mul
from freetoken.kernels.triton.plan import (
    KIND_FETCH,
    KIND_HIT,
    BlockTable,
    DevicePlan,
    PlanEntry,
    build_block_table,
    group_routes,
)
from freetoken.kernels.triton.rope_kv import PagedKV, rope_kv
from freetoken.kernels.triton.router import norm_router, top_k
from freetoken.kernels.triton.sampling import SamplerState, SamplingParameters, greedy, sample
from freetoken.quant.q4_0_record import plan_q4_0_layout
from freetoken.quant.record import RecordLayout, plan_record_layout

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
Q_HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 32, 4, 128, 151936, 48
QKV = (Q_HEADS + 2 * KV_HEADS) * DIM
BLOCK_SIZE = 16


def layout_of(fmt: str) -> RecordLayout:
    """The record layout of the model's experts in ``q4_0`` or ``bf16``."""
    return plan_q4_0_layout(HIDDEN, INTERMEDIATE) if fmt == "q4_0" else plan_record_layout(fmt, HIDDEN, INTERMEDIATE)


@dataclass
class Case:
    """One launch. ``bytes_moved`` is what must cross the memory bus at least, ``flops`` the useful operations."""

    name: str
    run: Callable[[], None]
    bytes_moved: float = 0.0
    flops: float = 0.0
    keep: list[object] = field(default_factory=list)


class Bench:
    """Inputs on one device, made from one seed. ``real`` False makes shapes only (for compiling)."""

    def __init__(self, device: str, real: bool = True) -> None:
        self.device = device
        self.real = real
        self.generator = torch.Generator().manual_seed(0)
        self._stores: dict[tuple[str, int], Tensor] = {}

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Normal values."""
        if not self.real:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return (torch.randn(shape, device=self.device, dtype=torch.float32) * scale).to(dtype)

    def ints(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Uniform integers below ``high``."""
        if not self.real:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.randint(0, high, shape, dtype=dtype, device=self.device)

    def store(self, fmt: str, records: int, host: bool = False) -> Tensor:
        """uint8 [records, stride] of random but finite weights, in VRAM or in pinned host memory; cached."""
        layout = layout_of(fmt)
        key = (fmt + ("-host" if host else ""), records)
        if key not in self._stores:
            if not self.real:
                self._stores[key] = torch.empty((records, layout.stride_bytes), dtype=torch.uint8)
            else:
                data = self._random_records(layout, records)
                if host:
                    pinned = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
                    pinned.copy_(data)
                    data = pinned
                self._stores[key] = data
        return self._stores[key]

    def forget(self) -> None:
        """Free the cached stores."""
        self._stores.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _random_records(self, layout: RecordLayout, records: int) -> Tensor:
        data = torch.empty((records, layout.stride_bytes), dtype=torch.uint8, device=self.device)
        step = max(1, (1 << 30) // layout.stride_bytes)
        for start in range(0, records, step):
            part = data[start : start + step]
            if layout.format == "bf16":
                values = torch.randn(part.numel() // 2, device=self.device) * 0.03
                part.copy_(values.to(torch.bfloat16).view(torch.uint8).view(part.shape))
                continue
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=self.device))
            tiles = part[:, : layout.payload_bytes].view(-1, layout.tile_stride_bytes)
            for name in ("gate_d", "up_d", "down_d"):
                f = layout.field(name)
                scales = torch.rand((tiles.shape[0], f.size_bytes // 2), device=self.device) * 0.01 + 0.001
                tiles[:, f.offset_bytes : f.offset_bytes + f.size_bytes] = scales.to(torch.float16).view(torch.uint8)
        return data

    def q4_0(self, outputs: int, inputs: int) -> Q4_0Weight:
        """A random Q4_0 matrix."""
        nibbles = self.ints(256, outputs, inputs // 2, dtype=torch.uint8)
        if not self.real:
            return Q4_0Weight(nibbles, torch.empty(outputs, inputs // 32, dtype=torch.float16, device=self.device))
        scales = torch.rand(outputs, inputs // 32, device=self.device) * 0.01 + 0.001
        return Q4_0Weight(nibbles, scales.to(torch.float16))

    def expert_ids(self, tokens: int) -> Tensor:
        """int32 [T, K], distinct in each row, uniform."""
        if not self.real:
            return torch.zeros(tokens, TOP_K, dtype=torch.int32, device=self.device)
        return torch.rand(tokens, EXPERTS, device=self.device).topk(TOP_K, dim=1).indices.int().contiguous()

    def plan(
        self, fmt: str, ids: Tensor, store: Tensor, offset: int = 0, kind: int = KIND_HIT, slots: Tensor | None = None
    ) -> DevicePlan:
        """A plan whose expert e lies at record (offset + e) of ``store`` and is copied to the same record of
        ``slots``."""
        tokens = ids.shape[0]
        plan = DevicePlan.empty(min(EXPERTS, tokens * TOP_K), tokens * TOP_K, self.device)
        if not self.real:
            return plan
        stride = layout_of(fmt).stride_bytes
        flat = ids.flatten().cpu()
        entries = []
        for expert in flat.unique().tolist():
            routes = (flat == expert).nonzero().flatten().tolist()
            record = (offset + expert) % store.shape[0]
            destination = slots.data_ptr() + (record % slots.shape[0]) * stride if slots is not None else 0
            entries.append(PlanEntry(kind, expert, store.data_ptr() + record * stride, routes, destination))
        plan.fill(entries)
        return plan

    def paged_kv(self, tokens_per_row: int, rows: int) -> tuple[PagedKV, Tensor]:
        """One layer's KV (block records of one layer each) and shuffled block tables [rows, blocks]."""
        blocks = -(-tokens_per_row // BLOCK_SIZE)
        record = 2 * BLOCK_SIZE * KV_HEADS * DIM
        data = self.randn(rows * blocks * record)
        tables = torch.arange(rows * blocks) if not self.real else torch.randperm(rows * blocks)
        tables = tables.int().view(rows, blocks).to(self.device)
        return PagedKV(data, 0, record, BLOCK_SIZE, KV_HEADS, DIM), tables


# ------------------------------------------------------------------------------------------------------------ experts


def gemv_case(
    bench: Bench,
    fmt: str,
    tokens: int,
    *,
    partials: bool = True,
    shape: GemvShape | None = None,
    grid: int | None = None,
    store: Tensor | None = None,
    slots: Tensor | None = None,
    kind: int = KIND_HIT,
    offset: int = 0,
    experts: int | None = None,
    tag: str = "",
) -> Case:
    """Decode experts by GEMV. ``experts`` limits one token's routes to that many (for fetches)."""
    layout = layout_of(fmt)
    store = store if store is not None else bench.store(fmt, EXPERTS * 4 if bench.real else EXPERTS)
    ids = bench.expert_ids(tokens)
    if experts is not None and bench.real:
        ids = ids.clone()
        ids[0, experts:] = ids[0, 0]
    plan = bench.plan(fmt, ids if experts is None else ids[:, :experts].contiguous(), store, offset, kind, slots)
    hidden, weights = bench.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K, device=bench.device)
    if experts is not None:
        weights = weights[:, :experts].contiguous()
    routes = weights.numel()
    single = tokens == 1
    shape = shape or GemvShape.of(layout, single_route=single)
    out = torch.empty(partials_shape(layout, routes, shape), device=bench.device)
    if not partials:
        out = torch.zeros(tokens, HIDDEN, device=bench.device)
    scratch = None if single else torch.empty(scratch_shape(layout, routes), device=bench.device)

    def run() -> None:
        expert_gemv(
            layout, plan, hidden, weights, out, scratch=scratch, partials=partials, fill_slots=slots is not None,
            single_route=single, shape=shape, grid=grid,
        )  # fmt: skip

    distinct = int(plan.counts[0]) if bench.real else routes
    return Case(
        f"gemv {fmt} T={tokens}{tag}", run, distinct * layout.payload_bytes, keep=[plan, hidden, weights, out, store]
    )


def gemm_case(
    bench: Bench,
    fmt: str,
    tokens: int,
    *,
    block_routes: int,
    shape: GemmShape | None = None,
    down_shape: GemmShape | None = None,
    offset: int = 0,
    decode: bool = False,
    fetched: bool = False,
    tag: str = "",
) -> Case:
    """Experts by grouped GEMM: as in prefill (grouping on the device) or, with ``decode``, from a ready plan.
    ``fetched`` compiles in the look at an entry's kind."""
    layout = layout_of(fmt)
    store = bench.store(fmt, EXPERTS * 4 if bench.real else EXPERTS)
    ids = bench.expert_ids(tokens)
    hidden = bench.randn(tokens, HIDDEN)
    routes = tokens * TOP_K
    act = torch.empty(routes, INTERMEDIATE, dtype=torch.bfloat16, device=bench.device)
    out = torch.empty(routes, HIDDEN, dtype=torch.bfloat16, device=bench.device)
    if decode:
        plan = bench.plan(fmt, ids, store, offset)
        table = BlockTable.one_per_entry(plan, block_routes)
    else:
        plan = DevicePlan.empty(EXPERTS, routes, bench.device)
        records = torch.arange(offset, offset + EXPERTS) % store.shape[0]
        addresses = (store.data_ptr() + records * layout.stride_bytes).to(bench.device)
        group_routes(ids, addresses, plan)
        table = build_block_table(plan, routes, block_routes)

    def run() -> None:
        expert_gemm(
            layout, plan, table, hidden, TOP_K, act, out, fetched=fetched, shape=shape, down_shape=down_shape
        )  # fmt: skip

    distinct = len(ids.unique()) if bench.real else EXPERTS
    return Case(
        f"gemm {fmt} T={tokens} BM={block_routes}{' decode' if decode else ''}{tag}",
        run,
        distinct * layout.payload_bytes,
        routes * 6 * HIDDEN * INTERMEDIATE,
        [plan, table, ids, hidden, act, out, store],
    )


def grouping_case(bench: Bench, tokens: int) -> Case:
    """Routes by expert and row blocks, on the device."""
    ids = bench.expert_ids(tokens)
    plan = DevicePlan.empty(EXPERTS, tokens * TOP_K, bench.device)
    addresses = torch.zeros(EXPERTS, dtype=torch.int64, device=bench.device)

    def run() -> None:
        group_routes(ids, addresses, plan)
        build_block_table(plan, tokens * TOP_K, 64)

    return Case(f"group routes T={tokens}", run)


def combine_case(bench: Bench, fmt: str, tokens: int, mode: str) -> Case:
    """``mode`` is partials (of the GEMV), rows (of the GEMM) or routed (atomics)."""
    layout = layout_of(fmt)
    routes = tokens * TOP_K
    plan = DevicePlan.empty(min(EXPERTS, routes), routes, bench.device)
    plan.on_gpu.fill_(1)
    residual, weights = bench.randn(tokens, HIDDEN, dtype=torch.float32), torch.rand(tokens, TOP_K, device=bench.device)
    partials = routed = None
    if mode == "partials":
        partials = bench.randn(
            *partials_shape(layout, routes, GemvShape.of(layout, single_route=tokens == 1)), dtype=torch.float32
        )
    elif mode == "rows":
        partials = bench.randn(routes, 1, HIDDEN)
    else:
        routed = bench.randn(tokens, HIDDEN, dtype=torch.float32)

    def run() -> None:
        combine(residual, weights, plan, partials=partials, routed=routed)

    source = partials if partials is not None else routed
    assert source is not None
    return Case(f"combine {fmt} T={tokens} {mode}", run, source.numel() * source.element_size())


def fetch_case(bench: Bench, fmt: str, experts: int, store: Tensor, slots: Tensor, grid: int, offset: int = 0) -> Case:
    """Copy records from host memory by a kernel."""
    layout = layout_of(fmt)
    ids = bench.expert_ids(1)[:, :experts].contiguous()
    plan = bench.plan(fmt, ids, store, offset, KIND_FETCH, slots)
    size = experts * layout.payload_bytes
    return Case(f"fetch {fmt} x{experts} grid={grid}", lambda: fetch_records(layout, plan, grid), size, keep=[plan])


# -------------------------------------------------------------------------------------------------------------- dense


def linear_case(bench: Bench, outputs: int, inputs: int, tokens: int, fmt: str, name: str, **options: object) -> Case:
    """A projection by GEMV, with the norm before it when ``norm`` is in the options."""
    x = bench.randn(tokens, inputs, dtype=torch.float32 if options.get("norm") else torch.bfloat16)
    weight: Tensor | Q4_0Weight = (
        bench.q4_0(outputs, inputs) if fmt == "q4_0" else bench.randn(outputs, inputs, scale=0.02)
    )
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16 if outputs != VOCAB else torch.float32, device=bench.device)
    keywords = {k: v for k, v in options.items() if k != "norm"}
    if options.get("norm"):
        keywords["norm"] = bench.randn(inputs)
    size = outputs * inputs * (0.5625 if fmt == "q4_0" else 2)
    return Case(
        f"{name} {fmt} T={tokens}" + "".join(f" {k}={v}" for k, v in keywords.items() if k != "norm"),
        lambda: linear(x, weight, out, **keywords),  # type: ignore[arg-type]
        size,
        2.0 * outputs * inputs * tokens,
        [x, weight, out],
    )


def q4_gemm_case(bench: Bench, outputs: int, inputs: int, tokens: int, name: str, **options: object) -> Case:
    """A Q4_0 projection by GEMM."""
    x, weight = bench.randn(tokens, inputs), bench.q4_0(outputs, inputs)
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=bench.device)
    return Case(
        f"{name} q4_0 gemm T={tokens}" + "".join(f" {v}" for v in options.values()),
        lambda: q4_0_gemm(x, weight, out, **options),  # type: ignore[arg-type]
        outputs * inputs * 0.5625,
        2.0 * outputs * inputs * tokens,
        [x, weight, out],
    )


def norm_case(bench: Bench, tokens: int) -> Case:
    """add + RMSNorm on the float32 residual."""
    residual, delta = bench.randn(tokens, HIDDEN, dtype=torch.float32), bench.randn(tokens, HIDDEN)
    weight, out = bench.randn(HIDDEN), bench.randn(tokens, HIDDEN)
    return Case(
        f"add+norm T={tokens}", lambda: add_rms_norm(residual, delta, weight, 1e-6, out), tokens * HIDDEN * 12.0
    )  # fmt: skip


def small_cases(bench: Bench, tokens: int) -> Iterator[Case]:
    """Everything else that a layer launches."""
    x, weight = bench.randn(tokens, HIDDEN, dtype=torch.float32), bench.randn(HIDDEN)
    hidden = bench.randn(tokens, HIDDEN)
    yield Case(f"norm T={tokens}", lambda: rms_norm(x, weight, 1e-6, hidden), tokens * HIDDEN * 6.0)
    yield norm_case(bench, tokens)
    fused, act = bench.randn(tokens, 2 * INTERMEDIATE), bench.randn(tokens, INTERMEDIATE)
    yield Case(f"silu*up T={tokens}", lambda: silu_and_mul(fused, act), tokens * INTERMEDIATE * 6.0)
    logits = bench.randn(tokens, EXPERTS, dtype=torch.float32)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=bench.device)
    weights = torch.zeros(tokens, TOP_K, device=bench.device)
    yield Case(f"top-k T={tokens}", lambda: top_k(logits, ids, weights))
    if tokens <= 32:
        router = bench.randn(EXPERTS, HIDDEN, scale=0.02)
        yield Case(
            f"norm+router T={tokens}",
            lambda: norm_router(x, weight, router, hidden, logits, 1e-6),
            router.numel() * 2.0,
        )
    yield rope_case(bench, tokens)


def rope_case(bench: Bench, tokens: int) -> Case:
    """q/k norm, rotary, KV store."""
    qkv = bench.randn(tokens, QKV)
    q, k, v = qkv.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    kv, _ = bench.paged_kv(tokens, 1)
    positions = torch.arange(tokens, dtype=torch.int32, device=bench.device)
    slots = torch.arange(tokens, dtype=torch.int64, device=bench.device)
    cos = bench.randn(40960, DIM // 2, dtype=torch.float32)
    norm = bench.randn(DIM)
    q_out = bench.randn(tokens, Q_HEADS, DIM)
    return Case(
        f"rope+kv T={tokens}",
        lambda: rope_kv(q, k, v, positions, slots, cos, cos, q_out, kv, q_norm=norm, k_norm=norm),
        tokens * QKV * 4.0,
        keep=[kv],
    )


def decode_attention_case(bench: Bench, batch: int, context: int, shape: AttentionShape) -> Case:
    """One new token per row at ``context`` keys."""
    kv, tables = bench.paged_kv(context, batch)
    q = bench.randn(batch, Q_HEADS, DIM)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=bench.device)
    blocks = QueryBlocks.decode(batch, bench.device)
    out = torch.empty(batch, Q_HEADS * DIM, dtype=torch.bfloat16, device=bench.device)
    work = workspace(batch, Q_HEADS, DIM, shape.splits, bench.device)
    return Case(
        f"attention T={batch} ctx={context} keys={shape.keys} splits={shape.splits} warps={shape.num_warps}"
        f" stages={shape.num_stages}",
        lambda: attention(q, kv, tables, positions, blocks, out, scale=DIM**-0.5, shape=shape, work=work),
        batch * context * 2.0 * KV_HEADS * DIM * 2,
        4.0 * batch * context * Q_HEADS * DIM,
        [kv, tables, q, positions, out],
    )


def prefill_attention_case(bench: Bench, new: int, context: int, shape: AttentionShape, rows: int = 128) -> Case:
    """``new`` tokens after ``context - new`` cached ones. ``rows`` of query heads per block."""
    kv, tables = bench.paged_kv(context, 1)
    q = bench.randn(new, Q_HEADS, DIM)
    positions = torch.arange(context - new, context, dtype=torch.int32, device=bench.device)
    blocks = QueryBlocks.prefill([0, new], query_block_tokens(Q_HEADS, KV_HEADS, rows), bench.device)
    out = torch.empty(new, Q_HEADS * DIM, dtype=torch.bfloat16, device=bench.device)
    work = workspace(new, Q_HEADS, DIM, shape.splits, bench.device) if shape.splits > 1 else None
    pairs = new * (context - new) + new * (new + 1) / 2
    return Case(
        f"prefill attention {new} of {context} rows={rows} keys={shape.keys} splits={shape.splits}"
        f" warps={shape.num_warps} stages={shape.num_stages}",
        lambda: attention(q, kv, tables, positions, blocks, out, scale=DIM**-0.5, shape=shape, work=work),
        context * 2.0 * KV_HEADS * DIM * 2,
        4.0 * pairs * Q_HEADS * DIM,
        [kv, tables, q, positions, out],
    )


def sampling_cases(bench: Bench, rows: int) -> Iterator[Case]:
    """Greedy and full sampling over the vocabulary."""
    logits = bench.randn(rows, VOCAB, dtype=torch.float32, scale=3.0)
    state = SamplerState.empty(rows, VOCAB, bench.device)
    ids = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    logprobs = torch.zeros(rows, device=bench.device)

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=bench.device)

    parameters = SamplingParameters(
        full(0.7, torch.float32), full(20, torch.int32), full(0.8, torch.float32), full(0.0, torch.float32),
        full(7, torch.int64), full(100, torch.int64),
    )  # fmt: skip
    size = rows * VOCAB * 4.0
    yield Case(f"greedy S={rows}", lambda: greedy(logits, state, ids, logprobs), size, keep=[logits])
    yield Case(f"sample S={rows}", lambda: sample(logits, parameters, state, ids, logprobs), size, keep=[logits])


def mailbox_cases(bench: Bench, box: MailboxAddresses, tokens: int, host: list[object]) -> Iterator[Case]:
    """Publish and the two waits, launched alone; for compiling (a bench that answers them is in
    ``mailbox_bench.py``)."""
    plan = DevicePlan.empty(min(EXPERTS, tokens * TOP_K), tokens * TOP_K, bench.device)
    seq = torch.zeros(1, dtype=torch.int32, device=bench.device)
    step = torch.zeros(1, dtype=torch.int64, device=bench.device)
    real = torch.full((1,), tokens, dtype=torch.int32, device=bench.device)
    hidden, logits = bench.randn(tokens, HIDDEN), bench.randn(tokens, EXPERTS, dtype=torch.float32)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=bench.device)
    weights = torch.zeros(tokens, TOP_K, device=bench.device)
    admit = torch.ones(tokens, dtype=torch.uint8, device=bench.device)
    store = torch.zeros(EXPERTS, dtype=torch.int64, device=bench.device)
    yield Case(
        f"publish T={tokens}",
        lambda: publish(box, seq, step, real, hidden, ids, weights, admit, 3, logits=logits),
        keep=host,
    )
    yield Case(f"await plan T={tokens}", lambda: await_plan(box, seq, store, 0, 4096, plan, 10**9))
    yield Case(f"await part T={tokens}", lambda: await_part(box, seq, plan, 10**9))


__all__ = ["Bench", "Case", "gemm_shape"]
