"""A small HTTP client for benchmarks: JSON calls and timed completion streams, standard library only."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Stream:
    """One completion: seconds to the first token, and the time of every chunk after the request was sent."""

    ttft_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def decode_ms(self) -> float:
        """Mean milliseconds between tokens, first to last."""
        tokens = int(self.usage.get("completion_tokens", len(self.times_s)))
        return 1e3 * (self.times_s[-1] - self.times_s[0]) / max(1, tokens - 1)


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


def get(url: str, path: str) -> Any:
    """GET, parsed as JSON."""
    connection = _connect(url, 60)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def actor_metrics(url: str) -> dict[str, dict[str, float]]:
    """Actor name -> its metrics."""
    return {a["name"]: a["metrics"] for a in get(url, "/v1/actors")["actors"]}


def stream(url: str, prompt: list[int], max_tokens: int, timeout_s: float = 600.0, **fields: Any) -> Stream:
    """A streamed greedy completion of token ids that does not stop at end-of-sequence."""
    body = {
        "model": get(url, "/v1/models")["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | fields
    result = Stream()
    connection = _connect(url, timeout_s)
    started = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            result.error = response.read().decode()
            return result
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result.error = str(event["error"])
            elif event.get("choices"):
                result.times_s.append(time.perf_counter() - started)
            if event.get("usage"):
                result.usage = event["usage"]
    finally:
        connection.close()
    if result.times_s:
        result.ttft_s = result.times_s[0]
    return result
