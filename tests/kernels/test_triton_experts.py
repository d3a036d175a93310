"""Expert kernels against plain torch: on the GPU where there is one, else in Triton's interpreter on tiny shapes."""

import numpy as np
import pytest
import torch

from freetoken.kernels.triton import reference
from freetoken.kernels.triton.combine import combine
from freetoken.kernels.triton.expert_gemm import expert_gemm, fetch_records, largest_step
from freetoken.kernels.triton.expert_gemv import (
    GemvShape,
    expert_gemv,
    partials_shape,
    scratch_shape,
)
from freetoken.kernels.triton.plan import (
    BLOCKS,
    CPU,
    ENTRIES,
    KIND_CPU,
    KIND_FETCH,
    KIND_HIT,
    ROUTES,
    BlockTable,
    DevicePlan,
    PlanEntry,
    build_block_table,
    group_routes,
)
from freetoken.quant import bf16
from freetoken.quant.pack import pack_expert
from freetoken.quant.q4_0_record import pack_q4_0_expert, plan_q4_0_layout, quantize_blocks
from freetoken.quant.record import plan_record_layout
from tests.kernels.triton_device import DEVICE, relative_error

NUM_EXPERTS = 4
TOP_K = 2


class Experts:
    """A few random records of one layout, their float32 matrices, and where the records lie."""

    def __init__(self, fmt, hidden, intermediate, tile_columns=None, seed=0):
        rng = np.random.default_rng(seed)

        def weight(rows, columns):
            return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

        if fmt == "q4_0":
            self.layout = plan_q4_0_layout(hidden, intermediate, tile_columns or 32)
        else:
            self.layout = plan_record_layout(fmt, hidden, intermediate, tile_columns)
        records, self.matrices = [], []
        for _ in range(NUM_EXPERTS):
            parts = weight(intermediate, hidden), weight(intermediate, hidden), weight(hidden, intermediate)
            if fmt == "q4_0":
                records.append(pack_q4_0_expert(self.layout, *(quantize_blocks(p) for p in parts)))
            else:
                stored = [bf16.from_f32(p) if fmt == "bf16" else p for p in parts]
                records.append(pack_expert(self.layout, *stored))
            self.matrices.append([m.to(DEVICE) for m in reference.expert_matrices(self.layout, records[-1])])
        self.store = torch.from_numpy(np.stack(records)).to(DEVICE)

    def address(self, expert):
        return self.store[expert].data_ptr()

    def expected(self, hidden, ids):
        """Unweighted outputs by route [T * K, H]."""
        out = torch.zeros(ids.numel(), hidden.shape[1], device=hidden.device)
        for route, expert in enumerate(ids.flatten().tolist()):
            out[route] = reference.expert_output(hidden[route // TOP_K][None], *self.matrices[expert])[0]
        return out


def random_batch(tokens, hidden, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).to(DEVICE)
    ids = (
        torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]).int().to(DEVICE)
    )
    weights = torch.rand(tokens, TOP_K, generator=generator).to(DEVICE)
    return x, ids, weights


def make_plan(experts, ids, kinds, destinations=None):
    plan = DevicePlan.empty(NUM_EXPERTS, ids.numel(), DEVICE)
    entries = []
    for expert in sorted(set(ids.flatten().tolist())):
        routes = (ids.flatten() == expert).nonzero().flatten().tolist()
        destination = destinations[expert].data_ptr() if destinations is not None and kinds[expert] == KIND_FETCH else 0
        entries.append(PlanEntry(kinds[expert], expert, experts.address(expert), routes, destination))
    plan.fill(entries)
    return plan


CASES = [
    ("q4_0", 64, 64, 32),
    ("q4_0", 96, 64, 64),  # hidden is no power of two; two parts a tile
    ("f32", 64, 32, 16),
    ("f32", 48, 24, 24),
    ("bf16", 64, 32, 16),
]


def tolerance(fmt):
    return 1e-3 if fmt == "q4_0" else 1e-5


@pytest.mark.parametrize(("fmt", "hidden", "intermediate", "columns"), CASES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("partials", [True, False])
def test_gemv_and_combine(fmt, hidden, intermediate, columns, tokens, partials):
    experts = Experts(fmt, hidden, intermediate, columns)
    x, ids, weights = random_batch(tokens, hidden)
    kinds = [KIND_HIT, KIND_FETCH, KIND_HIT, KIND_CPU]
    slots = torch.zeros_like(experts.store)
    plan = make_plan(experts, ids, kinds, slots)
    # A chunk smaller than hidden exercises the loop over chunks.
    shape = GemvShape.of(experts.layout, chunk=32)
    out = torch.full(partials_shape(experts.layout, ids.numel(), shape), float("nan"), device=DEVICE)
    if not partials:
        out = torch.zeros(tokens, hidden, device=DEVICE)
    scratch = torch.full(scratch_shape(experts.layout, ids.numel()), float("nan"), device=DEVICE)
    expert_gemv(
        experts.layout, plan, x, weights, out, scratch=scratch, partials=partials, single_route=tokens == 1, shape=shape
    )
    on_gpu = torch.tensor([kinds[e] != KIND_CPU for e in ids.flatten().tolist()], device=DEVICE)
    routed = experts.expected(x, ids) * weights.flatten()[:, None] * on_gpu[:, None]
    residual = torch.randn(tokens, hidden, device=DEVICE)
    expected = residual + routed.reshape(tokens, TOP_K, hidden).sum(1)
    combine(residual, weights, plan, **({"partials": out} if partials else {"routed": out}))
    assert relative_error(residual, expected) < tolerance(fmt)
    if not partials:
        assert not out.any()
    payload = experts.layout.payload_bytes
    for expert in set(ids.flatten().tolist()):
        wanted = experts.store[expert] if kinds[expert] == KIND_FETCH else torch.zeros_like(slots[expert])
        assert torch.equal(slots[expert][:payload], wanted[:payload])


@pytest.mark.parametrize("fmt", ["q4_0", "f32"])
def test_gemv_with_few_programs_and_a_share_of_the_tiles(fmt):
    experts = Experts(fmt, 64, 96, 32)
    x, ids, weights = random_batch(2, 64)
    plan = DevicePlan.empty(NUM_EXPERTS, ids.numel(), DEVICE)
    expert = int(ids[0, 0])
    plan.fill([PlanEntry(KIND_FETCH, expert, experts.address(expert), [0], first_tile=1, num_tiles=2)])
    shape = GemvShape.of(experts.layout)
    out = torch.full(partials_shape(experts.layout, ids.numel(), shape), float("nan"), device=DEVICE)
    expert_gemv(
        experts.layout, plan, x, weights, out, scratch=None, partials=True, single_route=True, shape=shape, grid=2
    )
    gate, up, down = experts.matrices[expert]
    expected = reference.expert_output(x[:1], gate[32:], up[32:], down[:, 32:])[0]
    assert relative_error(out[0].sum(0), expected) < tolerance(fmt)
    assert out[1:].isnan().all()


@pytest.mark.parametrize("fmt", ["q4_0", "f32"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_both_parts_of_a_split_record_become_one_sum(fmt, tokens):
    experts = Experts(fmt, 64, 96, 32)
    x, ids, weights = random_batch(tokens, 64)
    split = int(ids[0, 0])
    routes = {e: (ids.flatten() == e).nonzero().flatten().tolist() for e in set(ids.flatten().tolist())}
    plan = DevicePlan.empty(NUM_EXPERTS, ids.numel(), DEVICE)
    kinds = dict.fromkeys(routes, KIND_HIT) | {split: KIND_FETCH}
    tiles = dict.fromkeys(routes, 0) | {split: 2}
    plan.fill([PlanEntry(kinds[e], e, experts.address(e), routes[e], num_tiles=tiles[e]) for e in sorted(routes)])
    plan.counts[CPU] = 1 | 1 << 16
    shape = GemvShape.of(experts.layout)
    out = torch.full(partials_shape(experts.layout, ids.numel(), shape), float("nan"), device=DEVICE)
    scratch = torch.full(scratch_shape(experts.layout, ids.numel()), float("nan"), device=DEVICE)
    expert_gemv(
        experts.layout, plan, x, weights, out, scratch=scratch, partials=True, single_route=tokens == 1, shape=shape
    )
    gate, up, down = experts.matrices[split]
    cpu = torch.zeros(tokens, 64, pin_memory=DEVICE == "cuda")
    for route in routes[split]:
        token = route // TOP_K
        rest = reference.expert_output(x[token : token + 1], gate[64:], up[64:], down[:, 64:])[0]
        cpu[token] += (weights.flatten()[route] * rest).cpu()
    residual = torch.randn(tokens, 64, device=DEVICE)
    routed = experts.expected(x, ids) * weights.flatten()[:, None]
    expected = residual + routed.reshape(tokens, TOP_K, 64).sum(1)
    combine(residual, weights, plan, partials=out, cpu_partial_address=cpu.data_ptr())
    assert relative_error(residual, expected) < tolerance(fmt)


def test_combine_adds_the_cpu_share_only_when_there_is_one():
    weights = torch.ones(2, TOP_K, device=DEVICE)
    plan = DevicePlan.empty(NUM_EXPERTS, 2 * TOP_K, DEVICE)
    partials = torch.full((2 * TOP_K, 1, 40), float("nan"), device=DEVICE)
    cpu = torch.randn(2, 40, device=DEVICE)
    residual = torch.zeros(2, 40, device=DEVICE)
    combine(residual, weights, plan, partials=partials, cpu_partial_address=cpu.data_ptr())
    assert not residual.any()
    plan.fill([PlanEntry(KIND_CPU, 0, 0, [0, 1, 2, 3])])
    combine(residual, weights, plan, partials=partials, cpu_partial_address=cpu.data_ptr())
    assert torch.equal(residual, cpu)


@pytest.mark.parametrize(("fmt", "hidden", "intermediate", "columns"), [*CASES[:4], ("f32", 40, 72, 36)])
def test_gemm_with_routes_grouped_on_the_device(fmt, hidden, intermediate, columns):
    experts = Experts(fmt, hidden, intermediate, columns)
    dtype = torch.float16 if fmt == "q4_0" else torch.float32
    x, ids, weights = random_batch(21, hidden, dtype)
    ids[5] = -1
    plan = DevicePlan.empty(NUM_EXPERTS, ids.numel(), DEVICE)
    addresses = torch.tensor([experts.address(e) for e in range(NUM_EXPERTS)], device=DEVICE)
    group_routes(ids, addresses, plan)
    table = build_block_table(plan, ids.numel(), 16)
    flat = ids.flatten().tolist()
    grouped = [r for e in range(NUM_EXPERTS) for r in range(len(flat)) if flat[r] == e]
    assert plan.routes[: len(grouped)].tolist() == grouped
    assert plan.counts[ROUTES] == len(grouped) and plan.counts[ENTRIES] == NUM_EXPERTS
    assert plan.counts[BLOCKS] == sum(-(-flat.count(e) // 16) for e in range(NUM_EXPERTS))
    assert plan.on_gpu.tolist() == [int(e >= 0) for e in flat]
    act = torch.zeros(ids.numel(), intermediate, dtype=dtype, device=DEVICE)
    out = torch.full((ids.numel(), hidden), float("nan"), dtype=dtype, device=DEVICE)
    expert_gemm(experts.layout, plan, table, x, TOP_K, act, out)
    expected = experts.expected(x, ids.clamp(min=0))
    there = torch.tensor(grouped, device=DEVICE)
    limit = 3e-3 if dtype == torch.float16 else 1e-5
    assert relative_error(out[there], expected[there]) < limit
    assert out[5 * TOP_K].isnan().all()
    residual = torch.zeros(21, hidden, device=DEVICE)
    combine(residual, weights, plan, partials=out)
    expected = (expected * weights.flatten()[:, None]).reshape(21, TOP_K, hidden).sum(1)
    expected[5] = 0
    assert relative_error(residual, expected) < limit


def test_steps_are_never_shorter_than_a_product_on_the_device_allows():
    assert [largest_step(size, 64) for size in (768, 96, 48, 40, 72, 7)] == [64, 32, 16, 16, 16, 16]


def test_gemm_reads_fetched_records_at_their_destination():
    experts = Experts("q4_0", 64, 64)
    x, ids, _ = random_batch(3, 64, torch.float16)
    staging = torch.zeros_like(experts.store)
    plan = make_plan(experts, ids, [KIND_FETCH, KIND_FETCH, KIND_HIT, KIND_HIT], staging)
    fetch_records(experts.layout, plan, grid=3)
    payload = experts.layout.payload_bytes
    used = set(ids.flatten().tolist())
    for expert in range(NUM_EXPERTS):
        copied = expert in used and expert < 2
        assert torch.equal(
            staging[expert][:payload], experts.store[expert][:payload] if copied else staging[expert][:payload] * 0
        )
    out = torch.zeros(ids.numel(), 64, dtype=torch.float16, device=DEVICE)
    act = torch.zeros(ids.numel(), 64, dtype=torch.float16, device=DEVICE)
    expected = experts.expected(x, ids)
    # The source is spoilt: what is read must be the copy.
    experts.store[:2] = 0
    expert_gemm(experts.layout, plan, BlockTable.one_per_entry(plan, 16), x, TOP_K, act, out, fetched=True)
    assert relative_error(out, expected) < 3e-3


def test_plan_refusals():
    plan = DevicePlan.empty(1, 2, DEVICE)
    with pytest.raises(ValueError, match="multiple of 16"):
        plan.fill([PlanEntry(KIND_HIT, 3, 40, [0])])
    with pytest.raises(ValueError, match="2 plan entries exceed the 1"):
        plan.fill([PlanEntry(KIND_HIT, 3, 32, [0]), PlanEntry(KIND_HIT, 4, 32, [1])])
    experts = Experts("f32", 64, 32, 16)
    x, ids, weights = random_batch(2, 64)
    with pytest.raises(ValueError, match="scratch"):
        out = torch.zeros(2, 64, device=DEVICE)
        expert_gemv(experts.layout, make_plan(experts, ids, [0] * 4), x, weights, out, scratch=None, partials=False)
