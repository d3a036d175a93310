"""How the Anthropic dialect writes messages, streams and errors."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from freetoken.serving.canonical import parse_object
from freetoken.serving.errors import ApiError
from freetoken.serving.reply import (
    CallEnded,
    CallPiece,
    CallStarted,
    ChoiceEnded,
    ReasoningPiece,
    ReplyCall,
    ReplyEvent,
    ReplyMessage,
    ReplyReasoning,
    TextPiece,
)
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.sse import event
from freetoken.serving.usage import Usage

ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}

_SIGNING_KEY = secrets.token_bytes(16)


def anthropic_error_body(error: ApiError) -> dict[str, Any]:
    """``{"type": "error", "error": {type, message, code}}``. An overflow is worded so that every agent that compacts on
    it recognises it."""
    kind = ERROR_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.overflow is not None:
        tokens, limit = error.overflow
        message = f"prompt is too long: {tokens} tokens > {limit} maximum context length"
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.code is not None:
        body["code"] = error.code
    return {"type": "error", "error": body, "request_id": REQUEST_ID.get()}


def usage_object(usage: Usage) -> dict[str, Any]:
    """``input_tokens`` are those that were not cached: the prompt is the sum of the three."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def signature(thinking: str) -> str:
    """What goes with a thinking block: clients send both back, and some want one. It proves nothing to anybody."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), key=_SIGNING_KEY, digest_size=24).digest()).decode()


def stop_fields(ended: ChoiceEnded | None) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``."""
    if ended is None:
        return {"stop_reason": None, "stop_sequence": None}
    if ended.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if ended.reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if ended.finish.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.finish.stop_string}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class MessageWriter:
    """Writes one message, whole or as events. ``usage`` tells what is known of it by now."""

    def __init__(self, message_id: str, model: str, usage: Callable[[], Usage]) -> None:
        self._id = message_id
        self._model = model
        self._usage = usage
        self._index = -1
        self._open = ""
        self._thinking: list[str] = []
        self._ended: ChoiceEnded | None = None

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop_fields(self._ended),
            "usage": usage,
        }

    def whole(self, message: ReplyMessage, usage: Usage) -> dict[str, Any]:
        """The response body without streaming."""
        self._ended = message.ended
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ReplyCall):
                content.append({**_tool_use(part), "input": parse_object(part.arguments) or {}})
            elif isinstance(part, ReplyReasoning):
                content.append({"type": "thinking", "thinking": part.text, "signature": signature(part.text)})
            else:
                content.append({"type": "text", "text": part.text})
        return self._message(content, usage_object(usage))

    # ---------------------------------------------------------------------------------------------- stream

    def keepalive(self) -> bytes:
        """``ping``, which every client counts as a sign of life."""
        return _event({"type": "ping"})

    def begin(self) -> bytes:
        """``message_start`` and a first ``ping``."""
        start = {"type": "message_start", "message": self._message([], usage_object(self._usage()))}
        return _event(start) + self.keepalive()

    def deltas(self, deltas: list[ReplyEvent]) -> bytes:
        """Blocks follow each other; each is closed before the next begins."""
        return b"".join(map(self._write, deltas))

    def _write(self, news: ReplyEvent) -> bytes:
        if isinstance(news, TextPiece):
            if not news.text:
                return b""
            start = self._switch("text", {"type": "text", "text": ""})
            return start + self._delta({"type": "text_delta", "text": news.text})
        if isinstance(news, ReasoningPiece):
            start = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(news.text)
            return start + self._delta({"type": "thinking_delta", "thinking": news.text})
        if isinstance(news, CallStarted):
            return self._close() + self._switch("tool_use", _tool_use(news.call))
        if isinstance(news, CallPiece):
            return self._delta({"type": "input_json_delta", "partial_json": news.arguments})
        if isinstance(news, CallEnded):
            return self._close()
        self._ended = news
        return self._close()

    def _switch(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closing = self._close()
        self._open = kind
        self._index += 1
        return closing + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": signature("".join(self._thinking))})
            self._thinking = []
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._index})

    def end(self, usage: Usage) -> bytes:
        """``message_delta`` with the final usage, ``message_stop``."""
        delta = {"type": "message_delta", "delta": stop_fields(self._ended), "usage": usage_object(usage)}
        return self._close() + _event(delta) + _event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        """``error`` in place of the rest."""
        return event(anthropic_error_body(error), "error")


def _tool_use(call: ReplyCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def session_name(metadata: Mapping[str, Any] | None) -> str:
    """The session's id within ``metadata.user_id``, which some clients fill with JSON; empty without one."""
    user = (metadata or {}).get("user_id")
    if not isinstance(user, str) or not user.startswith("{"):
        return ""
    try:
        value = json.loads(user)
    except ValueError:
        return ""
    session = value.get("session_id") if isinstance(value, dict) else None
    return session[:512] if isinstance(session, str) else ""
