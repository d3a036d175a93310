"""A reply as a response object and as the events that lead to it.

Both modes run through ``ResponseWriter``: a response that is not streamed is what the last event of the stream would
have carried. One response has one writer; it serialises every event at once and keeps only the items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.serving.errors import ApiError
from freetoken.serving.reply import (
    CallEnded,
    CallPiece,
    CallStarted,
    ReasoningPiece,
    ReplyCall,
    ReplyEvent,
    TextPiece,
)
from freetoken.serving.responses.output_items import (
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    SearchCallItem,
    Status,
)
from freetoken.serving.responses.tools import TOOL_SEARCH
from freetoken.serving.sse import event
from freetoken.serving.usage import Usage


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """``summaries``: reasoning goes out as summary text, not as content. ``sealed``: reasoning items carry
    ``encrypted_content``. ``searches``: the client runs ``tool_search`` itself."""

    summaries: bool = False
    sealed: bool = False
    searches: bool = False


class ResponseWriter:
    """Writes one response. ``head`` is the response object before anything happened; its ``id`` names the items too.

    ``num_generated`` tells how many tokens there are by now. Exactly one of ``end`` and ``error`` is called last
    (``error`` also after an ``end`` that raised); ``on_end`` receives the response of ``end`` before its last event is
    returned, so that a client that has seen the event can refer to it.
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
        self._sequence_number = 0
        self._frames: list[bytes] = []
        self._items: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._space = ""
        self._reason = "stop"
        self._counted_tokens = 0
        self._reasoning_tokens = 0.0
        self.response: dict[str, Any] = self._head

    # ------------------------------------------------------------------------------------------------- the stream

    def begin(self) -> bytes:
        """``response.created`` and ``response.in_progress``."""
        self.response = {**self._head, "status": "in_progress", "output": []}
        self._emit("created", {"response": self.response})
        return self.keepalive()

    def keepalive(self) -> bytes:
        """An event that says that nothing is wrong. Comments are not enough: some clients only count events."""
        self._emit("in_progress", {"response": self.response})
        return self._sent()

    def deltas(self, deltas: list[ReplyEvent]) -> bytes:
        """The next events of the reply."""
        self._count_reasoning(deltas)
        for item in deltas:
            if isinstance(item, TextPiece):
                self._text(item.text)
            elif isinstance(item, ReasoningPiece):
                self._reasoning(item.text)
            elif isinstance(item, CallStarted):
                self._start(self._call_item(item.call))
            elif isinstance(item, CallPiece):
                self._more(item.arguments)
            elif isinstance(item, CallEnded):
                self._close("completed")
            else:
                self._reason = item.reason
        return self._sent()

    def end(self, usage: Usage) -> bytes:
        """The rest, up to ``response.completed``, or ``response.incomplete`` when the length ended it."""
        cut = self._reason == "length"
        status: Status = "incomplete" if cut else "completed"
        self._close(status)
        if not self._items:
            self._start(MessageItem(self._id("msg")))
            self._close(status)
        self.response = {
            **self._head,
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": usage_object(usage, min(usage.output_tokens, round(self._reasoning_tokens))),
        }
        if self._on_end is not None:
            self._on_end(self.response)
        self._emit(status, {"response": self.response})
        return self._sent()

    def error(self, error: ApiError) -> bytes:
        """The rest, up to ``response.failed``."""
        self._close("incomplete")
        self.response = {**self._head, "status": "failed", "output": self._items, "error": failure_object(error)}
        self._emit("failed", {"response": self.response})
        return self._sent()

    def _emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Events wait in ``_frames`` until they are returned, so that an exception between two of them loses none."""
        name = f"response.{kind}"
        self._frames.append(event({"type": name, "sequence_number": self._sequence_number, **fields}, name))
        self._sequence_number += 1

    def _sent(self) -> bytes:
        data = b"".join(self._frames)
        self._frames.clear()
        return data

    # -------------------------------------------------------------------------------------------------- the items

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self._items)}"

    def _start(self, item: OutputItem) -> None:
        self._close("completed")
        self._open = item
        self._emit("output_item.added", {"output_index": len(self._items), "item": item.shell})
        self._emit_of(item, item.open())

    def _more(self, text: str) -> None:
        if self._open is not None and text:
            self._emit_of(self._open, self._open.more(text))

    def _close(self, status: Status) -> None:
        """Finish the open item, if there is one."""
        self._space = ""
        item, self._open = self._open, None
        if item is None:
            return
        events, whole = item.close(status)
        self._emit_of(item, events)
        self._emit("output_item.done", {"output_index": len(self._items), "item": whole})
        self._items.append(whole)

    def _emit_of(self, item: OutputItem, events: list[tuple[str, dict[str, Any]]]) -> None:
        for kind, fields in events:
            self._emit(kind, {"item_id": item.id, "output_index": len(self._items), **fields})

    def _text(self, text: str) -> None:
        """White space alone is no message, unless text follows it."""
        if not isinstance(self._open, MessageItem):
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._start(MessageItem(self._id("msg")))
        self._more(text)

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            self._start(ReasoningItem(self._id("rs"), self._options.summaries, self._options.sealed))
        self._more(text)

    def _call_item(self, call: ReplyCall) -> OutputItem:
        if call.kind == "custom":
            return CustomCallItem(self._id("ctc"), call)
        if self._options.searches and call.name == TOOL_SEARCH and call.namespace is None:
            return SearchCallItem(self._id("tsc"), call)
        return FunctionCallItem(self._id("fc"), call)

    def _count_reasoning(self, events: list[ReplyEvent]) -> None:
        """Tokens are counted by step. Those of a step that tells reasoning and something else are shared out by
        characters, which is off by less than the step."""
        reasoning = other = 0
        for item in events:
            if isinstance(item, ReasoningPiece):
                reasoning += len(item.text)
            elif isinstance(item, TextPiece):
                other += len(item.text)
            elif isinstance(item, CallPiece):
                other += len(item.arguments)
        if not reasoning and not other:
            return
        count = self._num_generated()
        self._reasoning_tokens += (count - self._counted_tokens) * reasoning / (reasoning + other)
        self._counted_tokens = count


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
