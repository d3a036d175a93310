"""The weights of synthetic checkpoints, and what their routers choose."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from freetoken import _native
from freetoken.checkpoint.synthetic import SynthOptions, synthesize
from freetoken.checkpoint.synthetic.forward import SyntheticModel
from freetoken.checkpoint.synthetic.locality import GROUP_TOKENS
from freetoken.checkpoint.synthetic.routing import (
    LayerRouting,
    layer_routing,
    measure_routing,
    uniform_routing,
)
from freetoken.checkpoint.synthetic.shapes import shape_config
from freetoken.checkpoint.synthetic.weights import EMBEDDING, OUTPUT, SyntheticWeights, to_f32
from freetoken.errors import CheckpointError
from freetoken.quant import bf16

DTYPES = ("f32", "bf16", "q4_0")
PARTS = ("gate", "up", "down")


def tiny(dtype="f32", shape="qwen3-moe-tiny", locality=0.0, seed=0, **overrides):
    return SyntheticWeights(shape_config(shape, overrides), dtype, locality, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_how_they_are_asked_for(dtype):
    weights = tiny(dtype, hidden=2048, heads=2, locality=0.3)
    for name, shape in weights.shapes.items():
        whole = weights.rows(name)
        assert len(whole) == shape[0]
        chunks = [weights.rows(name, *rows) for rows in weights.chunks(name)]
        assert np.array_equal(np.concatenate(chunks), whole), name
        first, end = shape[0] // 3, shape[0] // 3 + 5
        assert np.array_equal(weights.rows(name, first, end), whole[first:end]), name
    assert len(weights.chunks(EMBEDDING)) > 1 and len(weights.chunks("model.layers.0.self_attn.o_proj.weight")) == 1


def test_seed_decides_everything():
    one, same, other = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    for name in one.shapes:
        assert np.array_equal(one.rows(name), same.rows(name))
        assert not np.array_equal(one.rows(name), other.rows(name)), name
    assert np.array_equal(one.expert(1, 3, "down"), same.expert(1, 3, "down"))
    matrices = {one.expert(layer, expert, part).tobytes() for layer in (0, 1) for expert in (0, 1) for part in PARTS}
    assert len(matrices) == 12


def test_bf16_is_the_rounded_f32_model():
    exact, rounded = tiny("f32"), tiny("bf16")
    for name in exact.shapes:
        assert np.array_equal(bf16.from_f32(exact.rows(name)), rounded.rows(name)), name
    for part in PARTS:
        assert np.array_equal(bf16.from_f32(exact.expert(0, 1, part)), rounded.expert(0, 1, part))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_values(dtype):
    weights = tiny(dtype, hidden=512, expert_intermediate=512)
    for part in ("gate", "up"):
        values = to_f32(weights.expert(0, 0, part))
        assert values.std() * np.sqrt(512) == pytest.approx(1, rel=0.02)
        assert abs(values.mean()) < 0.02 * values.std()
    assert to_f32(weights.rows(EMBEDDING)).std() == pytest.approx(1, rel=0.05)
    router = to_f32(weights.rows("model.layers.0.mlp.gate.weight"))
    assert np.linalg.norm(router, axis=1) == pytest.approx(2, rel=0.01)


def test_q4_0_uses_all_codes_and_scales_of_both_signs():
    blocks = tiny("q4_0", hidden=512).expert(0, 0, "gate")
    codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    share = np.bincount(codes.reshape(-1), minlength=16) / codes.size
    assert share == pytest.approx(1 / 16, rel=0.1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    assert 0.4 < (scales < 0).mean() < 0.6
    assert np.abs(scales).max() / np.abs(scales).min() == pytest.approx(1.25 / 0.75, rel=0.02)


def test_embeddings_of_a_group_have_the_cosine_and_others_have_none():
    weights = tiny("f32", hidden=2048, locality=0.5)
    rows = weights.rows(EMBEDDING, 0, 2 * GROUP_TOKENS)
    cosines = rows @ rows.T / 2048
    within = cosines[:GROUP_TOKENS, :GROUP_TOKENS][~np.eye(GROUP_TOKENS, dtype=bool)]
    assert within.mean() == pytest.approx(weights.cosine, abs=0.05)
    assert abs(cosines[:GROUP_TOKENS, GROUP_TOKENS:]).mean() < 0.05


@pytest.mark.parametrize("locality", [0.0, 0.35, 0.7])
def test_output_rows_point_at_the_next_token_of_the_walk(locality):
    weights = tiny("f32", hidden=1024, vocab=2000, locality=locality)
    tokens = np.concatenate([weights.walk.order[-1:], weights.walk.order[:-1]])
    logits = weights.rows(EMBEDDING)[tokens] @ weights.rows(OUTPUT).T
    assert (logits.argmax(1) == weights.walk.order).mean() > 0.99
    assert logits.max(1).mean() == pytest.approx(20, abs=1)


def test_impossible_weights_are_named():
    with pytest.raises(CheckpointError, match="dtype 'fp8' is not one of bf16, f32, q4_0"):
        tiny("fp8")
    with pytest.raises(CheckpointError, match=r"an expert's down projection has rows of 40, which blocks of 32"):
        tiny("q4_0", expert_intermediate=40)
    with pytest.raises(CheckpointError, match=r"needs a choice of experts"):
        tiny("f32", shape="llama-tiny", locality=0.5)


# ---------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("qwen3-moe-tiny", "bf16"), ("qwen3-moe-tiny", "q4_0"), ("mixtral-tiny", "f32"), ("llama-tiny", "q4_0")],
)
def test_forward_agrees_with_transformers(tmp_path, shape, dtype):
    import transformers

    options = SynthOptions(format="safetensors", dtype=dtype, seed=4, num_threads=1, measure_tokens=0)
    synthesize(shape, tmp_path / "m", options)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    weights = tiny(dtype, shape=shape, seed=4)
    tokens = np.random.default_rng(1).integers(0, 500, (2, 40))
    with torch.no_grad():
        expected = oracle(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    workers = _native.WorkerPool(1)
    with ThreadPoolExecutor(1) as pool:
        model = SyntheticModel(weights, pool, workers)
        logits = model.logits(model.forward(tokens).residual)
        without = model.logits(model.embed(tokens))
    workers.close()
    assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()
    # The output of blocks matters enough that a fault in one would show here.
    assert np.abs(without - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_routing_is_diverse_in_every_layer(dtype):
    report = measure_routing(tiny(dtype, hidden=256, experts=64, layers=6, experts_per_token=4), 256, 2)
    assert report.experts == "computed" and report.walk_followed == 1
    assert report.residual_cosine > 0.9 and report.largest_activation < 10 and report.largest_logit < 40
    for sequence in (report.walk, report.prompt):
        assert len(sequence.layers) == 6
        for layer in sequence.layers.values():
            assert layer.distinct_experts > 0.95 * report.uniform.distinct_experts
            assert layer.overlap < report.uniform.overlap + 0.04
            assert layer.entropy_bits > report.uniform.entropy_bits - 0.15


def test_locality_shows_in_the_walk_and_not_in_a_random_prompt():
    shape = {"hidden": 512, "experts": 64, "experts_per_token": 4, "vocab": 4000}
    report = measure_routing(tiny("bf16", locality=0.35, **shape), 256, 2)
    chance = report.uniform.overlap
    assert report.walk.mean.overlap == pytest.approx(chance + 0.35 * (1 - chance), abs=0.08)
    assert report.prompt.mean.overlap < chance + 0.04
    assert report.walk_followed == 1
    assert report.walk.mean.distinct_experts < 0.75 * report.prompt.mean.distinct_experts


def test_sampled_experts_are_a_fair_stand_in():
    weights = tiny("bf16", hidden=256, experts=64, layers=6, experts_per_token=4)
    exact, sampled = (measure_routing(weights, 128, 1, limit) for limit in (1 << 40, 0))
    assert (exact.experts, sampled.experts) == ("computed", "sampled")
    assert sampled.residual_cosine == pytest.approx(exact.residual_cosine, abs=0.02)
    assert sampled.prompt.mean.overlap == pytest.approx(exact.prompt.mean.overlap, abs=0.03)


def test_dense_model_has_no_routing_but_is_measured():
    report = measure_routing(tiny("f32", shape="llama-tiny"), 64, 1)
    assert (report.walk, report.prompt, report.uniform) == (None, None, None)
    assert report.walk_followed > 0.8
    json.dumps(report.to_json())


def test_figures_of_known_choices():
    collapsed = layer_routing(np.tile([3, 5], (64, 1)), 8)
    assert collapsed == LayerRouting(2, 1.0, 1.0)
    alternating = layer_routing(np.array([[0, 1], [2, 3], [4, 5], [6, 7]] * 32), 8)
    assert alternating == LayerRouting(8, 0.0, 3.0)


def test_uniform_figures_match_uniform_choices():
    random = np.random.default_rng(0)
    chosen = np.argsort(random.random((4096, 32)), axis=1)[:, :4]
    found, expected = layer_routing(chosen, 32), uniform_routing(32, 4, 4096)
    assert found.distinct_experts == pytest.approx(expected.distinct_experts, rel=0.02)
    assert found.overlap == pytest.approx(expected.overlap, abs=0.01)
    assert found.entropy_bits == pytest.approx(expected.entropy_bits, abs=0.005)


def test_too_few_tokens_are_refused():
    with pytest.raises(CheckpointError, match=r"over 10 tokens; it takes 64 to"):
        measure_routing(tiny(), 10)
