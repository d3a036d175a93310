"""Norms, projections, router and rotary/KV kernels against plain torch (see ``triton_device``)."""

import numpy as np
import pytest
import torch

from freetoken.kernels.triton import reference
from freetoken.kernels.triton.linear import Q4_0Weight, linear, q4_0_gemm
from freetoken.kernels.triton.norm import add_rms_norm, rms_norm, silu_and_mul
from freetoken.kernels.triton.rope_kv import PagedKV, rope_kv
from freetoken.kernels.triton.router import norm_router, top_k
from freetoken.quant.q4_0_record import quantize_blocks, split_blocks
from tests.kernels.triton_device import DEVICE, relative_error


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def q4_0_weight(outputs, inputs, seed=0):
    values = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32) / np.sqrt(inputs)
    nibbles, scales = split_blocks(quantize_blocks(values.astype(np.float32)))
    weight = Q4_0Weight(torch.from_numpy(nibbles).to(DEVICE), torch.from_numpy(scales).to(DEVICE))
    return weight, reference.q4_0_matrix(weight.nibbles, weight.scales)


@pytest.mark.parametrize("size", [8, 48])
def test_norms(size):
    x, delta, weight = randn(3, size), randn(3, size, seed=1), randn(size, seed=2)
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out)
    assert relative_error(out, reference.rms_norm(x, weight, 1e-5)) < 1e-6
    residual = x.clone()
    add_rms_norm(residual, delta, weight, 1e-5, out)
    assert torch.equal(residual, x + delta)
    assert relative_error(out, reference.rms_norm(x + delta, weight, 1e-5)) < 1e-6


def test_silu_and_mul():
    x = randn(3, 80)
    out = torch.empty(3, 40, device=DEVICE)
    silu_and_mul(x, out)
    assert relative_error(out, reference.silu_mul(x[:, :40], x[:, 40:])) < 1e-6


@pytest.mark.parametrize(
    ("outputs", "inputs", "q4_0"), [(24, 64, False), (7, 96, False), (5, 40, False), (24, 64, True), (7, 96, True)]
)
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_linear(outputs, inputs, q4_0, options):
    x = randn(3, inputs)
    weight, matrix = q4_0_weight(outputs, inputs) if q4_0 else (randn(outputs, inputs, seed=1),) * 2
    out = randn(3, outputs, seed=3)
    if options == "plain":
        expected = x @ matrix.T
        linear(x, weight, out)
    else:
        norm, bias = randn(inputs, seed=4), randn(outputs, seed=5)
        expected = out + reference.rms_norm(x, norm, 1e-6) @ matrix.T + bias
        linear(x, weight, out, norm=norm, bias=bias, accumulate=True)
    assert relative_error(out, expected) < (1e-3 if q4_0 else 1e-5)


@pytest.mark.parametrize("tokens", [5, 40])
def test_q4_0_gemm(tokens):
    weight, matrix = q4_0_weight(40, 96)
    x, bias = randn(tokens, 96, dtype=torch.float16), randn(40, seed=2)
    out = randn(tokens, 40, seed=3)
    expected = out + x.float() @ matrix.T + bias
    q4_0_gemm(x, weight, out, bias=bias, accumulate=True)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (12, 5), (4, 4)])
def test_top_k(scoring, renormalize, num_experts, k):
    logits = randn(6, num_experts)
    logits[1] = 0.5  # all equal: lower ids first
    logits[2, ::2] = logits[2, 1]
    logits[3, 0] = float("nan")
    logits[4] = float("-inf")
    bias = randn(num_experts, seed=7) if scoring == "sigmoid" else None
    ids = torch.empty(6, k, dtype=torch.int32, device=DEVICE)
    weights = torch.empty(6, k, device=DEVICE)
    top_k(logits, ids, weights, scoring=scoring, renormalize=renormalize, scaling=2.5, bias=bias)
    rows = [0, 1, 2, 5] if scoring == "sigmoid" else [0, 1, 2, 3, 5]
    expected_ids, expected = reference.choose_experts(logits, k, scoring, renormalize, 2.5, bias)
    assert torch.equal(ids[rows], expected_ids[rows])
    assert torch.allclose(weights[rows], expected[rows], rtol=1e-5, atol=1e-7)
    for row in ids.tolist():
        assert len(set(row)) == k and all(0 <= i < num_experts for i in row)


def test_norm_router():
    residual, norm, router = randn(3, 48), randn(48, seed=1), randn(10, 48, seed=2)
    hidden = torch.empty(3, 48, dtype=torch.float16, device=DEVICE)
    logits = torch.empty(3, 10, device=DEVICE)
    norm_router(residual, norm, router, hidden, logits, 1e-6)
    expected = reference.rms_norm(residual, norm, 1e-6)
    assert relative_error(hidden, expected) < 1e-3
    assert relative_error(logits, expected @ router.T) < 1e-5


def test_norm_router_of_a_later_layer_too():
    residual, norm, router = randn(1, 48), randn(48, seed=1), randn(10, 48, seed=2)
    later = randn(48, seed=3), randn(10, 48, seed=4), torch.empty(1, 10, device=DEVICE)
    hidden, logits = torch.empty(1, 48, device=DEVICE), torch.empty(1, 10, device=DEVICE)
    norm_router(residual, norm, router, hidden, logits, 1e-6, ahead=later)
    own = reference.rms_norm(residual, norm, 1e-6)
    assert relative_error(hidden, own) < 1e-6
    assert relative_error(logits, own @ router.T) < 1e-5
    assert relative_error(later[2], reference.rms_norm(residual, later[0], 1e-6) @ later[1].T) < 1e-5


@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (16, 8), (12, 12)])
@pytest.mark.parametrize("norm", [True, False])
def test_rope_kv(dim, rotary, norm):
    tokens, q_heads, kv_heads, block_size = 4, 6, 3, 4
    fused = randn(tokens, (q_heads + 2 * kv_heads) * dim)
    q, k, v = fused.split([q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    positions = torch.tensor([5, 0, -1, 9], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([6, 1, -1, 11], dtype=torch.int64, device=DEVICE)
    angles = torch.outer(torch.arange(10.0), torch.rand(rotary // 2, generator=torch.Generator().manual_seed(1)))
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    record = 3 * 2 * block_size * kv_heads * dim  # three layers a block record; this one is the second
    data = torch.zeros(3 * record, device=DEVICE)
    kv = PagedKV(data, record // 3, record, block_size, kv_heads, dim)
    norms = {"q_norm": randn(dim, seed=2), "k_norm": randn(dim, seed=3)} if norm else {}
    q_out = torch.full((tokens, q_heads, dim), float("nan"), device=DEVICE)
    rope_kv(q, k, v, positions, slots, cos, sin, q_out, kv, **norms)

    queries, keys = q.reshape(tokens, q_heads, dim), k.reshape(tokens, kv_heads, dim)
    if norm:
        queries = reference.rms_norm(queries, norms["q_norm"], 1e-6)
        keys = reference.rms_norm(keys, norms["k_norm"], 1e-6)
    live = [0, 1, 3]
    expected = reference.rotate(queries[live], positions[live], cos, sin)
    assert torch.allclose(q_out[live], expected, rtol=1e-5, atol=1e-5)
    assert not q_out[2].any()
    keys = reference.rotate(keys[live], positions[live], cos, sin)
    cells = data.view(3, 3, 2, block_size, kv_heads, dim)
    written = torch.zeros(3, 3, 2, block_size, dtype=torch.bool)
    for i, token in enumerate(live):
        block, offset = divmod(int(slots[token]), block_size)
        assert torch.allclose(cells[block, 1, 0, offset], keys[i], rtol=1e-5, atol=1e-5)
        assert torch.equal(cells[block, 1, 1, offset], v[token].reshape(kv_heads, dim))
        written[block, 1, :, offset] = True
    assert not cells[~written.to(DEVICE)].any()
