"""What happens on the way: keep-alive, clients that leave or do not read, failures after the first byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from freetoken.messages import FinishReason, LogprobEntry, RequestFailure, TokenDelta
from freetoken.serving.streams import Inbox, RequestStreams
from freetoken.testing.waiting import until

from .conftest import Site, open_site

BODY = {"model": "tiny", "prompt": "hi"}
LOGPROBS = (LogprobEntry(5, -1.0, tuple((i, -float(i)) for i in range(100))),) * 10


@asynccontextmanager
async def streaming(site: Site, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    async with site.session.post("/v1/completions", json={**BODY, "stream": True, **fields}) as response:
        assert response.status == 200
        yield response


async def test_headers_and_role_come_before_any_token(site: Site) -> None:
    site.scheduler.script = None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with site.session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert site.scheduler.num_running == 1


async def test_keepalive_while_nothing_comes(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"keepalive_s": 0.01}) as site:
        site.scheduler.script = None
        async with streaming(site) as response:
            for _ in range(3):
                assert await response.content.readline() == b": keep-alive\n"
                assert await response.content.readline() == b"\n"
            request = site.scheduler.submitted[0]
            site.scheduler.send(TokenDelta(request.request_id, (5, 2), finish_reason=FinishReason.STOP))
            rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")


async def test_keepalive_while_text_is_withheld(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"keepalive_s": 0.01}) as site:
        site.scheduler.script = None
        async with streaming(site, stop="hello world") as response:
            request = site.scheduler.submitted[0]
            site.scheduler.send(TokenDelta(request.request_id, tuple(site.ids("hello"))))
            assert await response.content.readline() == b": keep-alive\n"
            site.scheduler.send(TokenDelta(request.request_id, finish_reason=FinishReason.LENGTH))
            assert b'"text":"hello"' in await response.read()


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_aborts_once(site: Site, n: int) -> None:
    site.scheduler.script = None
    async with streaming(site, n=n):
        await until(lambda: len(site.scheduler.submitted) == n)
    await until(lambda: site.scheduler.num_running == 0)
    await site.get("/health")  # a round trip, in which a second abort would arrive
    assert sorted(m.request_id for m in site.scheduler.aborted) == sorted(
        r.request_id for r in site.scheduler.submitted
    )
    assert site.front.metrics()["requests"] == 0


async def test_leaving_in_the_middle_of_a_stream_aborts_once(site: Site) -> None:
    site.scheduler.script = None
    async with streaming(site) as response:
        request = site.scheduler.submitted[0]
        site.scheduler.send(TokenDelta(request.request_id, (5,)))
        await response.content.readline()
    await until(lambda: site.scheduler.num_running == 0)
    site.scheduler.send(TokenDelta(request.request_id, (6,)))  # late tokens of a forgotten request
    await site.get("/health")
    assert len(site.scheduler.aborted) == 1


async def test_leaving_without_streaming_aborts_once(site: Site) -> None:
    site.scheduler.script = None
    task = asyncio.ensure_future(site.complete(n=2))
    await until(lambda: len(site.scheduler.submitted) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: site.scheduler.num_running == 0)
    await site.get("/health")
    assert len(site.scheduler.aborted) == 2
    async with site.session.get("/metrics") as response:
        text = await response.text()
    assert 'freetoken_http_responses_total{route="/v1/completions",status="499"} 1.0' in text
    assert 'freetoken_generations_total{outcome="disconnected"} 1.0' in text
    assert "freetoken_generations_in_flight 0.0" in text


async def test_finished_requests_are_not_aborted(site: Site) -> None:
    await site.complete(n=2)
    async with streaming(site) as response:
        await response.read()
    await site.get("/health")
    assert site.scheduler.aborted == []


async def test_failure_in_the_middle_is_an_event(site: Site) -> None:
    site.scheduler.script = None
    async with streaming(site) as response:
        request = site.scheduler.submitted[0]
        site.scheduler.send(TokenDelta(request.request_id, (5,)))
        await response.content.readline()
        failure = RequestFailure("numeric", "logits are not finite")
        site.scheduler.send(TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, failure=failure))
        events = [e for e in (await response.read()).decode().split("\n\n") if e.strip()]
    error = json.loads(events[-1].strip().removeprefix("data: "))["error"]
    assert error == {"message": "logits are not finite", "type": "server_error", "param": None, "code": "numeric"}
    assert site.scheduler.aborted == []


async def test_unexpected_fault_in_the_middle_is_an_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.scheduler.script = None
    async with streaming(site) as response:

        def broken(*args: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("freetoken.serving.choice.ChoiceState.feed", broken)
        site.scheduler.send(TokenDelta(site.scheduler.submitted[0].request_id, (5,)))
        assert b'"code":"internal_error"' in await response.read()
    await until(lambda: len(site.scheduler.aborted) == 1)


async def test_a_client_that_does_not_read_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.serving.streams.Inbox.__init__.__defaults__", (200,))
    site.scheduler.script = None
    _, writer = await asyncio.open_connection("127.0.0.1", site.front.port, limit=1024)
    data = json.dumps({**BODY, "stream": True, "logprobs": 20, "max_tokens": 500}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    await until(lambda: site.scheduler.num_running == 1)
    request_id = site.scheduler.submitted[0].request_id

    def flood() -> bool:
        if site.scheduler.num_running:
            site.scheduler.send(*(TokenDelta(request_id, (5,) * 10, LOGPROBS) for _ in range(10)))
        return not site.scheduler.num_running

    await until(flood)
    await site.get("/health")
    assert [m.request_id for m in site.scheduler.aborted] == [request_id]
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_many_streams_with_random_ends(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        site.reply = "the quick brown fox jumps over the lazy dog"

        async def one(i: int) -> str:
            async with streaming(site, prompt=f"{i}") as response:
                if i % 3 == 0:
                    await response.content.readline()
                    return "left"
                return (await response.read()).decode()

        results = await asyncio.gather(*(one(i) for i in range(48)))
        assert all(r == "left" or r.endswith("data: [DONE]\n\n") for r in results)
        await until(lambda: site.front.metrics()["requests"] == 0)


async def test_inbox_joins_waits_and_silence() -> None:
    inbox = Inbox()
    assert await inbox.take(0.001) == []
    inbox.put(TokenDelta("a", (1,)))
    inbox.put(TokenDelta("b", (2,)))
    taken = await inbox.take(10)
    assert isinstance(taken, list) and [delta.request_id for delta in taken] == ["a", "b"]
    waiting = asyncio.ensure_future(inbox.take(1000))
    await asyncio.sleep(0)
    inbox.put(TokenDelta("a", (3,)))
    assert len(await waiting) == 1  # type: ignore[arg-type]
    assert await inbox.take(0.001) == []  # a shorter wait than the armed timer's
    inbox.fail(RequestFailure("internal", "x"))
    assert await inbox.take(1) == await inbox.take(1) == RequestFailure("internal", "x")
    inbox.close()


async def test_streams_know_who_is_under_way() -> None:
    streams = RequestStreams(2)
    inbox = streams.open(["a", "b"])
    assert len(streams) == 2
    assert not await streams.wait_idle(0.001)
    assert streams.forget("a") and not streams.forget("a")
    streams.fail_all(RequestFailure("engine_restarted", "x", True))
    assert await streams.wait_idle(1)
    assert not streams.forget("b")
    assert isinstance(await inbox.take(1), RequestFailure)
    inbox.close()
