"""Whatever the text and however it is cut: the same output; no partial calls; linear work."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.serving.parsers import OutputFormat, ToolCallDelta, ToolCallEnded, ToolCallStarted, format_named
from freetoken.serving.parsers.cursor import Cursor
from freetoken.serving.parsers.format import JsonCalls
from freetoken.serving.parsers.whole import parse_output
from freetoken.serving.tools import ToolSpec
from freetoken.testing.model_outputs import TOOLS, ModelOutput, call_formats, canonical_outputs, whole_output

OUTPUTS = list(canonical_outputs())
FORMATS = list(call_formats())


def _ids(value: Any) -> str:
    return value.label if isinstance(value, ModelOutput) else value.name


@pytest.mark.parametrize("output", OUTPUTS, ids=_ids)
def test_every_split_point(output: ModelOutput) -> None:
    whole = parse_output(output.format, TOOLS, output.prompt_tail, [output.text])
    assert (whole.reasoning, whole.text) == (output.reasoning, output.answer)
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == list(output.calls)
    for split in range(1, len(output.text)):
        pieces = [output.text[:split], output.text[split:]]
        assert parse_output(output.format, TOOLS, output.prompt_tail, pieces) == whole, split


@pytest.mark.parametrize("output", OUTPUTS, ids=_ids)
def test_cut_anywhere_no_call_is_told_in_part(output: ModelOutput) -> None:
    markup = {marker for form in output.format.calls for marker in (form.begin, form.end) if len(marker) > 2}
    for length in range(len(output.text)):
        cut = output.text[:length]
        pieces = [cut[: length // 2], cut[length // 2 :]]
        parsed = parse_output(output.format, TOOLS, output.prompt_tail, pieces, "length")
        assert parsed == parse_output(output.format, TOOLS, output.prompt_tail, [cut], "length")
        calls = [(name, json.loads(arguments)) for name, arguments in parsed.calls]
        assert calls == list(output.calls)[: len(calls)]
        assert output.answer.startswith(parsed.text.rstrip())
        assert output.reasoning.startswith(parsed.reasoning.rstrip())
        assert not any(marker in parsed.text for marker in markup)


@pytest.mark.parametrize("output", OUTPUTS, ids=_ids)
def test_cut_anywhere_and_called_a_stop_nothing_breaks(output: ModelOutput) -> None:
    for length in range(0, len(output.text), 3):
        cut = output.text[:length]
        parsed = parse_output(output.format, TOOLS, output.prompt_tail, [cut])
        pieces = [cut[i : i + 7] for i in range(0, length, 7)]
        assert parsed == parse_output(output.format, TOOLS, output.prompt_tail, pieces)
        for _, arguments in parsed.calls:
            assert isinstance(json.loads(arguments), dict)


def _fragments(format: OutputFormat) -> list[str]:
    """Pieces of the format's own markup and of everything else."""
    found = {*format.special_tokens, "<", "\n", " ", '{"name": "get_time", "arguments": {}}', '"', "}", "x", "Paris"}
    for form in format.calls:
        fields = [value for value in vars_of(form).values() if isinstance(value, str) and value]
        found.update(value for value in fields if "(?" not in value)
        if isinstance(form, JsonCalls):
            found.update(("get_time", "[ARGS]", "]", "[", "```json\n", ";"))
    for reasoning in format.reasoning:
        found.update((reasoning.begin, reasoning.end))
    if format.channels:
        found.update((" to=functions.get_time", "analysis", "final", "commentary", "assistant", " to=user", " to=self"))
        found.update((" to=get_time", *format.channels.ends))
        if format.channels.body:
            body = vars_of(format.channels.body).values()
            found.update(value for value in body if isinstance(value, str) and value and "(?" not in value)
    found.update(
        ('name="get_time"', 'name="city" string="true"', ' name="city">', "city", "get_weather", ">", "=", "`")
    )
    return sorted(found)


def vars_of(form: Any) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__dataclass_fields__}


@pytest.mark.parametrize("format", FORMATS, ids=_ids)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_markup_in_random_pieces(format: OutputFormat, data: st.DataObject) -> None:
    fragments = _fragments(format)
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=25)))
    reason = data.draw(st.sampled_from(("stop", "length")))
    tail = data.draw(st.sampled_from(("", format.turn_begin[0])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse_output(format, TOOLS, tail, [text], reason)
    assert parse_output(format, TOOLS, tail, pieces, reason) == whole
    assert parse_output(format, TOOLS, tail, list(text), reason) == whole


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcdef", min_size=1), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.call_syntax and f.call_syntax.body == "json"], ids=_ids)
@settings(max_examples=25, deadline=None)
@given(arguments=st.dictionaries(st.text("abc_", min_size=1, max_size=6), VALUES, max_size=4), seed=st.integers(0, 99))
def test_json_arguments_come_back(format: OutputFormat, arguments: dict[str, Any], seed: int) -> None:
    tail, text = whole_output(format, "", "", (("get_weather", arguments),))
    pieces, source, position = [], random.Random(seed), 0
    while position < len(text):
        end = position + source.randint(1, 12)
        pieces.append(text[position:end])
        position = end
    parsed = parse_output(format, TOOLS, tail, pieces)
    assert [(name, json.loads(text)) for name, text in parsed.calls] == [("get_weather", arguments)]
    assert (parsed.text, parsed.reasoning) == ("", "")


TAGGED = [f for f in FORMATS if f.call_syntax and f.call_syntax.body in ("tagged", "elements", "object")]


@pytest.mark.parametrize("format", TAGGED, ids=_ids)
@settings(max_examples=25, deadline=None)
@given(content=st.text(st.characters(codec="utf-8", exclude_characters="<|｜]["), max_size=40), mode=st.integers())
def test_typed_arguments_come_back(format: OutputFormat, content: str, mode: int) -> None:
    arguments = {"content": content, "mode": mode, "path": "1e5"}
    tail, text = whole_output(format, "", "", (("write_file", arguments),))
    parsed = parse_output(format, TOOLS, tail, list(text))
    assert [(name, json.loads(text)) for name, text in parsed.calls] == [("write_file", arguments)]


@pytest.mark.parametrize("format", FORMATS, ids=_ids)
def test_a_huge_argument_is_not_read_again_and_again(format: OutputFormat) -> None:
    line = 'value = call("x", [1, 2], {3: 4}) if a < b else c  # <tag> \\ 東京\n'
    arguments = {"path": "a.py", "content": line * 1600, "mode": 1}
    tail, text = whole_output(format, "", "", (("write_file", arguments),))
    parser = format.open(TOOLS, tail)
    events = []
    longest = 0
    for position in range(0, len(text), 4):
        events += parser.feed(text[position : position + 4])
        longest = max(longest, len(parser._cursor.waiting))
    events += parser.finish("stop")
    ended = [event for event in events if isinstance(event, ToolCallEnded)]
    assert [json.loads(event.arguments) for event in ended] == [arguments]
    # What is looked at again with each piece is bounded, so the work grows with the length only.
    assert longest < 200


def test_a_model_that_opens_calls_without_end_is_read_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = "]<]minimax[>["
    text = f'{prefix}<tool_call>{prefix}<invoke name="x">loose' * 500
    taken = 0
    take = Cursor.take

    def counting(cursor: Cursor, count: int) -> str:
        nonlocal taken
        taken += count
        return take(cursor, count)

    monkeypatch.setattr(Cursor, "take", counting)
    parsed = parse_output(format_named("minimax-m3"), TOOLS, "", [text[i : i + 5] for i in range(0, len(text), 5)])
    assert (parsed.text, parsed.calls) == (text, [])
    assert taken < 12 * len(text)


def test_calls_have_increasing_indexes_and_complete_events() -> None:
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    parser = format_named("qwen-json").open(TOOLS, "")
    events = parser.feed(call * 3)
    for index in range(3):
        assert events[3 * index : 3 * index + 3] == [
            ToolCallStarted(index, "get_time"),
            ToolCallDelta(index, "{}"),
            ToolCallEnded(index, "get_time", "{}"),
        ]
    assert parser.num_calls == 3
    assert parser.finish("stop") == []


def test_an_empty_custom_input_has_no_delta() -> None:
    tools = [ToolSpec("note", kind="custom")]
    parser = format_named("qwen-json").open(tools, "")
    events = parser.feed('<tool_call>{"name": "note", "arguments": {"input": ""}}</tool_call>')
    assert events == [ToolCallStarted(0, "note"), ToolCallEnded(0, "note", "")]


def test_text_goes_out_as_it_comes() -> None:
    parser = format_named("qwen-xml").open(TOOLS, "<|im_start|>assistant\n")
    pieces = ["Hel", "lo", " wor", "ld", " <", "tool", "s>", " ok"]
    shown = ["".join(event.text for event in parser.feed(piece)) for piece in pieces]
    assert shown == ["Hel", "lo", " wor", "ld", "", "", " <tools>", " ok"]
