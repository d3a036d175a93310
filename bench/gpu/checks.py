"""Every kernel at real shapes against plain torch, on a CUDA device. Each check yields (what, error, limit)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu.cases import (
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
from freetoken.kernels.triton import reference
from freetoken.kernels.triton.attention import (
    AttentionShape,
    QueryBlocks,
    attention,
    query_block_tokens,
    workspace,
)
from freetoken.kernels.triton.combine import combine
from freetoken.kernels.triton.expert_gemm import expert_gemm, fetch_records
from freetoken.kernels.triton.expert_gemv import GemvShape, expert_gemv, partials_shape, scratch_shape
from freetoken.kernels.triton.linear import Q4_0Weight, linear, q4_0_gemm
from freetoken.kernels.triton.mailbox import await_part, await_plan, publish
from freetoken.kernels.triton.norm import add_rms_norm, rms_norm, silu_and_mul
from freetoken.kernels.triton.plan import (
    ENTRIES,
    KIND_FETCH,
    STATUS,
    BlockTable,
    DevicePlan,
    build_block_table,
    group_routes,
)
from freetoken.kernels.triton.rope_kv import PagedKV, rope_kv
from freetoken.kernels.triton.router import norm_router, top_k
from freetoken.kernels.triton.sampling import SamplerState, SamplingParameters, greedy, sample
from freetoken.kernels.triton.token_mask import apply_token_masks
from freetoken.quant.record import RecordLayout

Finding = tuple[str, float, float]
GEMV_LIMITS = {"q4_0": 1e-3, "bf16": 1e-4}


def relative(actual: Tensor, expected: Tensor) -> float:
    """Error norm over the expected norm; NaN stays NaN, which passes no limit."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def matrices(layout: RecordLayout, record: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 gate [I, H], up [I, H] and down [H, I] of a record, on its device."""
    tiles = record[: layout.payload_bytes].view(layout.num_tiles, layout.tile_stride_bytes)

    def plane(name: str, dtype: torch.dtype) -> Tensor:
        f = layout.field(name)
        raw = tiles[:, f.offset_bytes : f.offset_bytes + f.size_bytes].contiguous()
        return raw.view(dtype).view(layout.num_tiles, f.shape[0], -1)

    parts = []
    for part in ("gate", "up", "down"):
        if layout.format == "q4_0":
            bytes_ = plane(f"{part}_q", torch.uint8)
            blocks = bytes_.view(*bytes_.shape[:2], -1, 16).int()
            q = torch.cat([blocks & 15, blocks >> 4], -1) - 8
            weights = (q * plane(f"{part}_d", torch.float16).float()[..., None]).flatten(2)
            by_rows = weights.transpose(0, 1).reshape(layout.hidden, -1) if part == "down" else weights.flatten(0, 1)
        else:
            weights = plane(part, torch.bfloat16).float().reshape(layout.intermediate, layout.hidden)
            by_rows = weights.T if part == "down" else weights
        parts.append(by_rows.contiguous())
    return parts[0], parts[1], parts[2]


def routed_outputs(layout: RecordLayout, store: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
    """Unweighted outputs [T * K, H] by route, float32."""
    out = torch.empty(ids.numel(), layout.hidden, device=hidden.device)
    flat = ids.flatten()
    for expert in flat.unique().tolist():
        routes = (flat == expert).nonzero().flatten()
        gate, up, down = matrices(layout, store[expert].to(hidden.device))
        out[routes] = reference.expert_output(hidden[routes // ids.shape[1]], gate, up, down)
    return out


def check_matrices(bench: Bench) -> Iterator[Finding]:
    """The decoding that the other checks rely on, against numpy."""
    for fmt in ("q4_0", "bf16"):
        layout, record = layout_of(fmt), bench.store(fmt, EXPERTS * 4)[3]
        expected = reference.expert_matrices(layout, record.cpu().numpy())
        for name, a, b in zip(("gate", "up", "down"), matrices(layout, record), expected, strict=True):
            yield f"decode {fmt} {name}", relative(a.cpu(), b), 0.0


def check_gemv(bench: Bench) -> Iterator[Finding]:
    """Decode by GEMV: hits, fetches that fill slots, one and several routes, partials and atomics, few programs."""
    for fmt in ("q4_0", "bf16"):
        layout = layout_of(fmt)
        store, host = bench.store(fmt, EXPERTS * 4), bench.store(fmt, EXPERTS, host=True)
        slots = torch.zeros(EXPERTS, layout.stride_bytes, dtype=torch.uint8, device=bench.device)
        for tokens, partials, grid, fetch in (
            (1, True, None, False),
            (1, False, None, False),
            (1, True, 132, False),
            (1, True, None, True),
            (4, True, None, False),
            (4, False, 264, True),
        ):
            ids = bench.expert_ids(tokens)
            source = host if fetch else store
            plan = bench.plan(fmt, ids, source, kind=KIND_FETCH if fetch else 0, slots=slots if fetch else None)
            hidden, weights = bench.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K, device=bench.device)
            shape = GemvShape.of(layout, single_route=tokens == 1)
            size = partials_shape(layout, ids.numel(), shape) if partials else (tokens, HIDDEN)
            out = torch.full(size, float("nan") if partials else 0.0, device=bench.device)
            scratch = torch.full(scratch_shape(layout, ids.numel()), float("nan"), device=bench.device)
            expert_gemv(
                layout, plan, hidden, weights, out, scratch=scratch, partials=partials, fill_slots=fetch,
                single_route=tokens == 1, shape=shape, grid=grid,
            )  # fmt: skip
            residual = bench.randn(tokens, HIDDEN, dtype=torch.float32)
            outputs = routed_outputs(layout, source, ids, hidden) * weights.flatten()[:, None]
            expected = residual + outputs.view(tokens, TOP_K, HIDDEN).sum(1)
            before = residual.clone()
            combine(residual, weights, plan, **({"partials": out} if partials else {"routed": out}))
            name = (
                f"gemv {fmt} T={tokens} {'partials' if partials else 'atomics'} grid={grid} {'fetch' if fetch else ''}"
            )
            yield name, relative(residual - before, expected - before), GEMV_LIMITS[fmt]
            if fetch:
                used = ids.flatten().unique()
                same = torch.equal(
                    slots[used][:, : layout.payload_bytes], host[used.cpu()].cuda()[:, : layout.payload_bytes]
                )
                yield f"{name}: slots hold the records", 0.0 if same else 1.0, 0.0
            if partials and grid is None:
                again = out.clone()
                expert_gemv(
                    layout, plan, hidden, weights, out, scratch=scratch, partials=True, fill_slots=False,
                    single_route=tokens == 1, shape=shape,
                )  # fmt: skip
                yield f"{name}: repeats bitwise", 0.0 if torch.equal(again, out) else 1.0, 0.0


def check_gemm(bench: Bench) -> Iterator[Finding]:
    """Grouped GEMM from a ready plan and from routes grouped on the device."""
    for fmt in ("q4_0", "bf16"):
        layout = layout_of(fmt)
        store = bench.store(fmt, EXPERTS * 4)
        addresses = store.data_ptr() + torch.arange(EXPERTS, device=bench.device) * layout.stride_bytes
        for tokens, block_routes in ((8, 16), (32, 32), (16, 16), (512, 32), (512, 64), (1024, 128)):
            ids = bench.expert_ids(tokens)
            hidden, weights = bench.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K, device=bench.device)
            act = torch.empty(ids.numel(), INTERMEDIATE, dtype=torch.bfloat16, device=bench.device)
            out = torch.full((ids.numel(), HIDDEN), float("nan"), dtype=torch.bfloat16, device=bench.device)
            if tokens in (8, 32):
                plan = bench.plan(fmt, ids, store)
                table = BlockTable.one_per_entry(plan, block_routes)
            else:
                plan = DevicePlan.empty(EXPERTS, ids.numel(), bench.device)
                group_routes(ids, addresses, plan)
                table = build_block_table(plan, ids.numel(), block_routes)
            expert_gemm(layout, plan, table, hidden, TOP_K, act, out)
            expected = routed_outputs(layout, store, ids, hidden)
            yield f"gemm {fmt} T={tokens} BM={block_routes}", relative(out, expected), 1e-2
            residual = torch.zeros(tokens, HIDDEN, device=bench.device)
            combine(residual, weights, plan, partials=out)
            expected = (out.float() * weights.flatten()[:, None]).view(tokens, TOP_K, HIDDEN).sum(1)
            yield f"combine rows T={tokens}", relative(residual, expected), 1e-6


def check_fetch(bench: Bench) -> Iterator[Finding]:
    """Records copied through PCIe by a kernel, then used where they were put."""
    layout, host = layout_of("q4_0"), bench.store("q4_0", EXPERTS, host=True)
    staging = torch.zeros(EXPERTS, layout.stride_bytes, dtype=torch.uint8, device=bench.device)
    ids, hidden = bench.expert_ids(8), bench.randn(8, HIDDEN)
    plan = bench.plan("q4_0", ids, host, kind=KIND_FETCH, slots=staging)
    fetch_records(layout, plan, 64)
    act = torch.empty(ids.numel(), INTERMEDIATE, dtype=torch.bfloat16, device=bench.device)
    out = torch.empty(ids.numel(), HIDDEN, dtype=torch.bfloat16, device=bench.device)
    expert_gemm(layout, plan, BlockTable.one_per_entry(plan, 16), hidden, TOP_K, act, out, fetched=True)
    yield "fetch + gemm", relative(out, routed_outputs(layout, host, ids, hidden)), 1e-2


def check_linear(bench: Bench) -> Iterator[Finding]:
    """Projections."""
    for outputs, inputs, name in ((QKV, HIDDEN, "qkv"), (HIDDEN, Q_HEADS * DIM, "o"), (VOCAB, HIDDEN, "lm_head")):
        quantised = bench.q4_0(outputs, inputs)
        matrix = _dequantize(quantised)
        plain = bench.randn(outputs, inputs, scale=0.02)
        for tokens in (1, 4, 7):
            x = bench.randn(tokens, inputs, dtype=torch.float32)
            norm = bench.randn(inputs)
            for fmt, weight, full in (("q4_0", quantised, matrix), ("bf16", plain, plain.float())):
                out = torch.randn(tokens, outputs, device=bench.device)
                if name == "o":
                    expected = out + x @ full.T
                    before = out.clone()
                    linear(x, weight, out, accumulate=True)
                    error = relative(out - before, expected - before)
                else:
                    linear(x, weight, out, norm=norm, eps=1e-6)
                    error = relative(out, reference.rms_norm(x, norm, 1e-6) @ full.T)
                yield f"linear {name} {fmt} T={tokens}", error, GEMV_LIMITS[fmt]
        if name != "lm_head":
            for tokens in (16, 33, 64, 512):
                x = bench.randn(tokens, inputs)
                out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=bench.device)
                q4_0_gemm(x, quantised, out)
                yield f"q4_0 gemm {name} T={tokens}", relative(out, x.float() @ matrix.T), 1e-2


def _dequantize(weight: Q4_0Weight) -> Tensor:
    blocks = weight.nibbles.view(weight.nibbles.shape[0], -1, 16)
    q = torch.cat([blocks & 15, blocks >> 4], -1).to(torch.float32) - 8
    return (q * weight.scales.float()[..., None]).flatten(1)


def _rows(kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    records = kv.data.view(-1, 2, kv.block_size, kv.num_heads, kv.head_dim)[table.long()]
    flat = records.transpose(0, 1).flatten(1, 2)[:, :length]
    return flat[0], flat[1]


def check_attention(bench: Bench) -> Iterator[Finding]:
    """Decode with and without splits, window and sinks; prefill chunks."""
    scale = DIM**-0.5
    for lengths, splits, window, with_sinks in (
        ([1000], 32, 0, False),
        ([32768], 32, 0, False),
        ([1, 17, 64, 700, 2048, 333, 4095, 5], 16, 0, True),
        ([1, 17, 64, 700, 2048, 333, 4095, 5], 1, 128, True),
    ):
        rows = len(lengths)
        kv, tables = bench.paged_kv(max(lengths), rows)
        q = bench.randn(rows, Q_HEADS, DIM)
        positions = torch.tensor(lengths, dtype=torch.int32, device=bench.device) - 1
        sinks = torch.randn(Q_HEADS, device=bench.device) if with_sinks else None
        out = torch.full((rows, Q_HEADS * DIM), float("nan"), dtype=torch.bfloat16, device=bench.device)
        shape = AttentionShape(keys=64, splits=splits)
        attention(
            q, kv, tables, positions, QueryBlocks.decode(rows, bench.device), out, scale=scale, window=window,
            sinks=sinks, shape=shape, work=workspace(rows, Q_HEADS, DIM, splits, bench.device),
        )  # fmt: skip
        expected = torch.cat(
            [
                reference.attention(q[r : r + 1], *_rows(kv, tables[r], n), positions[r : r + 1], scale, window, sinks)
                for r, n in enumerate(lengths)
            ]
        )
        error = relative(out.view_as(expected), expected)
        yield f"attention decode rows={rows} splits={splits} window={window} sinks={with_sinks}", error, 1e-2
    for new, context, window, splits in ((512, 512, 0, 1), (300, 2000, 0, 1), (16, 3000, 0, 8), (700, 1500, 256, 1)):
        kv, tables = bench.paged_kv(context, 1)
        q = bench.randn(new, Q_HEADS, DIM)
        positions = torch.arange(context - new, context, dtype=torch.int32, device=bench.device)
        out = torch.full((new, Q_HEADS * DIM), float("nan"), dtype=torch.bfloat16, device=bench.device)
        blocks = QueryBlocks.prefill([0, new], query_block_tokens(Q_HEADS, KV_HEADS), bench.device)
        attention(
            q, kv, tables, positions, blocks, out, scale=scale, window=window,
            shape=AttentionShape(keys=64, splits=splits, num_warps=8),
            work=workspace(new, Q_HEADS, DIM, splits, bench.device),
        )  # fmt: skip
        expected = reference.attention(q, *_rows(kv, tables[0], context), positions, scale, window)
        error = relative(out.view_as(expected), expected)
        yield f"attention prefill {new} of {context} window={window} splits={splits}", error, 1e-2


def check_router(bench: Bench) -> Iterator[Finding]:
    """Top-k over many rows; norm and router for a few."""
    logits = bench.randn(4096, EXPERTS, dtype=torch.float32, scale=2.0)
    ids = torch.empty(4096, TOP_K, dtype=torch.int32, device=bench.device)
    weights = torch.empty(4096, TOP_K, device=bench.device)
    for scoring in ("softmax", "softmax_of_chosen", "sigmoid"):
        bias = torch.randn(EXPERTS, device=bench.device) if scoring == "sigmoid" else None
        top_k(logits, ids, weights, scoring=scoring, bias=bias)
        expected_ids, expected = reference.choose_experts(logits, TOP_K, scoring, True, 1.0, bias)
        same = (ids == expected_ids).all(1)
        yield f"top-k {scoring}: rows that differ", float((~same).float().mean()), 1e-3
        yield f"top-k {scoring}: weights", relative(weights[same], expected[same]), 1e-5
    for tokens in (1, 5):
        x, norm, router = (
            bench.randn(tokens, HIDDEN, dtype=torch.float32),
            bench.randn(HIDDEN),
            bench.randn(EXPERTS, HIDDEN),
        )
        hidden = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=bench.device)
        out = torch.empty(tokens, EXPERTS, device=bench.device)
        norm_router(x, norm, router, hidden, out, 1e-6)
        expected = reference.rms_norm(x, norm, 1e-6)
        yield f"norm+router T={tokens}: hidden", relative(hidden, expected), 3e-3
        yield f"norm+router T={tokens}: logits", relative(out, expected @ router.float().T), 1e-5


def check_elementwise(bench: Bench) -> Iterator[Finding]:
    """Norms, SiLU, rotary and KV store."""
    tokens = 257
    x, delta, weight = (
        bench.randn(tokens, HIDDEN, dtype=torch.float32),
        bench.randn(tokens, HIDDEN),
        bench.randn(HIDDEN),
    )
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=bench.device)
    rms_norm(x, weight, 1e-6, out)
    yield "norm", relative(out, reference.rms_norm(x, weight, 1e-6)), 3e-3
    expected = reference.rms_norm(x + delta.float(), weight, 1e-6)
    add_rms_norm(x, delta, weight, 1e-6, out)
    yield "add+norm", relative(out, expected), 3e-3
    fused, act = bench.randn(tokens, 2 * INTERMEDIATE), bench.randn(tokens, INTERMEDIATE)
    silu_and_mul(fused, act)
    yield "silu*up", relative(act, reference.silu_mul(fused[:, :INTERMEDIATE], fused[:, INTERMEDIATE:])), 3e-3

    qkv = bench.randn(tokens, QKV)
    q, k, v = qkv.split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    kv, tables = bench.paged_kv(tokens, 1)
    kv.data.fill_(float("nan"))
    positions = torch.arange(1000, 1000 + tokens, dtype=torch.int32, device=bench.device)
    index = torch.arange(tokens, device=bench.device)
    slots = tables[0].long()[index // kv.block_size] * kv.block_size + index % kv.block_size
    angles = torch.outer(torch.arange(2048.0), 1e6 ** (-torch.arange(0, DIM, 2) / DIM)).to(bench.device)
    q_norm, k_norm = bench.randn(DIM), bench.randn(DIM)
    q_out = torch.empty(tokens, Q_HEADS, DIM, dtype=torch.bfloat16, device=bench.device)
    rope_kv(q, k, v, positions, slots, angles.cos(), angles.sin(), q_out, kv, q_norm=q_norm, k_norm=k_norm)
    normed = reference.rms_norm(q.reshape(tokens, Q_HEADS, DIM), q_norm, 1e-6)
    yield "rope q", relative(q_out, reference.rotate(normed, positions, angles.cos(), angles.sin())), 3e-3
    keys, values = _rows(kv, tables[0], tokens)
    normed = reference.rms_norm(k.reshape(tokens, KV_HEADS, DIM), k_norm, 1e-6)
    yield "rope k in KV", relative(keys, reference.rotate(normed, positions, angles.cos(), angles.sin())), 3e-3
    yield "v in KV", relative(values, v.reshape(tokens, KV_HEADS, DIM)), 0.0


def check_sampling(bench: Bench) -> Iterator[Finding]:
    """Draws over the vocabulary against sorting and the same noise in numpy."""
    cases = [
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.8, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 500, 1.0, 0.0),
        (0.6, 0, 0.95, 0.02), (1.0, 1, 1.0, 0.0), (2.0, 40, 0.5, 0.1),
    ]  # fmt: skip
    rows = len(cases)
    logits = bench.randn(rows, VOCAB, dtype=torch.float32, scale=3.0)
    state = SamplerState.empty(rows, VOCAB, bench.device)
    ids = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    logprobs = torch.zeros(rows, device=bench.device)
    columns = list(zip(*cases, strict=True))
    seeds = [2**35 + 11 * i for i in range(rows)]
    places = [i * 100 + (i << 32) for i in range(rows)]
    floats = (torch.float32, torch.int32, torch.float32, torch.float32)
    parameters = SamplingParameters(
        *(torch.tensor(c, dtype=d, device=bench.device) for c, d in zip(columns, floats, strict=True)),
        torch.tensor(seeds, device=bench.device),
        torch.tensor(places, device=bench.device),
    )
    for _ in range(3):
        sample(logits, parameters, state, ids, logprobs)
    wrong = 0
    for i, (temperature, k, p, minimum) in enumerate(cases):
        if temperature == 0:
            wrong += int(ids[i] != logits[i].argmax())
            continue
        keep = reference.kept_tokens(logits[i], temperature, k, p, minimum).cpu()
        scores = torch.where(keep, reference.gumbel_scores(logits[i], temperature, seeds[i], places[i]), float("-inf"))
        wrong += int(not keep[ids[i]] or scores[ids[i]] < scores.max() - 1e-3)
    yield "sampling: wrong draws", wrong, 0.0
    expected = torch.log_softmax(logits.double(), -1).gather(1, ids[:, None])[:, 0]
    yield "sampling: logprobs", float((logprobs - expected).abs().max()), 1e-3
    left = float(state.counts.any() or state.masses.any() or state.arrivals.any())
    yield "sampling: state is zero again", left, 0.0
    greedy(logits, state, ids, logprobs)
    yield "greedy", float((ids != logits.argmax(-1)).sum()), 0.0


def check_token_masks(bench: Bench) -> Iterator[Finding]:
    """Ruled out tokens of some rows, and that nothing else changes."""
    logits = bench.randn(8, VOCAB, dtype=torch.float32, scale=3.0)
    rows = torch.tensor([6, 1, 3], dtype=torch.int32, device=bench.device)
    words = -(-VOCAB // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64, device=bench.device).to(torch.int32)
    expected = reference.apply_token_masks(logits, rows, masks)
    apply_token_masks(logits, rows, masks)
    yield "token masks", float((logits != expected).sum()), 0.0


def check_mailbox(bench: Bench) -> Iterator[Finding]:
    """Publish and wait against a responder, captured in a graph; then a late answer and an abort."""
    for tokens in (1, 4):
        yield from _check_mailbox(bench, tokens)


def _check_mailbox(bench: Bench, tokens: int) -> Iterator[Finding]:
    layers = 8
    slot_of = torch.arange(layers * EXPERTS, dtype=torch.int32).view(layers, EXPERTS)
    slot_of[:, ::5] = -1
    responder = Responder(tokens, TOP_K, HIDDEN, slot_of, cpu_share=True)
    plan = DevicePlan.empty(min(EXPERTS, tokens * TOP_K), tokens * TOP_K, bench.device)
    seq = torch.zeros(1, dtype=torch.int32, device=bench.device)
    step, real = torch.zeros(1, dtype=torch.int64, device=bench.device), torch.full_like(seq, tokens)
    hidden = bench.randn(tokens, HIDDEN)
    logits = [bench.randn(tokens, EXPERTS, dtype=torch.float32) for _ in range(layers)]
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=bench.device)
    weights = torch.zeros(tokens, TOP_K, device=bench.device)
    admit = torch.ones(tokens, dtype=torch.uint8, device=bench.device)
    store = torch.arange(EXPERTS, device=bench.device) * 4096 + (1 << 40)
    seen = torch.zeros(layers, *plan.addresses.shape, dtype=torch.int64, device=bench.device)
    experts = torch.zeros(layers, *plan.entries.shape, dtype=torch.int32, device=bench.device)
    box, limit_ns = responder.addresses, 2_000_000_000

    def launch(layer: int) -> None:
        publish(box, seq, step, real, hidden, ids, weights, admit, layer, flags=4, logits=logits[layer])
        await_plan(box, seq, store, 1 << 33, 8192, plan, limit_ns)
        await_part(box, seq, plan, limit_ns)
        seen[layer].copy_(plan.addresses)
        experts[layer].copy_(plan.entries)

    responder.start()
    try:
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(layers):
                launch(layer)
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
    finally:
        responder.stop()
    wrong = 0
    for layer in range(layers):
        chosen = set(logits[layer].topk(TOP_K, dim=1).indices.flatten().tolist())
        rows = experts[layer][: len(chosen)].tolist()
        wrong += {row[0] for row in rows} != chosen
        for row, (source, destination) in zip(rows, seen[layer].tolist(), strict=False):
            slot = int(slot_of[layer, row[0]])
            wrong += source != ((1 << 33) + slot * 8192 if slot >= 0 else (1 << 40) + row[0] * 4096)
            wrong += destination != 0
    yield f"mailbox T={tokens}: wrong plan entries", wrong, 0.0
    yield f"mailbox T={tokens}: failed waits", float(plan.counts[STATUS]), 0.0
    yield f"mailbox T={tokens}: unanswered", 401.0 - responder.answered, 0.0

    await_plan(box, seq - 1, store, 0, 4096, plan, 1_000_000)  # nobody serves: late after a millisecond
    torch.cuda.synchronize()
    late = plan.counts.tolist()
    yield "mailbox: a late answer", float(late[STATUS] != 2 or late[ENTRIES] != 0), 0.0
    await_plan(box, seq - 1, store, 0, 4096, plan, 10**12)  # the abort word is up now: at once
    torch.cuda.synchronize()
    yield "mailbox: an abort", float(plan.counts[STATUS] != 1), 0.0


CHECKS: tuple[Callable[[Bench], Iterator[Finding]], ...] = (
    check_matrices,
    check_gemv,
    check_gemm,
    check_fetch,
    check_linear,
    check_attention,
    check_router,
    check_elementwise,
    check_sampling,
    check_token_masks,
    check_mailbox,
)
