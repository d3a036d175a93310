"""From the bytes of a request body to a validated model, with errors that name field, value and limit."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from freetoken.serving.errors import ApiError, bad_value
from freetoken.serving.json_depth import MAX_DEPTH, is_too_deep
from freetoken.serving.openai_schema import shown

M = TypeVar("M", bound=BaseModel)

INLINE_BODY_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that they do not hold up the streams of others."""


async def read_request(request: web.Request, model: type[M], pool: Executor) -> tuple[M, dict[str, Any]]:
    """The request's body as ``model``, and as it came. Raises ``ApiError`` (400, 413)."""
    try:
        data = await request.read()
    except web.HTTPException:
        raise
    except ConnectionError:
        raise
    except Exception as error:  # a body that is not what its headers say
        raise ApiError(400, f"the request body cannot be read: {error}", "invalid_body") from error
    if len(data) <= INLINE_BODY_BYTES:
        return parse(data, model)
    return await asyncio.get_running_loop().run_in_executor(pool, parse, data, model)


def parse(data: bytes, model: type[M]) -> tuple[M, dict[str, Any]]:
    """Parse and validate; raises ``ApiError``."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _malformed(data, error) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body is {_kind(value)}; it must be a JSON object", "invalid_body")
    if is_too_deep(value):
        raise ApiError(400, f"the request body is nested deeper than {MAX_DEPTH} levels", "invalid_body")
    try:
        return model.model_validate(value), value
    except ValidationError as error:
        raise _invalid(error) from None


def _malformed(data: bytes, error: orjson.JSONDecodeError) -> ApiError:
    field = _non_finite_field(data)
    if field is not None:
        path, value = field
        return bad_value(f"{path} is {value}; numbers must be finite", path)
    if not data.strip():
        return ApiError(400, "the request body is empty; it must be a JSON object", "invalid_json")
    return ApiError(400, f"the request body is not valid JSON: {error}", "invalid_json")


def _non_finite_field(data: bytes) -> tuple[str, str] | None:
    """Where a body that is JSON but for NaN or an infinity (as Python and others write them) has the first of them."""
    if len(data) > INLINE_BODY_BYTES or not any(word in data for word in (b"NaN", b"Infinity", b"e", b"E")):
        return None
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return None
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return dotted(path), {math.inf: "infinite", -math.inf: "infinite"}.get(value, "NaN")
        if isinstance(value, dict):
            stack.extend(((*path, key), item) for key, item in value.items())
        elif isinstance(value, list):
            stack.extend(((*path, i), item) for i, item in enumerate(value))
    return None


def dotted(path: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    path = dotted(first["loc"]) or "the request body"
    if first["type"] == "missing":
        return bad_value(f"{path} is required", path, "missing_required_parameter")
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return bad_value(f"{path} is {shown(first['input'])}: {reason}", path)
