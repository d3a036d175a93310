"""``/v1/cache/trace``: an operator records which experts are routed to, and gets the file."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from freetoken.errors import ConfigError, FreeTokenError, TraceBusyError
from freetoken.experts.trace_files import MIN_BYTES, find_trace
from freetoken.messages import TraceRecording, TraceWish
from freetoken.serving.body import read_request
from freetoken.serving.context import CONTEXT, FrontContext
from freetoken.serving.errors import ApiError, unavailable
from freetoken.units import parse_bytes

_BYTES_SCHEMA = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": MIN_BYTES}, {"type": "string"}]})


class TraceRequest(BaseModel):
    """Begin a recording, or end it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["start", "stop"] = Field(description="`stop` ends a recording whoever began it.")
    name: str | None = Field(
        None,
        description="start: of the new file in `experts.trace_dir`; letters, digits, `.`, `_`, `-`, and at the end "
        "`.routes`. Unset: chosen by the server.",
    )
    max_bytes: Annotated[int, BeforeValidator(parse_bytes), _BYTES_SCHEMA] | None = Field(
        None, ge=MIN_BYTES, description="start: where recording ends, in bytes or as a text like 64MiB; unset: 256MiB."
    )


async def record_trace(request: web.Request) -> web.StreamResponse:
    """Begin or end the recording of a route trace; the answer names the file and counts what is in it."""
    context = request.app[CONTEXT]
    fields, _ = await read_request(request, TraceRequest, context.pool)
    if fields.action == "stop" and (fields.name is not None or fields.max_bytes is not None):
        raise ApiError(400, "name and max_bytes belong to action=start", "invalid_value", "action")
    if fields.name == "":
        raise ApiError(400, "name is empty; leave it out to let the server choose", "invalid_value", "name")
    wish = TraceWish(fields.action, fields.name or "", fields.max_bytes)
    recording = await _ask(context, wish)
    if recording is None:
        raise ApiError(409, "nothing was recorded since the engine was started", "no_recording")
    return _json(recording)


async def show_trace(request: web.Request) -> web.StreamResponse:
    """The recording of a route trace that is under way, or else the last one."""
    return _json(await _ask(request.app[CONTEXT], TraceWish("show")))


async def get_trace(request: web.Request) -> web.StreamResponse:
    """The file of a recording that has ended."""
    return web.FileResponse(await _find(request), headers={"Content-Type": "application/octet-stream"})


async def delete_trace(request: web.Request) -> web.StreamResponse:
    """Delete such a file."""
    path = await _find(request)
    with contextlib.suppress(FileNotFoundError):
        await asyncio.to_thread(path.unlink)
    from freetoken.serving.app import json_response

    return json_response({"object": "cache.trace.deleted", "name": path.name, "deleted": True})


async def _find(request: web.Request) -> Path:
    context, name = request.app[CONTEXT], request.match_info["name"]
    try:
        path = await asyncio.to_thread(find_trace, context.spec.config.trace_dir, name)
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value", "name") from error
    if path is None:
        raise ApiError(404, f"there is no trace {name!r}", "not_found", "name")
    recording = await _ask(context, TraceWish("show"))
    if recording is not None and not recording.ended and Path(recording.path) == path.absolute():
        raise ApiError(409, f"{name} is being recorded; stop that first", "trace_under_way", "name")
    return path


async def _ask(context: FrontContext, wish: TraceWish) -> TraceRecording | None:
    try:
        return await context.engine.trace(wish)
    except TraceBusyError as error:
        raise ApiError(409, str(error), "trace_under_way") from error
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value", "name" if wish.name else None) from error
    except FreeTokenError as error:
        raise unavailable(f"routes cannot be recorded now: {error}") from error


def _json(recording: TraceRecording | None) -> web.Response:
    from freetoken.serving.app import json_response

    return json_response({"object": "cache.trace", **recording_json(recording)})


def recording_json(recording: TraceRecording | None) -> dict[str, Any]:
    """One recording; without one, only that there is none."""
    if recording is None:
        return {"recording": False}
    return {
        "recording": not recording.ended,
        "name": recording.name,
        "path": recording.path,
        "model": recording.model,
        "started": recording.started_s,
        "seconds": round(recording.seconds, 3),
        "bytes": recording.num_bytes,
        "max_bytes": recording.max_bytes,
        "publishes": recording.publishes,
        "tokens": recording.tokens,
        "unrecorded": recording.unrecorded,
        "ended": recording.ended or None,
    }
