"""A reply as a response object and as the events that lead to it.

Both modes run through ``ResponseWriter``: a response that is not streamed is what the last event of the stream would
have carried. One response has one writer; it serialises every event at once and keeps only the items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from freetoken.serving.errors import ApiError
from freetoken.serving.reply import (
    CallEnded,
    ChoiceEnded,
    ReasoningPiece,
    ReplyCall,
    ReplyEvent,
    TextPiece,
)
from freetoken.serving.responses.sealed import seal
from freetoken.serving.responses.tools import TOOL_SEARCH
from freetoken.serving.sse import event
from freetoken.serving.usage import Usage

WRAPPERS = frozenset({"input", "patch"})
"""Models that know only functions wrap a custom tool's text in an object with one of these keys."""


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """``summaries``: reasoning goes out as summary text, not as content. ``sealed``: reasoning items carry
    ``encrypted_content``. ``searches``: the client runs ``tool_search`` itself."""

    summaries: bool = False
    sealed: bool = False
    searches: bool = False


class ResponseWriter:
    """Writes one response. ``head`` is the response object before anything happened; its ``id`` names the items too.

    ``num_generated`` tells how many tokens there are by now. Exactly one of ``end`` and ``error`` is called last;
    ``on_end`` receives the response of ``end`` before its last event is returned, so that a client that has seen the
    event can refer to it.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        options: WriterOptions,
        num_generated: Callable[[], int],
        on_end: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._head = dict(head)
        self._suffix = str(head["id"]).removeprefix("resp_")
        self._options = options
        self._num_generated = num_generated
        self._on_end = on_end
        self._counted_tokens = 0
        self._reasoning_tokens = 0.0
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._open: _Message | _Reasoning | None = None
        self._space = ""
        self._reason = "stop"
        self.response: dict[str, Any] = self._head

    # ------------------------------------------------------------------------------------------------- the stream

    def begin(self) -> bytes:
        """``response.created`` and ``response.in_progress``."""
        self.response = {**self._head, "status": "in_progress", "output": []}
        return self._whole("response.created") + self.keepalive()

    def keepalive(self) -> bytes:
        """An event that says that nothing is wrong. Comments are not enough: some clients only count events."""
        return self._whole("response.in_progress")

    def deltas(self, deltas: list[ReplyEvent]) -> bytes:
        """The next events of the reply."""
        self._count_reasoning(deltas)
        frames: list[bytes] = []
        for item in deltas:
            if isinstance(item, TextPiece):
                self._text(item, frames)
            elif isinstance(item, ReasoningPiece):
                self._reasoning(item.text, frames)
            elif isinstance(item, CallEnded):
                self._call(item.call, frames)
            elif isinstance(item, ChoiceEnded):
                self._reason = item.reason
            # Starts and pieces of calls are not told: an item that was announced has to be finished too, and a client
            # would run half a call.
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """The rest, up to ``response.completed``, or ``response.incomplete`` when the length ended it."""
        frames: list[bytes] = []
        cut = self._reason == "length"
        self._close(frames, "incomplete" if cut else "completed")
        if not self._items:
            self._open_message(frames)
            self._close(frames, "incomplete" if cut else "completed")
        self.response = {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": usage_object(usage, min(usage.output_tokens, round(self._reasoning_tokens))),
        }
        if self._on_end is not None:
            self._on_end(self.response)
        frames.append(self._whole("response.incomplete" if cut else "response.completed"))
        return b"".join(frames)

    def error(self, error: ApiError) -> bytes:
        """The rest, up to ``response.failed``."""
        frames: list[bytes] = []
        self._close(frames, "incomplete")
        self.response = {**self._head, "status": "failed", "output": self._items, "error": failure_object(error)}
        frames.append(self._whole("response.failed"))
        return b"".join(frames)

    def _count_reasoning(self, events: list[ReplyEvent]) -> None:
        """Tokens are counted by step. Those of a step that tells reasoning and something else are shared out by
        characters, which is off by less than the step."""
        reasoning = other = 0
        for item in events:
            if isinstance(item, ReasoningPiece):
                reasoning += len(item.text)
            elif isinstance(item, TextPiece):
                other += len(item.text)
            elif isinstance(item, CallEnded):
                other += len(item.call.arguments) + len(item.call.name)
        if not reasoning and not other:
            return
        count = self._num_generated()
        self._reasoning_tokens += (count - self._counted_tokens) * reasoning / (reasoning + other)
        self._counted_tokens = count

    # ------------------------------------------------------------------------------------------------------ items

    def _event(self, kind: str, **fields: Any) -> bytes:
        frame = event({"type": kind, "sequence_number": self._sequence_number, **fields}, kind)
        self._sequence_number += 1
        return frame

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self._items)}"

    def _text(self, piece: TextPiece, frames: list[bytes]) -> None:
        """White space alone is no message, unless text follows it."""
        if not isinstance(self._open, _Message):
            text = self._space + piece.text
            if not text.strip():
                self._space = text
                return
            self._open_message(frames)
            piece = TextPiece(piece.choice, text)
        assert isinstance(self._open, _Message)
        if piece.text:
            self._open.texts.append(piece.text)
            frames.append(
                self._event(
                    "response.output_text.delta",
                    item_id=self._open.id,
                    output_index=len(self._items),
                    content_index=0,
                    delta=piece.text,
                    logprobs=[],
                )
            )

    def _open_message(self, frames: list[bytes]) -> None:
        self._close(frames, "completed")
        message = self._open = _Message(self._id("msg"))
        where = {"item_id": message.id, "output_index": len(self._items), "content_index": 0}
        frames.append(self._added(message.item("in_progress", empty=True)))
        frames.append(self._event("response.content_part.added", **where, part=_output_text("")))

    def _reasoning(self, text: str, frames: list[bytes]) -> None:
        reasoning = self._open
        if not isinstance(reasoning, _Reasoning):
            self._close(frames, "completed")
            reasoning = self._open = _Reasoning(self._id("rs"), self._options.summaries)
            frames.append(self._added(reasoning.item("in_progress", empty=True, sealed=False)))
            frames.append(
                self._event(reasoning.part_kind + ".added", **self._place(reasoning), part=reasoning.part(""))
            )
        reasoning.texts.append(text)
        frames.append(self._event(reasoning.text_kind + ".delta", **self._place(reasoning), delta=text))

    def _place(self, reasoning: _Reasoning) -> dict[str, Any]:
        index = "summary_index" if reasoning.summaries else "content_index"
        return {"item_id": reasoning.id, "output_index": len(self._items), index: 0}

    def _close(self, frames: list[bytes], status: str) -> None:
        """Finish the open item."""
        self._space = ""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.texts)
        if isinstance(item, _Message):
            where = {"item_id": item.id, "output_index": len(self._items), "content_index": 0}
            frames.append(self._event("response.output_text.done", **where, text=text, logprobs=[]))
            frames.append(self._event("response.content_part.done", **where, part=_output_text(text)))
            self._done(item.item(status), frames)
        else:
            place = self._place(item)
            frames.append(self._event(item.text_kind + ".done", **place, text=text))
            frames.append(self._event(item.part_kind + ".done", **place, part=item.part(text)))
            self._done(item.item(status, sealed=self._options.sealed), frames)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: dict[str, Any], frames: list[bytes]) -> None:
        frames.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)

    def _call(self, call: ReplyCall, frames: list[bytes]) -> None:
        self._close(frames, "completed")
        if call.kind == "custom":
            self._custom_call(call, frames)
        elif self._options.searches and call.name == TOOL_SEARCH and call.namespace is None:
            self._search_call(call, frames)
        else:
            self._function_call(call, frames)

    def _function_call(self, call: ReplyCall, frames: list[bytes]) -> None:
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "",
        }
        if call.namespace is not None:
            item["namespace"] = call.namespace
        where = {"item_id": item["id"], "output_index": len(self._items)}
        frames.append(self._added(item))
        arguments = call.arguments or "{}"
        frames.append(self._event("response.function_call_arguments.delta", **where, delta=arguments))
        frames.append(self._event("response.function_call_arguments.done", **where, arguments=arguments))
        self._done({**item, "status": "completed", "arguments": arguments}, frames)

    def _custom_call(self, call: ReplyCall, frames: list[bytes]) -> None:
        item = {
            "id": self._id("ctc"),
            "type": "custom_tool_call",
            "call_id": call.call_id,
            "name": call.name,
            "input": "",
        }
        if call.namespace is not None:
            item["namespace"] = call.namespace
        where = {"item_id": item["id"], "output_index": len(self._items)}
        text = unwrapped(call.arguments)
        frames.append(self._added(item))
        if text:
            frames.append(self._event("response.custom_tool_call_input.delta", **where, delta=text))
        frames.append(self._event("response.custom_tool_call_input.done", **where, input=text))
        self._done({**item, "input": text}, frames)

    def _search_call(self, call: ReplyCall, frames: list[bytes]) -> None:
        item = {
            "id": self._id("tsc"),
            "type": "tool_search_call",
            "status": "in_progress",
            "call_id": call.call_id,
            "execution": "client",
            "arguments": {},
        }
        frames.append(self._added(item))
        self._done({**item, "status": "completed", "arguments": _parsed(call.arguments)}, frames)


class _Message:
    """The message that is being written."""

    def __init__(self, identifier: str) -> None:
        self.id = identifier
        self.texts: list[str] = []

    def item(self, status: str, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [_output_text("".join(self.texts))]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Reasoning:
    """The reasoning that is being written, in one part of the item's summary or of its content."""

    def __init__(self, identifier: str, summaries: bool) -> None:
        self.id = identifier
        self.summaries = summaries
        self.texts: list[str] = []
        self.part_kind = "response.reasoning_summary_part" if summaries else "response.content_part"
        self.text_kind = "response.reasoning_summary_text" if summaries else "response.reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self.summaries else "reasoning_text", "text": text}

    def item(self, status: str, empty: bool = False, sealed: bool = False) -> dict[str, Any]:
        text = "".join(self.texts)
        parts = [] if empty else [self.part(text)]
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        item["summary" if self.summaries else "content"] = parts
        if sealed:
            item["encrypted_content"] = seal(text)
        return item


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        value = orjson.loads(arguments or "{}")
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


def usage_object(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """``usage``: input tokens are all of them, cached or not; output tokens include reasoning."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def failure_object(error: ApiError) -> dict[str, Any]:
    """``error`` of a failed response. Agents read the code: ``server_error`` is tried again, ``rate_limit_exceeded``
    after the time that the message names, the others not."""
    message = error.message
    if error.status == 429:
        code = "rate_limit_exceeded"
        seconds = error.headers.get("Retry-After", "1")
        message = f"{message}. Please try again in {seconds}s."
    elif error.code == "context_length_exceeded":
        code = "context_length_exceeded"
    elif error.status < 500:
        code = "invalid_prompt"
    else:
        code = "server_error"
    return {"code": code, "message": message}
