"""A whole model's decode step, and one layer of prefill, put together from the kernels with random weights.

Shapes of Qwen3-30B-A3B, Q4_0 projections and experts, all experts in VRAM. What the numbers mean is in ``kernels.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.cases import (
    BLOCK_SIZE,
    DIM,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    Q_HEADS,
    QKV,
    TOP_K,
    VOCAB,
    Bench,
    layout_of,
)
from bench.gpu.responder import Responder
from freetoken.kernels.triton.attention import (
    AttentionShape,
    QueryBlocks,
    attention,
    query_block_tokens,
    workspace,
)
from freetoken.kernels.triton.combine import combine
from freetoken.kernels.triton.expert_gemm import block_routes_for, expert_gemm
from freetoken.kernels.triton.expert_gemv import GemvShape, expert_gemv, partials_shape, scratch_shape
from freetoken.kernels.triton.linear import linear, q4_0_gemm
from freetoken.kernels.triton.mailbox import await_plan, publish
from freetoken.kernels.triton.norm import add_rms_norm, rms_norm
from freetoken.kernels.triton.plan import BlockTable, DevicePlan, build_block_table, group_routes
from freetoken.kernels.triton.rope_kv import PagedKV, rope_kv
from freetoken.kernels.triton.router import norm_router, top_k
from freetoken.kernels.triton.sampling import SamplerState, greedy

GEMV_TOKENS = 2
LINEAR_TOKENS = 8


class FakeModel:
    """Random weights of ``layers`` layers and the KV of ``batch`` rows at ``context`` tokens."""

    def __init__(self, bench: Bench, layers: int, batch: int, context: int) -> None:
        self.bench, self.layers, self.batch, self.context = bench, layers, batch, context
        self.layout = layout_of("q4_0")
        self.store = bench.store("q4_0", layers * EXPERTS)
        self.qkv = [bench.q4_0(QKV, HIDDEN) for _ in range(layers)]
        self.o = [bench.q4_0(HIDDEN, Q_HEADS * DIM) for _ in range(layers)]
        self.router = [bench.randn(EXPERTS, HIDDEN, scale=0.05) for _ in range(layers)]
        self.norm, self.head_norm = bench.randn(HIDDEN), bench.randn(DIM)
        self.lm_head = bench.q4_0(VOCAB, HIDDEN)
        blocks = -(-context // BLOCK_SIZE)
        record = 2 * BLOCK_SIZE * KV_HEADS * DIM
        data = bench.randn(batch * blocks * layers * record)
        self.kv = [PagedKV(data, i * record, layers * record, BLOCK_SIZE, KV_HEADS, DIM) for i in range(layers)]
        self.tables = torch.randperm(batch * blocks).int().view(batch, blocks).to(bench.device)
        self.cos = bench.randn(40960, DIM // 2, dtype=torch.float32)
        self.residual = bench.randn(batch, HIDDEN, dtype=torch.float32)


class DecodeStep:
    """One token for each row. ``responder`` answers the mailbox; without one the experts are those of a fixed plan."""

    def __init__(self, model: FakeModel, responder: Responder | None, shape: AttentionShape) -> None:
        m, bench, t = model, model.bench, model.batch
        self.model, self.responder, self.attention_shape = model, responder, shape
        device = bench.device
        self.positions = torch.full((t,), m.context - 1, dtype=torch.int32, device=device)
        last = m.tables[:, -1].long() * BLOCK_SIZE
        self.slots = last + (m.context - 1) % BLOCK_SIZE
        self.blocks = QueryBlocks.decode(t, device)
        self.work = workspace(t, Q_HEADS, DIM, shape.splits, device)
        self.qkv, self.queries = bench.randn(t, QKV), bench.randn(t, Q_HEADS, DIM)
        self.mixed, self.hidden = bench.randn(t, Q_HEADS * DIM), bench.randn(t, HIDDEN)
        self.logits = torch.empty(t, EXPERTS, device=device)
        self.ids = torch.zeros(t, TOP_K, dtype=torch.int32, device=device)
        self.weights = torch.full((t, TOP_K), 0.125, device=device)
        self.seq = torch.zeros(1, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.real = torch.full_like(self.seq, t)
        self.admit = torch.ones(t, dtype=torch.uint8, device=device)
        self.vocab_logits = torch.empty(t, VOCAB, device=device)
        self.state, self.tokens = SamplerState.empty(t, VOCAB, device), torch.zeros(t, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(t, device=device)
        self.gemv = t <= GEMV_TOKENS
        layout = m.layout
        self.shape = GemvShape.of(layout, single_route=t == 1)
        self.partials = torch.empty(partials_shape(layout, t * TOP_K, self.shape) if self.gemv else (1,), device=device)
        self.scratch = torch.empty(scratch_shape(layout, t * TOP_K), device=device)
        self.act = bench.randn(t * TOP_K, INTERMEDIATE)
        self.out = bench.randn(t * TOP_K, HIDDEN)
        stride = layout.stride_bytes
        self.addresses = [
            m.store.data_ptr() + (i * EXPERTS + torch.arange(EXPERTS, device=device)) * stride for i in range(m.layers)
        ]
        self.plans = []
        if responder is None:
            ids = bench.expert_ids(t)
            self.plans = [bench.plan("q4_0", ids, m.store, i * EXPERTS) for i in range(m.layers)]
        self.plan = DevicePlan.empty(min(EXPERTS, t * TOP_K), t * TOP_K, device)
        self.table = BlockTable.one_per_entry(self.plan, max(16, 1 << (t - 1).bit_length()))

    def layer(self, i: int) -> None:
        """Launch layer ``i``."""
        m = self.model
        if m.batch <= LINEAR_TOKENS:
            linear(m.residual, m.qkv[i], self.qkv, norm=m.norm)
        else:
            rms_norm(m.residual, m.norm, 1e-6, self.hidden)
            q4_0_gemm(self.hidden, m.qkv[i], self.qkv)
        q, k, v = self.qkv.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        rope_kv(
            q, k, v, self.positions, self.slots, m.cos, m.cos, self.queries, m.kv[i], q_norm=m.head_norm,
            k_norm=m.head_norm,
        )  # fmt: skip
        attention(
            self.queries, m.kv[i], m.tables, self.positions, self.blocks, self.mixed, scale=DIM**-0.5,
            shape=self.attention_shape, work=self.work,
        )  # fmt: skip
        multiply = linear if m.batch <= LINEAR_TOKENS else q4_0_gemm
        multiply(self.mixed, m.o[i], m.residual, accumulate=True)
        norm_router(m.residual, m.norm, m.router[i], self.hidden, self.logits, 1e-6)
        plan = self._plan(i)
        if self.gemv:
            expert_gemv(
                m.layout, plan, self.hidden, self.weights, self.partials, scratch=self.scratch, partials=True,
                fill_slots=False, single_route=m.batch == 1, shape=self.shape,
            )  # fmt: skip
            combine(m.residual, self.weights, plan, partials=self.partials)
        else:
            expert_gemm(m.layout, plan, self.table, self.hidden, TOP_K, self.act, self.out)
            combine(m.residual, self.weights, plan, partials=self.out)

    def _plan(self, i: int) -> DevicePlan:
        if self.responder is None:
            return self.plans[i]
        box, m = self.responder.addresses, self.model
        publish(
            box, self.seq, self.step, self.real, self.hidden, self.ids, self.weights, self.admit, i, flags=4,
            logits=self.logits,
        )  # fmt: skip
        await_plan(box, self.seq, self.addresses[i], m.store.data_ptr(), m.layout.stride_bytes, self.plan, 10**9)
        return self.plan

    def head(self) -> None:
        """Logits and a greedy token."""
        m = self.model
        if m.batch <= LINEAR_TOKENS:
            linear(m.residual, m.lm_head, self.vocab_logits, norm=m.norm)
        else:
            rms_norm(m.residual, m.norm, 1e-6, self.hidden)
            q4_0_gemm(self.hidden, m.lm_head, self.vocab_logits)
        greedy(self.vocab_logits, self.state, self.tokens, self.logprobs)

    def run(self) -> None:
        """The step. The residual is reset, so that it does not grow from step to step."""
        self.model.residual.fill_(0.5)
        for i in range(self.model.layers):
            self.layer(i)
        self.head()


class PrefillLayer:
    """One layer over a chunk of ``tokens`` new tokens of one row, its experts in VRAM."""

    def __init__(self, model: FakeModel, tokens: int, shape: AttentionShape) -> None:
        bench, device = model.bench, model.bench.device
        self.model, self.tokens, self.attention_shape = model, tokens, shape
        self.residual, self.delta = bench.randn(tokens, HIDDEN, dtype=torch.float32), bench.randn(tokens, HIDDEN)
        self.hidden, self.qkv = bench.randn(tokens, HIDDEN), bench.randn(tokens, QKV)
        self.queries, self.mixed = bench.randn(tokens, Q_HEADS, DIM), bench.randn(tokens, Q_HEADS * DIM)
        self.positions = torch.arange(model.context - tokens, model.context, dtype=torch.int32, device=device)
        index = self.positions.long()
        self.slots = model.tables[0].long()[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
        self.blocks = QueryBlocks.prefill([0, tokens], query_block_tokens(Q_HEADS, KV_HEADS), device)
        self.work = workspace(tokens, Q_HEADS, DIM, shape.splits, device) if shape.splits > 1 else None
        self.logits = torch.empty(tokens, EXPERTS, device=device)
        self.ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=device)
        self.weights = torch.zeros(tokens, TOP_K, device=device)
        routes = tokens * TOP_K
        self.plan = DevicePlan.empty(EXPERTS, routes, device)
        self.block_routes = block_routes_for(routes, EXPERTS)
        self.act, self.out = bench.randn(routes, INTERMEDIATE), bench.randn(routes, HIDDEN)
        self.addresses: Tensor = (
            model.store.data_ptr() + torch.arange(EXPERTS, device=device) * model.layout.stride_bytes
        )

    def run(self) -> None:
        """Launch layer 0 over the chunk."""
        m = self.model
        rms_norm(self.residual, m.norm, 1e-6, self.hidden)
        q4_0_gemm(self.hidden, m.qkv[0], self.qkv)
        q, k, v = self.qkv.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        rope_kv(
            q, k, v, self.positions, self.slots, m.cos, m.cos, self.queries, m.kv[0], q_norm=m.head_norm,
            k_norm=m.head_norm,
        )  # fmt: skip
        attention(
            self.queries, m.kv[0], m.tables, self.positions, self.blocks, self.mixed, scale=DIM**-0.5,
            shape=self.attention_shape, work=self.work,
        )  # fmt: skip
        q4_0_gemm(self.mixed, m.o[0], self.delta)
        add_rms_norm(self.residual, self.delta, m.norm, 1e-6, self.hidden)
        self.logits.copy_(torch.mm(self.hidden, m.router[0].t(), out_dtype=torch.float32))
        top_k(self.logits, self.ids, self.weights)
        group_routes(self.ids, self.addresses, self.plan)
        table = build_block_table(self.plan, self.tokens * TOP_K, self.block_routes)
        expert_gemm(m.layout, self.plan, table, self.hidden, TOP_K, self.act, self.out)
        combine(self.residual, self.weights, self.plan, partials=self.out)
