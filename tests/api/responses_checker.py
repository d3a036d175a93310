"""Checks raw event streams of the Responses dialect as the official SDK and the agents read them.

Every event must be valid for the SDK's own pydantic class (the SDKs themselves construct leniently), carry no field
that the class does not know, and keep the order that clients rely on. A check returns what is wrong, one line each;
an empty list is a good stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from .event_frames import event_classes, frames_of, strict

KNOWN_EXTRAS = frozenset({"store"})
"""Fields that the vendor's servers send although its SDK's classes do not have them."""

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def validated(model: type[BaseModel], data: Any, where: str, problems: list[str]) -> Any:
    """``data`` as ``model``; what is wrong with it goes to ``problems``."""
    value, found = strict(model, data, KNOWN_EXTRAS)
    problems += [f"{where}: {problem}" for problem in found]
    return value


def check_response_body(body: Any) -> list[str]:
    """A response that is not streamed."""
    problems: list[str] = []
    validated(Response, body, "response", problems)
    return problems


RESPONSE_EVENTS = event_classes(ResponseStreamEvent)


@dataclass
class _Item:
    """An output item under way: ``deltas`` joins what was streamed of it, ``parts`` counts open parts."""

    id: str
    kind: str
    deltas: str = ""
    text_done: bool = False
    open_parts: set[int] = field(default_factory=set)
    closed: bool = False


class _ResponseOrder:
    """The order rules of a Responses stream, event by event."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.items: list[_Item] = []
        self.final: list[dict[str, Any]] = []
        self.response_id: str | None = None
        self.terminal: str | None = None
        self.count = 0

    def wrong(self, text: str) -> None:
        self.problems.append(f"event {self.count - 1}: {text}")

    def take(self, data: dict[str, Any]) -> None:
        kind = data["type"]
        self.count += 1
        if self.terminal is not None:
            self.wrong(f"{kind} after {self.terminal}")
        if data.get("sequence_number") != self.count - 1:
            self.wrong(f"sequence_number {data.get('sequence_number')}")
        expected = {0: "response.created", 1: "response.in_progress"}.get(self.count - 1, kind)
        if kind != expected:
            self.wrong(f"{kind} instead of {expected}")
        if "response" in data:
            self.take_response(kind, data["response"])
        elif kind == "response.output_item.added":
            self.take_added(data)
        else:
            self.take_within_item(kind, data)

    def take_response(self, kind: str, response: dict[str, Any]) -> None:
        if self.response_id not in (None, response["id"]):
            self.wrong("the response's id changed")
        self.response_id = response["id"]
        if kind not in TERMINAL:
            if response["status"] != "in_progress":
                self.wrong(f"status {response['status']} in {kind}")
            return
        self.terminal = kind
        if response["status"] != kind.removeprefix("response."):
            self.wrong(f"status {response['status']} in {kind}")
        if response["output"] != self.final:
            self.wrong("the output is not the items that were streamed")
        if any(not item.closed for item in self.items):
            self.wrong("an item is still open")
        if kind != "response.failed" and not response["usage"]:
            self.wrong("no usage")
        if (kind == "response.failed") != bool(response["error"]):
            self.wrong(f"error {response['error']} in {kind}")
        if (kind == "response.incomplete") != bool(response["incomplete_details"]):
            self.wrong(f"incomplete_details {response['incomplete_details']} in {kind}")

    def take_added(self, data: dict[str, Any]) -> None:
        item = data["item"]
        if data["output_index"] != len(self.items):
            self.wrong(f"output_index {data['output_index']} of item {len(self.items)}")
        if self.items and not self.items[-1].closed:
            self.wrong("an item begins inside another")
        if any(other.id == item["id"] for other in self.items):
            self.wrong(f"item id {item['id']} twice")
        if item["type"] == "message" and item["content"] != []:
            self.wrong("a message begins with content")
        self.items.append(_Item(item["id"], item["type"]))

    def take_within_item(self, kind: str, data: dict[str, Any]) -> None:
        if not self.items or data.get("output_index") != len(self.items) - 1:
            self.wrong(f"{kind} for output_index {data.get('output_index')}")
            return
        item = self.items[-1]
        if item.closed:
            self.wrong(f"{kind} after the item is done")
        if kind == "response.output_item.done":
            self.take_done(item, data["item"])
            return
        if data["item_id"] != item.id:
            self.wrong(f"item_id {data['item_id']} of {item.id}")
        part = data.get("content_index", data.get("summary_index"))
        if kind.endswith("_part.added"):
            item.open_parts.add(part)
        elif kind.endswith("_part.done"):
            if part not in item.open_parts:
                self.wrong(f"part {part} was not open")
            item.open_parts.discard(part)
            if data["part"]["text"] != item.deltas:
                self.wrong("a part is not the sum of its deltas")
        elif part is not None and part not in item.open_parts:
            self.wrong(f"{kind} before its part was added")
        elif kind.endswith(".delta"):
            if not data["delta"]:
                self.wrong("an empty delta")
            item.deltas += data["delta"]
        elif kind.endswith(".done"):
            whole = next(data[key] for key in ("text", "arguments", "input") if key in data)
            if whole != item.deltas:
                self.wrong(f"{kind} is not the sum of its deltas")

    def take_done(self, item: _Item, final: dict[str, Any]) -> None:
        item.closed = True
        self.final.append(final)
        if (final["id"], final["type"]) != (item.id, item.kind):
            self.wrong("an item changed its id or type")
        if item.open_parts:
            self.wrong("an item is done with open parts")
        whole_call = item.kind == "function_call" and final["status"] == "completed"
        if whole_call and not isinstance(json.loads(final["arguments"]), dict):
            self.wrong("arguments that are no object")
        if item.kind in ("function_call", "custom_tool_call") and not final["call_id"]:
            self.wrong("a call without call_id")
        parts = [*final.get("content", ()), *final.get("summary", ())]
        whole = [part["text"] for part in parts]
        whole += [final[key] for key in ("arguments", "input") if isinstance(final.get(key), str)]
        if "".join(whole) != item.deltas:
            self.wrong("an item is not the sum of its deltas")


def check_responses(raw: bytes) -> list[str]:
    """A stream of ``/v1/responses``."""
    frames, problems = frames_of(raw)
    order = _ResponseOrder(problems)
    for i, frame in enumerate(frames):
        try:
            data = json.loads(frame.data)
        except ValueError:
            problems.append(f"event {i}: not JSON: {frame.data[:60]!r}")
            continue
        model = RESPONSE_EVENTS.get(data.get("type"))
        if model is None:
            problems.append(f"event {i}: unknown type {data.get('type')!r}")
            continue
        if frame.name != data["type"]:
            problems.append(f"event {i}: its line says {frame.name!r}, its type {data['type']!r}")
        if validated(model, data, f"event {i} {data['type']}", problems) is not None:
            order.take(data)
    if order.terminal is None:
        problems.append("no terminal event")
    return problems
