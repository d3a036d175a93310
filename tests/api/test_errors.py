"""Every refusal has its status, the OpenAI shape, and the value and limit in its message."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest

from freetoken.messages import FinishReason, RequestFailure, TokenDelta
from freetoken.serving.openai_schema import ChatRequest, CompletionRequest
from freetoken.testing.front_fakes import write_text_checkpoint
from freetoken.testing.waiting import until

from .conftest import Site, open_site


def error_of(body: Any) -> dict[str, Any]:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -0.5}, "temperature", ["-0.5", "0"]),
        ({"temperature": "hot"}, "temperature", ["'hot'"]),
        ({"temperature": True}, "temperature", ["True"]),
        ({"temperature": 1000}, "temperature", ["1000", "100"]),
        ({"top_p": 0}, "top_p", ["0"]),
        ({"top_p": 1.5}, "top_p", ["1.5", "1"]),
        ({"top_k": 0}, "top_k", ["0", "-1"]),
        ({"top_k": -7}, "top_k", ["-7"]),
        ({"min_p": 2}, "min_p", ["2"]),
        ({"n": 0}, "n", ["0"]),
        ({"n": 1000}, "n", ["1000", "128"]),
        ({"max_tokens": 0}, "max_tokens", ["0"]),
        ({"max_tokens": 5.5}, "max_tokens", ["5.5"]),
        ({"max_tokens": "5"}, "max_tokens", ["'5'"]),
        ({"seed": 2**70}, "seed", ["integer"]),
        ({"stop": ""}, "stop", ["empty"]),
        ({"stop": [1]}, "stop", ["string"]),
        ({"stop": ["x"] * 33}, "stop", ["33", "32"]),
        ({"stop": "x" * 2000}, "stop", ["2000", "1024"]),
        ({"logit_bias": {"a": 1}}, "logit_bias", ["'a'"]),
        ({"logit_bias": {"1": 101}}, "logit_bias", ["101", "100"]),
        ({"logit_bias": {"400": 1}}, "logit_bias", ["400", "399"]),
        ({"stop_token_ids": [-1]}, "stop_token_ids", ["-1", "399"]),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", ["9", "3"]),
        ({"presence_penalty": 3}, "presence_penalty", ["3", "2"]),
        ({"repetition_penalty": 0}, "repetition_penalty", ["0"]),
        ({"stream": "yes"}, "stream", ["'yes'"]),
        ({"stream_options": 1}, "stream_options", ["1"]),
    ],
)
async def test_shared_fields(site: Site, fields: dict[str, Any], param: str, words: list[str]) -> None:
    for status, body in [await site.chat(**fields), await site.complete(**fields)]:
        assert status == 400
        error = error_of(body)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        for word in [param, *words]:
            assert word in error["message"]
    assert site.scheduler.submitted == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", ["1"]),
        ({"messages": "hi"}, "messages", ["'hi'"]),
        ({"messages": [{"role": "", "content": ""}]}, "messages[0].role", ["''", "1"]),
        ({"messages": [{"content": "x"}]}, "messages[0].role", ["required"]),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5"]),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", ["'x'"]),
        ({"messages": [{"role": "user", "content": [{"kind": "text"}]}]}, "messages[0].content[0]", ["type"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", ["None"]),
        ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
        ({"response_format": {"type": "yaml"}}, "response_format", ["yaml", "json_schema"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
            "response_format.json_schema.schema.properties.a.not",
            ["'not' cannot be enforced"],
        ),
        ({"response_format": {"type": "regex", "pattern": "(?=a)"}}, "response_format.pattern", ["look-around"]),
        ({"tool_choice": "required"}, "tool_choice", ["required"]),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["messages"]),
        ({"tools": ["x"]}, "tools[0]", ["'x'"]),
        ({"max_completion_tokens": -1}, "max_completion_tokens", ["-1"]),
    ],
)
async def test_chat_fields(site: Site, fields: dict[str, Any], param: str, words: list[str]) -> None:
    status, body = await site.chat(**fields)
    error = error_of(body)
    assert (status, error["param"]) == (400, param)
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": 5}, "prompt", ["5"]),
        ({"prompt": []}, "prompt", ["none empty"]),
        ({"prompt": [[]]}, "prompt", ["none empty"]),
        ({"prompt": [1, "a"]}, "prompt", ["list"]),
        ({"prompt": [1, True]}, "prompt", ["list"]),
        ({"prompt": [400]}, "prompt", ["400", "399"]),
        ({"prompt": [-1]}, "prompt", ["-1"]),
        ({"logprobs": 21}, "logprobs", ["21", "20"]),
        ({"logprobs": True}, "logprobs", ["True"]),
        ({"echo": True, "logprobs": 1}, "logprobs", ["echo"]),
        ({"suffix": "x"}, "suffix", ["suffix"]),
        ({"best_of": 4, "n": 2}, "best_of", ["4", "2"]),
    ],
)
async def test_completion_fields(site: Site, fields: dict[str, Any], param: str, words: list[str]) -> None:
    status, body = await site.complete(**fields)
    error = error_of(body)
    assert (status, error["param"]) == (400, param)
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_not_finite(site: Site, value: str) -> None:
    data = b'{"model": "tiny", "prompt": "x", "temperature": %s}' % value.encode()
    status, body = await site.post("/v1/completions", data)
    error = error_of(body)
    assert (status, error["param"]) == (400, "temperature")
    assert "finite" in error["message"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"model": "tiny",', ["line 1 column 18"]),
        (b'{"model":\n "tiny" x}', ["line 2 column 9"]),
        (b"", ["empty"]),
        (b"[]", ["array"]),
        (b"null", ["null"]),
        (b"3", ["number"]),
        (b'{"model": "\xff"}', ["JSON"]),
        (b'{"model": "\\ud800"}', ["JSON"]),
        (b"[" * 5000, ["JSON"]),
        (b"{" + b" " * 100_000, ["JSON"]),
    ],
)
async def test_malformed_bodies(site: Site, data: bytes, words: list[str]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, body = await site.post(path, data)
        error = error_of(body)
        assert status == 400
        for word in words:
            assert word in error["message"]


async def test_body_that_is_not_what_its_header_says(site: Site) -> None:
    status, body = await site.post("/v1/completions", b"not gzip", headers={"Content-Encoding": "gzip"})
    assert (status, error_of(body)["code"]) == (400, "invalid_body")


async def test_model_and_path(site: Site) -> None:
    for status, body in [await site.chat(model="other"), await site.get("/v1/models/other/x")]:
        error = error_of(body)
        assert (status, error["code"]) == (404, "model_not_found")
        assert "other" in error["message"] and "tiny" in error["message"]
    status, body = await site.post("/v1/completions", {"prompt": "x"})
    assert (status, error_of(body)["message"]) == (400, "model is required")
    status, body = await site.get("/v1/nothing")
    assert (status, error_of(body)["code"]) == (404, "not_found")
    async with site.session.get("/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert "POST" in error_of(await response.json())["message"]


async def test_too_large(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"max_body_bytes": 1000}) as site:
        status, body = await site.complete("x" * 2000)
        assert status == 413
        assert "1000" in error_of(body)["message"]


async def test_context_length(site: Site) -> None:
    status, body = await site.complete([5] * 512)
    error = error_of(body)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "maximum context length is 512 tokens" in error["message"]
    assert "512 tokens and at least 1 more" in error["message"]
    status, body = await site.chat("hello " * 600)
    assert (status, error_of(body)["param"]) == (400, "messages")
    status, body = await site.complete([5] * 511)
    assert (status, body["usage"]["completion_tokens"]) == (200, 1)
    status, body = await site.complete([5] * 500, max_tokens=12)
    assert status == 200


async def test_max_tokens_is_clamped_to_the_context(site: Site) -> None:
    status, body = await site.complete([5] * 500, max_tokens=256_000)
    assert (status, site.scheduler.submitted[0].sampling.max_tokens) == (200, 12)
    assert body["usage"]["prompt_tokens"] == 500  # the prompt is never cut
    status, body = await site.complete([5] * 512, max_tokens=256_000)
    assert (status, error_of(body)["code"]) == (400, "context_length_exceeded")


async def test_max_tokens_beyond_the_context_can_be_refused(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"clamp_max_tokens": False}) as site:
        status, body = await site.complete([5] * 500, max_tokens=13)
        error = error_of(body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        for word in ("512", "513", "500", "13", "at most 12"):
            assert word in error["message"]


async def test_template_refusal(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    async with open_site(write_text_checkpoint(tmp_path, template)) as site:
        status, body = await site.chat(messages=[{"role": "assistant", "content": "x"}])
        error = error_of(body)
        assert (status, error["code"], error["param"]) == (400, "template_refused", "messages")
        assert "start with the user" in error["message"]


async def test_no_template(tmp_path: Path) -> None:
    async with open_site(write_text_checkpoint(tmp_path, None)) as site:
        status, body = await site.chat()
        assert (status, error_of(body)["code"]) == (400, "no_chat_template")
        assert (await site.complete())[0] == 200


@pytest.mark.parametrize(
    ("failure", "status", "retry"),
    [
        (RequestFailure("queue_full", "256 are waiting", True), 429, True),
        (RequestFailure("context_length_exceeded", "600 tokens > 512"), 400, False),
        (RequestFailure("engine_restarted", "GpuExecutor died", True), 503, True),
        (RequestFailure("numeric", "logits are not finite"), 500, False),
        (RequestFailure("repetition", "token 0 4096 times"), 500, False),
        (RequestFailure("internal", "oops"), 500, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_of_the_engine(
    site: Site, failure: RequestFailure, status: int, retry: bool, stream: bool
) -> None:
    site.scheduler.script = lambda request: [
        TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, failure=failure)
    ]
    body = {"model": "tiny", "prompt": "x", "stream": stream}
    async with site.session.post("/v1/completions", json=body) as response:
        assert response.status == status
        error = error_of(await response.json())
        assert error["message"] == failure.message
        assert ("Retry-After" in response.headers) == retry
    assert site.scheduler.aborted == []


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_ends_without_a_failure(site: Site, reason: FinishReason) -> None:
    site.scheduler.script = lambda request: [TokenDelta(request.request_id, finish_reason=reason)]
    status, body = await site.complete()
    assert status >= 500
    error_of(body)


async def test_one_failing_choice_ends_the_others(site: Site) -> None:
    site.scheduler.script = None
    running = asyncio.ensure_future(site.complete(n=3))
    await until(lambda: len(site.scheduler.submitted) == 3)
    second = site.scheduler.submitted[1].request_id
    failure = RequestFailure("numeric", "bad")
    site.scheduler.send(TokenDelta(second, finish_reason=FinishReason.ERROR, failure=failure))
    status, _ = await running
    assert status == 500
    await until(lambda: site.scheduler.num_running == 0)
    assert sorted(m.request_id for m in site.scheduler.aborted) == sorted(
        r.request_id for r in site.scheduler.submitted if r.request_id != second
    )


async def test_queue_bound_of_the_front(checkpoint: Path) -> None:
    async with open_site(checkpoint, scheduler={"max_num_running": 2, "max_num_waiting": 1}) as site:
        site.scheduler.script = None
        running = asyncio.ensure_future(site.complete(n=2))
        await until(lambda: len(site.scheduler.submitted) == 2)
        async with site.session.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"]}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            error = error_of(await response.json())
            assert error["code"] == "rate_limit_exceeded" and "3" in error["message"]
        status, body = await site.complete(n=4)
        assert (status, error_of(body)["param"]) == (400, "prompt")
        for request in site.scheduler.submitted[:2]:
            site.scheduler.send(TokenDelta(request.request_id, (5,), finish_reason=FinishReason.STOP))
        assert (await running)[0] == 200


async def test_unexpected_faults_are_500(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("freetoken.serving.chat.read_chat", broken)
    with caplog.at_level(logging.ERROR):
        async with site.session.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
            headers={"X-Request-Id": "mine-1"},
        ) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (500, "mine-1")
            error = error_of(await response.json())
    assert "mine-1" in error["message"] and "secret" not in error["message"]
    assert "secret detail" in caplog.text


async def test_keys(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"api_keys": ("one", "zwei-ü")}) as site:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic one"},
            {"Authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/metrics", "/v1/actors", "/nothing"):
                status, body = await site.get(path, headers=headers)
                error = error_of(body)
                assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
        assert (await site.get("/health"))[0] == 200
        assert (await site.get("/v1/models", headers={"Authorization": "Bearer one"}))[0] == 200
        assert (await site.get("/v1/models", headers={"Authorization": "bearer  zwei-ü"}))[0] == 200


async def test_other_origins(site: Site) -> None:
    status, body = await site.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert (status, error_of(body)["code"]) == (403, "cross_origin")
    status, _ = await site.get("/v1/models", headers={"Origin": site.front.url})
    assert status == 200
    assert (await site.get("/v1/models", headers={"Origin": "http://["}))[0] == 403
    async with site.session.options("/v1/models", headers={"Origin": "null"}) as response:
        assert response.status == 403
        assert not any(name.lower().startswith("access-control") for name in response.headers)


VALUES: list[Any] = [None, True, 0, -1, 1, 1.5, 2**63, -(2**63), 1e300, "", "x", "\x00", [], [[]], {}, {"type": "text"}]
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


async def test_random_bodies_never_break_it(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    site.reply = "x"

    def value(depth: int = 0) -> Any:
        kind = rng.random()
        if depth < 3 and kind < 0.25:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if depth < 3 and kind < 0.5:
            keys = ["role", "content", "type", "text", "name", "1"]
            return {rng.choice(keys): value(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice([*VALUES, "user", "text", "tiny"])

    for _ in range(400):
        path = rng.choice(["/v1/chat/completions", "/v1/completions"])
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "n": 1, "prompt": "x"}
        body["messages"] = [{"role": "user", "content": "x"}]
        for _ in range(rng.randrange(1, 4)):
            body[rng.choice(FIELDS)] = value()
        async with site.session.post(path, data=json.dumps(body)) as response:
            content = await response.read()
            assert response.status in (200, 400, 404), (body, content)
            if response.status != 200:
                error_of(json.loads(content))
    data = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    for _ in range(100):
        cut = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            cut[rng.randrange(len(cut))] = rng.randrange(256)
        async with site.session.post("/v1/completions", data=bytes(cut)) as response:
            await response.read()
            assert response.status in (200, 400, 404)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    status, _ = await site.complete()
    assert status == 200


async def test_nan_from_python_clients(site: Site) -> None:
    data = json.dumps({"model": "tiny", "prompt": "x", "logit_bias": {"3": math.nan}}).encode()
    status, body = await site.post("/v1/completions", data)
    assert (status, error_of(body)["param"]) == (400, "logit_bias.3")


async def test_junk_on_the_socket(site: Site) -> None:
    for junk in (
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.front.port)
        writer.write(junk)
        await writer.drain()
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
    for path in ("/v1/models/%FF%FE", "/%FF", "/v1/models/%00"):
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", site.front.port)
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
        writer.close()
        await writer.wait_closed()
    headers = b"X-Session-Id: \xff\r\nAuthorization: Bearer \xff\r\nX-Request-Id: \xff"
    body = b'{"model": "tiny", "prompt": "x"}'
    reader, writer = await asyncio.open_connection("127.0.0.1", site.front.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % (headers, len(body)) + body)
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()
    assert (await site.complete())[0] == 200


async def test_request_ids(site: Site) -> None:
    async with site.session.get("/v1/models") as response:
        assert response.headers["X-Request-Id"].startswith("req-")
    async with site.session.get("/v1/models", headers={"X-Request-Id": "bad id"}) as response:
        assert response.headers["X-Request-Id"].startswith("req-")


async def test_bytes_that_are_not_utf8_in_field_names(site: Site) -> None:
    """JSON with a lone surrogate is refused, and the refusal is JSON."""
    body = b'{"model": "tiny", "prompt": "x", "\\ud800": -Infinity}'
    status, answer = await site.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "?")


@pytest.mark.parametrize("entry", [{"type": ["function"]}, {"type": {}}, [], 7])
async def test_an_allowed_tool_of_a_strange_type(site: Site, entry: Any) -> None:
    tools = [{"type": "function", "function": {"name": "ls"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [entry]}}
    status, answer = await site.chat(tools=tools, tool_choice=choice)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_a_value_too_deep_to_print(site: Site) -> None:
    body = b'{"model": "tiny", "prompt": "x", "temperature": ' + b"[" * 190 + b"]" * 190 + b"}"
    status, answer = await site.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "temperature")
    assert len(answer["error"]["message"]) < 300


@pytest.mark.parametrize("value", [[], {}, True, "9" * 400, 1.5, None])
async def test_quantities_of_strange_types(site: Site, value: Any) -> None:
    assert (await site.post("/v1/cache/rebalance", {"expert_bytes": value}))[0] == 400


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def earlier_call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


@pytest.mark.parametrize("depth", [100, 300, 1000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_schema_nested_too_deep(checkpoint: Path, path: str, depth: int) -> None:
    """What can be read but neither rendered nor returned is a request's fault."""
    function = '"name": "ls", "parameters": ' + nested(depth)
    tools = {
        "/v1/chat/completions": '{"type": "function", "function": {' + function + "}}",
        "/v1/messages": '{"name": "ls", "input_schema": ' + nested(depth) + "}",
        "/v1/responses": '{"type": "function", ' + function + "}",
    }
    conversation = '"input": "hi"' if path == "/v1/responses" else '"messages": [{"role": "user", "content": "hi"}]'
    body = '{"model": "tiny", "max_tokens": 2, ' + conversation + ', "tools": [' + tools[path] + "]}"
    async with open_site(checkpoint, context_tokens=20_000) as site:
        status, answer = await site.post(path, body.encode())
    if depth < 200:
        assert status == 200
    else:
        assert (status, answer["error"]["code"]) == (400, "invalid_body")


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', nested(900), nested(300), '{"a": NaN}', "[" * 5000])
async def test_arguments_that_cannot_be_rendered_as_an_object(checkpoint: Path, arguments: str) -> None:
    async with open_site(checkpoint, context_tokens=20_000) as site:
        messages = earlier_call(arguments)
        body = {"model": "tiny", "messages": messages, "max_tokens": 2}
        assert (await site.post("/v1/chat/completions", body))[0] == 200
        items = [
            {"type": "function_call", "call_id": "c", "name": "ls", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ]
        assert (await site.post("/v1/responses", {"model": "tiny", "input": items, "max_output_tokens": 2}))[0] == 200
