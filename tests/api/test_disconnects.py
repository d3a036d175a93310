"""Clients that go away, in every dialect, streaming or not, at every moment: one abort for what runs, none for the
rest, and nothing is left. Whole engines are in tests/e2e/test_disconnects.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from freetoken.messages import FinishReason, TokenDelta
from freetoken.testing.waiting import until

from .conftest import Site

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
    "/v1/responses": {"input": "hi"},
}
every_dialect = pytest.mark.parametrize("path", list(BODIES))
both_modes = pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])


@asynccontextmanager
async def client(site: Site, path: str, streamed: bool, share: float = 1.0) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that has sent ``share`` of a request and is dropped at the end of the block."""
    body = json.dumps({"model": "tiny", "stream": streamed, **BODIES[path]}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", site.front.port)
    try:
        writer.write(head.encode() + body[: int(len(body) * share)])
        await writer.drain()
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def settled(site: Site) -> None:
    """Nothing runs any more, and a second abort would have arrived."""
    await until(lambda: site.scheduler.num_running == 0 and site.front.metrics()["requests"] == 0)
    await site.get("/health")
    assert site.front.pending_tokens == 0


@every_dialect
async def test_before_the_body_is_complete(site: Site, path: str) -> None:
    async with client(site, path, True, 0.5):
        await site.get("/health")
    await settled(site)
    assert site.scheduler.submitted == []


@every_dialect
@both_modes
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_while_it_runs(site: Site, path: str, streamed: bool, num_tokens: int) -> None:
    site.scheduler.script = None
    async with client(site, path, streamed) as reader:
        await until(lambda: len(site.scheduler.submitted) == 1)
        request_id = site.scheduler.submitted[0].request_id
        for token_id in site.ids("hello world stop")[:num_tokens]:
            site.scheduler.send(TokenDelta(request_id, (token_id,)))
        await until(lambda: site.front.pending_tokens == 0)
        if streamed:
            await reader.readuntil(b"\r\n\r\n")
    await settled(site)
    assert [message.request_id for message in site.scheduler.aborted] == [request_id]
    site.scheduler.send(TokenDelta(request_id, (7,), finish_reason=FinishReason.STOP))
    await settled(site)


@every_dialect
@both_modes
async def test_after_its_end_and_before_all_was_read(site: Site, path: str, streamed: bool) -> None:
    async with client(site, path, streamed) as reader:
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: site.scheduler.num_running == 0)
    await settled(site)
    assert site.scheduler.aborted == []


@every_dialect
@both_modes
async def test_at_the_moment_of_its_end(site: Site, path: str, streamed: bool) -> None:
    """The abort and the last tokens cross: whichever comes first, both sides forget the request once."""
    site.scheduler.script = None
    site.scheduler.answers_aborts = False
    async with client(site, path, streamed):
        await until(lambda: len(site.scheduler.submitted) == 1)
        request_id = site.scheduler.submitted[0].request_id
    site.scheduler.send(TokenDelta(request_id, (5, 2), finish_reason=FinishReason.STOP))
    await settled(site)
    assert len(site.scheduler.aborted) <= 1
