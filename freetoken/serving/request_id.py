"""The id under which a request appears in logs, errors and the ``X-Request-Id`` header."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that the current task handles."""
