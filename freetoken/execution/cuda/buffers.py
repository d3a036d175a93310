"""Activations of a batch of T tokens on the device, allocated once per T: captured graphs know their addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freetoken.execution.cuda.data_plane import DataPlane
from freetoken.execution.cuda.placed import PlacedExperts
from freetoken.kernels.triton.attention import AttentionShape, workspace
from freetoken.kernels.triton.common import next_power_of_2
from freetoken.kernels.triton.expert_gemv import GemvShape, partials_shape, scratch_shape
from freetoken.kernels.triton.plan import DevicePlan
from freetoken.models.spec import ModelSpec
from freetoken.quant.record import RecordLayout

GEMV_TOKENS = 8
"""Up to so many tokens, projections are vector products that read each weight once; beyond, matrix products."""

PARTIALS_BYTES = 16 << 20
"""Expert outputs are kept apart and summed in a fixed order while they fit this; else they are added with atomics."""


@dataclass(frozen=True)
class ExpertBuffers:
    """Of one record layout: ``partials`` [T * K, parts, H], or ``routed`` [T, H] for atomics; ``scratch`` [T * K, 2, I]
    unless every expert has one route."""

    layout: RecordLayout
    shape: GemvShape
    partials: Tensor | None
    routed: Tensor | None
    scratch: Tensor | None

    @classmethod
    def allocate(cls, layout: RecordLayout, tokens: int, top_k: int, device: torch.device) -> ExpertBuffers:
        """For T = ``tokens``."""
        single, routes = tokens == 1, tokens * top_k
        shape = GemvShape.of(layout, single_route=single)
        rows = partials_shape(layout, routes, shape)
        apart = rows[0] * rows[1] * rows[2] * 4 <= PARTIALS_BYTES
        scratch = None if single else torch.zeros(scratch_shape(layout, routes), device=device)
        return cls(
            layout=layout,
            shape=shape,
            partials=torch.zeros(rows, device=device) if apart else None,
            routed=None if apart else torch.zeros((tokens, layout.hidden), device=device),
            scratch=scratch,
        )


@dataclass(frozen=True)
class TokenBuffers:
    """What T tokens need between kernels. ``small``: projections are vector products on the float32 residual stream."""

    tokens: int
    small: bool
    residual: Tensor  # f32 [T, H]
    hidden: Tensor  # [T, H], normed, what experts and large projections read
    wide_hidden: Tensor | None  # f32 [T, H], for the router of large batches
    qkv: Tensor  # [T, (QH + 2 KVH) * D]
    queries: Tensor  # [T, QH, D]
    mixed: Tensor  # [T, QH * D]
    delta: Tensor | None  # [T, H], large only
    gate_up: Tensor | None  # [T, 2 I], layers without experts
    inner: Tensor | None  # [T, I]
    router_logits: Tensor | None  # f32 [T, E]
    ids: Tensor | None  # i32 [T, K]
    weights: Tensor | None  # f32 [T, K]
    plan: DevicePlan | None
    experts: dict[RecordLayout, ExpertBuffers]
    placed: PlacedExperts | None = None  # experts run as GEMMs, instead of ``plan`` and ``experts``

    def rows(self, tokens: int) -> TokenBuffers:
        """The first ``tokens`` rows, of buffers for more."""
        cut: dict[str, Any] = {
            name: value[:tokens]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.shape[0] == self.tokens
        }
        return replace(self, tokens=tokens, **cut)

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        tokens: int,
        dtype: torch.dtype,
        plane: DataPlane | None,
        device: torch.device,
        *,
        spares: tuple[int, int, int] | None = None,
    ) -> TokenBuffers:
        """For ``tokens`` tokens. Without ``spares`` experts are read where they lie, by ``expert_gemv``; with them
        (places for records, see ``PlacedExperts``) they run as GEMMs."""
        by_address = spares is None

        def new(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        small = tokens <= GEMV_TOKENS
        f32 = torch.float32
        hidden, top_k = spec.hidden_size, spec.num_experts_per_tok
        is_dense = len(spec.moe_layers) < spec.num_layers
        moe = spec.is_moe
        experts = {}
        if plane is not None and by_address:
            experts = {
                layout: ExpertBuffers.allocate(layout, tokens, top_k, device) for layout in set(plane.records.layouts)
            }
        return cls(
            tokens=tokens,
            small=small,
            residual=new(tokens, hidden, of=f32),
            hidden=new(tokens, hidden),
            wide_hidden=new(tokens, hidden, of=f32) if moe and not small else None,
            qkv=new(tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, of=f32 if small else dtype),
            queries=new(tokens, spec.num_heads, spec.head_dim),
            mixed=new(tokens, spec.num_heads * spec.head_dim),
            delta=None if small else new(tokens, hidden),
            gate_up=new(tokens, 2 * spec.intermediate_size, of=f32 if small else dtype) if is_dense else None,
            inner=new(tokens, spec.intermediate_size) if is_dense else None,
            router_logits=new(tokens, spec.num_experts, of=f32) if moe else None,
            ids=new(tokens, top_k, of=torch.int32) if moe else None,
            weights=new(tokens, top_k, of=f32) if moe else None,
            plan=plane.new_plan(tokens, top_k) if plane is not None and by_address else None,
            experts=experts,
            placed=PlacedExperts.allocate(plane, tokens, top_k, hidden, dtype, spares)
            if plane is not None and spares is not None
            else None,
        )


def attention_shape(
    query_blocks: int, num_kv_heads: int, num_multiprocessors: int, max_context: int, max_splits: int = 32
) -> AttentionShape:
    """Splits of the key range such that about two programs per multiprocessor run, and none has less than 128 keys."""
    programs = max(1, query_blocks * num_kv_heads)
    wanted = max(1, 2 * num_multiprocessors // programs)
    splits = min(max_splits, next_power_of_2(wanted), next_power_of_2(max(1, max_context // 128)))
    return AttentionShape(splits=splits)


def attention_workspace(
    spec: ModelSpec, tokens: int, shape: AttentionShape, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """What the splits of ``shape`` need, if it has any."""
    if shape.splits == 1:
        return None
    return workspace(tokens, spec.num_heads, spec.head_dim, shape.splits, device)
