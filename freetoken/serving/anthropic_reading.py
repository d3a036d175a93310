"""Requests of the Anthropic dialect as conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from freetoken.serving.anthropic_schema import CountTokensRequest
from freetoken.serving.chat_reading import check_names, warn_ignored
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
    ToolReferencePart,
    ToolResultPart,
    Turn,
)
from freetoken.serving.errors import bad_value, unsupported
from freetoken.serving.openai_schema import shown
from freetoken.serving.tools import ToolChoice, ToolSpec


def read_messages(fields: CountTokensRequest, session: Session) -> Conversation:
    """The conversation of a request. Raises ``ApiError`` (400)."""
    turns: list[Turn] = []
    if fields.system:
        parts = _blocks(fields.system, "system")
        turns.append(Turn("system", tuple(part for part in parts if isinstance(part, TextPart))))
    for i, message in enumerate(fields.messages):
        turns += _turns(message, f"messages[{i}]")
    tools = _tools(fields.tools or [])
    choice, parallel = _choice(fields.tool_choice, tools)
    last = turns[-1]
    return Conversation(
        turns=tuple(turns),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        reasoning=_reasoning(fields),
        response_format=_format(fields),
        session=session,
        continue_final=last.role == "assistant" and bool(last.parts) and isinstance(last.parts[-1], TextPart),
    )


def _turns(message: Mapping[str, Any], path: str) -> list[Turn]:
    """A user's message with results becomes several turns, in the order of its blocks."""
    given = message.get("role")
    if not isinstance(given, str) or not given:
        raise bad_value(f"{path}.role is {shown(given)}: it must be a string", f"{path}.role")
    roles: Mapping[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
    role = roles.get(given)
    if role is None:
        warn_ignored("role", given)
        role = "user"
    if "content" not in message:
        raise bad_value(f"{path}.content is required", f"{path}.content")
    parts = _blocks(message["content"], f"{path}.content")
    if role == "assistant":
        return [Turn(role, tuple(part for part in parts if not isinstance(part, ToolResultPart)))]
    turns: list[Turn] = []
    for part in parts:
        if isinstance(part, ToolCallPart):
            continue
        kind: Role = "tool" if isinstance(part, ToolResultPart) else role
        if turns and turns[-1].role == kind:
            turns[-1] = Turn(kind, (*turns[-1].parts, part))
        else:
            turns.append(Turn(kind, (part,)))
    return turns or [Turn(role)]


def _blocks(content: Any, path: str) -> list[Part]:
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    if content is None:
        return []
    if not isinstance(content, list):
        raise bad_value(f"{path} is {shown(content)}: it must be a string or a list of blocks", path)
    parts: list[Part] = []
    for i, block in enumerate(content):
        part = _block(block, f"{path}[{i}]")
        if part is not None:
            parts.append(part)
    return parts


def _text_of(block: Mapping[str, Any], field: str, path: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise bad_value(f"{path}.{field} is {shown(value)}: it must be a string", f"{path}.{field}")
    return value


def _block(block: Any, path: str) -> Part | None:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise bad_value(f"{path} is {shown(block)}: it must be an object with a type", path)
    if kind == "text":
        text = _text_of(block, "text", path)
        return TextPart(text) if text else None
    if kind == "thinking":
        thought, signature = block.get("thinking"), block.get("signature")
        if not isinstance(thought, str) or not thought:
            return None
        return ReasoningPart(thought, signature if isinstance(signature, str) else "")
    if kind == "redacted_thinking":
        return None
    if kind == "tool_use":
        given = block.get("input")
        arguments = given if isinstance(given, (dict, str)) else {}
        return ToolCallPart(_text_of(block, "id", path), _text_of(block, "name", path), arguments)
    if kind == "tool_result":
        content = tuple(
            part
            for part in _blocks(block.get("content"), f"{path}.content")
            if isinstance(part, (TextPart, ImagePart, ToolReferencePart))
        )
        is_error = block.get("is_error")
        return ToolResultPart(
            _text_of(block, "tool_use_id", path), content, is_error if isinstance(is_error, bool) else None
        )
    if kind == "image":
        return ImagePart()
    if kind == "tool_reference":
        return ToolReferencePart(_text_of(block, "tool_name", path))
    return _other_block(block, kind)


def _other_block(block: Mapping[str, Any], kind: str) -> Part | None:
    """Documents and search results carry text; what servers' own tools said is of no use here."""
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and isinstance(source.get("data"), str):
        if source.get("type") == "text":
            return TextPart(source["data"])
    elif kind == "search_result" and isinstance(block.get("content"), list):
        texts = [item.get("text") for item in block["content"] if isinstance(item, dict)]
        return TextPart("\n".join(text for text in texts if isinstance(text, str)))
    warn_ignored("content block", kind)
    return TextPart(f"[A block of type {kind[:40]!r} was here. This model cannot read it.]")


def _tools(tools: list[dict[str, Any]]) -> tuple[ToolSpec, ...]:
    found: list[ToolSpec] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            warn_ignored("server tool", kind)
            continue
        name, description, schema = tool.get("name"), tool.get("description"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            raise bad_value(
                f"tools[{i}].name is {shown(name)}: it must be a string that is not empty", f"tools[{i}].name"
            )
        if schema is not None and not isinstance(schema, dict):
            raise bad_value(
                f"tools[{i}].input_schema is {shown(schema)}: it must be a JSON schema object",
                f"tools[{i}].input_schema",
            )
        found.append(
            ToolSpec(
                name,
                "function",
                description if isinstance(description, str) else "",
                schema or {},
                deferred=tool.get("defer_loading") is True,
            )
        )
    return tuple(found)


def _choice(given: Mapping[str, Any] | None, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, bool]:
    if given is None:
        return ToolChoice(), True
    parallel = given.get("disable_parallel_tool_use") is not True
    kind, name = given.get("type"), given.get("name")
    if kind in ("auto", "none"):
        return ToolChoice("auto" if kind == "auto" else "none"), parallel
    if kind == "any":
        if not tools:
            raise bad_value("tool_choice is 'any', but there are no tools", "tool_choice")
        return ToolChoice("required"), parallel
    if kind == "tool" and isinstance(name, str):
        check_names([name], tools)
        return ToolChoice("named", (name,)), parallel
    raise bad_value(
        f"tool_choice is {shown(dict(given))}: its type must be 'auto', 'any', 'none', or 'tool' with a name",
        "tool_choice",
    )


def _reasoning(fields: CountTokensRequest) -> ReasoningRequest:
    thinking, config = fields.thinking or {}, fields.output_config or {}
    kind, budget, effort = thinking.get("type"), thinking.get("budget_tokens"), config.get("effort")
    mode: Literal["default", "off", "auto", "on"] = "default"
    if kind == "enabled":
        mode = "on"
    elif kind == "disabled":
        mode = "off"
    elif kind == "adaptive":
        mode = "auto"
    elif kind is not None:
        warn_ignored("thinking", kind)
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise bad_value(
            f"thinking.budget_tokens is {shown(budget)}: it must be an integer of at least 1", "thinking.budget_tokens"
        )
    return ReasoningRequest(mode, effort if isinstance(effort, str) else None, budget)


def _format(fields: CountTokensRequest) -> ResponseFormat:
    given = (fields.output_config or {}).get("format") or fields.output_format
    if given is None:
        return ResponseFormat()
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "json_schema":
        raise unsupported(
            f"output_config.format is {shown(given)}; its type can only be 'json_schema'", "output_config.format"
        )
    schema = given.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise bad_value(
            f"output_config.format.schema is {shown(schema)}: it must be a JSON schema", "output_config.format.schema"
        )
    return ResponseFormat("json_schema", schema)
