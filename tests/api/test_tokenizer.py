"""Tokenizer and chat template, against transformers where that is the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from freetoken.errors import CheckpointError
from freetoken.serving.template import ChatTemplate, TemplateRefusedError
from freetoken.serving.tokenizer import RELEASING_CHARACTERS, GenerationDefaults, load_text_model
from freetoken.testing.front_fakes import write_text_checkpoint

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "größe 你好 <|im_end|>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": {"ü": "<&>"}}}}]

TEMPLATES = {
    "loops": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content | trim }}\n{% endfor %}",
    "tools": "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}"
    "{% endif %}{{ messages | tojson }}{{ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "whitespace": "{% for m in messages %}\n    {% if m.content %}\n  {{ m.content }}\n    {% endif %}\n"
    "{% endfor %}\nend",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ 'on' if thinking is defined and thinking else 'off' }}{{ unknown }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers_does(name: str, tools: list[dict[str, Any]] | None, checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    template = ChatTemplate({"default": TEMPLATES[name]}, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    expected = reference.apply_chat_template(
        MESSAGES, tools=tools, chat_template=TEMPLATES[name], tokenize=False, thinking=True
    )
    assert template.render(MESSAGES, tools, False, {"thinking": True}) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[0] }}", "SecurityError"),
    ],
)
def test_a_refusal_is_one_error(source: str, reason: str) -> None:
    with pytest.raises(TemplateRefusedError, match=reason):
        ChatTemplate({"default": source}, {}).render(MESSAGES)


def test_tool_use_template_is_chosen_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, TOOLS) == "tools"


def test_deep_nesting_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateRefusedError, match="nested too deeply"):
        ChatTemplate({"default": "{{ tools | tojson }}"}, {}).render(MESSAGES, [{"x": deep}])
    while deep:  # taken apart by hand: the interpreter's own way is as deep
        deep = deep.pop()


def test_broken_template_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        load_text_model(write_text_checkpoint(tmp_path, "{% for %}"))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_text_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_text_model(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 0], "repetition_penalty": "much"}
    model = load_text_model(write_text_checkpoint(tmp_path, generation_config=config))
    assert model.defaults == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, eos_token_ids=(2, 0))


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("processor", [True, False])
def test_specials_around_a_prompt_follow_transformers(tmp_path: Path, flag: bool | None, processor: bool) -> None:
    transformers = pytest.importorskip("transformers")
    write_text_checkpoint(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = RawTokenizer.from_file(str(path))
    if processor:
        raw.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", 1)]
        )
    raw.enable_truncation(3)
    raw.save(str(path))
    config: dict[str, Any] = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if flag is not None:
        config["add_bos_token"] = flag
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_text_model(tmp_path).tokenizer
    text = "hello <|im_end|> world, quick brown fox"
    reference.backend_tokenizer.no_truncation()
    expected = reference.encode(text)
    if flag and not processor:
        expected.insert(0, 1)  # transformers 4 honours the flag, 5 ignores it; the models mean it
    assert ours.encode(text, add_special_tokens=True) == expected
    assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    assert 2 in ours.encode(text, add_special_tokens=False)


def test_tokens_known_only_to_the_configuration(tmp_path: Path) -> None:
    write_text_checkpoint(tmp_path)
    size = load_text_model(tmp_path).tokenizer.vocab_size
    config = {"added_tokens_decoder": {str(size): {"content": "<think>", "special": False}}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_text_model(tmp_path).tokenizer
    assert tokenizer.encode("<think>", add_special_tokens=False) == [size]
    assert tokenizer.decode([size]) == "<think>"


@pytest.mark.parametrize("specials", [True, False])
def test_long_texts_have_the_ids_of_their_parts(tokenizer: Any, specials: bool) -> None:
    """However long a text is, and in whatever way it is encoded."""
    words = "the quick größe 你好 😀 0123 <|im_end|> fox\n"
    parts = [words * n for n in (1, 10, 40)]
    for part in parts:
        raw = tokenizer._raw.encode(part, add_special_tokens=specials).ids
        assert tokenizer.encode(part, specials) == raw
    assert max(map(len, parts)) > RELEASING_CHARACTERS > min(map(len, parts))
