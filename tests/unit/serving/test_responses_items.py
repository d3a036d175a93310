"""Input items and tool declarations of the Responses dialect."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from freetoken.serving.conversation import (
    ImagePart,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolReferencePart,
    ToolResultPart,
    Turn,
)
from freetoken.serving.errors import ApiError
from freetoken.serving.responses.items import input_items, join_turns, read_items
from freetoken.serving.responses.sealed import seal, unseal
from freetoken.serving.responses.tools import ToolTable, read_choice
from freetoken.serving.tools import ToolChoice, ToolGrammar, ToolSpec


def turns(*items: Any) -> list[Turn]:
    return read_items(items, ToolTable())


def text(value: str, role: Any = "user") -> Turn:
    return Turn(role, (TextPart(value),))


def test_messages_in_every_form() -> None:
    forms: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "user",
            "content": [{"type": "text", "text": "hi"}],
        },
    ]
    assert turns(*forms) == [text("hi")] * 4
    assert turns(*({**forms[0], "role": role} for role in ("system", "developer", "assistant"))) == [
        text("hi", "system"),
        text("hi", "developer"),
        text("hi", "assistant"),
    ]
    assert read_items(input_items("hi"), ToolTable()) == [text("hi")]


def test_roles_and_parts_that_nobody_knows_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = turns(
            {
                "role": "critic",
                "content": [{"type": "input_text", "text": "hm"}, {"type": "input_file", "filename": "a.pdf"}],
            },
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "web_search_call", "id": "ws_2", "status": "completed"},
            {"type": "brand_new_item", "secret": 1},
        )
    assert found == [Turn("user", (TextPart("hm"), TextPart("[input_file: a.pdf]")))]
    assert sum("type='web_search_call'" in record.getMessage() for record in caplog.records) == 1


def test_pictures_are_parts_of_their_own() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    assert turns({"role": "user", "content": [picture]}) == [Turn("user", (ImagePart("image/png"),))]
    output = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    assert turns(output) == [Turn("tool", (ToolResultPart("c", (ImagePart("image/png"),)),))]


def test_calls_keep_key_order_and_exact_numbers() -> None:
    arguments = '{"b": 1, "a": [123456789012345678901234567890, 1.0]}'
    (turn,) = turns({"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments, "namespace": "n"})
    (part,) = turn.parts
    assert isinstance(part, ToolCallPart) and isinstance(part.arguments, dict)
    assert list(part.arguments) == ["b", "a"]
    assert part.arguments["a"] == [123456789012345678901234567890, 1.0]
    assert (part.call_id, part.name, part.namespace, part.kind) == ("c", "f", "n", "function")


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 3000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    (turn,) = turns({"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments})
    (part,) = turn.parts
    assert isinstance(part, ToolCallPart) and part.arguments == arguments


def test_empty_arguments_are_an_empty_object() -> None:
    for given in ("", " ", None, {}):
        (turn,) = turns({"type": "function_call", "call_id": "c", "name": "f", "arguments": given})
        assert isinstance(turn.parts[0], ToolCallPart) and turn.parts[0].arguments == {}


def test_outputs_as_text_and_as_parts_are_the_same() -> None:
    plain = {"type": "function_call_output", "call_id": "c", "output": "done"}
    parts = {**plain, "output": [{"type": "input_text", "text": "done"}], "id": "fco_1", "status": "completed"}
    custom = {**plain, "type": "custom_tool_call_output"}
    assert turns(plain) == turns(parts) == turns(custom) == [Turn("tool", (ToolResultPart.of_text("c", "done"),))]
    (turn,) = turns({**plain, "output": {"exit": 0}})
    assert turn == Turn("tool", (ToolResultPart.of_text("c", '{"exit":0}'),))


def test_calls_of_other_kinds() -> None:
    found = turns(
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "id": "l", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "d", "output": "a"},
        {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "a", "stderr": ""}]},
    )
    assert [part for turn in found for part in turn.parts] == [
        ToolCallPart("c", "apply_patch", "*** Begin", kind="custom"),
        ToolCallPart("d", "local_shell", {"type": "exec", "command": ["ls"]}),
        ToolResultPart.of_text("d", "a"),
        ToolResultPart.of_text("e", '[{"stdout":"a","stderr":""}]'),
    ]


def test_one_answer_is_one_turn() -> None:
    found = join_turns(
        "be brief",
        turns(
            {"role": "user", "content": "go"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": ""},
        ),
    )
    assert [turn.role for turn in found] == ["system", "user", "assistant", "tool"]
    assert found[2].parts == (ReasoningPart("hm"), TextPart("ok"), ToolCallPart("c", "f", {}))


def test_reasoning_comes_from_what_we_sealed_then_content_then_summary() -> None:
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}]}
    content = {**summary, "content": [{"type": "reasoning_text", "text": "long"}]}
    sealed = {**content, "encrypted_content": seal("all of it")}
    foreign = {**content, "encrypted_content": "bW9jaw=="}
    texts = [
        turn.parts[0].text
        for turn in turns(summary, content, sealed, foreign)
        if isinstance(turn.parts[0], ReasoningPart)
    ]
    assert texts == ["short", "long", "all of it", "long"]
    assert turns({"type": "reasoning", "summary": [], "encrypted_content": "bW9jaw=="}) == []


@pytest.mark.parametrize("value", ["", "naïve 你好", "x" * 100_000])
def test_sealed_text_comes_back(value: str) -> None:
    assert unseal(seal(value)) == value
    assert unseal(seal(value)[:-8]) is None
    assert unseal("ftr1.AAAA") is None and unseal("ftr1.é") is None and unseal(value) is None


def test_an_empty_request_is_an_empty_message() -> None:
    assert join_turns(None, []) == (Turn("user", ()),)
    assert [turn.role for turn in join_turns("rules", [])] == ["system", "user"]


@pytest.mark.parametrize(
    ("item", "path"),
    [
        (5, "input[0]"),
        ({"content": "x"}, "input[0].type"),
        ({"type": 5}, "input[0].type"),
        ({"role": None, "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [5]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": 1, "name": "f"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "name": ""}, "input[0].name"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}, "input[0].arguments"),
        ({"type": "function_call", "call_id": "c", "name": "f", "namespace": 5}, "input[0].namespace"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "reasoning", "summary": 5}, "input[0].summary"),
        ({"type": "reasoning", "content": [{}]}, "input[0].content[0]"),
        ({"type": "additional_tools", "tools": 5}, "input[0].tools"),
        ({"type": "additional_tools", "tools": [{"type": "function"}]}, "input[0].tools[0].name"),
        ({"type": "shell_call", "call_id": "c", "action": "ls"}, "input[0].action"),
    ],
)
def test_mistakes_are_named(item: Any, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        turns(item)
    assert (caught.value.status, caught.value.param) == (400, path)
    assert path in caught.value.message


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}


def test_tools_of_every_kind(caplog: pytest.LogCaptureFixture) -> None:
    table = ToolTable()
    with caplog.at_level(logging.WARNING):
        table.add(
            [
                {"type": "function", "name": "run", "strict": False, "parameters": None},
                {"type": "namespace", "name": "agents", "description": "", "tools": [SPAWN, PATCH]},
                PATCH,
                {"type": "web_search", "external_web_access": True},
                {"type": "function", "name": "run", "description": "again"},
                {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}},
            ],
            "tools",
        )
    grammar = ToolGrammar("lark", "start: /x/")
    assert list(table.specs.values()) == [
        ToolSpec("run"),
        ToolSpec("spawn", schema=SPAWN["parameters"], namespace="agents"),  # type: ignore[arg-type]
        ToolSpec("apply_patch", "custom", "Edit files.", namespace="agents", grammar=grammar),
        ToolSpec("apply_patch", "custom", "Edit files.", grammar=grammar),
        ToolSpec("tool_search", description="find", schema={"type": "object"}),
    ]
    assert table.searches
    assert [shape["type"] for shape in table.declared] == ["function", "namespace", "custom", "tool_search"]
    assert [record.getMessage() for record in caplog.records] == [
        "event=tool_ignored request= type='web_search' path=tools[3]"
    ]


def test_a_function_called_tool_search_is_a_function() -> None:
    table = ToolTable()
    table.add([{"type": "function", "name": "tool_search"}], "tools")
    assert not table.searches


def test_tools_found_by_a_search_are_deferred() -> None:
    table = ToolTable()
    found = read_items(
        [
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "x"}},
            {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [SPAWN]},
        ],
        table,
    )
    assert found[0].parts == (ToolCallPart("c", "tool_search", {"query": "x"}),)
    assert found[1].parts == (ToolResultPart("c", (ToolReferencePart("spawn"),)),)
    assert [spec.deferred for spec in table.specs.values()] == [True]


def table_of(*names: str) -> ToolTable:
    table = ToolTable()
    table.add([{"type": "function", "name": name} for name in names], "tools")
    table.add([{"type": "namespace", "name": "agents", "tools": [SPAWN]}], "tools")
    return table


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ToolChoice("named", ("f",))),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", ("f",))),
        ({"type": "custom", "name": "g"}, ToolChoice("named", ("g",))),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, ToolChoice("named", ("spawn",))),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}],
            },
            ToolChoice("required", ("f",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, ToolChoice("none")),
    ],
)
def test_tool_choices(value: Any, choice: ToolChoice) -> None:
    assert read_choice(value, table_of("f", "g"))[0] == choice


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ("always", "tool_choice", "invalid_value"),
        (5, "tool_choice", "invalid_value"),
        ({"type": "function", "name": "h"}, "tool_choice", "invalid_value"),
        ({"type": "function"}, "tool_choice.name", "invalid_value"),
        ({"type": "web_search"}, "tool_choice", "unsupported_value"),
        ({"type": "allowed_tools", "mode": "named", "tools": []}, "tool_choice.mode", "invalid_value"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice.tools", "invalid_value"),
    ],
)
def test_tool_choices_that_cannot_be(value: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_choice(value, table_of("f", "g"))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_namesakes_of_two_namespaces_are_told_apart() -> None:
    table = table_of()
    table.add([{"type": "namespace", "name": "others", "tools": [SPAWN]}], "tools")
    choice, _ = read_choice({"type": "function", "name": "spawn", "namespace": "others"}, table)
    assert choice == ToolChoice("named", ("others__spawn",))
    with pytest.raises(ApiError, match="not among the tools"):
        read_choice({"type": "function", "name": "spawn"}, table)


def test_required_needs_tools() -> None:
    with pytest.raises(ApiError, match="no tools to call"):
        read_choice("required", ToolTable())


def test_sealed_reasoning_does_not_unpack_without_end() -> None:
    """A few bytes may unpack to very many; one request has one bound for all its items."""
    large = seal("a" * (10 * 1024**2))
    items = [{"type": "reasoning", "summary": [{"text": "short"}], "encrypted_content": large} for _ in range(3)]
    assert len(large) < 20_000
    lengths = [len(part.text) for turn in turns(*items) for part in turn.parts if isinstance(part, ReasoningPart)]
    assert lengths == [10 * 1024**2, 5, 5]
    assert unseal(seal("abc"), 2) is None and unseal(seal("abc"), 3) == "abc"
