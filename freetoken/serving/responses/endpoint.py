"""POST /v1/responses, and what can be done with stored responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from freetoken.messages import SamplingParams
from freetoken.serving.body import read_request
from freetoken.serving.choice import TextOptions
from freetoken.serving.context import CONTEXT, FrontContext, session_of
from freetoken.serving.conversation import Conversation
from freetoken.serving.dialogue import ReplyPlan, start_reply
from freetoken.serving.errors import ApiError, bad_value, unsupported
from freetoken.serving.generation import COLLECT_WAIT_S
from freetoken.serving.openai_schema import MAX_INT32, shown
from freetoken.serving.reply import Reply
from freetoken.serving.responses.items import input_items
from freetoken.serving.responses.reading import ReadRequest, check, read, resolve_references, with_ids
from freetoken.serving.responses.schema import ResponsesRequest
from freetoken.serving.responses.store import Segment, StoredResponse
from freetoken.serving.responses.writer import ResponseWriter
from freetoken.serving.sampling import resolve_sampling
from freetoken.serving.sse import stream

MAX_LISTED = 100
DEFAULT_LISTED = 20


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer input items (Responses API), as one JSON object or as a stream of events."""
    arrived_s = time.monotonic()
    context = request.app[CONTEXT]
    context.ready_text()
    fields, _ = await read_request(request, ResponsesRequest, context.pool)
    context.check_model(fields.model)
    check(fields)
    history = _history(context, fields.previous_response_id)
    earlier = [item for segment in history for item in segment.items]
    items = resolve_references(input_items(fields.input), context.responses.item)
    size = MAX_INT32 if request.content_length is None else request.content_length
    size += sum(segment.size_bytes for segment in history)
    session = session_of(request, fields.prompt_cache_key)
    meaning = await context.run(size, lambda: read(fields, earlier, items, session))
    reply, sampling = await _start(context, fields, meaning.conversation, size, arrived_s)
    # Whoever knows an id can read the conversation: none may follow from another one.
    suffix = f"{reply.request_id}{secrets.token_hex(12)}"
    kept = with_ids(items, suffix)

    def keep(body: dict[str, Any]) -> None:
        if fields.store is not False:
            context.responses.put(body, history, kept)

    head = _head(context, suffix, sampling, fields, meaning)
    writer = ResponseWriter(head, meaning.options, lambda: reply.usage().output_tokens, keep)
    if fields.stream:
        return await stream(request, reply, writer, context.spec.config.server.keepalive_s)
    async with reply:
        writer.begin()
        while not reply.done:
            writer.deltas(await reply.next(COLLECT_WAIT_S))
        await reply.settle()
        writer.end(reply.usage())
    return _json(writer.response)


async def _start(
    context: FrontContext, fields: ResponsesRequest, conversation: Conversation, size: int, arrived_s: float
) -> tuple[Reply, SamplingParams]:
    """The reply to ``conversation``, to be entered."""
    plan = ReplyPlan(
        conversation=conversation,
        sampling=resolve_sampling(fields, context.ready_text().defaults, context.spec, -1),
        options=TextOptions(
            stop=tuple(fields.stop),
            include_stop=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
        ),
        max_tokens=fields.max_output_tokens or fields.max_tokens,
        seed=fields.seed,
        count=1,
        param="input",
        size=size,
        format_param="text.format.schema",
    )
    try:
        return await start_reply(context, plan, arrived_s)
    except ApiError as error:
        if error.param == "messages":  # as the renderer calls the conversation
            error.param = "input"
        raise


def _history(context: FrontContext, previous_response_id: str | None) -> tuple[Segment, ...]:
    """What the request continues."""
    if previous_response_id is None:
        return ()
    found = context.responses.get(previous_response_id)
    if found is None:
        raise ApiError(
            400,
            f"previous_response_id is {shown(previous_response_id)}, which is not in the store: it was never stored, "
            "was deleted, or made way for newer ones (server.response_store_entries, server.response_store_bytes); "
            "send the whole conversation as input",
            "previous_response_not_found",
            "previous_response_id",
        )
    return found.segments


def _head(
    context: FrontContext, suffix: str, sampling: SamplingParams, fields: ResponsesRequest, meaning: ReadRequest
) -> dict[str, Any]:
    """The response object before anything has happened."""
    return {
        "id": f"resp_{suffix}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": context.spec.served_model_name,
        "output": [],
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "usage": None,
        "user": None,
        **meaning.shape,
    }


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _stored(request: web.Request) -> StoredResponse:
    """The response of the path. Raises 404."""
    identifier = request.match_info["id"]
    found = request.app[CONTEXT].responses.get(identifier)
    if found is None:
        raise ApiError(404, f"there is no response with id {shown(identifier)} in the store", "not_found", "id")
    return found


async def get_response(request: web.Request) -> web.StreamResponse:
    """A stored response."""
    found = _stored(request)
    if request.query.get("stream", "false").lower() not in ("", "false", "0"):
        raise unsupported("stream: a stored response cannot be streamed again", "stream")
    return _json(found.body)


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Forget a stored response; those that continue it stay whole."""
    found = _stored(request)
    request.app[CONTEXT].responses.delete(str(found.body["id"]))
    return _json({"id": found.body["id"], "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """Always refused: only responses in the background could be cancelled. Closing the connection cancels."""
    found = _stored(request)
    raise unsupported(
        f"response {found.body['id']} is {found.body['status']} already; a response under way is cancelled by closing "
        "its connection",
        "id",
    )


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """A stored response's input items: `limit` (1 to 100, default 20), `order` (`asc` or `desc`), `after` (an id)."""
    found = _stored(request)
    items: Sequence[Any] = found.own_input.items
    query = request.query
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_value(f"order is {shown(order)}: it must be 'asc' or 'desc'", "order")
    limit = query.get("limit", str(DEFAULT_LISTED))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise bad_value(f"limit is {shown(limit)}: it must be an integer from 1 to {MAX_LISTED}", "limit")
    if order == "desc":
        items = items[::-1]
    after = query.get("after")
    if after:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_value(f"after is {shown(after)}, which is no item of this response's input", "after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ids = [item["id"] for item in page]
    return _json(
        {
            "object": "list",
            "data": list(page),
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": len(items) > len(page),
        }
    )
