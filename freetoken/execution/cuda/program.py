"""The forward pass as a sequence of kernel launches into buffers that exist: no host synchronisation, so it can be
captured.

One program serves decode batches (T rows of one token) and pieces of prefill (T tokens of any rows); they differ in
their query blocks. Up to ``GEMV_TOKENS`` tokens, projections read the float32 residual stream directly, norm included;
larger batches go through normed rows and matrix products. Padding tokens have position -1 and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from freetoken.execution.cuda.arena import CudaArena
from freetoken.execution.cuda.branch import Branch
from freetoken.execution.cuda.buffers import TokenBuffers
from freetoken.execution.cuda.data_plane import DataPlane
from freetoken.execution.cuda.embed import embed
from freetoken.execution.cuda.expert_kernels import COPY_PROGRAMS, gemm_cut
from freetoken.execution.cuda.inputs import RequestTable
from freetoken.execution.cuda.staging import StagedStep, Stager
from freetoken.execution.cuda.trace import Trace
from freetoken.execution.cuda.weights import DenseWeights, LayerWeights, Linear
from freetoken.kernels.triton import linear as linear_kernels
from freetoken.kernels.triton.attention import AttentionShape, QueryBlocks, attention
from freetoken.kernels.triton.combine import combine
from freetoken.kernels.triton.expert_gemm import expert_gemm
from freetoken.kernels.triton.expert_gemv import expert_gemv
from freetoken.kernels.triton.linear import Q4_0Weight
from freetoken.kernels.triton.norm import add_rms_norm, rms_norm, silu_and_mul
from freetoken.kernels.triton.placed_plan import copy_records
from freetoken.kernels.triton.plan import fill_block_table
from freetoken.kernels.triton.rope_kv import PagedKV, rope_kv
from freetoken.kernels.triton.router import norm_router, top_k

# Up to so many rows, logits are vector products (Q4_0 on an H200: 182 us for 2 rows, 330 for 4, 634 for 8).
LOGIT_GEMV_ROWS = 2
# Up to so many tokens the combine kernel itself waits for the CPU share, which saves a launch.
_COMBINE_WAITS_TOKENS = 2


def multiply(x: Tensor, linear: Linear, out: Tensor) -> None:
    """out [T, O] = x @ weight.T + bias for large T; out may be wider (float32) than x."""
    if isinstance(linear.weight, Q4_0Weight):
        linear_kernels.q4_0_gemm(x, linear.weight, out, bias=linear.bias)
        return
    if out.dtype == x.dtype:
        torch.mm(x, linear.weight.t(), out=out)
    elif x.device.type == "cuda":
        out.copy_(torch.mm(x, linear.weight.t(), out_dtype=out.dtype))
    else:
        out.copy_(torch.mm(x.to(out.dtype), linear.weight.t().to(out.dtype)))
    if linear.bias is not None:
        out.add_(linear.bias)


class LayerProgram:
    """A model's layers over one arena. Stateless beside what it is given; used on one stream at a time."""

    def __init__(self, weights: DenseWeights, arena: CudaArena, table: RequestTable, plane: DataPlane | None) -> None:
        """``plane`` is needed by models with experts."""
        self.weights = weights
        self.spec = weights.spec
        self.plane = plane
        self._arena = arena
        self._table = table
        self.trace: Trace | None = None
        self.reserved: Stager | None = None
        """The staging buffer while a background step uses it: others keep to its spare places."""
        self._kv: list[PagedKV] = []
        self._branch = Branch(arena.device)
        experts = [layer for layer in weights.layers if layer.router is not None]
        self._next_experts = {layer.ordinal: later for layer, later in pairwise(experts)}
        self.follow_arena()

    def follow_arena(self) -> None:
        """Take the arena's addresses."""
        self._kv = [self._arena.layer_kv(layer) for layer in range(self.spec.num_layers)]

    def release_arena(self) -> None:
        """Let go of its memory; nothing can run before ``follow_arena``."""
        self._kv.clear()

    def embed(self, x: TokenBuffers, inputs: Mapping[str, Tensor]) -> None:
        """Token rows into the residual stream."""
        embed(inputs["token"], inputs["request_slot"], self._table.last_token, self.weights.embedding, x.residual)

    def run(
        self,
        x: TokenBuffers,
        inputs: Mapping[str, Tensor],
        blocks: QueryBlocks,
        shape: AttentionShape,
        work: tuple[Tensor, Tensor] | None,
        staged: StagedStep | None = None,
    ) -> None:
        """Embedding and all layers; ``x.residual`` then holds the last layer's output. ``staged``: records come by the
        copy engine, a layer ahead; not for graphs."""
        for _ in self.layers(x, inputs, blocks, shape, work, staged):
            pass

    def layers(
        self,
        x: TokenBuffers,
        inputs: Mapping[str, Tensor],
        blocks: QueryBlocks,
        shape: AttentionShape,
        work: tuple[Tensor, Tensor] | None,
        staged: StagedStep | None = None,
        counts: Tensor | None = None,
    ) -> Iterator[None]:
        """``run`` a layer at a time: yields after each. Other batches may be launched in between, if their buffers and
        inputs are others; ``counts`` [L, 8] then keeps this one's figures apart."""
        self._mark("before")
        if staged is not None:
            staged.begin()
        if x.tokens == 1:
            self._branch.forget()
        self.embed(x, inputs)
        for layer in self.weights.layers:
            self.attention(layer, x, inputs, blocks, shape, work)
            self._mark("attention")
            if layer.router is None:
                self.mlp(layer, x)
                self._mark("mlp")
                yield
                continue
            if x.placed is None:
                self.experts(layer, x, inputs)
            else:
                self.placed_experts(layer, x, inputs, staged, counts)
            if staged is not None:
                staged.after(layer.ordinal)
            yield
        self._mark("after")

    def _mark(self, name: str) -> None:
        if self.trace is not None:
            self.trace.mark(name)

    def logits(self, rows: Tensor, normed: Tensor, out: Tensor) -> None:
        """out f32 [S, V] of residual ``rows`` f32 [S, H]; ``normed`` [S, H] is scratch."""
        weights, eps = self.weights, self.spec.rms_norm_eps
        if len(rows) <= LOGIT_GEMV_ROWS:
            linear_kernels.linear(rows, weights.lm_head.weight, out, norm=weights.final_norm, eps=eps)
        else:
            rms_norm(rows, weights.final_norm, eps, normed)
            multiply(normed, weights.lm_head, out)

    # ------------------------------------------------------------------------------------------ parts of a layer

    def attention(
        self,
        layer: LayerWeights,
        x: TokenBuffers,
        inputs: Mapping[str, Tensor],
        blocks: QueryBlocks,
        shape: AttentionShape,
        work: tuple[Tensor, Tensor] | None,
    ) -> None:
        """residual += attention(norm(residual)), storing keys and values."""
        spec, eps = self.spec, self.spec.rms_norm_eps
        if x.small:
            linear_kernels.linear(
                x.residual, layer.qkv.weight, x.qkv, norm=layer.input_norm, eps=eps, bias=layer.qkv.bias
            )
        else:
            rms_norm(x.residual, layer.input_norm, eps, x.hidden)
            multiply(x.hidden, layer.qkv, x.qkv)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        kv = self._kv[layer.index]
        rope_kv(
            x.qkv[:, :q_size],
            x.qkv[:, q_size : q_size + kv_size],
            x.qkv[:, q_size + kv_size :],
            inputs["position"],
            inputs["slot_mapping"],
            self.weights.cos,
            self.weights.sin,
            x.queries,
            kv,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=eps,
        )
        attention(
            x.queries,
            kv,
            self._table.block_tables,
            inputs["position"],
            blocks,
            x.mixed,
            scale=spec.head_dim**-0.5,
            window=layer.sliding_window,
            shape=shape,
            work=work,
        )
        if x.small:
            linear_kernels.linear(x.mixed, layer.output.weight, x.residual, bias=layer.output.bias, accumulate=True)
        else:
            assert x.delta is not None
            multiply(x.mixed, layer.output, x.delta)

    def mlp(self, layer: LayerWeights, x: TokenBuffers) -> None:
        """residual += mlp(norm(residual)), of a layer without experts."""
        eps = self.spec.rms_norm_eps
        assert layer.gate_up is not None and layer.down is not None and x.gate_up is not None and x.inner is not None
        if x.small:
            linear_kernels.linear(
                x.residual, layer.gate_up.weight, x.gate_up, norm=layer.post_norm, eps=eps, bias=layer.gate_up.bias
            )
            silu_and_mul(x.gate_up, x.inner)
            linear_kernels.linear(x.inner, layer.down.weight, x.residual, bias=layer.down.bias, accumulate=True)
        else:
            assert x.delta is not None
            add_rms_norm(x.residual, x.delta, layer.post_norm, eps, x.hidden)
            multiply(x.hidden, layer.gate_up, x.gate_up)
            silu_and_mul(x.gate_up, x.inner)
            multiply(x.inner, layer.down, x.delta)
            x.residual.add_(x.delta)

    def route(self, layer: LayerWeights, x: TokenBuffers, ahead: LayerWeights | None = None) -> bool:
        """Norm and router; fills ``hidden`` and either ``router_logits`` only (True) or ids and weights too (False).
        ``ahead``: a later layer's router is applied too, for a hint."""
        eps, router = self.spec.rms_norm_eps, self.spec.router
        assert layer.router is not None and router is not None and x.router_logits is not None
        if x.small:
            later = None
            if ahead is not None:
                assert ahead.router is not None
                later = (ahead.post_norm, ahead.router, self._hint_logits(ahead))
            norm_router(x.residual, layer.post_norm, layer.router, x.hidden, x.router_logits, eps, ahead=later)
            return True
        assert x.wide_hidden is not None and x.delta is not None and x.ids is not None and x.weights is not None
        add_rms_norm(x.residual, x.delta, layer.post_norm, eps, x.wide_hidden)
        torch.mm(x.wide_hidden, layer.router.t(), out=x.router_logits)
        x.hidden.copy_(x.wide_hidden)
        top_k(
            x.router_logits,
            x.ids,
            x.weights,
            scoring=router.scoring,
            renormalize=router.renormalize,
            scaling=router.scaling,
        )
        return False

    def experts(self, layer: LayerWeights, x: TokenBuffers, inputs: Mapping[str, Tensor]) -> None:
        """residual += experts(norm(residual)) through the mailbox, each record read where it lies."""
        plane = self.plane
        assert plane is not None and plane.box is not None and x.plan is not None
        assert x.ids is not None and x.weights is not None
        ahead = self._next_experts.get(layer.ordinal) if x.tokens == 1 and plane.lookahead is not None else None
        chooses = self.route(layer, x, ahead)
        self._mark("router")
        if ahead is not None:
            with self._branch.fork():
                plane.hint(ahead.ordinal, inputs["step_id"], self._hint_logits(ahead))
        plane.publish(
            layer.ordinal,
            inputs["step_id"],
            inputs["num_real"],
            x.hidden,
            x.ids,
            x.weights,
            inputs["admit"],
            x.router_logits if chooses else None,
        )
        plan = plane.layer_plan(x.plan, layer.ordinal)
        if x.tokens == 1 and plane.lookahead is not None:
            self._branch.join(layer.ordinal)
        plane.await_plan(layer.ordinal, plan, one_token=x.tokens == 1)
        self._mark("plan")
        buffers = x.experts[plane.records.layouts[layer.ordinal]]
        apart = buffers.partials is not None
        out = buffers.partials if buffers.partials is not None else buffers.routed
        assert out is not None
        expert_gemv(
            buffers.layout,
            plan,
            x.hidden,
            x.weights,
            out,
            scratch=buffers.scratch,
            partials=apart,
            single_route=x.tokens == 1,
            shape=buffers.shape,
        )
        self._mark("experts")
        if ahead is not None:
            with self._branch.fork():
                plane.copy_ahead(ahead.ordinal)
            self._branch.end(ahead.ordinal)
        wait = None
        if x.tokens <= _COMBINE_WAITS_TOKENS:
            wait = plane.part_wait(layer.ordinal)
        else:
            plane.await_part(layer.ordinal, plan)
        combine(
            x.residual,
            x.weights,
            plan,
            partials=buffers.partials,
            routed=buffers.routed,
            cpu_partial_address=plane.box.partial,
            wait=wait,
        )
        plane.end_layer()
        self._mark("combine")

    def _hint_logits(self, layer: LayerWeights) -> Tensor:
        assert self.plane is not None and self.plane.lookahead is not None
        return self.plane.lookahead.logits[layer.ordinal % 2]

    def placed_experts(
        self,
        layer: LayerWeights,
        x: TokenBuffers,
        inputs: Mapping[str, Tensor],
        staged: StagedStep | None,
        counts: Tensor | None = None,
    ) -> None:
        """residual += experts(norm(residual)) through the mailbox: records are put in place, then multiplied. Batches
        of up to ``max_shared_tokens`` share the work with the CPU, longer and staged ones do not."""
        plane, placed, ordinal = self.plane, x.placed, layer.ordinal
        assert plane is not None and plane.box is not None and placed is not None
        assert x.ids is not None and x.weights is not None
        shared = x.tokens <= plane.max_shared_tokens and staged is None
        chooses = self.route(layer, x)
        assert not chooses
        self._mark("router")
        if staged is not None:
            staged.stager.join(ordinal)  # before the publish: its plan would count on what may fail
        step_id, num_real, admit = inputs["step_id"], inputs["num_real"], inputs["admit"]
        num_routes = plane.publish_routes(
            ordinal, step_id, num_real, x.ids, x.weights, admit, x.hidden if shared else None, staged is not None
        )
        plan = plane.layer_plan(placed.plan, ordinal, counts)
        if staged is not None:
            table, spares = staged.stager.table(ordinal), staged.stager.spares
        else:
            table = plane.nothing_staged
            spares = placed.spares if self.reserved is None else self.reserved.spares
        plane.await_placed_plan(ordinal, plan, placed.copies, num_routes, table, spares)
        self._mark("plan")
        if staged is not None:
            staged.stager.wait(ordinal)
            self._mark("staging")
        layout = plane.records.layouts[ordinal]
        copy_records(plan, placed.copies, layout.payload_bytes, COPY_PROGRAMS)
        self._mark("copies")
        top_k = x.ids.shape[1]
        routes = x.tokens * top_k
        cut = gemm_cut(layout.format, routes, plane.router.num_experts)
        # The whole table, because the kernel is compiled for its length.
        fill_block_table(plan, placed.tables[cut.block_routes])
        blocks = placed.table(cut.block_routes, routes)
        out = placed.out[:routes]
        act = placed.act[layout.intermediate][:routes]
        expert_gemm(layout, plan, blocks, x.hidden, top_k, act, out, shape=cut.shape)
        self._mark("experts")
        if shared:
            plane.await_part(ordinal, plan)
            self._mark("cpu")
        combine(
            x.residual, x.weights, plan, partials=out, cpu_partial_address=plane.box.partial if shared else 0
        )  # fmt: skip
        plane.end_layer()
        self._mark("combine")
