"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from freetoken.serving.body import read_request
from freetoken.serving.chat_reading import read_chat
from freetoken.serving.choice import TextOptions
from freetoken.serving.context import CONTEXT, FrontContext, session_of
from freetoken.serving.dialogue import ReplyPlan, start_reply
from freetoken.serving.errors import ApiError, bad_value, openai_error_body
from freetoken.serving.openai_format import chat_logprobs, usage_object
from freetoken.serving.openai_schema import MAX_INT32, ChatRequest
from freetoken.serving.reply import (
    CallPiece,
    CallStarted,
    ChoiceEnded,
    ReasoningPiece,
    Reply,
    ReplyCall,
    ReplyEvent,
    ReplyMessage,
    TextPiece,
)
from freetoken.serving.sampling import check_choices, resolve_sampling
from freetoken.serving.sse import event, stream
from freetoken.serving.tokenizer import TextModel
from freetoken.serving.usage import Usage

_FORMAT_PARAMS = {
    "json_schema": "response_format.json_schema.schema",
    "regex": "response_format.pattern",
    "grammar": "response_format.grammar",
}
"""Where an answer's schema or grammar stands."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, as one JSON object or as a stream of chunks."""
    arrived_s = time.monotonic()
    context = request.app[CONTEXT]
    text = context.ready_text()
    fields, raw = await read_request(request, ChatRequest, context.pool)
    context.check_model(fields.model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_value(f"top_logprobs is {fields.top_logprobs}, which needs logprobs to be true", "top_logprobs")
    count = fields.n or 1
    check_choices(count, context.limits, "n")
    plan = ReplyPlan(
        conversation=read_chat(fields, raw, session_of(request, fields.prompt_cache_key)),
        sampling=resolve_sampling(
            fields, text.defaults, context.spec, (fields.top_logprobs or 0) if fields.logprobs else -1
        ),
        options=TextOptions(
            stop=tuple(fields.stop),
            include_stop=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
        ),
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        seed=fields.seed,
        count=count,
        param="messages",
        size=MAX_INT32 if request.content_length is None else request.content_length,
        format_param=_FORMAT_PARAMS.get(str((fields.response_format or {}).get("type")), "response_format"),
    )
    reply, _ = await start_reply(context, plan, arrived_s)
    dialect = ChatDialect(context, text, fields, reply)
    if fields.stream:
        return await stream(request, reply, dialect, context.spec.config.server.keepalive_s)
    async with reply:
        messages = await reply.collect()
        body = dialect.whole(messages, reply.usage())
    return web.Response(body=orjson.dumps(body), content_type="application/json")


class ChatDialect:
    """Writes chat completions, whole or as chunks."""

    def __init__(self, context: FrontContext, text: TextModel, fields: ChatRequest, reply: Reply) -> None:
        self._texts = text.tokenizer.texts
        self._logprobs = bool(fields.logprobs)
        self._num_choices = reply.num_choices
        self._custom: dict[tuple[int, int], bool] = {}
        self._under_way = list(range(reply.num_choices))
        self._include_usage = bool(fields.stream_options and fields.stream_options.include_usage)
        self._head = {
            "id": f"chatcmpl-{reply.request_id}",
            "created": int(time.time()),
            "model": context.spec.served_model_name,
            "system_fingerprint": context.fingerprint,
        }

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._event([choice], None)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)

    def keepalive(self) -> bytes:
        """An event: some clients' timers do not see comments."""
        return self._chunk(self._under_way[0], {}) if self._under_way else b""

    def begin(self) -> bytes:
        start = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, start) for index in range(self._num_choices))

    def deltas(self, deltas: list[ReplyEvent]) -> bytes:
        return b"".join(map(self._delta, deltas))

    def _delta(self, news: ReplyEvent) -> bytes:
        if isinstance(news, TextPiece):
            if not news.text and not (self._logprobs and news.logprobs):
                return b""
            logprobs = chat_logprobs(self._texts, news.logprobs) if self._logprobs and news.logprobs else None
            return self._chunk(news.choice, {"content": news.text}, logprobs)
        if isinstance(news, ReasoningPiece):
            return self._chunk(news.choice, {"reasoning_content": news.text})
        if isinstance(news, CallStarted):
            self._custom[news.choice, news.call.index] = news.call.kind == "custom"
            return self._chunk(news.choice, {"tool_calls": [{"index": news.call.index, **_call(news.call)}]})
        if isinstance(news, CallPiece):
            custom = self._custom[news.choice, news.index]
            body = {"custom": {"input": news.arguments}} if custom else {"function": {"arguments": news.arguments}}
            return self._chunk(news.choice, {"tool_calls": [{"index": news.index, **body}]})
        if isinstance(news, ChoiceEnded):
            self._under_way.remove(news.choice)
            return self._chunk(news.choice, {}, finish=news.reason)
        return b""

    def end(self, usage: Usage) -> bytes:
        last = self._event([], usage_object(usage)) if self._include_usage else b""
        return last + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return event(openai_error_body(error))

    def whole(self, messages: list[ReplyMessage], usage: Usage) -> dict[str, Any]:
        """The response body without streaming."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": message.choice,
                    "message": _message(message),
                    "logprobs": chat_logprobs(self._texts, message.logprobs) if self._logprobs else None,
                    "finish_reason": message.ended.reason if message.ended else None,
                }
                for message in messages
            ],
            "usage": usage_object(usage),
        }


def _message(message: ReplyMessage) -> dict[str, Any]:
    content = None if message.calls and not message.text else message.text
    body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [_call(call) for call in message.calls]
    return body


def _call(call: ReplyCall) -> dict[str, Any]:
    if call.kind == "custom":
        return {"id": call.call_id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
