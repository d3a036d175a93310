"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time

import orjson
from aiohttp import web

from freetoken.serving.anthropic_format import MessageWriter, session_name
from freetoken.serving.anthropic_reading import read_messages
from freetoken.serving.anthropic_schema import CountTokensRequest, MessagesRequest
from freetoken.serving.body import read_request
from freetoken.serving.choice import TextOptions
from freetoken.serving.context import CONTEXT, session_of
from freetoken.serving.conversation import Session
from freetoken.serving.dialogue import ReplyPlan, render, start_reply
from freetoken.serving.openai_schema import MAX_INT32
from freetoken.serving.sampling import resolve_sampling
from freetoken.serving.sse import stream


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation (Anthropic Messages), as one JSON object or as a stream of events."""
    arrived_s = time.monotonic()
    context = request.app[CONTEXT]
    text = context.ready_text()
    fields, _ = await read_request(request, MessagesRequest, context.pool)
    context.check_model(fields.model)
    plan = ReplyPlan(
        conversation=read_messages(fields, session_of(request, session_name(fields.metadata))),
        sampling=resolve_sampling(fields.generation_fields(), text.defaults, context.spec, -1),
        options=TextOptions(stop=tuple(fields.stop_sequences)),
        max_tokens=fields.max_tokens,
        seed=None,
        count=1,
        param="messages",
        format_param="output_config.format.schema",
        size=MAX_INT32 if request.content_length is None else request.content_length,
        call_id_prefix="toolu_",
    )
    reply, _ = await start_reply(context, plan, arrived_s)
    writer = MessageWriter(f"msg_{reply.request_id}", fields.model, reply.usage)
    if fields.stream:
        return await stream(request, reply, writer, context.spec.config.server.keepalive_s)
    async with reply:
        message = (await reply.collect())[0]
        body = writer.whole(message, reply.usage())
    return web.Response(body=orjson.dumps(body), content_type="application/json")


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the prompt of such a request has, exactly."""
    context = request.app[CONTEXT]
    fields, _ = await read_request(request, CountTokensRequest, context.pool)
    context.check_model(fields.model)
    size = MAX_INT32 if request.content_length is None else request.content_length
    prompt = await render(context, read_messages(fields, Session()), size)
    count = len(context.checked_prompt(prompt.token_ids, "messages"))
    return web.Response(body=orjson.dumps({"input_tokens": count}), content_type="application/json")
