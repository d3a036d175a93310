"""What goes wrong with a request, independent of the API dialect, and how the OpenAI dialect writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from freetoken.messages import RequestFailure

OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
"""``error.type`` by status; other 4xx are ``invalid_request_error``, 5xx are ``server_error``."""

RETRY_AFTER_LOADING_S = 2
RETRY_AFTER_BUSY_S = 1
RETRY_AFTER_RESTART_S = 2


class ApiError(Exception):
    """A request that cannot be answered. ``message`` is for the client and names the value and the limit.

    ``code`` is the machine-readable reason, ``param`` the request field at fault. ``retry_after_s`` becomes an
    integer ``Retry-After`` header, which clients need to come back instead of giving up. ``overflow`` is (tokens
    wanted, tokens possible) when the context is too short.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(status, message, code, param, retry_after_s, overflow)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.overflow = overflow

    def __str__(self) -> str:
        return f"{self.status} {self.code or '-'}: {self.message}"

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that belong to the error."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def bad_value(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: one field of the request is wrong."""
    return ApiError(400, message, code, param)


def unsupported(message: str, param: str) -> ApiError:
    """400: well formed, but this server does not do it."""
    return ApiError(400, message, "unsupported_value", param)


def context_overflow(limit_tokens: int, prompt_tokens: int, max_tokens: int | None, param: str) -> ApiError:
    """400 ``context_length_exceeded``. ``max_tokens`` is the requested output when only the sum is too long.

    Agents recognise the overflow by the code or by the words "maximum context length is N tokens".
    """
    head = f"This model's maximum context length is {limit_tokens} tokens, but "
    if max_tokens is None:
        tail = (
            f"the {param} has {prompt_tokens} tokens and at least 1 more must be generated. Shorten the {param} "
            f"to at most {limit_tokens - 1} tokens."
        )
    else:
        tail = (
            f"{prompt_tokens + max_tokens} tokens were requested: {prompt_tokens} in the {param} and {max_tokens} "
            f"to generate. Shorten the {param} or lower max_tokens to at most {limit_tokens - prompt_tokens}."
        )
    wanted = max(prompt_tokens + (max_tokens or 0), limit_tokens + 1)
    return ApiError(400, head + tail, "context_length_exceeded", param, overflow=(wanted, limit_tokens))


def model_not_found(name: str, served: str) -> ApiError:
    """404: this server serves one model, and it is another one."""
    return ApiError(404, f"model {name!r} does not exist; this server serves {served!r}", "model_not_found", "model")


def busy(message: str) -> ApiError:
    """429: the queue is full."""
    return ApiError(429, message, "rate_limit_exceeded", retry_after_s=RETRY_AFTER_BUSY_S)


def unavailable(
    message: str, code: str = "engine_unavailable", retry_after_s: float = RETRY_AFTER_RESTART_S
) -> ApiError:
    """503: loading, recovering or stopping."""
    return ApiError(503, message, code, retry_after_s=retry_after_s)


def internal(request_id: str) -> ApiError:
    """500: a fault of the server's own, whose details are in its log."""
    return ApiError(500, f"internal error; the server's log tells more under request id {request_id}", "internal_error")


def from_failure(failure: RequestFailure) -> ApiError:
    """The HTTP face of an engine's refusal or failure."""
    if failure.kind == "queue_full":
        return busy(failure.message)
    if failure.kind == "context_length_exceeded":
        return ApiError(400, failure.message, "context_length_exceeded", "prompt")
    if failure.kind == "engine_restarted" or failure.retryable:
        return unavailable(failure.message, failure.kind)
    return ApiError(500, failure.message, failure.kind)


def openai_error_body(error: ApiError) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``."""
    kind = OPENAI_TYPES.get(error.status) or ("server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
