"""A row has the same bits alone, in a batch of any size, and on a pool of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freetoken.kernels import Kernels
from tests.kernels.implementations import available_isas, make_bank, make_kernels
from tests.kernels.test_attention import fill_pages

BATCHES = [*range(2, 10), 37]


@pytest.fixture(params=available_isas(), scope="module")
def pools(request):
    return [make_kernels(request.param, threads) for threads in (1, 2, 3, 4)]


def assert_rows_do_not_depend_on_the_batch(
    pools: list[Kernels], run: Callable[[Kernels, slice], Tensor], tokens: int
) -> None:
    """``run`` computes the rows of a slice of the tokens."""
    alone = torch.cat([run(pools[t % len(pools)], slice(t, t + 1)) for t in range(tokens)])
    for batch in BATCHES:
        for kernels in pools:
            together = run(kernels, slice(0, min(batch, tokens)))
            assert torch.equal(together, alone[: len(together)])
    assert torch.equal(run(pools[1], slice(5, tokens)), alone[5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(45, 21), (512, 300)])
def test_linear(pools, dtype, inputs, outputs):
    torch.manual_seed(1)
    x, weight, bias = torch.randn(37, inputs), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    assert_rows_do_not_depend_on_the_batch(pools, lambda k, rows: k.linear(x[rows], weight, bias), 37)


def test_light_kernels(pools):
    torch.manual_seed(2)
    x, y, weight = torch.randn(37, 700), torch.randn(37, 700), torch.randn(700)
    assert_rows_do_not_depend_on_the_batch(pools, lambda k, rows: k.rms_norm(x[rows], weight, 1e-6), 37)
    assert_rows_do_not_depend_on_the_batch(pools, lambda k, rows: k.silu_and_mul(x[rows], y[rows]), 37)
    assert_rows_do_not_depend_on_the_batch(pools, lambda k, rows: k.router_topk(x[rows], 8, True, 1.0)[1], 37)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("hidden_size", "intermediate"), [(45, 70), (640, 256)])
def test_expert_ffn(pools, dtype, hidden_size, intermediate):
    torch.manual_seed(3)
    bank, _ = make_bank(dtype, hidden_size, intermediate, 5)
    hidden, weights = torch.randn(37, hidden_size), torch.rand(37, 3)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(37)]).to(torch.int32)
    assert_rows_do_not_depend_on_the_batch(
        pools, lambda k, rows: k.expert_ffn(bank, 0, hidden[rows], ids[rows], weights[rows]), 37
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 300])
def test_attention(pools, dtype, window):
    """Queries of one sequence in any chunking, with and without another sequence beside it."""
    torch.manual_seed(4)
    pages = fill_pages(pools[0], [1100, 70], 2, 24, 16, dtype)
    queries = torch.randn(38, 6, 24)
    positions = torch.cat([torch.arange(1063, 1100), torch.tensor([69])]).int()

    def attend(kernels: Kernels, rows: slice) -> Tensor:
        count = len(range(*rows.indices(37)))
        starts = torch.tensor([0, count], dtype=torch.int32)
        return kernels.paged_attention(queries[rows], starts, positions[rows], pages.tables[:1], pages.kv, 0.2, window)

    assert_rows_do_not_depend_on_the_batch(pools, attend, 37)
    alone = attend(pools[0], slice(0, 37))
    for kernels in pools:
        starts = torch.tensor([0, 37, 38], dtype=torch.int32)
        both = kernels.paged_attention(queries, starts, positions, pages.tables, pages.kv, 0.2, window)
        assert torch.equal(both[:37], alone)
