"""Grammars of answers and tool calls for every family's format: what the family writes fits, nothing else does, and
what a model draws at random from the allowed tokens is parsed to calls that follow the tools' schemas."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken.grammar import Matcher
from freetoken.grammar.matcher import num_words
from freetoken.serving.constraints import Constraints
from freetoken.serving.conversation import ResponseFormat
from freetoken.serving.errors import ApiError
from freetoken.serving.parsers.format import OutputFormat
from freetoken.serving.parsers.render import render_calls
from freetoken.serving.parsers.select import FORMATS, PLAIN, format_named
from freetoken.serving.parsers.whole import parse_output
from freetoken.serving.tools import ToolChoice, ToolGrammar, ToolSpec
from freetoken.testing.tiny_models import IM_END_ID, VOCAB_SIZE, write_tiny_tokenizer

WEATHER = ToolSpec(
    "get_weather",
    schema={
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "São Paulo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "hourly": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
SHELL = ToolSpec(
    "run_shell",
    schema={
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
TOOLS = (WEATHER, SHELL)
WITH_CALLS = [output for output in FORMATS if output.call_syntax is not None]
NAMES = [output.name for output in WITH_CALLS]


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Constraints:
    """A vocabulary in which all markers are special tokens, as in the families' own."""
    directory: Path = tmp_path_factory.mktemp("vocabulary")
    write_tiny_tokenizer(directory)
    path = directory / "tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    known = {token["content"] for token in definition["added_tokens"]}
    first = len(definition["model"]["vocab"])
    markers = sorted({token for output in FORMATS for token in output.special_tokens} - known)
    for i, token in enumerate(markers):
        definition["added_tokens"].append(
            {"id": first + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": i % 2 == 0}
        )  # fmt: skip
    path.write_text(json.dumps(definition), encoding="utf-8")
    return Constraints(directory, VOCAB_SIZE + 200, (IM_END_ID,), None)


def prompt_of(output: OutputFormat) -> str:
    return "hello " + (output.turn_begin[0] if output.turn_begin else "")


def matcher_of(constraints: Constraints, output: OutputFormat, prompt: str = "", **wanted: Any) -> Matcher:
    constraint = constraints.build(output, prompt or prompt_of(output), **wanted)
    return Matcher(constraints.compiler, constraint, (IM_END_ID,))


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros(num_words(matcher.vocab_size), dtype=np.uint32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def takes(constraints: Constraints, matcher: Matcher, text: str) -> bool:
    """Whether ``text`` fits, by the longest tokens that are allowed, and may end there."""
    vocabulary, rest = constraints.compiler.vocabulary, text.encode()
    while rest:
        usable = ((vocabulary.text_of(i), i) for i in allowed(matcher) if i != IM_END_ID)
        word, token = max(((word, i) for word, i in usable if word and rest.startswith(word)), default=(b"", -1))
        if token < 0:
            return False
        matcher.advance([token])
        rest = rest[len(word) :]
    return matcher.is_complete


CALLS = [
    [("get_weather", {"city": "Paris", "days": 3})],
    [("get_weather", {"city": "São Paulo", "days": 14, "hourly": True})],
    [("run_shell", {"command": 'grep -n "a < b" x.py | head', "timeout": 2.5})],
    [("run_shell", {"command": "ls\n  -la"}), ("get_weather", {"city": "Paris", "days": 1})],
]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_fits_its_grammar(constraints: Constraints, name: str) -> None:
    output = format_named(name)
    assert output.call_syntax is not None
    for calls in CALLS:
        spelled = [(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in calls]
        if len(calls) > 1 and not output.call_syntax.parallel:
            continue
        text = render_calls(output.call_syntax, spelled) + output.call_syntax.ends_turn
        assert takes(constraints, matcher_of(constraints, output, tools=TOOLS, forced=True), text), text
        alone = takes(constraints, matcher_of(constraints, output, tools=TOOLS, forced=True, parallel=False), text)
        assert alone == (len(calls) == 1)


WRONG = [
    [("get_weather", {"city": "Rome", "days": 3})],
    [("get_weather", {"city": "Paris", "days": 99})],
    [("get_weather", {"city": "Paris"})],
    [("get_weather", {"city": "Paris", "days": 3, "extra": 1})],
    [("unknown", {"city": "Paris", "days": 3})],
]


@pytest.mark.parametrize("name", NAMES)
def test_what_breaks_a_schema_does_not_fit(constraints: Constraints, name: str) -> None:
    output = format_named(name)
    assert output.call_syntax is not None
    for calls in WRONG:
        text = render_calls(output.call_syntax, [(tool, json.dumps(arguments)) for tool, arguments in calls])
        assert not takes(constraints, matcher_of(constraints, output, tools=TOOLS, forced=True), text), text
    for text in ("", "Hello", "I shall call a tool."):
        assert not takes(constraints, matcher_of(constraints, output, tools=TOOLS, forced=True), text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_are_parsed_and_follow_the_schema(constraints: Constraints, name: str, seed: int) -> None:
    output = format_named(name)
    vocabulary, choose = constraints.compiler.vocabulary, random.Random(seed)
    prompt, opener = prompt_of(output), b""
    if output.reasoning:
        prompt += output.reasoning[0].begin + output.reasoning[0].end
    elif output.channels is not None:  # as far as nothing else begins so
        opener = (f"{output.channels.channel}a" if output.channels.channel else " to=s").encode()
    matcher = matcher_of(constraints, output, prompt, tools=(WEATHER,), forced=True, parallel=False)
    text = b""
    for _ in range(300):
        can = {i for i in allowed(matcher) if not opener or not (text + vocabulary.text_of(i)).startswith(opener)}
        blank = {i for i in can if vocabulary.text_of(i).isspace()}
        token = choose.choice(sorted(can - blank or can))
        if token == IM_END_ID:
            break
        text += vocabulary.text_of(token)
        matcher.advance([token])
    else:
        raise AssertionError(text)
    found = parse_output(output, (WEATHER,), prompt, [text.decode()])
    assert [tool for tool, _ in found.calls] == ["get_weather"], text
    arguments = json.loads(found.calls[0][1])
    assert arguments["city"] in ("Paris", "São Paulo") and 1 <= arguments["days"] <= 14
    assert set(arguments) <= {"city", "days", "hourly"} and isinstance(arguments.get("hourly", True), bool)


@pytest.mark.parametrize("name", [output.name for output in FORMATS if output.reasoning])
def test_reasoning_before_a_call_is_free_wherever_it_begins(constraints: Constraints, name: str) -> None:
    output = format_named(name)
    assert output.call_syntax is not None
    pair = output.reasoning[0]
    call = render_calls(output.call_syntax, [("run_shell", '{"command": "ls"}')])
    wanted: dict[str, Any] = {"tools": TOOLS, "forced": True}
    turn = prompt_of(output)
    for prompt, text in [
        (turn, call),
        (turn, f"{pair.begin}\nhm, {{}} or\n{pair.end}\n\n{call}"),
        (f"{turn}{pair.begin}\n", f"hm{pair.end}\n\n{call}"),
        (f"{turn}{pair.begin}\n\n{pair.end}\n\n", call),
    ]:
        assert takes(constraints, matcher_of(constraints, output, prompt, **wanted), text), (prompt, text)
    assert not takes(constraints, matcher_of(constraints, output, f"{turn}{pair.begin}\n", **wanted), "hm")
    assert not takes(constraints, matcher_of(constraints, output, f"{turn}{pair.begin}{pair.end}", **wanted), "hm")


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("output", [*FORMATS, PLAIN], ids=lambda output: output.name)
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["alone", "with-tools"])
def test_a_schema_binds_the_answer_and_leaves_calls_possible(
    constraints: Constraints, output: OutputFormat, tools: tuple[ToolSpec, ...]
) -> None:
    wanted = {"response_format": ResponseFormat("json_schema", SCHEMA), "tools": tools}
    header, channels = "", output.channels
    if channels is not None:
        header = f"{channels.channel}final{channels.message}" if channels.channel else f" to=user{channels.message}"
    assert takes(constraints, matcher_of(constraints, output, **wanted), header + '{"title": "A \\"b\\""}')
    assert not takes(constraints, matcher_of(constraints, output, **wanted), header + '{"name": "x"}')
    assert not takes(constraints, matcher_of(constraints, output, **wanted), header + "Title")
    if output.call_syntax is not None:
        call = render_calls(output.call_syntax, [("run_shell", '{"command": "ls"}')]) + output.call_syntax.ends_turn
        bare = (output.call_syntax.section_begin + output.call_syntax.begin).startswith("{")  # as answers are
        assert takes(constraints, matcher_of(constraints, output, **wanted), call) == (bool(tools) and not bare)
    if channels is not None:
        first = f"{channels.channel}analysis" if channels.channel else " to=self"
        thoughts = f"{first}{channels.message}so{channels.ends[0]}{channels.start}assistant"
        assert takes(constraints, matcher_of(constraints, output, **wanted), thoughts + header + '{"title": ""}')


def test_other_answers(constraints: Constraints) -> None:
    for wanted, good, bad in [
        (ResponseFormat("json_object"), '{"a": [1, {}]}', "[1]"),
        (ResponseFormat("regex", source="[ab]/c"), "a/c", "c/c"),
        (ResponseFormat("grammar", source='start: "x" A\nA: /[0-9]+/'), "x12", "xx"),
        (ResponseFormat("json_schema", True), "[1, null]", "x"),
    ]:
        assert takes(constraints, matcher_of(constraints, PLAIN, response_format=wanted), good)
        assert not takes(constraints, matcher_of(constraints, PLAIN, response_format=wanted), bad)


async def test_requests_without_a_wish_are_free(constraints: Constraints) -> None:
    output = format_named("qwen-json")
    for mode in ("auto", "none"):
        assert await constraints.for_request(output, "", tools=TOOLS, choice=ToolChoice(mode)) is None
    forced = await constraints.for_request(output, prompt_of(output), tools=TOOLS, choice=ToolChoice("required"))
    assert forced is not None and forced.free_until == "</think>" and forced.free_opener == "<think>"
    bound = await constraints.for_request(
        output, "", response_format=ResponseFormat("json_object"), tools=TOOLS, choice=ToolChoice("none")
    )
    assert bound is not None and "run_shell" not in bound.text


@pytest.mark.parametrize("name", ["qwen-xml", "glm", "minimax-m2", "qwen-json"])
def test_a_custom_tool_and_its_grammar(constraints: Constraints, name: str) -> None:
    output = format_named(name)
    assert output.call_syntax is not None
    for grammar in (
        ToolGrammar("lark", 'start: "*** " WORD\nWORD: /[a-z]+/'),
        ToolGrammar("regex", "\\*\\*\\* [a-z]+"),
    ):
        tool = ToolSpec("patch", "custom", grammar=grammar)
        for value, fits in (("*** begin", True), ("nonsense 1", False)):
            text = render_calls(output.call_syntax, [("patch", json.dumps({"input": value}))])
            matcher = matcher_of(constraints, output, tools=(tool,), forced=True)
            enforced = output.call_syntax.body != "json" or grammar.syntax == "regex"
            assert takes(constraints, matcher, text) == (fits or not enforced), text


def test_tool_schemas_that_cannot_be_enforced_are_relaxed(
    constraints: Constraints, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?!x)y"}}, "required": ["a"]}
    tools = (
        ToolSpec("one", schema={"type": "object", "properties": {"a": {"not": {"type": "string"}}}}),
        ToolSpec("two", schema=odd),
        ToolSpec("three", schema={}),
    )
    output = format_named("qwen-json")
    for call in (("one", '{"a": 1}'), ("two", '{"a": "x"}'), ("three", '{"b": {}}')):
        assert output.call_syntax is not None
        text = render_calls(output.call_syntax, [call])
        assert takes(constraints, matcher_of(constraints, output, tools=tools, forced=True), text)
    assert "tool_schema_relaxed tool='one'" in caplog.text and "tool_schema_ignored tool='two'" in caplog.text


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


REFUSED = [
    ({"not": {}}, ".not", "'not' cannot be enforced"),
    ({"properties": {"a": {"items": {"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}}}},
     ".properties.a.items.anyOf[1].uniqueItems", "uniqueItems"),
    ({"properties": {"a/b": {"type": "string", "pattern": "(?=x)"}}}, ".properties.a/b", "look-around"),
    ({"properties": {"a": {"type": "strin"}}}, ".properties.a", "Invalid type: strin"),
    ({"properties": {"a": {"type": "string", "format": "zz"}}}, ".properties.a", "Unknown format: zz"),
    ({"properties": {"a": {"$ref": "http://x/y"}}}, ".properties.a", "http://x/y"),
    ({"properties": {"a": {"$ref": "#/$defs/no"}}}, ".properties.a", "'/$defs/no' does not exist"),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"x": {"$ref": "#/$defs/n"}, "y": {"contains": {}}}}}},
     ".$defs.n.properties.y.contains", "contains"),
    ({"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, ".properties.a", "use 'anyOf'"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "", "no text"),
    ({"enum": []}, "", "Unsatisfiable"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "", "'z' is unsatisfiable"),
    ({"type": "object", "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}}, "required": ["a"]},
     "", "'a' is unsatisfiable"),
    (nested(80), ".properties.a", "limit of 64"),
    ({"enum": [f"value {i}" for i in range(100_000)]}, "", "limit"),
    ({"description": "x" * 600_000}, "", "limit of 524288"),
    ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)]},
     "", "too large"),
    ([1], "", "not list"),
    ("x", "", "not str"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "reason"), REFUSED)
async def test_schemas_that_cannot_be_enforced_are_refused_with_the_place(
    constraints: Constraints, schema: Any, path: str, reason: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await constraints.for_request(
            PLAIN, "", response_format=ResponseFormat("json_schema", schema), format_param="text.format.schema"
        )
    error = caught.value
    assert error.status == 400 and error.message.startswith(f"text.format.schema{path}"), error
    assert reason in error.message and len(error.message) < 800


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (ResponseFormat("regex", source="(?<=a)b"), "look-around"),
        (ResponseFormat("regex", source="("), "unclosed"),
        (ResponseFormat("grammar", source="start: nothing"), "unknown name"),
        (ResponseFormat("grammar", source=""), ""),
        (ResponseFormat("grammar", source="start: start"), "no text"),
        (ResponseFormat("regex", source="x" * 600_000), "limit of 524288"),
    ],
)
async def test_wrong_grammars_are_refused(constraints: Constraints, wanted: ResponseFormat, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        await constraints.for_request(PLAIN, "", response_format=wanted, format_param="response_format.grammar")
    assert caught.value.status == 400 and reason in caught.value.message
    assert "response_format.grammar cannot be enforced" in caught.value.message


async def test_a_tokenizer_that_grammars_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "unheard of"}}', encoding="utf-8")
    broken = Constraints(tmp_path, VOCAB_SIZE, (IM_END_ID,), None)
    with pytest.raises(ApiError, match="this model's tokenizer"):
        await broken.for_request(PLAIN, "", response_format=ResponseFormat("json_object"))


async def test_a_call_that_cannot_be_forced(constraints: Constraints) -> None:
    for output, tools in ((PLAIN, TOOLS), (format_named("glm"), ())):
        with pytest.raises(ApiError, match="tool_choice"):
            await constraints.for_request(output, "", tools=tools, choice=ToolChoice("required"))
