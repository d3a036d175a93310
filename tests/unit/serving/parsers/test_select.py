"""Which format a model gets."""

from __future__ import annotations

import pytest

from freetoken.serving.parsers import format_for, format_named, render_calls
from freetoken.serving.parsers.select import FORMATS


@pytest.mark.parametrize(
    ("family", "template", "name"),
    [
        ("qwen3", '{{ \'<tool_call>\' }} {"name": ..., \\"arguments\\": ...}', "qwen-json"),
        ("qwen3", "<tool_call>\\n<function=x>\\n<parameter=y>", "qwen-xml"),
        ("qwen3_5_moe", "<tool_call>\\n<function=x>\\n<parameter=y>", "qwen-xml"),
        # Weights of one family, trained on the format of another.
        ("qwen3", "<｜tool▁calls▁begin｜>{{ name }}\\n```json", "deepseek-v3"),
        (None, "<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek-v3.1"),
        (None, "<｜DSML｜function_calls>", "deepseek-v3.2"),
        ("deepseek_v4", "<｜DSML｜tool_calls>", "deepseek-v4"),
        ("deepseek_v4", "<｜DSML｜ calls>", "deepseek-v4.1"),
        ("glm4_moe", "<tool_call>...<arg_key>...<arg_value>", "glm"),
        ("minimax_m2", "<minimax:tool_call>", "minimax-m2"),
        (None, "{%- set ns_token = ']<]minimax[>[' -%} <tool_call>", "minimax-m3"),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", "harmony"),
        (None, "<|start|>assistant to=self<|message|>...<|eom|>", "muse"),
        ("gemma4", '<|tool_call>call:... <|"|>', "gemma4"),
        ("llama", '<|start_header_id|>... "parameters"', "llama3"),
        ("llama", "[TOOL_CALLS] [", "mistral-list"),
        ("mistral", "[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("llama", "<|im_start|>", "plain"),
        ("qwen3", "{{ '<think>' }}", "plain-thinking"),
        (None, None, "plain"),
        ("deepseek_v4", None, "deepseek-v4"),
        ("unheard_of", None, "plain"),
    ],
)
def test_the_template_decides_and_the_family_helps(family: str | None, template: str | None, name: str) -> None:
    assert format_for(family, template).name == name


def test_without_a_template_the_vocabulary_is_asked() -> None:
    assert format_for("deepseek_v4", None, lambda token: token == "｜DSML｜").name == "deepseek-v4"
    assert format_for("deepseek_v4", None, lambda token: False).name == "plain"


def test_names_are_unique_and_known() -> None:
    assert len({format.name for format in FORMATS}) == len(FORMATS)
    assert all(format_named(format.name) is format for format in FORMATS)
    with pytest.raises(KeyError, match="no output format is called 'x'"):
        format_named("x")


def test_rendering_refuses_what_the_format_cannot_have() -> None:
    syntax = format_named("harmony").call_syntax
    assert syntax is not None
    with pytest.raises(ValueError, match="2 calls where the format has one"):
        render_calls(syntax, [("a", "{}"), ("b", "{}")])
