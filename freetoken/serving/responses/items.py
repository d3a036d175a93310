"""Input items of the Responses dialect as turns of a conversation.

Items come with and without ``type``, from this server and from others. A known kind with a wrong shape is an error that
names the place; an unknown kind is left out, with a warning in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from freetoken.serving.canonical import parse_object
from freetoken.serving.conversation import (
    ImagePart,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolReferencePart,
    ToolResultPart,
    Turn,
    join_assistant_turns,
)
from freetoken.serving.errors import bad_value
from freetoken.serving.openai_schema import shown
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.responses.sealed import MAX_REASONING_BYTES, unseal
from freetoken.serving.responses.tools import TOOL_SEARCH, ToolTable

logger = logging.getLogger(__name__)

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_KINDS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def input_items(value: str | list[Any] | None) -> list[Any]:
    """``input`` in its long form: a string is one message of the user."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return value


def read_items(items: Iterable[Any], table: ToolTable, path: str = "input") -> list[Turn]:
    """The turns of ``items``, neighbouring parts of one answer not joined yet; tools that items declare go to
    ``table``. Raises ``ApiError`` (400)."""
    reader = _Reader(table)
    turns: list[Turn] = []
    for i, item in enumerate(items):
        turn = reader.read(item, f"{path}[{i}]")
        if turn is not None:
            turns.append(turn)
    return turns


def join_turns(instructions: str | None, turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """All turns of a request. A request without any is one empty message of the user (clients warm up that way)."""
    head = [Turn("system", (TextPart(instructions),))] if instructions else []
    joined = join_assistant_turns([*head, *turns])
    return joined if any(turn.role != "system" for turn in joined) else (*joined, Turn("user", ()))


class _Reader:
    """One request's items, in order."""

    def __init__(self, table: ToolTable) -> None:
        self._table = table
        self._warned: set[str] = set()
        self._sealed_bytes = MAX_REASONING_BYTES
        self._readers: dict[str, Callable[[Mapping[str, Any], str], Turn | None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "tool_search_call": self._search_call,
            "local_shell_call": self._local_shell_call,
            "shell_call": self._shell_call,
            "apply_patch_call": self._patch_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call_output": self._output,
            "shell_call_output": self._output,
            "apply_patch_call_output": self._output,
            "tool_search_output": self._search_output,
            "additional_tools": self._additional_tools,
        }

    def read(self, item: Any, path: str) -> Turn | None:
        """The turn of one item, or None when it has none."""
        if not isinstance(item, Mapping):
            raise bad_value(f"{path} is {shown(item)}: it must be an object", path)
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else None
        if not isinstance(kind, str):
            raise bad_value(f"{path}.type is {shown(kind)}: it must be a string", f"{path}.type")
        reader = self._readers.get(kind)
        if reader is None:
            self._warn("item_ignored", kind, path)
            return None
        return reader(item, path)

    def _warn(self, what: str, kind: str, path: str) -> None:
        if (what + kind) not in self._warned:
            self._warned.add(what + kind)
            logger.warning("event=%s request=%s type=%s path=%s", what, REQUEST_ID.get(), shown(kind), path)

    def _message(self, item: Mapping[str, Any], path: str) -> Turn:
        given = item.get("role")
        if not isinstance(given, str):
            raise bad_value(f"{path}.role is {shown(given)}: it must be a string", f"{path}.role")
        role = _ROLES.get(given)
        if role is None:
            self._warn("role_taken_as_user", given, path)
            role = "user"
        return Turn(role, self._parts(item.get("content"), f"{path}.content"))

    def _parts(self, content: Any, path: str) -> tuple[TextPart | ImagePart, ...]:
        """Text and pictures of a message or a result; both forms of plain text give the same."""
        if content is None:
            return ()
        if isinstance(content, str):
            return (TextPart(content),) if content else ()
        if isinstance(content, Mapping):
            content = [content]
        if not isinstance(content, list):
            raise bad_value(f"{path} is {shown(content)}: it must be a string or a list of parts", path)
        return tuple(self._part(part, f"{path}[{i}]") for i, part in enumerate(content))

    def _part(self, part: Any, path: str) -> TextPart | ImagePart:
        if isinstance(part, str):
            return TextPart(part)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise bad_value(f"{path} is {shown(part)}: it must be an object with a type", path)
        if kind in _TEXT_KINDS:
            return TextPart(_string(part, "text", path))
        if kind == "refusal":
            return TextPart(_string(part, "refusal", path))
        if kind in ("input_image", "image_url", "computer_screenshot", "image"):
            return ImagePart(_media_type(part.get("image_url")))
        self._warn("content_part_replaced", kind, path)
        name = part.get("filename")
        return TextPart(f"[{kind}: {name}]" if isinstance(name, str) and name else f"[{kind}]")

    def _reasoning(self, item: Mapping[str, Any], path: str) -> Turn | None:
        sealed = item.get("encrypted_content")
        text = unseal(sealed, self._sealed_bytes) if isinstance(sealed, str) else None
        if text is not None:
            self._sealed_bytes -= len(text)
        else:
            text = _texts(item.get("content"), f"{path}.content") or _texts(item.get("summary"), f"{path}.summary")
        if not text:
            return None
        identifier = item.get("id")
        opaque = sealed if isinstance(sealed, str) else identifier if isinstance(identifier, str) else ""
        return Turn("assistant", (ReasoningPart(text, opaque),))

    def _function_call(self, item: Mapping[str, Any], path: str) -> Turn:
        name = _string(item, "name", path)
        if not name:
            raise bad_value(f"{path}.name is empty", f"{path}.name")
        return self._call(item, path, name, _arguments(item.get("arguments"), f"{path}.arguments"))

    def _custom_call(self, item: Mapping[str, Any], path: str) -> Turn:
        name, text = _string(item, "name", path), _string(item, "input", path)
        if not name:
            raise bad_value(f"{path}.name is empty", f"{path}.name")
        return self._call(item, path, name, text, custom=True)

    def _search_call(self, item: Mapping[str, Any], path: str) -> Turn | None:
        if item.get("call_id") is None:  # a search that a hosted service ran
            self._warn("item_ignored", "tool_search_call", path)
            return None
        return self._call(item, path, TOOL_SEARCH, _arguments(item.get("arguments"), f"{path}.arguments"))

    def _local_shell_call(self, item: Mapping[str, Any], path: str) -> Turn:
        return self._call(item, path, "local_shell", _object(item, "action", path))

    def _shell_call(self, item: Mapping[str, Any], path: str) -> Turn:
        return self._call(item, path, "shell", _object(item, "action", path))

    def _patch_call(self, item: Mapping[str, Any], path: str) -> Turn:
        return self._call(item, path, "apply_patch", _object(item, "operation", path))

    def _call(
        self, item: Mapping[str, Any], path: str, name: str, arguments: Mapping[str, Any] | str, custom: bool = False
    ) -> Turn:
        namespace = item.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            raise bad_value(f"{path}.namespace is {shown(namespace)}: it must be a string", f"{path}.namespace")
        kind = "custom" if custom else "function"
        part = ToolCallPart(_call_id(item, path), name, arguments, namespace or None, kind)  # type: ignore[arg-type]
        return Turn("assistant", (part,))

    def _output(self, item: Mapping[str, Any], path: str) -> Turn:
        output = item.get("output")
        call_id = _call_id(item, path)
        if isinstance(output, list) and all(isinstance(part, Mapping) and "type" in part for part in output):
            return Turn("tool", (ToolResultPart(call_id, self._parts(output, f"{path}.output")),))
        if output is not None and not isinstance(output, str):
            output = _dump(output)
        return Turn("tool", (ToolResultPart.of_text(call_id, output or ""),))

    def _search_output(self, item: Mapping[str, Any], path: str) -> Turn | None:
        tools = item.get("tools")
        if not isinstance(tools, list):
            raise bad_value(f"{path}.tools is {shown(tools)}: it must be a list of tools", f"{path}.tools")
        found = self._table.add(tools, f"{path}.tools", deferred=True)
        if item.get("call_id") is None:
            self._warn("item_ignored", "tool_search_output", path)
            return None
        references = tuple(ToolReferencePart(spec.name) for spec in found)
        return Turn("tool", (ToolResultPart(_call_id(item, path), references),))

    def _additional_tools(self, item: Mapping[str, Any], path: str) -> None:
        tools = item.get("tools")
        if not isinstance(tools, list):
            raise bad_value(f"{path}.tools is {shown(tools)}: it must be a list of tools", f"{path}.tools")
        self._table.add(tools, f"{path}.tools")


def _string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise bad_value(f"{path}.{key} is {shown(value)}: it must be a string", f"{path}.{key}")
    return value


def _object(item: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    value = item.get(key)
    if not isinstance(value, Mapping):
        raise bad_value(f"{path}.{key} is {shown(value)}: it must be an object", f"{path}.{key}")
    return value


def _call_id(item: Mapping[str, Any], path: str) -> str:
    for key in ("call_id", "id"):
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise bad_value(f"{path}.{key} is {shown(value)}: it must be a string", f"{path}.{key}")
        return value
    raise bad_value(f"{path}.call_id is required", f"{path}.call_id", "missing_required_parameter")


def _arguments(value: Any, path: str) -> Mapping[str, Any] | str:
    """Arguments of a call: an object if the text is one, else the text. Key order and integers stay exact."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise bad_value(f"{path} is {shown(value)}: it must be a string that holds a JSON object", path)
    if not value.strip():
        return {}
    parsed = parse_object(value)
    return value if parsed is None else parsed


def _texts(parts: Any, path: str) -> str:
    """The joined texts of a reasoning item's ``content`` or ``summary``."""
    if parts is None:
        return ""
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise bad_value(f"{path} is {shown(parts)}: it must be a list of parts", path)
    texts = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise bad_value(f"{path}[{i}] is {shown(part)}: it must be an object with a text", f"{path}[{i}]")
        texts.append(text)
    return "\n\n".join(texts)


def _media_type(url: Any) -> str:
    if isinstance(url, Mapping):  # as chat completions write it
        url = url.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        return ""
    return url[5:].split(",", 1)[0].split(";", 1)[0][:64]


def _dump(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, orjson.JSONEncodeError):
        return str(value)
