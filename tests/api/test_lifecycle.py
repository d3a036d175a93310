"""The front as an actor: loading, recovery, stopping."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from freetoken.errors import CheckpointError, ConfigError
from freetoken.messages import ActorName, ActorState, TokenDelta
from freetoken.serving import front as front_module
from freetoken.serving.front import ApiFrontService
from freetoken.testing.front_fakes import make_front_spec, wire_pair
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

from .conftest import open_site

BODY = {"model": "tiny", "prompt": "hi"}


def lone_front(checkpoint: Path, **settings: Any) -> ApiFrontService:
    return ApiFrontService(make_front_spec(checkpoint, **settings), InProcessHub().endpoint(ActorName.API_FRONT))


async def test_listens_while_loading(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    load = front_module.load_text_model

    def slow(directory: str) -> Any:
        assert go.wait(20)
        return load(directory)

    monkeypatch.setattr(front_module, "load_text_model", slow)
    front = lone_front(checkpoint)
    loading = asyncio.ensure_future(front.load())
    try:
        await until(lambda: front.port > 0)
        assert front.state is ActorState.LOADING
        assert front.progress() == (0, 0, "tokenizer")
        async with aiohttp.ClientSession(front.url) as session:
            async with session.get("/health") as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "2")
                report = await response.json()
                assert report["status"] == "loading"
                assert report["progress"]["what"] == "tokenizer"
            for path in ("/v1/completions", "/v1/chat/completions"):
                async with session.post(path, json=BODY) as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "2")
                    assert (await response.json())["error"]["code"] == "engine_loading"
            async with session.get("/v1/models") as response:
                assert response.status == 200
            go.set()
            await loading
            assert front.progress() == (0, 0, "")
            async with session.post("/v1/completions", json=BODY) as response:
                assert response.status == 503
    finally:
        go.set()
        await front.close()


async def test_a_taken_port_is_a_clear_error(checkpoint: Path) -> None:
    first = lone_front(checkpoint)
    await first.load()
    second = lone_front(checkpoint, server={"port": first.port})
    try:
        with pytest.raises(ConfigError, match=rf"server\.port {first.port}"):
            await second.load()
    finally:
        await second.close()
        await first.close()


async def test_a_checkpoint_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    front = lone_front(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            await front.load()
    finally:
        await front.close()


async def test_pause_ends_requests_and_resume_takes_new_ones(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        site.scheduler.script = None
        whole = asyncio.ensure_future(site.complete())
        await until(lambda: len(site.scheduler.submitted) == 1)
        async with site.session.post("/v1/completions", json={**BODY, "stream": True}) as stream:
            await until(lambda: len(site.scheduler.submitted) == 2)
            site.scheduler.send(TokenDelta(site.scheduler.submitted[1].request_id, (5,)))
            await stream.content.readline()
            await site.front.pause("GpuExecutor died")
            status, body = await whole
            assert (status, body["error"]["code"]) == (503, "engine_restarted")
            assert "GpuExecutor died" in body["error"]["message"]
            rest = (await stream.read()).decode().strip()
            error = json.loads(rest.split("\n\n")[-1].removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == ("engine_restarted", "server_error")
            assert "[DONE]" not in rest
        async with site.session.post("/v1/completions", json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "2")
        status, report = await site.get("/health")
        assert (status, report["status"]) == (503, "degraded")
        assert site.scheduler.aborted == []
        wiring = await wire_pair(site.front.endpoint, site.scheduler.endpoint, epoch=2)
        await site.front.wire(wiring)
        await site.front.resume()
        site.scheduler.script = site.script
        assert (await site.complete())[0] == 200
        assert (await site.get("/health"))[0] == 200


async def test_a_lost_scheduler_ends_requests(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        site.scheduler.script = None
        running = asyncio.ensure_future(site.complete())
        await until(lambda: len(site.scheduler.submitted) == 1)
        await site.scheduler.endpoint.close()
        status, body = await running
        assert (status, body["error"]["code"]) == (503, "engine_restarted")
        async with site.session.post("/v1/completions", json=BODY) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "2"
        status, report = await site.get("/health")
        assert (status, report["status"]) == (503, "degraded")
        assert "Scheduler" in report["detail"]


async def test_a_request_at_the_moment_of_loss(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        site.front.endpoint.on_peer_lost(lambda peer: None)
        site.front._gate.open()
        await site.scheduler.endpoint.close()
        site.front._gate.open()
        status, body = await site.complete(n=2)
        assert (status, body["error"]["type"]) == (503, "server_error")
        assert site.front.metrics()["requests"] == 0


async def test_close_lets_short_requests_end(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        site.scheduler.script = None
        running = asyncio.ensure_future(site.complete())
        await until(lambda: len(site.scheduler.submitted) == 1)
        closing = asyncio.ensure_future(site.front.close())
        await asyncio.sleep(0)
        for delta in site.script(site.scheduler.submitted[0]):
            site.scheduler.send(delta)
        status, body = await running
        assert (status, body["choices"][0]["text"]) == (200, "hello world")
        await closing
        assert site.front.state is ActorState.STOPPED
        with pytest.raises(aiohttp.ClientError):
            await site.get("/health")


async def test_close_ends_long_streams(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "DRAIN_S", 0.01)
    async with open_site(checkpoint) as site:
        site.scheduler.script = None
        async with site.session.post("/v1/completions", json={**BODY, "stream": True}) as stream:
            await until(lambda: len(site.scheduler.submitted) == 1)
            await site.front.close()
            assert b"engine_restarted" in await stream.read()
        await site.front.close()


async def test_close_in_any_state(checkpoint: Path) -> None:
    front = lone_front(checkpoint)
    await front.close()
    assert front.state is ActorState.STOPPED


async def test_status_tells_where_it_listens(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        status = site.front.status()
        assert status.detail == site.front.url == f"http://127.0.0.1:{site.front.port}"
        assert status.name is ActorName.API_FRONT
