"""From a conversation to the messages and tools that a chat template renders: pure, and the same for the same meaning.

What a client changes between two requests without meaning anything by it (a string instead of one text block, cache
marks, other ids, re-serialised arguments) leaves no trace; what it says later never changes what was said before. So
the prompt of a turn begins with the prompt of the turn before it wherever the client's own words allow that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from freetoken.serving.conversation import (
    Conversation,
    ImagePart,
    Part,
    ReasoningPart,
    ReasoningRequest,
    TextPart,
    ToolCallPart,
    ToolReferencePart,
    ToolResultPart,
    Turn,
)
from freetoken.serving.json_depth import is_too_deep
from freetoken.serving.template_traits import TemplateTraits
from freetoken.serving.tools import ToolSpec
from freetoken.serving.toolset import Toolset

IMAGE_PLACEHOLDER = "[An image was here. This model cannot see images.]"
CUSTOM_FIELD = "input"
"""The one argument of a custom tool, as models see it: they know functions only."""

_BILLING_BLOCK = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\s*")
_TOKENS_LEFT_LINE = re.compile(
    r"^[ \t]*<total_tokens>[ \t]*[\d,]+ tokens left[ \t]*</total_tokens>[ \t]*(?:\n|\Z)", re.MULTILINE
)

FALLBACK_TOOLS_HEAD = (
    "# Tools\n\nYou may call functions to help with the user's request. Their definitions, JSON objects, one a line:\n"
    "<tools>\n"
)
FALLBACK_TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, write a JSON object with its name and arguments within tags, then stop:\n"
    '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class CanonicalPrompt:
    """What goes to the template. ``sources[i]`` is the assistant's turn behind ``messages[i]``, None for others."""

    messages: list[dict[str, Any]]
    sources: list[Turn | None]
    tools: list[dict[str, Any]]
    toolset: Toolset


def canonicalise(conversation: Conversation, traits: TemplateTraits, ordered_tools: bool = False) -> CanonicalPrompt:
    """``ordered_tools`` sorts the tools by name and the keys of their schemas, so that clients which shuffle them keep
    their prefix."""
    tools = tuple(_ordered(conversation.tools)) if ordered_tools else conversation.tools
    toolset = Toolset(tools, conversation.tool_choice)
    builder = _Builder(traits, toolset)
    for turn in conversation.turns:
        builder.add(turn)
    declared = [tool_definition(tool) for tool in toolset.visible]
    if declared and not traits.tools:
        builder.declare(declared)
        declared = []
    return CanonicalPrompt(builder.messages, builder.sources, declared, toolset)


def _ordered(tools: Iterable[ToolSpec]) -> Iterable[ToolSpec]:
    for tool in sorted(tools, key=lambda tool: (tool.name, tool.namespace or "")):
        schema = _sorted_keys(tool.schema)
        yield ToolSpec(tool.name, tool.kind, tool.description, schema, tool.namespace, tool.grammar, tool.deferred)


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value


def tool_definition(tool: ToolSpec) -> dict[str, Any]:
    """A tool as a function, in the form that templates expect."""
    description, schema = tool.description, tool.schema
    if tool.kind == "custom":
        field: dict[str, Any] = {"type": "string", "description": "The input as plain text."}
        if tool.grammar is not None:
            field["description"] = (
                f"The input as plain text. It must match this {tool.grammar.syntax} grammar:\n{tool.grammar.definition}"
            )
        schema = {"type": "object", "properties": {CUSTOM_FIELD: field}, "required": [CUSTOM_FIELD]}
    elif not schema:
        schema = {"type": "object", "properties": {}}
    function: dict[str, Any] = {"name": tool.name}
    if description:
        function["description"] = description
    function["parameters"] = dict(schema)
    return {"type": "function", "function": function}


def dump(value: Any) -> str:
    """JSON as templates write it: key order kept, no escapes but the needed ones."""
    return json.dumps(value, ensure_ascii=False)


def parsed_arguments(arguments: str, kind: str) -> Mapping[str, Any] | str:
    """A call's arguments as a client sends them back: an object, or text."""
    if kind == "custom":
        return arguments
    value = parse_object(arguments)
    return arguments if value is None else value


def parse_object(text: str) -> dict[str, Any] | None:
    """A JSON object, its keys in order and its integers exact; None for anything else, and for what no template could
    write again: NaN, lone surrogates, deep nesting."""
    try:
        if is_too_deep(orjson.loads(text)):
            return None
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def strip_volatile(texts: Sequence[str]) -> list[str]:
    """A system prompt's blocks without what changes on every request and says nothing to the model: a block that is
    nothing but the billing line, and lines that are nothing but the count of tokens left. Blocks that have become
    empty are dropped."""
    kept: list[str] = []
    for text in texts:
        if _BILLING_BLOCK.fullmatch(text):
            continue
        clean = _TOKENS_LEFT_LINE.sub("", text) if "<total_tokens>" in text else text
        if clean is text or clean.strip():
            kept.append(clean)
    return kept


def template_variables(request: ReasoningRequest, known: frozenset[str]) -> dict[str, Any]:
    """What a template is told about reasoning: only names it reads (``known``)."""
    effort = (request.effort or "").lower()
    mode = request.mode
    if effort in ("none", "off") and mode == "default":
        mode = "off"
    variables: dict[str, Any] = {}
    if mode in ("off", "on"):
        for name in ("enable_thinking", "thinking"):
            if name in known:
                variables[name] = mode == "on"
    if effort and mode != "off" and "reasoning_effort" in known:
        steps = {"minimal": "low", "low": "low", "medium": "medium"}
        variables["reasoning_effort"] = steps.get(effort, "high")
    if mode == "off" and "reasoning_effort" in known and not variables:
        variables["reasoning_effort"] = "low"
    if request.budget_tokens is not None and mode != "off" and "thinking_budget" in known:
        variables["thinking_budget"] = request.budget_tokens
    return variables


class _Builder:
    """Appends turns as messages; what was appended changes only where the template wants neighbours merged."""

    def __init__(self, traits: TemplateTraits, toolset: Toolset) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[Turn | None] = []
        self._traits = traits
        self._toolset = toolset
        self._ids: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._last_id = 0

    def add(self, turn: Turn) -> None:
        """Append one turn."""
        if turn.role in ("system", "developer"):
            texts = strip_volatile([self._text(part) for part in turn.parts])
            if texts:
                self._add_system(turn, "\n".join(texts))
        elif turn.role == "assistant":
            self._add_assistant(turn)
        else:
            self._add_user_or_tool(turn)

    # ---------------------------------------------------------------------------------------------- system

    def _add_system(self, turn: Turn, text: str) -> None:
        role = "developer" if turn.role == "developer" and self._traits.developer else "system"
        leading = all(message["role"] in ("system", "developer") for message in self.messages)
        if self._traits.system and leading and (not self.messages or self._traits.system_anywhere):
            self._append({**turn.extra, "role": role, "content": text})
        elif self._traits.system and leading:
            self.messages[-1]["content"] += f"\n\n{text}"
        elif self._traits.system_anywhere:
            self._append({**turn.extra, "role": role, "content": text})
        else:
            self._add_user(f"<system>\n{text}\n</system>", {})

    def declare(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        """Write the tools into the system prompt, for templates that have no place for them."""
        section = FALLBACK_TOOLS_HEAD + "\n".join(map(dump, definitions)) + FALLBACK_TOOLS_TAIL
        first = self.messages[0] if self.messages else None
        if first is not None and first["role"] in ("system", "developer"):
            first["content"] += f"\n\n{section}"
        elif self._traits.system:
            self.messages.insert(0, {"role": "system", "content": section})
            self.sources.insert(0, None)
        elif first is not None and first["role"] == "user":
            first["content"] = f"<system>\n{section}\n</system>\n\n{first['content']}"
        else:
            self.messages.insert(0, {"role": "user", "content": f"<system>\n{section}\n</system>"})
            self.sources.insert(0, None)

    # ------------------------------------------------------------------------------------------- assistant

    def _add_assistant(self, turn: Turn) -> None:
        text = "".join(part.text for part in turn.parts if isinstance(part, TextPart))
        reasoning = "".join(part.text for part in turn.parts if isinstance(part, ReasoningPart))
        calls = [part for part in turn.parts if isinstance(part, ToolCallPart)]
        message: dict[str, Any] = {**turn.extra, "role": "assistant", "content": text}
        if reasoning and self._traits.reasoning_field is not None:
            message[self._traits.reasoning_field] = reasoning
        if calls and self._traits.shows_calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        elif calls:
            written = [self._written_call(call) for call in calls]
            message["content"] = "\n".join([text, *written] if text else written)
        self._append(message, turn)

    def _call(self, call: ToolCallPart) -> dict[str, Any]:
        name, arguments = self._function(call)
        given: Any = dump(arguments) if self._traits.arguments_as_text else arguments
        call_id = self._new_id(call.call_id, name)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}

    def _written_call(self, call: ToolCallPart) -> str:
        name, arguments = self._function(call)
        self._new_id(call.call_id, name)
        body = dump({"name": name, "arguments": arguments})
        return f"<tool_call>\n{body}\n</tool_call>"

    def _function(self, call: ToolCallPart) -> tuple[str, dict[str, Any]]:
        name = self._toolset.flat_name(call.name, call.namespace)
        if isinstance(call.arguments, str):
            return name, {CUSTOM_FIELD: call.arguments}
        return name, dict(call.arguments)

    def _new_id(self, call_id: str, name: str) -> str:
        """Ids by order of appearance: clients rewrite them, and some templates take only nine characters."""
        self._last_id += 1
        own = f"{self._last_id:09d}"
        self._ids[call_id], self._names[call_id] = own, name
        return own

    # ---------------------------------------------------------------------------------------- user and tool

    def _add_user_or_tool(self, turn: Turn) -> None:
        texts: list[str] = []
        for part in turn.parts:
            if not isinstance(part, ToolResultPart):
                texts.append(self._text(part))
                continue
            if texts:
                self._add_user("\n".join(texts), turn.extra)
                texts = []
            self._add_result(part)
        if texts or not turn.parts:
            self._add_user("\n".join(texts), turn.extra)

    def _add_user(self, text: str, extra: Mapping[str, Any]) -> None:
        last = self.messages[-1] if self.messages else None
        apart = {"user": self._traits.repeated_users, "tool": self._traits.user_after_result}
        if last is not None and not apart.get(last["role"], True):
            last["content"] += f"\n\n{text}"
        else:
            self._append({**extra, "role": "user", "content": text})

    def _add_result(self, result: ToolResultPart) -> None:
        text = "\n".join(self._text(part) for part in result.content)
        if not self._traits.shows_calls:
            self._add_user(f"<tool_response>\n{text}\n</tool_response>", {})
            return
        name = self._names.get(result.call_id, "")
        own = self._ids.get(result.call_id, result.call_id)
        self._append({"role": "tool", "tool_call_id": own, "name": name, "content": text})

    def _text(self, part: Part) -> str:
        if isinstance(part, TextPart):
            return part.text
        if isinstance(part, ImagePart):
            return IMAGE_PLACEHOLDER
        if isinstance(part, ToolReferencePart):
            tool = self._toolset.by_name(self._toolset.flat_name(part.name))
            if tool is None or not tool.deferred:
                return f"The tool {part.name} is available."
            return f"The tool {part.name} is available from here on:\n{dump(tool_definition(tool))}"
        if isinstance(part, ReasoningPart):
            return part.text
        return ""

    def _append(self, message: dict[str, Any], source: Turn | None = None) -> None:
        self.messages.append(message)
        self.sources.append(source)
