"""Requests of POST /v1/chat/completions as conversations.

What is unknown (roles, kinds of parts and tools) is taken for its nearest meaning or left out with a warning, because
clients are newer than servers; what is malformed is an error that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from freetoken.serving.canonical import parse_object
from freetoken.serving.conversation import (
    Conversation,
    ImagePart,
    Part,
    ReasoningPart,
    ReasoningRequest,
    ResponseFormat,
    Role,
    Session,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from freetoken.serving.errors import bad_value, unsupported
from freetoken.serving.openai_schema import ChatRequest, Message, shown
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.template import RESERVED_NAMES
from freetoken.serving.tools import ToolChoice, ToolGrammar, ToolSpec

logger = logging.getLogger(__name__)

_ROLES: Mapping[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
_OWN_FIELDS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal", "cache_control"}
)


def warn_ignored(what: str, value: Any) -> None:
    """One line for each thing that was left out of a request."""
    logger.warning("event=request_part_ignored request=%s what=%s value=%s", REQUEST_ID.get(), what, shown(value))


def read_chat(fields: ChatRequest, raw: Mapping[str, Any], session: Session) -> Conversation:
    """The conversation of a request; ``raw`` is its body as it came. Raises ``ApiError`` (400)."""
    for name in fields.chat_template_kwargs or {}:
        if name in RESERVED_NAMES:
            raise bad_value(
                f"chat_template_kwargs must not set {name!r}; it has a field of its own", "chat_template_kwargs"
            )
    turns = [
        _turn(message, original, f"messages[{i}]")
        for i, (message, original) in enumerate(zip(fields.messages, raw["messages"], strict=True))
    ]
    tools = read_tools(fields.tools or [])
    return Conversation(
        turns=tuple(turns),
        tools=tools,
        tool_choice=_choice(fields.tool_choice, tools),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        reasoning=_reasoning(fields),
        response_format=_format(fields.response_format),
        template_variables=fields.chat_template_kwargs or {},
        session=session,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final=bool(fields.continue_final_message) and turns[-1].role == "assistant",
    )


def _turn(message: Message, original: Mapping[str, Any], path: str) -> Turn:
    extra = {key: value for key, value in original.items() if key not in _OWN_FIELDS and isinstance(value, str)}
    parts = _parts(message, path)
    if message.role in ("tool", "function"):
        content = tuple(part for part in parts if isinstance(part, (TextPart, ImagePart)))
        call_id = original.get("tool_call_id") or original.get("name") or ""
        return Turn("tool", (ToolResultPart(str(call_id), content),))
    role = _ROLES.get(message.role)
    if role is None:
        warn_ignored("role", message.role)
        role = "user"
    if role != "assistant":
        return Turn(role, tuple(parts), extra)
    for name in ("reasoning_content", "reasoning"):
        thought = original.get(name)
        if isinstance(thought, str) and thought:
            parts.insert(0, ReasoningPart(thought))
            break
    parts += [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or [])]
    return Turn(role, tuple(parts), extra)


def _parts(message: Message, path: str) -> list[Part]:
    content = message.content
    if isinstance(content, str):
        return [TextPart(content)] if content or message.role == "user" else []
    if content is None:
        if message.role in ("assistant", "tool", "function"):
            return []
        raise bad_value(f"{path}.content is required for role {message.role!r}", f"{path}.content")
    if not isinstance(content, list):
        raise bad_value(
            f"{path}.content is {shown(content)}: it must be a string or a list of parts", f"{path}.content"
        )
    return [read_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]


def read_part(part: Any, where: str) -> Part:
    """One part of a message's content. Raises 400 for what is no part at all."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad_value(f"{where} is {shown(part)}: it must be an object with a type", where)
    if kind in ("image_url", "image", "input_image"):
        return ImagePart()
    for field in ("text", "refusal", "thinking"):
        value = part.get(field)
        if isinstance(value, str):
            return ReasoningPart(value) if field == "thinking" else TextPart(value)
        if kind == field:
            raise bad_value(f"{where}.{field} is {shown(value)}: it must be a string", f"{where}.{field}")
    warn_ignored("content part", kind)
    return TextPart(f"[A part of type {kind[:40]!r} was here. This model cannot read it.]")


def _call(call: Mapping[str, Any], where: str) -> ToolCallPart:
    kind: Literal["function", "custom"] = "custom" if call.get("type") == "custom" else "function"
    body = call.get(kind)
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise bad_value(f"{where} is {shown(call)}: it must have a {kind} with a name", where)
    call_id = call.get("id")
    given = body.get("input" if kind == "custom" else "arguments", "")
    return ToolCallPart(
        call_id if isinstance(call_id, str) else "",
        body["name"],
        given if kind == "custom" and isinstance(given, str) else read_arguments(given),
        kind=kind,
    )


def read_arguments(given: Any) -> Mapping[str, Any] | str:
    """A call's arguments, which clients send as JSON text: an object, or the text where it is none."""
    if isinstance(given, dict):
        return given
    text = given if isinstance(given, str) else ""
    if not text.strip():
        return {}
    value = parse_object(text)
    return text if value is None else value


# ---------------------------------------------------------------------------------------------------------- tools


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Functions and custom tools; others are the business of servers that have them, and left out."""
    found: list[ToolSpec] = []
    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", tool.get("type", "function")
        if kind not in ("function", "custom"):
            warn_ignored("tool", kind)
            continue
        body = tool.get(kind, tool)
        if not isinstance(body, dict):
            raise bad_value(f"{where}.{kind} is {shown(body)}: it must be an object", where)
        name, description = body.get("name"), body.get("description")
        if not isinstance(name, str) or not name:
            raise bad_value(f"{where}.{kind}.name is {shown(name)}: it must be a string that is not empty", where)
        text = description if isinstance(description, str) else ""
        if kind == "custom":
            found.append(ToolSpec(name, "custom", text, grammar=_grammar(body.get("format"), where)))
            continue
        schema = body.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            raise bad_value(f"{where}.function.parameters is {shown(schema)}: it must be a JSON schema object", where)
        found.append(ToolSpec(name, "function", text, schema or {}))
    return tuple(found)


def _grammar(given: Any, where: str) -> ToolGrammar | None:
    if not isinstance(given, dict) or given.get("type") != "grammar":
        return None
    body = given.get("grammar", given)
    syntax = body.get("syntax") if isinstance(body, dict) else None
    definition = body.get("definition") if isinstance(body, dict) else None
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise bad_value(f"{where}: its grammar must have a syntax ('lark' or 'regex') and a definition", where)
    return ToolGrammar(syntax, definition)


def check_names(names: Sequence[str], tools: Sequence[ToolSpec]) -> None:
    """Raises 400 when the choice names a tool that is not declared."""
    declared = {tool.name for tool in tools}
    for name in names:
        if name not in declared:
            raise bad_value(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")


def _choice(given: Any, tools: Sequence[ToolSpec]) -> ToolChoice:
    if given is None or given in ("auto", "none"):
        return ToolChoice("none" if given == "none" else "auto")
    if given == "required":
        if not tools:
            raise bad_value("tool_choice is 'required', but there are no tools", "tool_choice")
        return ToolChoice("required")
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("function", "custom"):
        body = given.get(kind, given)
        name = body.get("name") if isinstance(body, dict) else None
        if isinstance(name, str):
            check_names([name], tools)
            return ToolChoice("named", (name,))
    if kind == "allowed_tools":
        return _allowed(given.get("allowed_tools", given), tools)
    raise bad_value(
        f"tool_choice is {shown(given)}: it must be 'auto', 'none', 'required', or name a tool", "tool_choice"
    )


def _allowed(body: Any, tools: Sequence[ToolSpec]) -> ToolChoice:
    names: list[str] = []
    listed = body.get("tools") if isinstance(body, dict) else None
    for entry in listed if isinstance(listed, list) else []:
        kind = entry.get("type") if isinstance(entry, dict) else None
        inner = entry.get(kind, entry) if isinstance(kind, str) else entry
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str):
            names.append(name)
    check_names(names, tools)
    mode = body.get("mode") if isinstance(body, dict) else None
    if mode not in ("auto", "required") or not names:
        raise bad_value("tool_choice.allowed_tools needs a mode ('auto' or 'required') and tools", "tool_choice")
    return ToolChoice("auto" if mode == "auto" else "required", tuple(names))


# -------------------------------------------------------------------------------------------- reasoning, format


def _reasoning(fields: ChatRequest) -> ReasoningRequest:
    """``reasoning_effort`` (OpenAI), ``thinking`` (DeepSeek, GLM) and ``reasoning`` (routers) ask for the same."""
    effort = fields.reasoning_effort
    budget: int | None = None
    mode: Literal["default", "off", "auto", "on"] = "default"
    thinking = (fields.thinking or {}).get("type")
    if thinking == "disabled":
        mode = "off"
    elif thinking == "enabled":
        mode = "on"
    routed = fields.reasoning or {}
    if isinstance(routed.get("effort"), str):
        effort = effort or routed["effort"]
    if isinstance(routed.get("max_tokens"), int):
        budget = routed["max_tokens"]
    if routed.get("enabled") is False or effort == "none":
        mode = "off"
    return ReasoningRequest(mode, effort, budget)


def _format(given: Mapping[str, Any] | None) -> ResponseFormat:
    if given is None:
        return ResponseFormat()
    kind = given.get("type")
    if kind == "text":
        return ResponseFormat()
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind == "json_schema":
        body = given.get("json_schema")
        schema = body.get("schema") if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(schema, (dict, bool)):
            raise bad_value(
                f"response_format.json_schema.schema is {shown(schema)}: it must be a JSON schema",
                "response_format.json_schema.schema",
            )
        strict, name = body.get("strict"), body.get("name")
        return ResponseFormat(
            "json_schema",
            schema,
            name=name if isinstance(name, str) else "",
            strict=strict if isinstance(strict, bool) else None,
        )
    if kind in ("regex", "grammar"):
        source = given.get("pattern" if kind == "regex" else "grammar")
        if not isinstance(source, str):
            raise bad_value(f"response_format of type {kind!r} is without its text", "response_format")
        return ResponseFormat("regex" if kind == "regex" else "grammar", source=source)
    raise unsupported(
        f"response_format is of type {shown(kind)}; it can be 'text', 'json_object', 'json_schema', 'regex' or "
        "'grammar'",
        "response_format",
    )
