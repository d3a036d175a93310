"""Q4_0 kernels of every instruction set: dense projections and experts, against numpy in float64.

With activations rounded to 8 bits as the kernels round them, results agree to float32 accuracy (experts: but for
hidden values that lie so near a rounding boundary that float32 decides it). Against unrounded activations the error of
a projection of normally distributed numbers is 0.53 %, that of a whole expert 1.3 %: what 8 bits cost.
"""

from __future__ import annotations

import numpy as np
import pytest

from freetoken import _native
from freetoken.errors import CheckpointError
from freetoken.quant.native_layout import native_layout
from freetoken.quant.q4_0_matrix import Q4_0Matrix
from freetoken.quant.q4_0_record import (
    dequantize_blocks,
    dequantize_q4_0_expert,
    pack_q4_0_expert,
    plan_q4_0_layout,
    quantize_blocks,
    split_blocks,
)
from freetoken.quant.record import plan_record_layout
from freetoken.testing.q4_0_oracle import expert, linear, quantize_activations, relative_error
from tests.kernels.implementations import available_isas

LINEAR_ROUNDING, EXPERT_ROUNDING = 0.01, 0.02
BATCHES = [*range(2, 10), 37]


@pytest.fixture(params=available_isas(), scope="module")
def pools(request):
    pools = [_native.WorkerPool(threads, isa=request.param) for threads in (1, 2, 3, 4)]
    yield pools
    for pool in pools:
        pool.close()


def random_matrix(rng, rows, columns):
    return Q4_0Matrix(*split_blocks(quantize_blocks(rng.standard_normal((rows, columns), np.float32))))


def run_linear(pool, x, matrix, bias=None):
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    _native.linear_q4_0(pool, x, matrix.nibbles, matrix.scales, bias, out)
    return out


class Bank:
    """Random experts of one layer in records, layer by layer; ``matrices[e]`` in float32."""

    def __init__(self, hidden, intermediate, num_experts, tile_columns=32, seed=0):
        rng = np.random.default_rng(seed)
        self.hidden, self.num_experts = hidden, num_experts
        self.layout = plan_q4_0_layout(hidden, intermediate, tile_columns)
        stride = self.layout.stride_bytes
        self.segment = _native.SharedSegment.create("bank", num_experts * stride)
        records = np.frombuffer(memoryview(self.segment), np.uint8).reshape(num_experts, stride)
        self.matrices = []
        for record in records:
            gate, up = (rng.standard_normal((intermediate, hidden), np.float32) / hidden**0.5 for _ in range(2))
            down = rng.standard_normal((hidden, intermediate), np.float32) / intermediate**0.5
            pack_q4_0_expert(self.layout, *(quantize_blocks(m.astype(np.float32)) for m in (gate, up, down)), record)
            self.matrices.append(dequantize_q4_0_expert(self.layout, record))
        self.store = _native.ExpertStore(
            [self.segment],
            [native_layout(self.layout)],
            [0],
            np.zeros((1, num_experts), np.int32),
            (np.arange(num_experts, dtype=np.int64) * stride)[None],
        )

    def run(self, pool, hidden, ids, weights):
        out = np.empty_like(hidden)
        _native.expert_ffn(pool, self.store, 0, hidden, ids, weights, out, True)
        return out

    def expected(self, hidden, ids, weights, *, rounded):
        out = np.zeros(hidden.shape, np.float64)
        for e in range(self.num_experts):
            tokens, slots = np.nonzero(ids == e)
            if len(tokens):
                rows = expert(hidden[tokens], *self.matrices[e], rounded=rounded)
                np.add.at(out, tokens, weights[tokens, slots].astype(np.float64)[:, None] * rows)
        return out


def random_routes(rng, tokens, num_experts, top_k):
    """Distinct experts per token, some of them -1."""
    ids = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    ids[rng.random(ids.shape) < 0.15] = -1
    return ids, rng.random((tokens, top_k), np.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(0, 32, 3), (1, 32, 1), (1, 2048, 64), (2, 96, 21), (3, 512, 9), (4, 544, 130), (5, 1504, 7), (37, 288, 70)],
)
def test_linear(pools, rows, inputs, outputs, bias):
    rng = np.random.default_rng(rows + inputs)
    x = rng.standard_normal((rows, inputs), np.float32)
    matrix = random_matrix(rng, outputs, inputs)
    offset = rng.standard_normal(outputs, np.float32) if bias else None
    weight = matrix.dequantize()
    close = linear(x, weight, rounded=True) + (0 if offset is None else offset)
    truth = linear(x, weight, rounded=False) + (0 if offset is None else offset)
    for pool in pools:
        out = run_linear(pool, x, matrix, offset)
        np.testing.assert_allclose(out, close, rtol=0, atol=2e-6 * inputs**0.5 * max(1, np.abs(truth).max(initial=0)))
        if out.size > 40:
            assert relative_error(out, truth) < LINEAR_ROUNDING


def test_linear_rows_do_not_depend_on_the_batch(pools):
    rng = np.random.default_rng(1)
    x, bias = rng.standard_normal((37, 544), np.float32), rng.standard_normal(300, np.float32)
    matrix = random_matrix(rng, 300, 544)
    alone = np.concatenate([run_linear(pools[t % 4], x[t : t + 1], matrix, bias) for t in range(37)])
    for batch in BATCHES:
        for pool in pools:
            assert np.array_equal(run_linear(pool, x[:batch], matrix, bias), alone[:batch])
    assert np.array_equal(run_linear(pools[1], x[5:], matrix, bias), alone[5:])


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k", "tile_columns"),
    [
        (0, 32, 32, 2, 1, 32),
        (1, 32, 32, 1, 1, 32),
        (1, 96, 64, 16, 8, 32),
        (2, 160, 128, 3, 2, 64),
        (5, 64, 192, 3, 2, 96),
        (9, 544, 96, 5, 3, 32),
        (70, 64, 64, 3, 2, 64),
        (20, 1056, 384, 3, 2, 128),
    ],
)
def test_experts(pools, tokens, hidden, intermediate, experts, top_k, tile_columns):
    rng = np.random.default_rng(tokens)
    bank = Bank(hidden, intermediate, experts, tile_columns)
    x = rng.standard_normal((tokens, hidden), np.float32)
    ids, weights = random_routes(rng, tokens, experts, top_k)
    close, truth = (bank.expected(x, ids, weights, rounded=rounded) for rounded in (True, False))
    for pool in pools:
        out = bank.run(pool, x, ids, weights)
        if tokens:
            assert relative_error(out, close) < 1e-3  # a hidden value now and then gets the neighbouring code
            assert relative_error(out, truth) < EXPERT_ROUNDING
        assert np.array_equal(out[(ids < 0).all(1)], np.zeros((np.count_nonzero((ids < 0).all(1)), hidden), np.float32))


@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 64), (640, 256)])
def test_expert_rows_do_not_depend_on_the_batch(pools, hidden, intermediate):
    rng = np.random.default_rng(3)
    bank = Bank(hidden, intermediate, 5)
    x, weights = rng.standard_normal((37, hidden), np.float32), rng.random((37, 3), np.float32)
    ids = np.argsort(rng.random((37, 5)), axis=1)[:, :3].astype(np.int32)
    alone = np.concatenate(
        [bank.run(pools[t % 4], x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(37)]
    )
    for batch in BATCHES:
        for pool in pools:
            assert np.array_equal(bank.run(pool, x[:batch], ids[:batch], weights[:batch]), alone[:batch])
    assert np.array_equal(bank.run(pools[2], x[5:], ids[5:], weights[5:]), alone[5:])


def test_instruction_sets_agree():
    """The integers are the same in all; only the order of float32 additions differs."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((6, 1024), np.float32)
    matrix = random_matrix(rng, 40, 1024)
    results = [run_linear(_native.WorkerPool(1, isa=isa), x, matrix) for isa in available_isas()]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=0, atol=1e-6 * np.abs(results[0]).max())


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_visible(pools, value):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 96), np.float32)
    x[1, 40] = value
    matrix = random_matrix(rng, 8, 96)
    out = run_linear(pools[1], x, matrix)
    assert not np.isfinite(out[1]).any() and np.isfinite(out[[0, 2]]).all()
    bank = Bank(96, 64, 2)
    ids = np.array([[0, 1]] * 3, np.int32)
    out = bank.run(pools[1], x, ids, np.ones((3, 2), np.float32))
    assert not np.isfinite(out[1]).any() and np.isfinite(out[[0, 2]]).all()


def test_tiny_and_huge_activations(pools):
    """Scales take part in float32, whatever the size of the numbers."""
    rng = np.random.default_rng(6)
    matrix = random_matrix(rng, 16, 64)
    x = rng.standard_normal((3, 64), np.float32) * np.array([[1e-20], [1.0], [1e20]], np.float32)
    x[1, :32] = 0
    expected = linear(x, matrix.dequantize(), rounded=True)
    for pool in pools:
        for row, truth in zip(run_linear(pool, x, matrix), expected, strict=True):
            assert relative_error(row, truth) < 1e-6
    assert np.array_equal(quantize_activations(np.full((1, 32), 1e-31, np.float32)), np.zeros((1, 32)))


@pytest.mark.parametrize("special", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF])
def test_extreme_scales(pools, special):
    """Zeros, subnormals and the largest float16 of both signs."""
    nibbles = np.random.default_rng(7).integers(0, 256, (4, 32), np.uint8)
    scales = np.full((4, 2), special, np.uint16).view(np.float16)
    matrix = Q4_0Matrix(nibbles, scales)
    x = np.random.default_rng(8).standard_normal((2, 64), np.float32)
    expected = linear(x, matrix.dequantize(), rounded=True)
    for pool in pools:
        assert relative_error(run_linear(pool, x, matrix), expected) < 1e-6


class TestArguments:
    """What does not fit is named."""

    def linear(self, **changed):
        arguments = {
            "pool": _native.WorkerPool(1),
            "x": np.zeros((3, 64), np.float32),
            "nibbles": np.zeros((5, 32), np.uint8),
            "scales": np.zeros((5, 2), np.float16),
            "bias": np.zeros(5, np.float32),
            "out": np.zeros((3, 5), np.float32),
        }
        _native.linear_q4_0(**{**arguments, **changed})

    def layout(self, **changed):
        arguments = {
            "dtype": "q4_0",
            "hidden": 64,
            "intermediate": 64,
            "tile_columns": 32,
            "num_tiles": 2,
            "tile_stride_bytes": 3456,
            "stride_bytes": 8192,
            "gate_offset": 0,
            "up_offset": 1024,
            "gate_scales_offset": 2048,
            "up_scales_offset": 2176,
            "down_offset": 2304,
            "down_scales_offset": 3328,
        }
        _native.NativeLayout(**{**arguments, **changed})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("x", np.zeros((3, 48), np.float32)),
            ("x", np.zeros((3, 64), np.float64)),
            ("x", np.zeros((3, 0), np.float32)),
            ("nibbles", np.zeros((5, 31), np.uint8)),
            ("nibbles", np.zeros((5, 32), np.int8)),
            ("scales", np.zeros((5, 3), np.float16)),
            ("scales", np.zeros((4, 2), np.float16)),
            ("scales", np.zeros((5, 2), np.uint16)),
            ("scales", np.zeros((5, 4), np.float16)[:, ::2]),
            ("bias", np.zeros(4, np.float32)),
            ("out", np.zeros((3, 4), np.float32)),
            ("out", np.zeros((2, 5), np.float32)),
        ],
    )
    def test_linear(self, name, value):
        self.linear()
        self.linear(bias=None)
        with pytest.raises(ValueError, match=name):
            self.linear(**{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("hidden", 48),
            ("tile_stride_bytes", 3455),
            ("gate_offset", -1),
            ("down_offset", 3000),
            ("gate_scales_offset", -1),
            ("up_scales_offset", 2177),
            ("down_scales_offset", 3400),
            ("stride_bytes", 4096),
        ],
    )
    def test_layout(self, name, value):
        self.layout()
        with pytest.raises(ValueError, match=name):
            self.layout(**{name: value})

    def test_tiles_are_made_of_blocks_and_only_q4_0_has_scales(self):
        with pytest.raises(ValueError, match="tile_columns must be a multiple of 32"):
            self.layout(tile_columns=16, num_tiles=4)
        with pytest.raises(ValueError, match="only q4_0 records have scales"):
            self.layout(dtype="bf16", tile_stride_bytes=12288, stride_bytes=24576)

    def test_both_kinds_of_layout_go_through_the_same_function(self):
        native_layout(plan_q4_0_layout(64, 96))
        native_layout(plan_record_layout("bf16", 40, 24))
        with pytest.raises(CheckpointError, match="multiple of 32"):
            plan_q4_0_layout(48, 32)


def test_dequantised_rows_are_the_blocks():
    rng = np.random.default_rng(9)
    blocks = quantize_blocks(rng.standard_normal((7, 96), np.float32))
    matrix = Q4_0Matrix(*split_blocks(blocks))
    assert matrix.shape == (7, 96)
    np.testing.assert_array_equal(matrix.dequantize(), dequantize_blocks(blocks))
    np.testing.assert_array_equal(matrix.rows(np.array([3, 3, 0])), dequantize_blocks(blocks)[[3, 3, 0]])
