"""Canonical messages: what leaves no trace, what stays in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freetoken.serving.canonical import IMAGE_PLACEHOLDER, canonicalise, strip_volatile, template_variables
from freetoken.serving.conversation import (
    Conversation,
    ImagePart,
    ReasoningPart,
    ReasoningRequest,
    TextPart,
    ToolCallPart,
    ToolReferencePart,
    ToolResultPart,
    Turn,
)
from freetoken.serving.template import ChatTemplate
from freetoken.serving.template_traits import TemplateTraits, probe
from freetoken.serving.tools import ToolGrammar, ToolSpec
from freetoken.testing.chat_templates import ALL

FULL = TemplateTraits(
    system_anywhere=True, tools=True, calls=True, results=True, results_alone=True, reasoning_field="reasoning_content"
)
STRICT = replace(FULL, system=False, system_anywhere=False, repeated_users=False, user_after_result=False)
BILLING = "x-anthropic-billing-header: cc_version=1.2.3.abc; cc_entrypoint=cli;"


def turn(role: Any, *parts: Any) -> Turn:
    return Turn(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def messages(*turns: Turn, traits: TemplateTraits = FULL, tools: tuple[ToolSpec, ...] = ()) -> list[dict[str, Any]]:
    return canonicalise(Conversation(turns, tools), traits).messages


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([BILLING, "a"], ["a"]),
        ([f"{BILLING}\n", "a"], ["a"]),
        ([f"{BILLING}\nmore"], [f"{BILLING}\nmore"]),
        ([f"Quote: {BILLING}"], [f"Quote: {BILLING}"]),
        (["<total_tokens>5 tokens left</total_tokens>", "a"], ["a"]),
        (["a\n<total_tokens>5 tokens left</total_tokens>\nb"], ["a\nb"]),
        (["say <total_tokens>5 tokens left</total_tokens>"], ["say <total_tokens>5 tokens left</total_tokens>"]),
        (["", "a"], ["", "a"]),
    ],
)
def test_volatile_lines(given: list[str], kept: list[str]) -> None:
    assert strip_volatile(given) == kept


def test_volatile_words_of_a_user_stay() -> None:
    assert messages(turn("user", BILLING))[0]["content"] == BILLING
    assert messages(turn("system", BILLING), turn("user", "x")) == [{"role": "user", "content": "x"}]


def test_late_system_messages_stay_in_their_place() -> None:
    turns = (turn("system", "s"), turn("user", "a"), turn("system", "late"), turn("assistant", "b"))
    assert [m["role"] for m in messages(*turns)] == ["system", "user", "system", "assistant"]
    marked = messages(*turns, traits=replace(FULL, system_anywhere=False))
    assert marked[2] == {"role": "user", "content": "<system>\nlate\n</system>"}
    merged = messages(*turns, traits=STRICT)
    assert merged[0] == {"role": "user", "content": "<system>\ns\n</system>\n\na\n\n<system>\nlate\n</system>"}
    assert [m["role"] for m in merged] == ["user", "assistant"]


def test_developers_are_system_unless_the_template_knows_them() -> None:
    turns = (turn("developer", "a"), turn("developer", "b"), turn("user", "c"))
    assert [m["role"] for m in messages(*turns, traits=replace(FULL, developer=True))] == ["developer"] * 2 + ["user"]
    one = messages(*turns, traits=replace(FULL, system_anywhere=False))
    assert one[0] == {"role": "system", "content": "a\n\nb"}


def test_calls_have_canonical_ids_and_their_keys_in_order() -> None:
    first = ToolCallPart("call_x", "ls", {"z": 1, "a": {"y": 2, "b": 3}})
    turns = (
        turn("user", "a"),
        turn("assistant", ReasoningPart("hm"), "text", first, ToolCallPart("call_y", "cat", "not json")),
        turn("tool", ToolResultPart.of_text("call_y", "2"), ToolResultPart.of_text("call_x", "1")),
        turn("user", "b"),
    )
    said = messages(*turns)
    assert said[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in said[1]["tool_calls"]] == ["000000001", "000000002"]
    assert list(said[1]["tool_calls"][0]["function"]["arguments"]) == ["z", "a"]
    assert said[1]["tool_calls"][1]["function"]["arguments"] == {"input": "not json"}
    assert [(m["tool_call_id"], m["name"], m["content"]) for m in said[2:4]] == [
        ("000000002", "cat", "2"),
        ("000000001", "ls", "1"),
    ]
    as_text = messages(*turns, traits=replace(FULL, arguments_as_text=True))
    assert as_text[1]["tool_calls"][0]["function"]["arguments"] == '{"z": 1, "a": {"y": 2, "b": 3}}'
    assert messages(*turns, traits=STRICT)[-1]["content"] == "1\n\nb"


def test_without_a_place_for_calls_they_are_written_out() -> None:
    traits = TemplateTraits()
    turns = (
        turn("user", "a"),
        turn("assistant", "I look.", ToolCallPart("c", "ls", {})),
        turn("tool", ToolResultPart.of_text("c", "x")),
    )
    said = messages(*turns, traits=traits, tools=(ToolSpec("ls", description="List."),))
    assert [m["role"] for m in said] == ["system", "user", "assistant", "user"]
    assert '"name": "ls", "description": "List."' in said[0]["content"]
    assert said[2]["content"] == 'I look.\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    assert said[3]["content"] == "<tool_response>\nx\n</tool_response>"


def test_deferred_tools_come_with_their_reference() -> None:
    tools = (ToolSpec("ls"), ToolSpec("later", description="Much later.", deferred=True))
    result = turn("tool", ToolResultPart("c", (ToolReferencePart("later"), ToolReferencePart("ls"))))
    call = turn("assistant", ToolCallPart("c", "search", {}))
    prompt = canonicalise(Conversation((turn("user", "a"), call, result), tools), FULL)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["ls"]
    text = prompt.messages[-1]["content"]
    assert "Much later." in text and "The tool ls is available." in text


def test_custom_tools_are_functions_of_one_text() -> None:
    tool = ToolSpec("patch", "custom", "Patches.", grammar=ToolGrammar("lark", "start: /x/"))
    definition = canonicalise(Conversation((turn("user", "a"),), (tool,)), FULL).tools[0]["function"]
    assert list(definition["parameters"]["properties"]) == ["input"]
    assert "start: /x/" in definition["parameters"]["properties"]["input"]["description"]


def test_images_have_a_placeholder() -> None:
    assert messages(turn("user", "see", ImagePart("image/png")))[0]["content"] == f"see\n{IMAGE_PLACEHOLDER}"


@pytest.mark.parametrize(
    ("request_", "known", "variables"),
    [
        (ReasoningRequest("off"), {"enable_thinking"}, {"enable_thinking": False}),
        (ReasoningRequest("on"), {"thinking"}, {"thinking": True}),
        (ReasoningRequest("auto", "high"), {"enable_thinking"}, {}),
        (ReasoningRequest("default", "xhigh"), {"reasoning_effort"}, {"reasoning_effort": "high"}),
        (ReasoningRequest("default", "minimal"), {"reasoning_effort"}, {"reasoning_effort": "low"}),
        (ReasoningRequest("default", "none"), {"enable_thinking", "reasoning_effort"}, {"enable_thinking": False}),
        (ReasoningRequest("off"), {"reasoning_effort"}, {"reasoning_effort": "low"}),
        (ReasoningRequest("on", None, 512), {"thinking_budget"}, {"thinking_budget": 512}),
        (ReasoningRequest(), {"enable_thinking", "reasoning_effort"}, {}),
    ],
)
def test_reasoning_reaches_only_templates_that_know_it(
    request_: ReasoningRequest, known: set[str], variables: dict[str, Any]
) -> None:
    assert template_variables(request_, frozenset(known)) == variables


def test_traits_are_seen_in_what_a_template_renders() -> None:
    traits = {name: probe(ChatTemplate({"default": source}, {})) for name, source in ALL.items()}
    assert [name for name, t in traits.items() if t.system_anywhere] == ["plain", "channels"]
    assert [name for name, t in traits.items() if not t.system] == ["strict"]
    assert [name for name, t in traits.items() if t.reasoning_field] == ["thinking", "opened"]
    assert [name for name, t in traits.items() if t.results_alone] == ["thinking", "opened"]
    assert [name for name, t in traits.items() if not t.shows_calls] == ["plain"]
    assert traits["strict"].arguments_as_text and not traits["strict"].repeated_users
    assert traits["channels"].call_closing == '"}<|call|>'
    nothing = probe(ChatTemplate({"default": "{{ raise_exception('no') }}"}, {}))
    assert not nothing.system and not nothing.tools
