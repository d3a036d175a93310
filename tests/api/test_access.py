"""Keys, web pages, and limits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from freetoken.testing.waiting import until

from .conftest import open_site

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


async def test_both_ways_to_send_a_key(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"api_keys": ("sk-one", "sk-two")}) as site:
        for headers in ({"Authorization": "Bearer sk-two"}, {"x-api-key": "sk-one"}):
            assert (await site.post("/v1/messages", BODY, headers=headers))[0] == 200
            assert (await site.post("/v1/chat/completions", BODY, headers=headers))[0] == 200
        for headers in ({}, {"x-api-key": "sk-three"}, {"Authorization": "Basic sk-one"}):
            status, body = await site.post("/v1/messages", BODY, headers=headers)
            assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
        status, body = await site.get("/v1/models")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await site.get("/"))[0] == 200


async def test_pages_of_other_origins_are_shut_out_unless_named(checkpoint: Path) -> None:
    page = {"Origin": "http://app.example"}
    asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    async with open_site(checkpoint) as site:
        assert (await site.post("/v1/messages", BODY, headers=page))[0] == 403
        async with site.session.options("/v1/messages", headers=asked) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
    server = {"allowed_origins": ("http://app.example",), "api_keys": ("k",)}
    async with open_site(checkpoint, server=server) as site:
        async with site.session.options("/v1/messages", headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "http://app.example"
            assert response.headers["Access-Control-Allow-Headers"] == "x-api-key"
        for key, expected in (("k", 200), ("wrong", 401)):
            headers = {**page, "x-api-key": key}
            async with site.session.post("/v1/messages", json=BODY, headers=headers) as response:
                assert response.status == expected
                assert response.headers["Access-Control-Allow-Origin"] == "http://app.example"
        other = {"Origin": "http://other.example", "x-api-key": "k"}
        assert (await site.post("/v1/messages", BODY, headers=other))[0] == 403


async def test_a_page_whose_name_was_pointed_here_is_another_origin(checkpoint: Path) -> None:
    """A name that resolves to this machine makes a foreign page look like one of ours."""
    page = {"Origin": "http://rebound.example:8321", "Host": "rebound.example:8321"}
    async with open_site(checkpoint) as site:
        assert (await site.post("/v1/messages", BODY, headers=page))[0] == 403
        for host in ("127.0.0.1:8321", "localhost:8321", "[::1]:8321", "192.168.1.7", "box.localhost"):
            own = {"Origin": f"http://{host}", "Host": host}
            assert (await site.post("/v1/messages", BODY, headers=own))[0] == 200, host
    async with open_site(checkpoint, server={"allowed_origins": (page["Origin"],)}) as site:
        assert (await site.post("/v1/messages", BODY, headers=page))[0] == 200


async def test_requests_of_one_key_are_bounded(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"api_keys": ("a", "b"), "max_requests_per_key": 1}) as site:
        site.scheduler.script = None
        first, second = {"x-api-key": "a"}, {"x-api-key": "b"}
        async with site.session.post("/v1/messages", json={**BODY, "stream": True}, headers=first):
            await until(lambda: site.scheduler.num_running == 1)
            async with site.session.post("/v1/chat/completions", json=BODY, headers=first) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
            site.scheduler.script = site.script
            assert (await site.post("/v1/chat/completions", BODY, headers=second))[0] == 200
            assert (await site.post("/v1/messages/count_tokens", BODY, headers=first))[0] == 200
        await until(lambda: site.scheduler.num_running == 0)
        assert (await site.post("/v1/chat/completions", BODY, headers=first))[0] == 200


async def test_a_generation_has_a_deadline(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"request_timeout_s": 0.1}) as site:
        site.scheduler.script = None
        status, body = await site.post("/v1/chat/completions", BODY)
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        async with site.session.post("/v1/messages", json={**BODY, "stream": True}) as response:
            text = (await response.read()).decode()
        assert text.count("event: message_start") == 1
        assert text.rstrip().rpartition("event: ")[2].startswith("error")
        await until(lambda: site.scheduler.num_running == 0)


async def test_names_of_the_model(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"model_aliases": ("small",)}) as site:
        assert [model["id"] for model in (await site.get("/v1/models"))[1]["data"]] == ["tiny", "small"]
        assert (await site.post("/v1/messages", {**BODY, "model": "small"}))[1]["model"] == "small"
        status, body = await site.post("/v1/messages", {**BODY, "model": "big"})
        assert (status, body["error"]["type"]) == (404, "not_found_error")


async def test_whose_conversations_come_back(checkpoint: Path) -> None:
    async with open_site(checkpoint) as site:
        session = {"x-claude-code-session-id": "s"}
        await site.post("/v1/messages", BODY, headers=session)
        await site.post("/v1/messages", BODY, headers={**session, "x-claude-code-agent-id": "a"})
        await site.post("/v1/messages", {**BODY, "metadata": {"user_id": '{"session_id": "m"}'}})
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        await site.post("/v1/messages", {**BODY, "tools": tools}, headers=session)
        await site.post("/v1/messages", {**BODY, "tools": tools})
        await site.post("/v1/messages", {**BODY, "tools": tools, "metadata": {"user_id": '{"session_id": "m"}'}})
        await site.post("/v1/messages", {**BODY, "tools": tools}, headers={**session, "x-claude-code-agent-id": "a"})
        told = [request.comes_back for request in site.scheduler.submitted]
        assert told == [None, False, None, True, None, True, False]


async def test_keepalives_are_events(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"keepalive_s": 0.01}) as site:
        site.scheduler.script = None
        async with site.session.post("/v1/messages", json={**BODY, "stream": True}) as response:
            lines = [await response.content.readline() for _ in range(12)]
        assert [line for line in lines if line.startswith(b"event")] == [
            b"event: message_start\n",
            *[b"event: ping\n"] * 3,
        ]
        async with site.session.post("/v1/chat/completions", json={**BODY, "stream": True}) as response:
            lines = [await response.content.readline() for _ in range(6)]
        assert b'"delta":{"role":"assistant","content":""}' in lines[0]
        assert all(b'"delta":{},' in line for line in lines[2::2])


async def test_a_choice_that_has_ended_stays_ended(checkpoint: Path) -> None:
    """Keep-alives belong to a choice that is still under way."""
    async with open_site(checkpoint, server={"keepalive_s": 0.01}) as site:
        site.scheduler.script = lambda request: None if request.request_id.endswith("-1") else site.script(request)
        async with site.session.post("/v1/chat/completions", json={**BODY, "n": 2, "stream": True}) as response:
            ended: set[int] = set()
            silent = 0
            while silent < 3:
                line = await response.content.readline()
                if not line.startswith(b"data: "):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                assert choice["index"] not in ended
                silent += bool(ended) and choice["delta"] == {}
                if choice["finish_reason"] is not None:
                    ended.add(choice["index"])
        assert ended == {0}


async def test_logs_tell_nothing_of_what_was_said(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "freetoken")
    secret = "hunter2"
    call = {"id": f"id-{secret}", "type": "function", "function": {"name": "ls", "arguments": f'{{"a": "{secret}"}}'}}
    chat = [
        {"role": "system", "content": secret},
        {"role": "assistant", "content": secret, "reasoning_content": secret, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"id-{secret}", "content": secret},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{secret}.example/"}}]},
    ]
    headers = {"Authorization": f"Bearer {secret}", "x-session-id": secret}
    async with open_site(checkpoint, server={"api_keys": (secret,)}, context_tokens=4096) as site:
        site.reply = f"the answer is {secret}"
        for stream in (False, True):
            bodies = {
                "/v1/chat/completions": {**BODY, "messages": chat, "stream": stream},
                "/v1/messages": {**BODY, "system": secret, "stream": stream, "metadata": {"user_id": secret}},
                "/v1/responses": {"model": "tiny", "input": secret, "instructions": secret, "stream": stream},
            }
            for path, body in bodies.items():
                async with site.session.post(path, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
        wrong = {**BODY, "temperature": secret, "stop": [{"text": secret}]}
        assert (await site.post("/v1/chat/completions", wrong, headers=headers))[0] == 400
        assert (await site.post("/v1/chat/completions", BODY, headers={"x-api-key": f"{secret}-wrong"}))[0] == 401
    assert "event=generation_ended" in caplog.text
    assert secret not in caplog.text


async def test_a_head_is_answered_where_a_get_is(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"api_keys": ("k",)}) as site:
        for path, status in (("/", 200), ("/health", 200), ("/v1/models", 401), ("/api/hello", 401)):
            async with site.session.head(path) as response:
                assert (response.status, await response.read()) == (status, b"")
