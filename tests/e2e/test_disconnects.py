"""Clients that leave a whole engine, in every dialect, streaming or not, at every phase: blocks and places in the batch
return to what they were, and the engine works on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from freetoken.cli.process import EngineProcess
from tests.e2e.conftest import complete, get

pytestmark = pytest.mark.e2e

WORDS = "one two three four five six seven eight nine ten "
LIMIT_S = 30.0


def body_of(path: str, words: int, max_tokens: int) -> dict[str, Any]:
    text = WORDS * (words // 10)
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": max_tokens}
    if path == "/v1/completions":
        return {"prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def scheduler(url: str) -> dict[str, float]:
    """The Scheduler's metrics."""
    metrics: dict[str, float] = next(a for a in get(url, "/v1/actors")["actors"] if a["name"] == "Scheduler")["metrics"]
    return metrics


def wait_for(what: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, description
        time.sleep(0.02)


def baseline(url: str) -> bool:
    figures = scheduler(url)
    return figures["running"] == figures["waiting"] == 0 == get(url, "/v1/cache/status")["kv"]["held_blocks"]


def leave(url: str, path: str, streamed: bool, phase: str) -> None:
    """One request whose client goes away in ``phase``."""
    words, max_tokens = (200, 20) if phase == "prefill" else (20, 300)
    fields = {"model": get(url, "/v1/models")["data"][0]["id"], "stream": streamed, **body_of(path, words, max_tokens)}
    data = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), LIMIT_S) as connection:
        if phase == "body":
            connection.sendall(head.encode() + data[: len(data) // 2])
            return
        connection.sendall(head.encode() + data)
        if phase == "sent":
            return
        if streamed:
            seen = b""
            wanted = {"prefill": 1, "decode": 8}[phase]
            while seen.count(b"data: ") < wanted and (more := connection.recv(4096)):
                seen += more
        else:
            wait_for(lambda: scheduler(url)["running"] + scheduler(url)["waiting"] > 0 or baseline(url), "never ran")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_everything_returns(engine: EngineProcess, path: str, streamed: bool) -> None:
    url = engine.url
    before = complete(url, [7, 8, 9], 4)["choices"][0]["text"]
    for phase in ("body", "sent", "prefill", "decode"):
        leave(url, path, streamed, phase)
        wait_for(
            lambda: baseline(url), f"after leaving in {phase}: {scheduler(url)}, {get(url, '/v1/cache/status')['kv']}"
        )
    assert complete(url, [7, 8, 9], 4)["choices"][0]["text"] == before
    experts = get(url, "/v1/cache/status")["experts"]
    assert experts["resident_slots"] + experts["in_flight_slots"] <= experts["slots"]


def test_many_leave_at_once(engine: EngineProcess) -> None:
    import concurrent.futures

    url = engine.url
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
    cases = [(path, streamed, phase) for path in paths for streamed in (True, False) for phase in ("sent", "prefill")]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda case: leave(url, *case), cases * 2))
    wait_for(lambda: baseline(url), "something is left")
    assert complete(url, [7, 8, 9], 4)["usage"]["completion_tokens"] == 4
