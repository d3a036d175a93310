"""Who may use the API: keys, web pages, and how much at a time."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from freetoken.serving.errors import ApiError, busy

OPEN_PATHS = frozenset({"/", "/health"})
CORS_MAX_AGE_S = 600


def given_key(request: web.Request) -> str:
    """The key that a client sent, as a bearer or in ``x-api-key``; empty without one."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return request.headers.get("x-api-key", "").strip()


def check_key(request: web.Request, api_keys: Sequence[str]) -> None:
    """Raises 401 without one of the keys. Takes the same time for every wrong key."""
    if not api_keys or request.path in OPEN_PATHS:
        return
    given = given_key(request)
    candidate = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    matches = [hmac.compare_digest(candidate, hashlib.sha256(key.encode()).digest()) for key in api_keys]
    if not any(matches):
        missing = "is missing; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
        detail = "is not valid" if given else missing
        raise ApiError(401, f"the API key {detail}", "invalid_api_key")


def check_origin(request: web.Request, allowed_origins: Sequence[str]) -> dict[str, str]:
    """Headers for the answer to a web page. Raises 403 for a page of another origin that is not allowed."""
    origin = request.headers.get("Origin")
    if origin is None or _is_own(_host_of(origin), request.headers.get("Host", "").lower()):
        return {}
    if origin not in allowed_origins and "*" not in allowed_origins:
        raise ApiError(403, f"requests from pages of {origin[:200]!r} are not allowed", "cross_origin")
    headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    if request.method == "OPTIONS":
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers["Access-Control-Allow-Methods"] = "GET, HEAD, POST, DELETE"
        headers["Access-Control-Allow-Headers"] = wanted or "authorization, content-type"
        headers["Access-Control-Max-Age"] = str(CORS_MAX_AGE_S)
    else:
        headers["Access-Control-Expose-Headers"] = "Request-Id, X-Request-Id, Retry-After"
    return headers


def _is_own(origin_host: str, host: str) -> bool:
    """Whether a page came from this server. A name proves nothing (whoever owns it may point it here), an address and
    this machine's own name do."""
    if origin_host != host:
        return False
    name = ""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class KeyLimiter:
    """Bounds the requests that one key has under way. Event loop only."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """For the time of one request. Raises 429 when the key has too many."""
        if self._limit is None:
            yield
            return
        if self._under_way[key] >= self._limit:
            raise busy(f"this API key has {self._limit} requests under way (server.max_requests_per_key)")
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]
