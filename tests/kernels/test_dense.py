"""Dense kernels against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.implementations import IMPLEMENTATIONS, make_kernels, to_dtype


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def kernels(request):
    return make_kernels(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"),
    [(0, 8, 3), (1, 1, 1), (1, 64, 40), (2, 37, 19), (3, 16, 7), (5, 130, 33), (9, 96, 8), (37, 300, 65), (70, 512, 9)],
)
def test_linear(kernels, dtype, tokens, inputs, outputs):
    x = torch.randn(tokens, inputs)
    weight = to_dtype(torch.randn(outputs, inputs) / inputs**0.5, dtype)
    bias = torch.randn(outputs)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(kernels.linear(x, weight).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(kernels.linear(x, weight, bias).double(), expected + bias.double(), rtol=0, atol=1e-5)


def test_linear_over_many_chunks(kernels):
    """More outputs than one worker takes at a time, more rows than one block."""
    x, weight = torch.randn(75, 1024), torch.randn(513, 1024) / 32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(kernels.linear(x, weight).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("tokens", "hidden"), [(0, 4), (1, 1), (3, 63), (4, 64), (2, 2048), (33, 130)])
def test_rms_norm(kernels, tokens, hidden):
    x, weight = torch.randn(tokens, hidden) * 3, torch.randn(hidden)
    expected = F.rms_norm(x.double(), (hidden,), weight.double(), 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6).double(), expected, rtol=1e-6, atol=2e-6)


def test_add_rms_norm(kernels):
    residual, delta, weight = torch.randn(5, 100), torch.randn(5, 100), torch.randn(100)
    total = residual + delta
    out = kernels.add_rms_norm(residual, delta, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, F.rms_norm(total, (100,), weight, 1e-5), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("heads", "head_dim", "rotated"), [(1, 2, 2), (3, 64, 64), (2, 20, 12), (4, 128, 64)])
def test_rotary_turns_pairs(kernels, heads, head_dim, rotated):
    positions = torch.tensor([0, 5, 99, 5], dtype=torch.int32)
    angle = torch.outer(torch.arange(100.0), 10000.0 ** (-torch.arange(0, rotated, 2) / rotated))
    x = torch.randn(4, heads, head_dim)
    half = rotated // 2
    turned = torch.polar(torch.ones(4, half), angle[positions.long()]).unsqueeze(1)
    pairs = torch.complex(x[..., :half], x[..., half:rotated]) * turned
    expected = torch.cat([pairs.real, pairs.imag, x[..., rotated:]], dim=-1)
    kernels.rotary(x, positions, angle.cos(), angle.sin())
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 17), (2, 768)])
def test_silu_and_mul(kernels, shape):
    gate, up = torch.randn(shape) * 4, torch.randn(shape)
    expected = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(kernels.silu_and_mul(gate, up).double(), expected, rtol=1e-6, atol=1e-7)


def test_silu_and_mul_at_the_ends(kernels):
    gate = torch.tensor([[-1e30, -1000.0, -88.5, -0.0, 88.0, 1000.0, 1e30, float("nan")]])
    out = kernels.silu_and_mul(gate, torch.ones(1, 8))[0]
    assert out[:3].abs().max() < 1e-30
    assert out[3] == 0.0
    assert out[4:7].tolist() == gate[0, 4:7].tolist()
    assert out[7].isnan()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (9, 8, 2), (4, 128, 8), (3, 5, 5)])
def test_router_topk(kernels, tokens, experts, top_k, renormalize):
    logits = torch.randn(tokens, experts)
    ids, weights = kernels.router_topk(logits, top_k, renormalize, 2.5)
    expected, expected_ids = torch.softmax(logits.double(), -1).topk(top_k, -1)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights.double(), expected * 2.5, rtol=1e-5, atol=1e-7)


def test_router_ties_go_to_the_lower_id(kernels):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, weights = kernels.router_topk(logits, 4, False, 1.0)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert weights[1].tolist() == pytest.approx([0.2] * 4)


@pytest.mark.parametrize("isa", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_router_names_experts_even_for_nan(isa):
    logits = torch.full((2, 6), float("nan"))
    logits[1, 4] = 1.0
    ids, _ = make_kernels(isa).router_topk(logits, 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2], [4, 0, 1]]
