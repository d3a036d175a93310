"""Rotary tables against the frequencies `transformers` computes from the same configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from freetoken.errors import UnsupportedModelError
from freetoken.models.families.common import parse_rope
from freetoken.models.rope import inverse_frequencies, rope_tables
from freetoken.models.spec import RopeSpec

HEAD_DIM = 64
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_betas": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 1.7,
        "original_max_position_embeddings": 1024,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_tables(case: str) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = CASES[case]
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    oracle = LlamaRotaryEmbedding(config)
    spec = parse_rope({"rope_parameters": parameters, "max_position_embeddings": 4096}, HEAD_DIM, 10000.0)
    frequencies, factor = inverse_frequencies(spec)
    assert frequencies.dtype == np.float32 and len(frequencies) == spec.rotary_dim // 2
    np.testing.assert_allclose(frequencies, oracle.inv_freq.numpy(), rtol=3e-7)
    assert factor == pytest.approx(oracle.attention_scaling, rel=1e-12)

    cos, sin = rope_tables(spec, 3000)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (3000, spec.rotary_dim // 2)
    expected_cos, expected_sin = oracle(torch.zeros(1), torch.arange(3000)[None])
    half = spec.rotary_dim // 2
    # One unit in the last place of a frequency is 3000 * 6e-8 of an angle.
    np.testing.assert_allclose(cos, expected_cos[0, :, :half].numpy(), atol=4e-4)
    np.testing.assert_allclose(sin, expected_sin[0, :, :half].numpy(), atol=4e-4)


def test_a_partial_embedding_is_that_of_a_smaller_head() -> None:
    spec = parse_rope({"partial_rotary_factor": 0.25}, HEAD_DIM, 10000.0)
    assert spec.rotary_dim == 16
    whole = parse_rope({}, 16, 10000.0)
    for ours, other in zip(rope_tables(spec, 50), rope_tables(whole, 50), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_old_spelling_and_filled_in_lengths() -> None:
    old = {
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "yarn", "factor": 2.0},
        "max_position_embeddings": 2048,
    }
    spec = parse_rope(old, HEAD_DIM, 1.0)
    assert spec.kind == "yarn" and spec.theta == 20000.0
    assert dict(spec.parameters) == {"factor": 2.0, "original_max_position_embeddings": 2048.0}
    ratio = {
        "rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
        "max_position_embeddings": 2048,
    }
    assert dict(parse_rope(ratio, HEAD_DIM, 10000.0).parameters)["factor"] == 4.0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="spiral"):
        rope_tables(RopeSpec(theta=1.0, kind="spiral", rotary_dim=4), 8)
