"""Which cases are compiled ahead and which variants are timed."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.cases import (
    DIM,
    HIDDEN,
    Q_HEADS,
    QKV,
    VOCAB,
    Bench,
    Case,
    combine_case,
    decode_attention_case,
    fetch_case,
    gemm_case,
    gemv_case,
    grouping_case,
    layout_of,
    linear_case,
    mailbox_cases,
    prefill_attention_case,
    q4_gemm_case,
    sampling_cases,
    small_cases,
)
from freetoken.kernels.triton.attention import AttentionShape
from freetoken.kernels.triton.mailbox import MailboxAddresses

DECODE_ATTENTION = AttentionShape(keys=64, splits=32, num_warps=4, num_stages=2)
PREFILL_ATTENTION = AttentionShape(keys=64, splits=1, num_warps=8, num_stages=2)


def compile_cases() -> Iterator[Case]:
    """One case for each kernel variant that the engine launches."""
    bench = Bench("cpu", real=False)
    for fmt in ("q4_0", "bf16"):
        store = bench.store(fmt, 128)
        yield gemv_case(bench, fmt, 1)
        yield gemv_case(bench, fmt, 1, slots=store, tag=" fill")
        yield gemv_case(bench, fmt, 1, partials=False, tag=" atomics")
        yield gemv_case(bench, fmt, 4)
        yield gemm_case(bench, fmt, 8, block_routes=16, decode=True)
        for block_routes in (16, 32, 64, 128):
            yield gemm_case(bench, fmt, 512, block_routes=block_routes)
        yield combine_case(bench, fmt, 1, "partials")
    yield combine_case(bench, "q4_0", 1, "routed")
    yield combine_case(bench, "q4_0", 512, "rows")
    yield grouping_case(bench, 512)
    yield fetch_case(bench, "q4_0", 4, store, store, 32)
    for fmt in ("q4_0", "bf16"):
        yield linear_case(bench, QKV, HIDDEN, 1, fmt, "qkv", norm=True)
        yield linear_case(bench, HIDDEN, Q_HEADS * DIM, 1, fmt, "o", accumulate=True)
        yield linear_case(bench, VOCAB, HIDDEN, 1, fmt, "lm_head", norm=True)
    for tokens in (16, 32, 64, 4096):
        yield q4_gemm_case(bench, QKV, HIDDEN, tokens, "qkv")
    for tokens in (1, 512):
        yield from small_cases(bench, tokens)
    yield decode_attention_case(bench, 1, 512, DECODE_ATTENTION)
    yield prefill_attention_case(bench, 512, 512, PREFILL_ATTENTION)
    yield prefill_attention_case(bench, 16, 512, AttentionShape(keys=64, splits=16, num_warps=8))
    yield from sampling_cases(bench, 1)
    box = MailboxAddresses(*[(1 << 40) + 4096 * i for i in range(13)])
    for tokens in (1, 32):
        yield from mailbox_cases(bench, box, tokens, [])


__all__ = ["DECODE_ATTENTION", "PREFILL_ATTENTION", "compile_cases", "layout_of"]
