"""The OpenAPI document of this server, made from its routes and request models."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from freetoken.serving.access import OPEN_PATHS
from freetoken.serving.anthropic_schema import CountTokensRequest, MessagesRequest
from freetoken.serving.cache_control import RebalanceRequest
from freetoken.serving.openai_schema import ChatRequest, CompletionRequest
from freetoken.serving.responses.schema import ResponsesRequest
from freetoken.serving.trace_control import TraceRequest

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/cache/rebalance": RebalanceRequest,
    "/v1/cache/trace": TraceRequest,
}
"""What is posted where; other paths take no body."""

QUERIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
    },
    "/v1/responses/{id}": {"stream": {"type": "boolean", "default": False}},
}

_REF = "#/components/schemas/"
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERRORS: Mapping[str, Any] = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT, "code": _TEXT},
            },
            "request_id": _TEXT,
        },
    },
}

Routes = Iterable[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]


def openapi_document(routes: Routes, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document of ``routes``: (method, path as aiohttp writes it, handler).

    Request bodies are described field by field; answers by their content types, since clients know them from their own
    dialect. What a handler's docstring says becomes the operation's summary.
    """
    schemas: dict[str, Any] = dict(_ERRORS)
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern, handler in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", pattern)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, handler, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "FreeToken", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(method: str, path: str, handler: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"schema": {"type": "object"}}
    content = {"application/json": answer}
    body = BODIES.get(path) if method == "POST" else None
    if body is not None and "stream" in body.model_fields:
        content["text/event-stream"] = {"schema": _TEXT}
    if path == "/metrics":
        content = {"text/plain": {"schema": _TEXT}}
    error = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{handler.__name__}" + ("_unversioned" if path == "/models" else ""),
        "summary": " ".join((handler.__doc__ or "").split()),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "What is wrong; docs/http.md lists the codes.",
                "content": {"application/json": {"schema": {"$ref": _REF + error}}},
            },
        },
        "security": [] if path in OPEN_PATHS else [{}, {"bearer": []}, {"key": []}],
    }
    if path == "/health":
        operation["responses"]["503"] = {"description": "Not ready.", "content": {"application/json": answer}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if method == "GET":
        parameters += [{"name": name, "in": "query", "schema": dict(s)} for name, s in QUERIES.get(path, {}).items()]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        schema = body.model_json_schema(ref_template=_REF + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"$ref": _REF + body.__name__}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
