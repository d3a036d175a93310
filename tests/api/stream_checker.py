"""Judges event streams by the types of the official clients, and by what agents are known to insist on.

Each check takes the raw bytes of a response and returns complaints; none means that every client can follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .event_frames import event_classes, frames_of, strict

OWN_FIELDS = frozenset({"reasoning_content", "freetoken"})
"""Deliberate extensions that no vendor's type knows."""


MESSAGE_EVENTS = event_classes(RawMessageStreamEvent)


@dataclass
class ChatSeen:
    """What a chat stream said of one choice."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str | None = None
    begun: bool = False


def check_chat(raw: bytes, wants_usage: bool = True) -> tuple[list[str], dict[int, ChatSeen]]:
    """Complaints about a chat stream, and what its choices said."""
    choices: dict[int, ChatSeen] = {}
    events, complaints = frames_of(raw)
    if not events or events[-1].data != "[DONE]":
        complaints.append("no [DONE] at the end")
    ids: set[str] = set()
    usage = None
    for i, frame in enumerate(events[:-1]):
        chunk, problems = strict(ChatCompletionChunk, json.loads(frame.data), OWN_FIELDS)
        complaints += [f"chunk {i}: {problem}" for problem in problems]
        if frame.name is not None:
            complaints.append(f"chunk {i} has an event line")
        if chunk is None:
            continue
        ids.add(chunk.id)
        if usage is not None:
            complaints.append(f"chunk {i} comes after usage")
        if chunk.usage is not None:
            usage = chunk.usage
            if chunk.choices:
                complaints.append("usage comes with choices")
            if any(choice.finish is None for choice in choices.values()):
                complaints.append("usage comes before the end of a choice")
        for choice in chunk.choices:
            seen = choices.setdefault(choice.index, ChatSeen())
            complaints += [f"chunk {i}: {problem}" for problem in _add_delta(seen, choice)]
    if len(ids) != 1:
        complaints.append(f"the ids differ: {ids}")
    if wants_usage and usage is None:
        complaints.append("no usage")
    for index, seen in choices.items():
        complaints += [f"choice {index}: {problem}" for problem in _check_choice(seen)]
    return complaints, choices


def _add_delta(seen: ChatSeen, choice: Any) -> Iterator[str]:
    delta = choice.delta
    if not seen.begun and delta.role != "assistant":
        yield "the first delta has no role"
    seen.begun = True
    if seen.finish is not None:
        yield "the choice goes on after its end"
    seen.text += delta.content or ""
    seen.reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
    for call in delta.tool_calls or []:
        known = seen.calls.get(call.index)
        function = call.function
        if known is None:
            if call.index != len(seen.calls):
                yield f"call {call.index} out of order"
            if not (call.id and call.type == "function" and function and function.name):
                yield f"call {call.index} begins without id, type or name"
            known = seen.calls[call.index] = {"id": call.id or "", "name": function.name or "", "arguments": ""}
        elif function and function.name:
            yield f"call {call.index} is named twice"
        known["arguments"] += (function and function.arguments) or ""
    if choice.finish_reason is not None:
        if seen.finish is not None:
            yield "two ends"
        seen.finish = choice.finish_reason


def _check_choice(seen: ChatSeen) -> Iterator[str]:
    if seen.finish is None:
        yield "no finish_reason"
    if seen.calls and seen.finish not in ("tool_calls", "length"):
        yield f"calls, but finish_reason {seen.finish}"
    if len({call["id"] for call in seen.calls.values()}) != len(seen.calls):
        yield "two calls have the same id"
    for call in seen.calls.values():
        if not isinstance(json.loads(call["arguments"]), dict):
            yield f"arguments of {call['name']} are no object"


@dataclass
class MessageSeen:
    """What a stream of messages said."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    stop_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    id: str = ""


_DELTA_OF = {"text_delta": "text", "input_json_delta": "tool_use", "thinking_delta": "thinking",
             "signature_delta": "thinking"}  # fmt: skip


class MessageOrder:
    """Follows a stream of messages event by event."""

    def __init__(self) -> None:
        self.seen = MessageSeen()
        self.state = "start"
        self.block: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> Iterator[str]:
        """Complaints about the next event (``ping`` and ``error`` are not for here)."""
        handler: Callable[[dict[str, Any]], Iterator[str]] = getattr(self, f"_{event['type']}")
        if self.state == "start" and event["type"] != "message_start":
            yield f"{event['type']} before message_start"
        yield from handler(event)

    def _message_start(self, event: dict[str, Any]) -> Iterator[str]:
        message = event["message"]
        if self.state != "start":
            yield "a second message_start"
        if message["content"] != [] or message["stop_reason"] is not None:
            yield "message_start has content or a stop_reason"
        self.state, self.seen.id = "body", message["id"]

    def _content_block_start(self, event: dict[str, Any]) -> Iterator[str]:
        if self.block is not None:
            yield "a block begins within another"
        if event["index"] != len(self.seen.blocks):
            yield f"block {event['index']} where {len(self.seen.blocks)} is next"
        self.block = dict(event["content_block"])
        if self.block["type"] == "tool_use":
            if self.block["input"] != {}:
                yield "a call begins with input"
            self.block["json"] = ""

    def _content_block_delta(self, event: dict[str, Any]) -> Iterator[str]:
        delta, block = event["delta"], self.block
        if block is None or event["index"] != len(self.seen.blocks):
            yield "a delta outside its block"
            return
        if _DELTA_OF[delta["type"]] != block["type"]:
            yield f"{delta['type']} in a {block['type']} block"
        for source, target in (("text", "text"), ("thinking", "thinking"), ("signature", "signature"),
                               ("partial_json", "json")):  # fmt: skip
            if source in delta:
                block[target] = block.get(target, "") + delta[source]

    def _content_block_stop(self, event: dict[str, Any]) -> Iterator[str]:
        if self.block is None or event["index"] != len(self.seen.blocks):
            yield "a block ends that is not open"
            return
        if self.block["type"] == "tool_use":
            self.block["input"] = json.loads(self.block.pop("json") or "{}")
        self.seen.blocks.append(self.block)
        self.block = None

    def _message_delta(self, event: dict[str, Any]) -> Iterator[str]:
        if self.block is not None:
            yield "message_delta within a block"
        self.seen.stop_reason, self.seen.usage, self.state = event["delta"]["stop_reason"], event["usage"], "delta"

    def _message_stop(self, event: dict[str, Any]) -> Iterator[str]:
        if self.state != "delta":
            yield "message_stop without message_delta"
        self.state = "stop"


def check_messages(raw: bytes) -> tuple[list[str], MessageSeen]:
    """Complaints about a stream of the Anthropic dialect, and what it said."""
    order = MessageOrder()
    frames, complaints = frames_of(raw)
    for i, frame in enumerate(frames):
        event = json.loads(frame.data)
        kind = event.get("type")
        if frame.name != kind:
            complaints.append(f"event {i}: event line {frame.name!r}, type {kind!r}")
        if kind in ("ping", "error"):
            continue
        if kind not in MESSAGE_EVENTS:
            complaints.append(f"event {i}: unknown type {kind!r}")
            continue
        _, problems = strict(MESSAGE_EVENTS[kind], event, OWN_FIELDS)
        complaints += [f"event {i} {kind}: {problem}" for problem in (*problems, *order.take(event))]
    if order.state != "stop":
        complaints.append(f"the stream ends in state {order.state}")
    kinds = {block["type"] for block in order.seen.blocks}
    if order.seen.stop_reason is None or ("tool_use" in kinds and order.seen.stop_reason == "end_turn"):
        complaints.append(f"stop_reason {order.seen.stop_reason} with {kinds}")
    return complaints, order.seen


def check_whole(kind: str, body: Any) -> list[str]:
    """Complaints about a body without streaming."""
    return strict(ChatCompletion if kind == "chat" else Message, body, OWN_FIELDS)[1]
