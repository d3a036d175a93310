"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from freetoken.serving.body import read_request
from freetoken.serving.choice import ChoiceDelta, TextOptions
from freetoken.serving.context import CONTEXT, FrontContext, session_key
from freetoken.serving.errors import ApiError, bad_value, openai_error_body, unsupported
from freetoken.serving.generation import Generation, SequencePlan
from freetoken.serving.openai_format import chat_logprobs, usage_object
from freetoken.serving.openai_schema import MAX_INT32, ChatRequest, Message, shown
from freetoken.serving.sampling import check_choices, for_choice, output_budget, resolve_sampling
from freetoken.serving.sse import KEEPALIVE_COMMENT, event, stream
from freetoken.serving.template import RESERVED_NAMES, TemplateRefusedError
from freetoken.serving.tokenizer import TextModel
from freetoken.serving.usage import Usage


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, as one JSON object or as a stream of chunks."""
    arrived_s = time.monotonic()
    context = request.app[CONTEXT]
    text = context.ready_text()
    fields, raw = await read_request(request, ChatRequest, context.pool)
    context.check_model(fields.model)
    _check(fields)
    size = MAX_INT32 if request.content_length is None else request.content_length
    sequences = await _plan(context, text, fields, raw, size)
    options = TextOptions(
        stop=tuple(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )
    generation = context.generator.start(
        sequences, text, options, arrived_s, session_key(request, fields.prompt_cache_key)
    )
    dialect = ChatDialect(context, text, fields, generation)
    if fields.stream:
        return await stream(request, generation, dialect, context.spec.config.server.keepalive_s)
    async with generation:
        choices = await generation.collect()
        body = dialect.whole(choices, generation.usage())
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def _check(fields: ChatRequest) -> None:
    """What is well formed but not possible."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_value(f"top_logprobs is {fields.top_logprobs}, which needs logprobs to be true", "top_logprobs")
    kind = (fields.response_format or {"type": "text"}).get("type")
    if kind != "text":
        raise unsupported(f"response_format of type {shown(kind)} is not supported; only 'text' is", "response_format")
    if fields.tool_choice not in (None, "auto", "none"):
        raise unsupported(
            f"tool_choice {shown(fields.tool_choice)} cannot be enforced; 'auto' and 'none' are supported",
            "tool_choice",
        )
    for name in fields.chat_template_kwargs or {}:
        if name in RESERVED_NAMES:
            raise bad_value(
                f"chat_template_kwargs must not set {name!r}; it has a field of its own", "chat_template_kwargs"
            )


async def _plan(
    context: FrontContext, text: TextModel, fields: ChatRequest, raw: dict[str, Any], size: int
) -> list[SequencePlan]:
    """One sequence a choice, all with the same prompt. ``size`` is that of the request, in bytes."""
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else -1
    sampling = resolve_sampling(fields, text.defaults, context.spec, top_logprobs)
    count = fields.n or 1
    check_choices(count, context.limits, "n")
    messages = template_messages(fields.messages, raw["messages"], text)
    encode = functools.partial(_encode, text, fields, messages)
    prompt = context.checked_prompt(await context.run(size, encode), "messages")
    requested = fields.max_completion_tokens or fields.max_tokens
    max_tokens = output_budget(context.limits, len(prompt), requested, "messages")
    return [SequencePlan(prompt, for_choice(sampling, max_tokens, fields.seed, i)) for i in range(count)]


def _encode(text: TextModel, fields: ChatRequest, messages: list[dict[str, Any]]) -> list[int]:
    if text.template is None:
        raise bad_value(
            "this model has no chat template; use /v1/completions with a prompt", "messages", "no_chat_template"
        )
    tools = None if fields.tool_choice == "none" else fields.tools or None
    try:
        prompt = text.template.render(
            messages, tools, fields.add_generation_prompt is not False, fields.chat_template_kwargs
        )
    except TemplateRefusedError as error:
        raise bad_value(str(error), "messages", "template_refused") from None
    return text.tokenizer.encode(prompt, add_special_tokens=False)


def template_messages(
    messages: Sequence[Message], raw: Sequence[dict[str, Any]], text: TextModel
) -> list[dict[str, Any]]:
    """The messages as templates expect them.

    Content becomes one string however the client wrote it, so that both forms give the same tokens; ``developer`` is
    ``system`` unless the template knows it; everything else of a message stays as it came.
    """
    out: list[dict[str, Any]] = []
    developer = "developer" if text.template is not None and text.template.knows_developer_role else "system"
    for i, (message, original) in enumerate(zip(messages, raw, strict=True)):
        content = _content(message, f"messages[{i}]")
        role = developer if message.role == "developer" else message.role
        out.append({**original, "role": role, "content": content})
    return out


def _content(message: Message, path: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise bad_value(f"{path}.content is required for role {message.role!r}", f"{path}.content")
    if not isinstance(content, list):
        raise bad_value(
            f"{path}.content is {shown(content)}: it must be a string or a list of parts", f"{path}.content"
        )
    texts: list[str] = []
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise bad_value(f"{where} is {shown(part)}: it must be an object with a type", where)
        if kind not in ("text", "refusal"):
            raise unsupported(f"{where} is of type {shown(kind)}; this model takes only parts of type 'text'", where)
        value = part.get(kind)
        if not isinstance(value, str):
            raise bad_value(f"{where}.{kind} is {shown(value)}: it must be a string", f"{where}.{kind}")
        texts.append(value)
    return "\n".join(texts)


class ChatDialect:
    """Writes chat completions, whole or as chunks."""

    def __init__(self, context: FrontContext, text: TextModel, fields: ChatRequest, generation: Generation) -> None:
        self._texts = text.tokenizer.texts
        self._logprobs = bool(fields.logprobs)
        self._num_choices = generation.num_choices
        self._include_usage = bool(fields.stream_options and fields.stream_options.include_usage)
        self._head = {
            "id": f"chatcmpl-{generation.request_id}",
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
        return KEEPALIVE_COMMENT

    def begin(self) -> bytes:
        start = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, start) for index in range(self._num_choices))

    def deltas(self, deltas: list[ChoiceDelta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            logprobs = chat_logprobs(self._texts, delta.logprobs) if self._logprobs and delta.logprobs else None
            if delta.text or logprobs:
                parts.append(self._chunk(delta.index, {"content": delta.text}, logprobs))
            if delta.finish is not None:
                parts.append(self._chunk(delta.index, {}, finish=delta.finish.reason))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        last = self._event([], usage_object(usage)) if self._include_usage else b""
        return last + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return event(openai_error_body(error))

    def whole(self, choices: list[ChoiceDelta], usage: Usage) -> dict[str, Any]:
        """The response body without streaming."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": chat_logprobs(self._texts, choice.logprobs) if self._logprobs else None,
                    "finish_reason": choice.finish.reason if choice.finish else None,
                }
                for choice in choices
            ],
            "usage": usage_object(usage),
        }
