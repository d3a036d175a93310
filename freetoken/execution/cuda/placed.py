"""Buffers of experts that run as grouped GEMMs on records put in place beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.execution.cuda.data_plane import DataPlane
from freetoken.execution.cuda.expert_kernels import gemm_cut
from freetoken.kernels.triton.plan import BlockTable, DevicePlan, max_row_blocks


@dataclass(frozen=True)
class PlacedExperts:
    """For up to N = T * K routes. ``copies`` int64 [D, 2] as in ``kernels.triton.placed_plan``; ``act`` [N, I] and
    ``out`` [N, H] of expert_gemm; row blocks by their size. ``spares`` is (device address, stride, number) of places
    for records that have none."""

    plan: DevicePlan
    copies: Tensor
    act: dict[int, Tensor]
    out: Tensor
    tables: dict[int, BlockTable]
    spares: tuple[int, int, int]

    @classmethod
    def allocate(
        cls, plane: DataPlane, tokens: int, top_k: int, hidden: int, dtype: torch.dtype, spares: tuple[int, int, int]
    ) -> PlacedExperts:
        """For T = ``tokens``."""
        routes = tokens * top_k
        device = plane.counts.device
        plan = plane.new_plan(tokens, top_k)
        num_experts = plane.router.num_experts
        widths = {layout.intermediate for layout in plane.records.layouts}
        formats = {layout.format for layout in plane.records.layouts}
        tables = {}
        for count in (routes, *(top_k << shift for shift in range(tokens.bit_length()))):
            for name in formats:
                size = gemm_cut(name, count, num_experts).block_routes
                blocks = max_row_blocks(routes, plan.max_entries, size)
                if size not in tables:
                    entry = torch.zeros(blocks, dtype=torch.int32, device=device)
                    tables[size] = BlockTable(entry, torch.zeros_like(entry), size)
        return cls(
            plan=plan,
            copies=torch.zeros((plan.max_entries, 2), dtype=torch.int64, device=device),
            act={width: torch.zeros((routes, width), dtype=dtype, device=device) for width in widths},
            out=torch.zeros((routes, hidden), dtype=dtype, device=device),
            tables=tables,
            spares=spares,
        )

    def table(self, block_routes: int, num_routes: int) -> BlockTable:
        """The part of ``tables[block_routes]`` that plans of up to ``num_routes`` routes use."""
        whole = self.tables[block_routes]
        blocks = max_row_blocks(num_routes, self.plan.max_entries, block_routes)
        return BlockTable(whole.entry[:blocks], whole.first[:blocks], block_routes)
