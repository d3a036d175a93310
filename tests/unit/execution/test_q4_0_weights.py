"""Quantised dense weights between the store and the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from freetoken import _native
from freetoken.errors import CheckpointError
from freetoken.execution.arena import Arena
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.experts import NoExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ReferenceOps
from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.models.decoder import check_dense_weights
from freetoken.quant.q4_0_matrix import Q4_0Matrix
from freetoken.testing.q4_0_models import Q4_0Model, load_q4_0_model, model_arrays

KV = KVGeometry(2, 1, 4, 1, 8, "f32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Q4_0Model:
    return load_q4_0_model("llama_tied", tmp_path_factory.mktemp("model"))


def test_planes_are_views_of_the_store(model: Q4_0Model) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weight, tensor = model.dense[name], model.index.tensors[name]
    assert isinstance(weight, Q4_0Weight) and weight.shape == tensor.shape and weight.format == "q4_0"
    store = np.frombuffer(memoryview(model.store.segments[tensor.file_index]), np.uint8)
    assert np.shares_memory(weight.nibbles.numpy(), store) and np.shares_memory(weight.scales.numpy(), store)
    prepared = CpuOps.prepare(weight)
    assert isinstance(prepared, Q4_0Matrix) and np.shares_memory(prepared.scales, store)
    np.testing.assert_array_equal(weight.dequantize().numpy(), model.index.read_tensor(name))
    np.testing.assert_array_equal(prepared.dequantize(), model.index.read_tensor(name))
    np.testing.assert_array_equal(ReferenceOps.prepare(weight).numpy(), model.index.read_tensor(name))


def test_embedding_rows_and_products(model: Q4_0Model) -> None:
    pool = _native.WorkerPool(1)
    ops = CpuOps(pool, Arena(KV, 0, 0), NoExperts())
    table = ops.prepare(model.dense["model.embed_tokens.weight"])
    expected = model.index.read_tensor("model.embed_tokens.weight")
    rows = ops.embed(np.array([7, 0, 511, 7]), table)
    np.testing.assert_array_equal(rows, expected[[7, 0, 511, 7]])
    assert rows.dtype == np.float32 and rows.flags.c_contiguous and rows.flags.writeable
    bias = np.arange(512, dtype=np.float32)
    for count in (1, 3, 40):
        x = np.random.default_rng(count).standard_normal((count, 96), np.float32)
        for offset in (None, bias):
            truth = x @ expected.T + (0 if offset is None else offset)
            assert np.abs(ops.linear(x, table, offset) - truth).max() < 0.02 * np.abs(x @ expected.T).max()
    pool.close()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_norms_must_be_numbers(model: Q4_0Model, name: str) -> None:
    weights = dict(model.dense)
    weights[name] = Q4_0Weight(torch.zeros(96, 16, dtype=torch.uint8), torch.zeros(96, 1, dtype=torch.float16))
    with pytest.raises(CheckpointError, match="has shape"):
        check_dense_weights(model.spec, weights)

    @dataclass
    class Flat:
        shape: tuple[int, ...] = (96,)
        format: str = "q4_0"

    with pytest.raises(CheckpointError, match=rf"'{name}' is quantised \(q4_0\); it must be float32 or bfloat16"):
        check_dense_weights(model.spec, {**model.dense, name: Flat()})


def test_a_format_without_kernels_is_named() -> None:
    @dataclass
    class Other:
        shape: tuple[int, int] = (4, 32)
        format: str = "q3_z"

    with pytest.raises(CheckpointError, match="no kernels for weights in the format 'q3_z'"):
        CpuOps.prepare(Other())


def test_the_models_are_what_their_names_say() -> None:
    arrays = model_arrays("qwen3_moe")
    assert arrays["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (96, 64)
    assert "model.layers.1.mlp.up_proj.weight" in arrays and "lm_head.weight" in arrays
    again = model_arrays("qwen3_moe")
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())
