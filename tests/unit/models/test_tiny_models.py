"""The tiny models are what they claim: diverse routing, no weight without effect, a tokenizer for any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.testing.tiny_models import (
    SPECIAL_TOKENS,
    TINY_MOE_MODELS,
    VOCAB_SIZE,
    build_tiny_model,
    write_tiny_tokenizer,
)

TOKENS = [5 + (i * 53) % 500 for i in range(40)]


@pytest.mark.parametrize("name", TINY_MOE_MODELS)
def test_routing_is_diverse(name: str) -> None:
    model = build_tiny_model(name)
    chosen: list[set[int]] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _module, _inputs, out: chosen.append(set(out[2].flatten().tolist())))
    with torch.no_grad():
        model(input_ids=torch.tensor([TOKENS]))
    spec = load_tiny_checkpoint(name).spec
    assert len(chosen) == len(spec.moe_layers)
    assert all(len(experts) >= 0.8 * spec.num_experts for experts in chosen)


@pytest.mark.parametrize("name", ["llama_bias_yarn", "mistral", "mixtral", "qwen3_moe_mixed"])
def test_every_parameter_matters(name: str) -> None:
    model = build_tiny_model(name)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for parameter_name, parameter in model.named_parameters():
            saved = parameter.clone()
            parameter.copy_(saved.roll(1, 0))
            change = (model(input_ids=ids).logits - before).abs().max()
            parameter.copy_(saved)
            assert change > 1e-4, parameter_name


def test_seeds_and_dtypes() -> None:
    first, again, other = (build_tiny_model("llama", seed=seed) for seed in (0, 0, 1))
    half = build_tiny_model("llama", dtype="bfloat16")
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert not torch.equal(tensor, other.state_dict()[name])
        assert torch.equal(tensor.bfloat16(), half.state_dict()[name])


def test_the_tokenizer_encodes_any_text_within_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert 300 < tokenizer.get_vocab_size() <= VOCAB_SIZE
    text = "Wörld 🦊\n\tdef f(x): return x  # ∑\x00"
    encoded = tokenizer.encode(text)
    assert max(encoded.ids) < VOCAB_SIZE and tokenizer.decode(encoded.ids) == text
    for token_id, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.token_to_id(token) == token_id

    config = json.loads((load_tiny_checkpoint("llama").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    chat = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
