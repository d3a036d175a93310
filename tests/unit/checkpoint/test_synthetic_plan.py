"""Shapes, vocabulary and locality of synthetic checkpoints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from freetoken.checkpoint.gguf_tokenizer import write_tokenizer
from freetoken.checkpoint.synthetic.locality import (
    GROUP_TOKENS,
    benchmark_prompt,
    cosine_for_locality,
    plan_walk,
)
from freetoken.checkpoint.synthetic.shapes import SHAPES, shape_config
from freetoken.checkpoint.synthetic.vocabulary import num_text_tokens, special_token_ids, tokenizer_metadata
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.models.registry import FAMILIES, parse_model_config
from freetoken.serving.template import ChatTemplate


def test_every_shape_is_a_model_and_every_architecture_family_has_one():
    specs = {name: parse_model_config(shape_config(name)) for name in SHAPES}
    assert {spec.family for spec in specs.values()} == {family.__name__.rpartition(".")[2] for family in FAMILIES}
    qwen = specs["qwen3-30b-a3b"]
    assert (qwen.num_layers, qwen.hidden_size, qwen.num_experts, qwen.num_experts_per_tok) == (48, 2048, 128, 8)
    assert (qwen.moe_intermediate_size, qwen.num_heads, qwen.num_kv_heads, qwen.head_dim) == (768, 32, 4, 128)
    assert (qwen.vocab_size, qwen.rope.theta, qwen.rms_norm_eps) == (151936, 1e6, 1e-6)
    assert qwen.qk_norm and qwen.router.renormalize and not any(spec.tie_word_embeddings for spec in specs.values())


def test_overrides_reach_the_key_that_the_family_uses():
    qwen = parse_model_config(shape_config("qwen3-30b-a3b", {"layers": 4, "experts": 32, "expert_intermediate": 64}))
    assert (qwen.num_layers, qwen.num_experts, qwen.moe_intermediate_size) == (4, 32, 64)
    assert qwen.intermediate_size == 6144
    mixtral = parse_model_config(shape_config("mixtral-8x7b", {"experts": 4, "expert_intermediate": 32}))
    assert (mixtral.num_experts, mixtral.moe_intermediate_size) == (4, 32)


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        ("qwen4", {}, "shape 'qwen4' is not known; known: qwen3-30b-a3b"),
        ("llama-8b", {"experts": 4}, "shape 'llama-8b' has no experts to override"),
        ("llama-8b", {"expert_intermediate": 4}, "has no expert intermediate to override"),
        ("llama-8b", {"width": 4}, "override 'width' is not known"),
        ("llama-8b", {"layers": 0}, "layers 0 is not a positive number"),
        ("llama-8b", {"vocab": 258}, "vocabulary size 258 is not between 259 and 1010459"),
        ("llama-8b", {"kv_heads": 5}, "32 attention heads cannot share 5"),
        ("mixtral-tiny", {"experts_per_token": 9}, "num_experts_per_tok 9 is not between 1 and 8"),
    ],
)
def test_impossible_dimensions_are_named(shape, overrides, message):
    with pytest.raises((CheckpointError, UnsupportedModelError)) as error:
        shape_config(shape, overrides)
    assert message in str(error.value)


@pytest.mark.parametrize("vocab_size", [259, 512, 8192, 32000])
def test_vocabulary_has_exactly_its_size_and_words_survive_a_round_trip(tmp_path, vocab_size):
    write_tokenizer(tokenizer_metadata(vocab_size), tmp_path, "test", 100)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == list(
        special_token_ids(vocab_size)
    )
    text = "Hello, wörld!\n\tdef f(x): return {x: 'banana'}"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    words = np.arange(456, num_text_tokens(vocab_size))
    ids = np.random.default_rng(0).permutation(words)[:500].tolist()
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_bytes_are_their_own_ids(tmp_path):
    write_tokenizer(tokenizer_metadata(300), tmp_path, "test", 100)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("Q! \n").ids == [ord(c) for c in "Q! \n"]
    assert tokenizer.encode("é").ids == list("é".encode())


def test_chat_template_ends_where_the_assistant_begins():
    template = ChatTemplate({"default": tokenizer_metadata(300)["tokenizer.chat_template"]}, {})
    text = template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_cosine_rises_with_locality_from_zero():
    cosines = [cosine_for_locality(x, 128, 8) for x in (0.0, 0.2, 0.5, 0.9)]
    assert cosines[0] == 0 and cosines == sorted(cosines) and cosines[-1] < 1


def test_cosine_gives_the_share_it_promises():
    cosine = cosine_for_locality(0.35, 64, 6)
    one, other = np.random.default_rng(5).standard_normal((2, 4000, 64))
    related = cosine * one + np.sqrt(1 - cosine**2) * other
    top = [np.argsort(-logits, axis=1)[:, :6] for logits in (one, related)]
    shared = (top[0][:, :, None] == top[1][:, None, :]).sum() / (4000 * 6)
    assert shared == pytest.approx(6 / 64 + 0.35 * (1 - 6 / 64), abs=0.01)


def test_impossible_locality_is_named():
    with pytest.raises(CheckpointError, match=r"locality 0.95 is not between 0 and 0.9"):
        cosine_for_locality(0.95, 128, 8)
    with pytest.raises(CheckpointError, match=r"locality 0.5 needs a choice of experts; the model uses 8 of 8"):
        cosine_for_locality(0.5, 8, 8)


@given(st.integers(260, 1500), st.integers(0, 3))
def test_walk_passes_every_ordinary_token_once_group_by_group(vocab_size, seed):
    walk = plan_walk(vocab_size, seed)
    num_text = num_text_tokens(vocab_size)
    assert np.array_equal(np.sort(walk.order), np.arange(num_text))
    groups = walk.order // GROUP_TOKENS
    assert (np.diff(groups) != 0).sum() == -(-num_text // GROUP_TOKENS) - 1
    token = int(walk.order[-1])
    following = walk.after(token, num_text)
    assert np.array_equal(following, walk.order)
    assert np.array_equal(walk.before(following[1:]), following[:-1])


def test_prompt_locality_is_the_share_of_steps_within_a_group():
    spec = parse_model_config(shape_config("qwen3-30b-a3b"))
    for locality, least, most in ((0.0, 0, 0.01), (0.5, 0.45, 0.55), (1.0, 0.98, 0.99)):
        tokens = benchmark_prompt(spec, 4096, locality, seed=1)
        assert tokens.shape == (4096,) and tokens.min() >= 0 and tokens.max() < num_text_tokens(spec.vocab_size)
        steps = np.diff(tokens // GROUP_TOKENS) == 0
        assert least <= steps.mean() <= most
    assert np.array_equal(benchmark_prompt(spec, 50, 0.5, 7), benchmark_prompt(spec, 50, 0.5, 7))
    assert not np.array_equal(benchmark_prompt(spec, 50, 0.5, 7), benchmark_prompt(spec, 50, 0.5, 8))
    assert benchmark_prompt(spec, 0, 0.5).size == 0
    with pytest.raises(CheckpointError, match=r"prompt locality 1.5"):
        benchmark_prompt(spec, 5, 1.5)
