"""Output items of a response while they are written: each knows its events from ``output_item.added`` to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import orjson

from freetoken.serving.reply import ReplyCall
from freetoken.serving.responses.sealed import seal

Status = Literal["completed", "incomplete"]
Event = tuple[str, dict[str, Any]]
"""An event's type without ``response.``, and its fields but for the numbers that the writer adds."""

WRAPPERS = frozenset({"input", "patch"})
"""Models that know only functions wrap a custom tool's text in an object with one of these keys."""


class OutputItem(Protocol):
    """An item under way. ``shell`` is what ``output_item.added`` shows; ``more`` takes the next, non-empty piece;
    ``close`` returns the last events and the item itself."""

    id: str

    @property
    def shell(self) -> dict[str, Any]: ...

    def open(self) -> list[Event]: ...

    def more(self, text: str) -> list[Event]: ...

    def close(self, status: Status) -> tuple[list[Event], dict[str, Any]]: ...


class MessageItem:
    """The answer's text, in one part."""

    def __init__(self, identifier: str) -> None:
        self.id = identifier
        self._texts: list[str] = []

    @property
    def shell(self) -> dict[str, Any]:
        return self._item("in_progress", [])

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def open(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": _output_text("")})]

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [("output_text.delta", {"content_index": 0, "delta": text, "logprobs": []})]

    def close(self, status: Status) -> tuple[list[Event], dict[str, Any]]:
        text = "".join(self._texts)
        part = _output_text(text)
        events: list[Event] = [
            ("output_text.done", {"content_index": 0, "text": text, "logprobs": []}),
            ("content_part.done", {"content_index": 0, "part": part}),
        ]
        return events, self._item(status, [part])


class ReasoningItem:
    """Reasoning, in one part of the item's summary or of its content. ``sealed``: with ``encrypted_content``."""

    def __init__(self, identifier: str, as_summary: bool, sealed: bool) -> None:
        self.id = identifier
        self._as_summary = as_summary
        self._sealed = sealed
        self._texts: list[str] = []
        self._place = {"summary_index" if as_summary else "content_index": 0}
        self._part_events = "reasoning_summary_part" if as_summary else "content_part"
        self._text_events = "reasoning_summary_text" if as_summary else "reasoning_text"

    @property
    def shell(self) -> dict[str, Any]:
        return self._item("in_progress", [])

    def _item(self, status: str, parts: list[Any]) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        item["summary" if self._as_summary else "content"] = parts
        return item

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": text}

    def open(self) -> list[Event]:
        return [(f"{self._part_events}.added", {**self._place, "part": self._part("")})]

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [(f"{self._text_events}.delta", {**self._place, "delta": text})]

    def close(self, status: Status) -> tuple[list[Event], dict[str, Any]]:
        text = "".join(self._texts)
        part = self._part(text)
        events: list[Event] = [
            (f"{self._text_events}.done", {**self._place, "text": text}),
            (f"{self._part_events}.done", {**self._place, "part": part}),
        ]
        item = self._item(status, [part])
        return events, {**item, "encrypted_content": seal(text)} if self._sealed else item


class FunctionCallItem:
    """A call of a function; its arguments go out as they come."""

    def __init__(self, identifier: str, call: ReplyCall) -> None:
        self.id = identifier
        self._call = call
        self._texts: list[str] = []

    @property
    def shell(self) -> dict[str, Any]:
        return self._item("in_progress", "")

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        return {"id": self.id, "type": "function_call", "status": status, **_named(self._call), "arguments": arguments}

    def open(self) -> list[Event]:
        return []

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [("function_call_arguments.delta", {"delta": text})]

    def close(self, status: Status) -> tuple[list[Event], dict[str, Any]]:
        events = self.more("{}") if status == "completed" and not self._texts else []
        arguments = "".join(self._texts)
        return [*events, ("function_call_arguments.done", {"arguments": arguments})], self._item(status, arguments)


class CustomCallItem:
    """A call of a custom tool. Its input goes out at the end, when it is known whether it is wrapped."""

    def __init__(self, identifier: str, call: ReplyCall) -> None:
        self.id = identifier
        self._call = call
        self._texts: list[str] = []

    @property
    def shell(self) -> dict[str, Any]:
        return self._item("")

    def _item(self, text: str) -> dict[str, Any]:
        return {"id": self.id, "type": "custom_tool_call", **_named(self._call), "input": text}

    def open(self) -> list[Event]:
        return []

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return []

    def close(self, status: Status) -> tuple[list[Event], dict[str, Any]]:
        text = unwrapped("".join(self._texts))
        events: list[Event] = [("custom_tool_call_input.delta", {"delta": text})] if text else []
        return [*events, ("custom_tool_call_input.done", {"input": text})], self._item(text)


class SearchCallItem:
    """A search of deferred tools that the client runs."""

    def __init__(self, identifier: str, call: ReplyCall) -> None:
        self.id = identifier
        self._call_id = call.call_id
        self._texts: list[str] = []

    @property
    def shell(self) -> dict[str, Any]:
        return self._item("in_progress", {})

    def _item(self, status: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        where = {"call_id": self._call_id, "execution": "client"}
        return {"id": self.id, "type": "tool_search_call", "status": status, **where, "arguments": arguments}

    def open(self) -> list[Event]:
        return []

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return []

    def close(self, status: Status) -> tuple[list[Event], dict[str, Any]]:
        return [], self._item(status, _object_of("".join(self._texts)))


def _named(call: ReplyCall) -> dict[str, Any]:
    named: dict[str, Any] = {"call_id": call.call_id, "name": call.name}
    return named if call.namespace is None else {**named, "namespace": call.namespace}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _object_of(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def unwrapped(text: str) -> str:
    """A custom tool's input without the object that a model may have put around it."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if isinstance(value, dict) and len(value) == 1:
        key, inner = next(iter(value.items()))
        if key in WRAPPERS and isinstance(inner, str):
            return inner
    return text
