"""A dense model cut into experts: the same function, exactly scaled."""

import numpy as np
import pytest

from freetoken.checkpoint.convert import ConvertOptions, convert, convert_source
from freetoken.checkpoint.source import ArraySource
from freetoken.checkpoint.split_experts import SplitExpertsSource
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.quant import bf16
from freetoken.testing.checkpoint_files import CONFIGS, tiny_arrays, write_hf_checkpoint

CONFIG = CONFIGS["llama"]


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("num_experts", [2, 4, 16])
def test_the_sum_of_experts_is_the_dense_mlp(tmp_path, num_experts):
    arrays = tiny_arrays(CONFIG)
    index = convert_source(SplitExpertsSource(ArraySource(CONFIG, arrays), num_experts), tmp_path / "m")
    spec = index.spec
    assert spec.architecture == "MixtralForCausalLM" and spec.moe_layers == (0, 1)
    assert (spec.num_experts, spec.num_experts_per_tok) == (num_experts, num_experts)
    assert spec.moe_intermediate_size == 48 // num_experts
    x = np.random.default_rng(3).standard_normal((5, 32))
    for layer in range(2):
        gate, up, down = (arrays[f"model.layers.{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        dense = (silu(x @ gate.T) * (x @ up.T)) @ down.T
        router = index.read_tensor(f"model.layers.{layer}.mlp.gate.weight")
        assert router.shape == (num_experts, 32) and not router.any()
        routed = np.zeros_like(dense)
        for expert in range(num_experts):
            g, u, d = index.read_expert(layer, expert)
            columns = slice(expert * 48 // num_experts, (expert + 1) * 48 // num_experts)
            np.testing.assert_array_equal(g, gate[columns])
            np.testing.assert_array_equal(u, up[columns])
            np.testing.assert_array_equal(d, down[:, columns] * num_experts)
            routed += (silu(x @ g.T) * (x @ u.T)) @ d.T / num_experts
        np.testing.assert_allclose(routed, dense, rtol=1e-12, atol=1e-12)
    for name in ("model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"):
        np.testing.assert_array_equal(index.read_tensor(name), arrays[name])


def test_bf16_stays_bf16(tmp_path):
    arrays = tiny_arrays(CONFIG)
    source = write_hf_checkpoint(tmp_path / "hf", CONFIG, arrays, dtype="BF16")
    index = convert(source, tmp_path / "m", ConvertOptions(split_dense_into_experts=4))
    assert index.layouts[0].format == "bf16" and {t.dtype for t in index.tensors.values()} == {"bf16"}
    down = arrays["model.layers.1.mlp.down_proj.weight"][:, 12:24] * 4
    np.testing.assert_array_equal(bf16.to_f32(index.read_expert(1, 1)[2]), down)
    assert index.source["split_dense_into_experts"] == 4


def test_configuration_of_the_split_model():
    config = {**CONFIG, "tie_word_embeddings": True, "rope_scaling": None, "pretraining_tp": 1, "eos_token_id": 2}
    split = SplitExpertsSource(ArraySource(config, tiny_arrays(config)), 8).config
    assert split["model_type"] == "mixtral" and split["intermediate_size"] == 6 and split["num_local_experts"] == 8
    assert split["head_dim"] == 8 and split["tie_word_embeddings"] and split["eos_token_id"] == 2
    assert "pretraining_tp" not in split and split["sliding_window"] is None
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert SplitExpertsSource(ArraySource(mistral, tiny_arrays(mistral)), 8).config["sliding_window"] == 64


@pytest.mark.parametrize("num_experts", [0, 1, 3, 6, 12, -2])
def test_only_powers_of_two_are_exact(num_experts):
    with pytest.raises(CheckpointError, match=f"into {num_experts} experts: the number must be a power of two"):
        SplitExpertsSource(ArraySource(CONFIG, tiny_arrays(CONFIG)), num_experts)


def test_the_number_must_divide():
    with pytest.raises(CheckpointError, match="into 32 experts: it does not divide the intermediate size 48"):
        SplitExpertsSource(ArraySource(CONFIG, tiny_arrays(CONFIG)), 32)


@pytest.mark.parametrize("config", [CONFIGS["qwen3"], CONFIGS["mixtral"], {**CONFIG, "mlp_bias": True}])
def test_only_plain_llamas_can_be_split(config):
    with pytest.raises(UnsupportedModelError, match="cannot be split into experts"):
        SplitExpertsSource(ArraySource(config, {}), 4)


def test_overflow_is_refused(tmp_path):
    arrays = tiny_arrays(CONFIG)
    arrays["model.layers.0.mlp.down_proj.weight"][3, 5] = 3e38
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj.* leaves the range"):
        convert_source(SplitExpertsSource(ArraySource(CONFIG, arrays), 2), tmp_path / "m")
