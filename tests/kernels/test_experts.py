"""Expert kernels against the matrices in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.implementations import IMPLEMENTATIONS, make_bank, make_kernels


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def kernels(request):
    return make_kernels(request.param)


def random_routes(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Distinct experts per token, some of them -1."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
    ids = torch.where(torch.rand(tokens, top_k) < 0.15, -1, ids).to(torch.int32)
    return ids, torch.rand(tokens, top_k)


def expected_output(matrices, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if expert < 0:
                continue
            gate, up, down = matrices[expert]
            x = hidden[token].double()
            out[token] += weights[token, slot].double() * (down @ (F.silu(gate @ x) * (up @ x)))
    return out


SHAPES = [
    # tokens, hidden, intermediate, experts, top_k, tile columns
    (0, 16, 8, 2, 1, None),
    (1, 1, 1, 1, 1, None),
    (1, 64, 48, 4, 1, None),
    (1, 96, 64, 16, 8, 16),
    (2, 40, 6, 3, 2, 1),
    (5, 37, 12, 3, 2, 4),
    (3, 130, 35, 5, 3, 35),
    (9, 33, 70, 2, 2, None),
    (70, 48, 40, 3, 2, None),
    (40, 64, 130, 24, 4, 65),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expert_ffn(kernels, dtype, shape):
    torch.manual_seed(11)
    tokens, hidden_size, intermediate, num_experts, top_k, tile_columns = shape
    bank, matrices = make_bank(dtype, hidden_size, intermediate, num_experts, tile_columns)
    hidden = torch.randn(tokens, hidden_size)
    ids, weights = random_routes(tokens, num_experts, top_k)
    out = kernels.expert_ffn(bank, 0, hidden, ids, weights)
    expected = expected_output(matrices, hidden, ids, weights)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_wide_experts_share_the_work(kernels, dtype):
    """Large enough that workers split single experts by units."""
    torch.manual_seed(12)
    bank, matrices = make_bank(dtype, 1056, 384, 3)
    for tokens in (1, 3, 20):
        hidden = torch.randn(tokens, 1056)
        ids, weights = random_routes(tokens, 3, 2)
        out = kernels.expert_ffn(bank, 0, hidden, ids, weights)
        torch.testing.assert_close(out.double(), expected_output(matrices, hidden, ids, weights), rtol=0, atol=5e-6)


def test_layers_and_segments(kernels):
    torch.manual_seed(13)
    bank, matrices = make_bank("bf16", 32, 16, 4, num_layers=3)
    hidden = torch.randn(6, 32)
    ids, weights = random_routes(6, 4, 2)
    for layer in range(3):
        out = kernels.expert_ffn(bank, layer, hidden, ids, weights)
        expected = expected_output(matrices[4 * layer : 4 * layer + 4], hidden, ids, weights)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


def test_the_same_expert_twice_for_a_token(kernels):
    torch.manual_seed(14)
    bank, matrices = make_bank("f32", 24, 8, 2)
    hidden = torch.randn(2, 24)
    ids = torch.tensor([[1, 1], [0, 0]], dtype=torch.int32)
    weights = torch.rand(2, 2)
    out = kernels.expert_ffn(bank, 0, hidden, ids, weights)
    torch.testing.assert_close(out.double(), expected_output(matrices, hidden, ids, weights), rtol=0, atol=3e-6)


def test_tokens_without_experts_are_zero(kernels):
    bank, _ = make_bank("f32", 16, 8, 2)
    ids = torch.full((3, 2), -1, dtype=torch.int32)
    out = kernels.expert_ffn(bank, 0, torch.randn(3, 16), ids, torch.rand(3, 2))
    assert torch.equal(out, torch.zeros(3, 16))
