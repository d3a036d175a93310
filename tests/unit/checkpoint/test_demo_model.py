"""The demo model: SmolLM2 from the GGUF of the ``[demo]`` extra, exactly, as a Mixture of Experts."""

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from freetoken.checkpoint.convert import open_source
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.resolve import find_demo_gguf, resolve_checkpoint
from freetoken.errors import CheckpointError

TEXTS = (
    "Hello, world! It's a test; don't WE'LL I'm.",
    "Grüße aus Köln: naïve café, e\u0301, ﬁ, Ǆ",
    "日本語のテキスト 한국어 русский العربية हिन्दी",
    "😀👍🏽 \u200d family: 👨‍👩‍👧",
    "\t\tdef f(x):\n    return x**2  # comment\r\n\n\n",
    "one 1 22 333, 4.5e-6; x1y2",
    "",
    " ",
    "   three spaces   ",
    "<|im_start|>user\nWhat is <|endoftext|>?<|im_end|>\n<repo_name>x<file_sep>",
    "nul \x00 and replacement \ufffd",
)


@pytest.fixture(scope="module")
def gguf_path():
    try:
        return find_demo_gguf()
    except CheckpointError as error:
        pytest.skip(f"needs the [demo] extra: {error}")


@pytest.fixture(scope="module")
def demo(gguf_path, tmp_path_factory):
    return FtwIndex.load(resolve_checkpoint("demo", str(tmp_path_factory.mktemp("cache"))))


@pytest.fixture(scope="module")
def reference(gguf_path):
    return {t.name: t for t in gguf.GGUFReader(gguf_path).tensors}


def dequantised(reference, name):
    tensor = reference[name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape[::-1]))


def half_split(weight, heads):
    """Undo GGUF's interleaving of rotary pairs."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def test_shape_of_the_model(demo):
    spec = demo.spec
    assert (spec.architecture, spec.num_layers, spec.num_experts, spec.num_experts_per_tok) == (
        "MixtralForCausalLM",
        30,
        8,
        8,
    )
    assert (spec.hidden_size, spec.moe_intermediate_size, spec.vocab_size) == (576, 192, 49152)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope.theta) == (9, 3, 64, 100000.0)
    assert spec.tie_word_embeddings and spec.rms_norm_eps == 1e-5 and spec.max_position_embeddings == 8192
    assert (spec.bos_token_id, spec.eos_token_ids, spec.dtype) == (1, (2,), "f32")


def test_every_weight_equals_the_gguf_package(demo, reference):
    pairs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for i in range(30):
        pairs[f"model.layers.{i}.input_layernorm.weight"] = f"blk.{i}.attn_norm.weight"
        pairs[f"model.layers.{i}.post_attention_layernorm.weight"] = f"blk.{i}.ffn_norm.weight"
        for mine, theirs in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "output")):
            pairs[f"model.layers.{i}.self_attn.{mine}.weight"] = f"blk.{i}.attn_{theirs}.weight"
    for name, theirs in pairs.items():
        expected = dequantised(reference, theirs)
        if "q_proj" in name or "k_proj" in name:
            expected = half_split(expected, 9 if "q_proj" in name else 3)
        np.testing.assert_array_equal(demo.read_tensor(name), expected, err_msg=name)
    routers = {f"model.layers.{i}.mlp.gate.weight" for i in range(30)}
    assert set(demo.tensors) == set(pairs) | routers
    assert not any(demo.read_tensor(name).any() for name in routers)
    for layer in range(30):
        gate, up, down = (dequantised(reference, f"blk.{layer}.ffn_{p}.weight") for p in ("gate", "up", "down"))
        for expert in range(8):
            columns = slice(expert * 192, expert * 192 + 192)
            g, u, d = demo.read_expert(layer, expert)
            np.testing.assert_array_equal(g, gate[columns])
            np.testing.assert_array_equal(u, up[columns])
            np.testing.assert_array_equal(d, down[:, columns] * 8)


def test_experts_add_up_to_the_dense_mlp(demo, reference):
    x = np.random.default_rng(0).standard_normal((4, 576))
    for layer in (0, 13, 29):
        gate, up, down = (dequantised(reference, f"blk.{layer}.ffn_{p}.weight") for p in ("gate", "up", "down"))

        def mlp(gate, up, down):
            z = x @ gate.T
            return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T

        dense = mlp(gate, up, down)
        routed = sum(mlp(*demo.read_expert(layer, expert)) / 8 for expert in range(8))
        assert np.abs(routed - dense).max() <= 1e-12 * np.abs(dense).max()


def test_the_source_is_the_dense_model(gguf_path):
    source = open_source(gguf_path)
    assert source.config["architectures"] == ["LlamaForCausalLM"] and source.config["intermediate_size"] == 1536
    assert len(source.tensors) == 272
    source.close()


@pytest.fixture(scope="module")
def oracle(gguf_path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)


def test_ids_equal_transformers_reading_the_same_gguf(demo, oracle):
    tokenizer = Tokenizer.from_file(str(demo.path / "tokenizer.json"))
    for text in TEXTS:
        expected = oracle(text).input_ids
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=False) == oracle.decode(expected)
    assert oracle.vocab_size == tokenizer.get_vocab_size() == 49152


def test_digits_stand_alone(demo):
    """SmolLM's own pre-tokenizer cuts at every digit, before white space is grouped: both spaces stay together."""
    tokenizer = Tokenizer.from_file(str(demo.path / "tokenizer.json"))
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.encode("x²").tokens == ["x", "Â²"]


def test_the_directory_works_as_a_tokenizer_of_transformers(demo, oracle):
    import transformers

    mine = transformers.AutoTokenizer.from_pretrained(demo.path)
    chat = [
        {"role": "user", "content": "Hi ü"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "?"},
    ]
    for prompt in (True, False):
        text = mine.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert text == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
        assert text.endswith("<|im_start|>assistant\n" if prompt else "<|im_end|>\n")
    assert (mine.bos_token, mine.eos_token, mine.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert mine.encode("hello") == oracle.encode("hello")
