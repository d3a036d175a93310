"""Which expert kernel runs a batch, and how it is cut. Measured on an H200 with the experts of Qwen3-30B-A3B (128 of
2048 x 768, 8 a token), all in device memory, microseconds a layer:

    tokens        1     2     4     8    16    32    64   128   512  2048  4096
    gemv q4_0    17    31    53    97
    gemm q4_0         129   203   121   198         262   265   540  1246  1944
    gemv bf16    26    77   134   248
    gemm bf16          57    86   131   197         307   294   353   689  1034

GEMV reads records where they lie, through PCIe too, and fills slots as it goes; GEMM wants them in device memory first.
So few tokens run as GEMV, although BF16 records in device memory are faster by GEMM from two tokens on.

GEMM figures are of 16 routes a block (64 columns, steps of 64, 4 warps, 3 stages) up to 128 tokens, 32 at 512 and 64
beyond (128 columns, steps of 64, 8 warps, 2 stages); other cuts were slower, by up to 4 times where Q4_0 spills (32
routes of 64 columns). At 4096 tokens, decoding Q4_0 records to BF16 beforehand would read 0.34 GB and write 1.2 GB a
layer, 570 us at 2.7 TB/s, and leave 1034 us for the GEMM. That saves 0.3 ms of 1.9, while PCIe needs 4.6 ms for the
layer at a quarter resident: not worth a gigabyte of scratch.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.kernels.triton.expert_gemm import GemmShape

GEMV_EXPERT_TOKENS = 16
"""Up to so many tokens, experts are run by ``expert_gemv``."""

COPY_PROGRAMS = 264
"""Of the kernel that puts records in place; PCIe is full from 16 on, copies within the device want more."""


@dataclass(frozen=True, slots=True)
class GemmCut:
    """Routes per row block, and the blocks of weights."""

    block_routes: int
    shape: GemmShape


_FEW = GemmCut(16, GemmShape(columns=64, k=64, num_warps=4, num_stages=3))
_SOME = GemmCut(32, GemmShape(columns=128, k=64, num_warps=8, num_stages=2))
_MANY = GemmCut(64, GemmShape(columns=128, k=64, num_warps=8, num_stages=2))
_FLOAT32 = GemmCut(16, GemmShape(columns=32, k=32, num_warps=4, num_stages=2))


def gemm_cut(record_format: str, num_routes: int, num_experts: int) -> GemmCut:
    """For evenly spread routes."""
    if record_format == "f32":
        return _FLOAT32
    mean = num_routes / num_experts
    if mean <= 12:
        return _FEW
    return _SOME if mean < 64 else _MANY
