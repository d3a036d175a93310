"""Which cases are compiled ahead and which variants are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.gpu.cases import (
    DIM,
    EXPERTS,
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
from freetoken.kernels.triton.expert_gemm import GemmShape
from freetoken.kernels.triton.expert_gemv import GemvShape
from freetoken.kernels.triton.mailbox import MailboxAddresses

DECODE_ATTENTION = AttentionShape(keys=64, splits=32, num_warps=4, num_stages=2)
PREFILL_ATTENTION = AttentionShape(keys=64, splits=1, num_warps=8, num_stages=2)


@dataclass(frozen=True)
class Timing:
    """``make(i)`` builds the i-th of ``copies`` launches on different data, enough of them to outgrow the L2 cache."""

    make: Callable[[int], Case]
    copies: int


def expert_gemv_timings(bench: Bench) -> Iterator[Timing]:
    """Experts of decode steps, all in VRAM: formats, batch sizes and variants of the kernel."""
    for fmt, copies in (("q4_0", 24), ("bf16", 8)):
        layout = layout_of(fmt)
        single = GemvShape.of(layout, single_route=True)
        variants: list[tuple[str, GemvShape, dict[str, object]]] = [
            ("", single, {}),
            (" atomics", single, {"partials": False}),
            (" grid=264", single, {"grid": 264}),
            (" grid=132", single, {"grid": 132}),
            (" no prefetch", GemvShape.of(layout, single_route=True, prefetch=False), {}),
            (" 4 warps", replace(single, num_warps=4, max_registers=255), {}),
            (" 16 warps", replace(single, num_warps=16, max_registers=64), {}),
        ]
        if fmt == "bf16":
            variants += [
                (f" columns={columns}", GemvShape.of(layout, single_route=True, columns=columns), {})
                for columns in (4, 16)
            ]
        for tag, shape, options in variants:
            yield Timing(
                lambda i, fmt=fmt, tag=tag, shape=shape, options=options: gemv_case(  # type: ignore[misc]
                    bench, fmt, 1, shape=shape, offset=i * 128, tag=tag, **options
                ),
                copies,
            )
        for tokens in (2, 4, 8):
            for partials in (True, False):
                yield Timing(
                    lambda i, fmt=fmt, tokens=tokens, partials=partials: gemv_case(  # type: ignore[misc]
                        bench, fmt, tokens, partials=partials, offset=i * 128, tag="" if partials else " atomics"
                    ),
                    4,
                )


def expert_gemm_timings(bench: Bench) -> Iterator[Timing]:
    """Experts by grouped GEMM: decode batches, short turns, long chunks."""
    for fmt in ("q4_0", "bf16"):
        for tokens in (2, 4, 8, 16, 32):
            block = 16 if tokens <= 16 else 32
            shapes = [GemmShape(k=128), GemmShape(k=64, num_stages=4)]
            if fmt == "q4_0":
                shapes += [GemmShape(k=256, num_stages=2), GemmShape(k=128, columns=128, num_warps=8)]
            else:
                shapes = [
                    GemmShape(k=64),
                    GemmShape(k=128, num_stages=2),
                    GemmShape(k=64, columns=128, num_warps=8, num_stages=2),
                ]
            for shape in shapes[: 1 if tokens in (2, 4) else None]:
                yield Timing(
                    lambda i, fmt=fmt, tokens=tokens, block=block, shape=shape: gemm_case(  # type: ignore[misc]
                        bench,
                        fmt,
                        tokens,
                        block_routes=block,
                        shape=shape,
                        decode=True,
                        offset=i * 128,
                        tag=_tag(shape),
                    ),
                    4,
                )
        for tokens, blocks in (
            (16, (16,)),
            (64, (16,)),
            (128, (16, 32)),
            (512, (32, 64)),
            (2048, (64, 128)),
            (4096, (64, 128)),
        ):
            for block in blocks:
                shapes = [GemmShape(k=64, num_stages=3 if fmt == "q4_0" or block <= 64 else 2)]
                if tokens >= 512:
                    shapes.append(GemmShape(k=64, num_stages=2, columns=128, num_warps=8))
                    shapes.append(GemmShape(k=32, num_stages=3))
                for shape in shapes:
                    yield Timing(
                        lambda i, fmt=fmt, tokens=tokens, block=block, shape=shape: gemm_case(  # type: ignore[misc]
                            bench, fmt, tokens, block_routes=block, shape=shape, offset=i * 128, tag=_tag(shape)
                        ),
                        2,
                    )


def _tag(shape: GemmShape) -> str:
    return f" columns={shape.columns} k={shape.k} warps={shape.num_warps} stages={shape.num_stages}"


def combine_timings(bench: Bench) -> Iterator[Timing]:
    """Sums at the end of a layer, and grouping before prefill's GEMM."""
    for tokens, modes in (
        (1, ("partials", "routed", "rows")),
        (4, ("partials", "routed")),
        (32, ("rows",)),
        (4096, ("rows",)),
    ):
        for mode in modes:
            yield Timing(lambda i, tokens=tokens, mode=mode: combine_case(bench, "q4_0", tokens, mode), 4)  # type: ignore[misc]
    for tokens in (16, 512, 4096):
        yield Timing(lambda i, tokens=tokens: grouping_case(bench, tokens), 2)  # type: ignore[misc]


def linear_timings(bench: Bench) -> Iterator[Timing]:
    """Dense projections of decode."""
    for outputs, inputs, name, options, copies in (
        (QKV, HIDDEN, "qkv", {"norm": True}, 16),
        (HIDDEN, Q_HEADS * DIM, "o", {"accumulate": True}, 24),
        (VOCAB, HIDDEN, "lm_head", {"norm": True}, 2),
    ):
        for fmt in ("q4_0", "bf16"):
            tunings: list[dict[str, int]] = [{}]
            if fmt == "q4_0":
                tunings += [{"rows": 4}, {"rows": 8, "num_warps": 4}, {"rows": 32}] if name != "o" else [{"rows": 4}]
            else:
                tunings += [{"rows": 2}, {"rows": 8}]
            for tuning in tunings:
                yield Timing(
                    lambda i, o=outputs, n=inputs, f=fmt, m=name, k={**options, **tuning}: linear_case(  # type: ignore[misc]
                        bench, o, n, 1, f, m, **k
                    ),
                    copies,
                )
            for tokens in (2, 4, 8):
                yield Timing(
                    lambda i, o=outputs, n=inputs, t=tokens, f=fmt, m=name, k=options: linear_case(  # type: ignore[misc]
                        bench, o, n, t, f, m, **k
                    ),
                    copies,
                )
    for outputs, inputs, name in ((QKV, HIDDEN, "qkv"), (HIDDEN, Q_HEADS * DIM, "o")):
        for tokens in (8, 16, 32, 64, 512, 4096):
            yield Timing(
                lambda i, o=outputs, n=inputs, t=tokens, m=name: q4_gemm_case(bench, o, n, t, m),  # type: ignore[misc]
                16 if tokens <= 64 else 2,
            )
        for shape, block in (
            (GemmShape(columns=64, k=64), 128),
            (GemmShape(columns=64, k=64, num_stages=4), 128),
            (GemmShape(columns=128, k=64, num_warps=8), 64),
            (GemmShape(columns=128, k=32, num_warps=8), 128),
        ):
            yield Timing(
                lambda i, o=outputs, n=inputs, m=name, s=shape, b=block: q4_gemm_case(  # type: ignore[misc]
                    bench, o, n, 4096, m, shape=s, block_tokens=b
                ),
                2,
            )


def attention_timings(bench: Bench) -> Iterator[Timing]:
    """Decode over short and long contexts, prefill chunks."""
    for batch, context, copies in ((1, 512, 32), (1, 4096, 12), (1, 32768, 2), (8, 2048, 4), (32, 2048, 2)):
        shapes = [DECODE_ATTENTION]
        if batch == 1:
            shapes += [replace(DECODE_ATTENTION, splits=s) for s in (16, 64)]
            shapes += [replace(DECODE_ATTENTION, keys=32), replace(DECODE_ATTENTION, keys=128, num_stages=1)]
            shapes += [replace(DECODE_ATTENTION, num_stages=3, keys=32), replace(DECODE_ATTENTION, num_warps=2)]
        else:
            shapes += [replace(DECODE_ATTENTION, splits=s) for s in (4, 8)]
        for shape in shapes:
            yield Timing(
                lambda i, b=batch, c=context, s=shape: decode_attention_case(bench, b, c, s),  # type: ignore[misc]
                copies,
            )
    for new, context in ((16, 4096), (512, 512), (4096, 4096), (4096, 16384)):
        shapes = [PREFILL_ATTENTION]
        if new == 16:
            shapes += [replace(PREFILL_ATTENTION, splits=s) for s in (8, 32)]
        elif context == 4096:
            shapes += [
                replace(PREFILL_ATTENTION, keys=32, num_stages=3),
                replace(PREFILL_ATTENTION, keys=32, num_stages=2),
            ]
        for shape in shapes:
            yield Timing(
                lambda i, n=new, c=context, s=shape: prefill_attention_case(bench, n, c, s),  # type: ignore[misc]
                2,
            )
    small = AttentionShape(keys=64, num_warps=4, num_stages=2)
    yield Timing(lambda i: prefill_attention_case(bench, 4096, 4096, small, rows=64), 2)


def other_timings(bench: Bench) -> Iterator[Timing]:
    """Norms, router, rotary + KV, sampling."""
    for tokens in (1, 8, 512, 4096):
        for index, _ in enumerate(small_cases(Bench("cpu", real=False), tokens)):
            yield Timing(
                lambda i, t=tokens, n=index: list(small_cases(bench, t))[n],  # type: ignore[misc]
                4,
            )
    for rows in (1, 8):
        for index in (0, 1):
            yield Timing(lambda i, r=rows, n=index: list(sampling_cases(bench, r))[n], 2)  # type: ignore[misc]


FAMILIES: dict[str, Callable[[Bench], Iterator[Timing]]] = {
    "experts, GEMV": expert_gemv_timings,
    "experts, GEMM": expert_gemm_timings,
    "combine and grouping": combine_timings,
    "projections": linear_timings,
    "attention": attention_timings,
    "other": other_timings,
}


def compile_cases() -> Iterator[Case]:
    """One case for each kernel variant that the engine launches by default."""
    bench = Bench("cpu", real=False)
    for fmt in ("q4_0", "bf16"):
        store = bench.store(fmt, EXPERTS)
        yield gemv_case(bench, fmt, 1)
        yield gemv_case(bench, fmt, 1, slots=store, tag=" fill")
        yield gemv_case(bench, fmt, 1, partials=False, tag=" atomics")
        yield gemv_case(bench, fmt, 4)
        yield gemv_case(bench, fmt, 4, slots=store, partials=False, tag=" fill atomics")
        yield gemm_case(bench, fmt, 8, block_routes=16, decode=True)
        yield gemm_case(bench, fmt, 8, block_routes=16, decode=True, fetched=True, tag=" fetched")
        for block_routes in (16, 32, 64, 128):
            yield gemm_case(bench, fmt, 512, block_routes=block_routes)
        yield combine_case(bench, fmt, 1, "partials")
        yield fetch_case(bench, fmt, 4, store, store, 32)
    yield combine_case(bench, "q4_0", 1, "routed")
    yield combine_case(bench, "q4_0", 512, "rows")
    yield grouping_case(bench, 512)
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
    yield prefill_attention_case(bench, 16, 512, replace(PREFILL_ATTENTION, splits=16))
    yield from sampling_cases(bench, 1)
    box = MailboxAddresses(*[(1 << 40) + 4096 * i for i in range(13)])
    for tokens in (1, 32):
        yield from mailbox_cases(bench, box, tokens, [])


def timed_cases() -> Iterator[Case]:
    """Every variant that is timed, for compiling."""
    bench = Bench("cpu", real=False)
    for family in FAMILIES.values():
        for timing in family(bench):
            yield timing.make(0)
