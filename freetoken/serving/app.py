"""Routes, authentication, and the frame around every request: ids, errors, counts."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

import orjson
from aiohttp import web

from freetoken import __version__
from freetoken.messages import HealthState
from freetoken.serving.access import KeyLimiter, check_key, check_origin, given_key
from freetoken.serving.anthropic_format import anthropic_error_body
from freetoken.serving.anthropic_messages import count_tokens, create_message
from freetoken.serving.cache_control import rebalance
from freetoken.serving.chat import chat_completions
from freetoken.serving.completions import completions
from freetoken.serving.context import CONTEXT, FrontContext
from freetoken.serving.errors import RETRY_AFTER_LOADING_S, ApiError, internal, openai_error_body
from freetoken.serving.metrics import CONTENT_TYPE, exposition
from freetoken.serving.openapi import openapi_document
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.responses.endpoint import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from freetoken.serving.status import actor_json
from freetoken.serving.trace_control import delete_trace, get_trace, record_trace, show_trace

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LIMITED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""Where generating happens: these count for ``server.max_requests_per_key``."""
LIMITER: web.AppKey[KeyLimiter] = web.AppKey("limiter", KeyLimiter)
CORS_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("cors_headers", default=MappingProxyType({}))
"""Of the answer to the request that the current task handles."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """``value`` as a JSON body. Numbers that JSON cannot write become null."""
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")


def printable(text: str) -> str:
    """``text`` as JSON can carry it: surrogates, which stand for bytes of a path that are not UTF-8, are replaced."""
    return text.encode(errors="replace").decode()


async def models(request: web.Request) -> web.StreamResponse:
    """The served model under each of its names, with its limits, in the OpenAI and the Anthropic dialect at once."""
    context = request.app[CONTEXT]
    aliases = [name for name in context.spec.config.server.model_aliases if name != "*"]
    names = list(dict.fromkeys([context.spec.served_model_name, *aliases]))
    listed = {"object": "list", "data": [_model(context, name) for name in names]}
    return json_response({**listed, "first_id": names[0], "last_id": names[-1], "has_more": False})


async def model(request: web.Request) -> web.StreamResponse:
    """One model by name."""
    context = request.app[CONTEXT]
    name = request.match_info["id"]
    context.check_model(name)
    return json_response(_model(context, name))


def _model(context: FrontContext, name: str) -> dict[str, Any]:
    context_tokens = context.limits.context_tokens
    created = datetime.fromtimestamp(context.created_s, timezone.utc)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": context.created_s,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "freetoken",
        "display_name": name,
        "context_length": context_tokens,
        "context_window": context_tokens,
        "max_model_len": context_tokens,
        "max_input_tokens": context_tokens - 1,
        "max_output_tokens": context_tokens - 1,
        "max_tokens": context_tokens - 1,
    }


async def root(request: web.Request) -> web.StreamResponse:
    """That there is a server, for clients that ask before they begin."""
    return json_response({"name": "freetoken", "object": "server"})


async def health(request: web.Request) -> web.StreamResponse:
    """200 when the engine answers requests, else 503; with progress while loading."""
    report = await request.app[CONTEXT].engine.health_report()
    if report["status"] == HealthState.READY.value:
        return json_response(report)
    return json_response(report, 503, {"Retry-After": str(RETRY_AFTER_LOADING_S)})


async def metrics(request: web.Request) -> web.StreamResponse:
    """Every actor's figures and the front's histograms, for Prometheus."""
    context = request.app[CONTEXT]
    body = exposition(context.metrics, await context.engine.actors())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def actors(request: web.Request) -> web.StreamResponse:
    """Every actor's status."""
    statuses = await request.app[CONTEXT].engine.actors()
    return json_response({"object": "list", "actors": [actor_json(status) for status in statuses]})


async def openapi(request: web.Request) -> web.StreamResponse:
    """This interface as an OpenAPI 3.1 document."""
    return json_response(openapi_document(ROUTES, __version__))


async def cache_status(request: web.Request) -> web.StreamResponse:
    """Expert slots, KV blocks and the store: plan and present figures."""
    return json_response(await request.app[CONTEXT].engine.cache_status())


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{id}", get_response),
    ("DELETE", "/v1/responses/{id}", delete_response),
    ("POST", "/v1/responses/{id}/cancel", cancel_response),
    ("GET", "/v1/responses/{id}/input_items", list_input_items),
    ("POST", "/v1/messages", create_message),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{id:.+}", model),
    ("GET", "/models", models),
    ("GET", "/v1/actors", actors),
    ("GET", "/v1/cache/status", cache_status),
    ("POST", "/v1/cache/rebalance", rebalance),
    ("POST", "/v1/cache/trace", record_trace),
    ("GET", "/v1/cache/trace", show_trace),
    ("GET", "/v1/cache/trace/{name}", get_trace),
    ("DELETE", "/v1/cache/trace/{name}", delete_trace),
    ("GET", "/", root),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", openapi),
)


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals."""
    if error.status == 404:
        return ApiError(404, f"there is no {request.path[:200]!r} here", "not_found")
    if error.status == 405:
        allowed = ", ".join(sorted(getattr(error, "allowed_methods", ())))
        return ApiError(
            405, f"{request.path[:200]!r} does not take {request.method}; it takes {allowed}", "method_not_allowed"
        )
    if error.status == 413:
        limit = request.app[CONTEXT].spec.config.server.max_body_bytes
        return ApiError(
            413, f"the request body is larger than {limit} bytes (server.max_body_bytes)", "request_too_large"
        )
    return ApiError(error.status, error.reason or "the request was refused", "http_error")


def _route_name(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


@web.middleware
async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around every request. Nothing but a lost client leaves it as an exception."""
    given = request.headers.get("X-Request-Id", "")
    CORS_HEADERS.set({})
    REQUEST_ID.set(given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}")
    context = request.app[CONTEXT]
    status = 499
    try:
        response = await _answer(request, handler, context)
        status = response.status
        return response
    finally:
        context.metrics.response(_route_name(request), status)


async def _answer(request: web.Request, handler: Handler, context: FrontContext) -> web.StreamResponse:
    headers: dict[str, str] = {}
    try:
        cors = check_origin(request, context.spec.config.server.allowed_origins)
        CORS_HEADERS.set(cors)
        if cors and request.method == "OPTIONS":
            return web.Response(status=204)
        check_key(request, context.spec.config.server.api_keys)
        if request.path not in LIMITED_PATHS:
            return await handler(request)
        with request.app[LIMITER].hold(given_key(request)):
            return await handler(request)
    except ApiError as caught:
        error = caught
    except web.HTTPException as caught:
        error = _from_http(request, caught)
        if "Allow" in caught.headers:
            headers["Allow"] = caught.headers["Allow"]
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("event=request_failed request=%s path=%r", REQUEST_ID.get(), request.path)
        error = internal(REQUEST_ID.get())
    error.message = printable(error.message)
    error.param = None if error.param is None else printable(error.param)
    anthropic = request.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    body = anthropic_error_body(error) if anthropic else openai_error_body(error)
    return json_response(body, error.status, {**headers, **error.headers})


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "freetoken"
    response.headers["X-Request-Id"] = response.headers["Request-Id"] = REQUEST_ID.get()
    response.headers.update(CORS_HEADERS.get())


def build_app(context: FrontContext) -> web.Application:
    """The application, to be run with ``handler_cancellation=True``: the handler of a client that left is cancelled,
    and so aborts its generation."""
    app = web.Application(middlewares=[frame], client_max_size=context.spec.config.server.max_body_bytes)
    app[CONTEXT] = context
    app[LIMITER] = KeyLimiter(context.spec.config.server.max_requests_per_key)
    app.on_response_prepare.append(_add_headers)
    for method, path, handler in ROUTES:
        if method == "GET":
            app.router.add_get(path, handler)  # answers HEAD too
        else:
            app.router.add_route(method, path, handler)
    return app
