"""/v1/responses over HTTP: requests of real clients, the store, and what is refused."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.messages import FinishReason, RequestFailure, SubmitRequest, TokenDelta
from freetoken.serving.responses.sealed import unseal
from freetoken.testing.front_fakes import scripted_reply, write_text_checkpoint
from freetoken.testing.waiting import until

from .conftest import Site, open_site
from .event_frames import frames_of
from .responses_checker import check_response_body, check_responses

PATH = "/v1/responses"
FIXTURES = sorted((Path(__file__).parent.parent / "fixtures" / "clients" / "responses").glob("*.json"))
CALL = '<tool_call>\n{"name": "run", "arguments": {"b": 1, "a": "x"}}\n</tool_call>'
RUN = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}


@pytest.fixture
async def site(checkpoint: Path) -> AsyncIterator[Site]:
    async with open_site(checkpoint, context_tokens=4096) as opened:
        yield opened


async def create(site: Site, value: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A response that is not streamed; checked."""
    status, body = await site.post(PATH, {"model": "tiny", "input": value, **fields})
    assert status == 200, body
    assert check_response_body(body) == []
    return dict(body)


async def events(site: Site, value: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; checked."""
    raw = await raw_stream(site, {"model": "tiny", "input": value, **fields})
    assert check_responses(raw) == []
    return [json.loads(frame.data) for frame in frames_of(raw)[0]]


async def raw_stream(site: Site, body: dict[str, Any]) -> bytes:
    async with site.session.post(PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return bytes(await response.read())


async def refused(site: Site, body: Any) -> dict[str, Any]:
    status, answer = await site.post(PATH, body)
    assert status == 400, answer
    return dict(answer["error"])


def prompts(site: Site) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in site.scheduler.submitted]


def same_but_for_ids(body: dict[str, Any]) -> str:
    suffix = body["id"].removeprefix("resp_")
    kept = {key: value for key, value in body.items() if key not in ("created_at", "completed_at")}
    for item in kept["output"]:
        item.pop("call_id", None)
    return json.dumps(kept).replace(suffix, "ID")


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("reply", ["hello", CALL, "<think>hm</think>hello" + CALL])
async def test_requests_of_real_clients(checkpoint: Path, path: Path, reply: str) -> None:
    async with open_site(checkpoint, context_tokens=20_000) as site:
        site.reply = reply
        body = json.loads(path.read_text())
        raw = await raw_stream(site, body)
        assert check_responses(raw) == []
        streamed = json.loads(frames_of(raw)[0][-1].data)["response"]
        status, whole = await site.post(PATH, {**body, "stream": False})
        assert status == 200 and check_response_body(whole) == []
        assert same_but_for_ids(whole) == same_but_for_ids(streamed)


async def test_turns_of_a_real_session_extend_each_other(checkpoint: Path) -> None:
    async with open_site(checkpoint, context_tokens=20_000) as site:
        for name in ("codex_first_turn", "codex_tool_result", "codex_resumed"):
            await raw_stream(site, json.loads((FIXTURES[0].parent / f"{name}.json").read_text()))
        for earlier, later in itertools.pairwise(prompts(site)):
            assert later[: len(earlier)] == earlier


async def test_a_text_answer(site: Site) -> None:
    site.num_cached_tokens = 4
    body = await create(site, metadata={"k": "v"}, max_output_tokens=50, temperature=0.5, instructions="be brief")
    assert body["id"].startswith("resp_") and body["status"] == "completed" and body["completed_at"]
    (message,) = body["output"]
    assert message["content"][0]["text"] == "hello world"
    assert (body["metadata"], body["max_output_tokens"], body["temperature"]) == ({"k": "v"}, 50, 0.5)
    assert body["usage"]["input_tokens"] == len(prompts(site)[0])
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    text = site.tokenizer.decode(prompts(site)[0], skip_special_tokens=False)
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_end_of_a_stream_is_the_whole_response(site: Site) -> None:
    told = await events(site, "hi")
    assert [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert told[-1]["type"] == "response.completed"
    assert same_but_for_ids(told[-1]["response"]) == same_but_for_ids(await create(site, "hi"))


async def test_forms_of_the_same_input_are_the_same_prompt(site: Site) -> None:
    for value in (
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    ):
        await create(site, value)
    assert len(set(prompts(site))) == 1
    assert (await create(site, "", max_output_tokens=1))["status"] == "incomplete"
    await create(site, [])


async def test_a_call_and_its_result(site: Site) -> None:
    site.reply = CALL
    first = await create(site, "go", tools=[RUN])
    (item,) = first["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "run", {"b": 1, "a": "x"})
    assert list(json.loads(item["arguments"])) == ["b", "a"]
    site.reply = "done"
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "ran"}
    history = [{"role": "user", "content": "go"}, *first["output"], output]
    await create(site, history, tools=[RUN])
    parts = {**output, "output": [{"type": "input_text", "text": "ran"}]}
    await create(site, [*history[:-1], parts], tools=[RUN])
    assert prompts(site)[1] == prompts(site)[2]
    assert prompts(site)[1][: len(prompts(site)[0])] == prompts(site)[0]


async def test_custom_and_namespaced_tools(site: Site) -> None:
    custom = {"type": "custom", "name": "patch", "description": "Edit."}
    site.reply = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>'
    (item,) = (await create(site, "go", tools=[custom]))["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin\n")
    site.reply = CALL
    (item,) = (await create(site, "go", tools=[{"type": "namespace", "name": "shell", "tools": [RUN]}]))["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "run", "shell")


async def test_one_call_where_no_parallel_calls_are_wanted(site: Site) -> None:
    site.reply = CALL + "\n" + CALL
    assert len((await create(site, "go", tools=[RUN]))["output"]) == 2
    assert len((await create(site, "go", tools=[RUN], parallel_tool_calls=False))["output"]) == 1


async def test_a_call_that_is_cut_off_is_not_told(site: Site) -> None:
    site.reply = "so " + CALL
    for stream in (False, True):
        limit = len(site.ids("so <tool_call>\n{")) + 4
        if stream:
            body = (await events(site, "go", tools=[RUN], max_output_tokens=limit))[-1]["response"]
        else:
            body = await create(site, "go", tools=[RUN], max_output_tokens=limit)
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["type"] for item in body["output"]] == ["message"]
        assert body["output"][0]["content"][0]["text"].strip() == "so"


async def test_reasoning_is_content_summary_or_sealed(site: Site) -> None:
    site.reply = "<think>\nlet me see\n</think>\n\nhello"
    reasoning = (await create(site))["output"][0]
    assert reasoning["content"][0]["text"].strip() == "let me see" and "encrypted_content" not in reasoning
    body = await create(site, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    reasoning = body["output"][0]
    assert reasoning["summary"][0]["text"].strip() == "let me see"
    assert (unseal(reasoning["encrypted_content"]) or "").strip() == "let me see"
    assert "encrypted_content" in (await create(site, store=False))["output"][0]


async def test_stored_and_stateless_conversations_are_the_same_prompt(site: Site) -> None:
    site.reply = CALL
    first = await create(site, "one", tools=[RUN])
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "ran"}
    site.reply = "hello"
    second = await create(site, [output], tools=[RUN], previous_response_id=first["id"])
    third = await create(site, "two", tools=[RUN], previous_response_id=second["id"])
    whole: list[Any] = [{"role": "user", "content": "one"}, *first["output"], output, *second["output"]]
    await create(site, [*whole, {"role": "user", "content": "two"}], tools=[RUN], store=False)
    assert prompts(site)[2] == prompts(site)[3]
    assert third["previous_response_id"] == second["id"]
    for earlier, later in zip(prompts(site), prompts(site)[1:3], strict=False):
        assert later[: len(earlier)] == earlier


async def test_ids_do_not_follow_from_one_another(site: Site) -> None:
    first, second = await create(site), await create(site)
    one, other = (int(body["id"][-24:], 16) for body in (first, second))
    assert abs(one - other) > 2**48


async def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    checkpoint = write_text_checkpoint(tmp_path / "picky", "{{ raise_exception('not today') }}")
    async with open_site(checkpoint) as site:
        error = await refused(site, {"model": "tiny", "input": "hi"})
        assert (error["code"], error["param"]) == ("template_refused", "input")
        assert "not today" in error["message"]


async def test_instructions_are_not_carried_over(site: Site) -> None:
    first = await create(site, "one", instructions="be brief")
    await create(site, "two", previous_response_id=first["id"])
    assert "brief" not in site.tokenizer.decode(prompts(site)[1])


async def test_the_store_over_http(site: Site) -> None:
    body = await create(site, [{"role": "user", "content": str(i)} for i in range(5)])
    where = f"{PATH}/{body['id']}"
    assert await site.get(where) == (200, body)
    _, page = await site.get(f"{where}/input_items?limit=2")
    assert [item["content"] for item in page["data"]] == ["4", "3"] and page["has_more"]
    _, rest = await site.get(f"{where}/input_items?after={page['last_id']}&order=desc")
    assert [item["content"] for item in rest["data"]] == ["2", "1", "0"] and not rest["has_more"]
    assert rest["first_id"] == rest["data"][0]["id"]
    for query in ("limit=0", "limit=x", "order=up", "after=msg_none"):
        assert (await site.get(f"{where}/input_items?{query}"))[0] == 400
    assert (await site.get(f"{where}?stream=true"))[0] == 400
    assert (await site.post(f"{where}/cancel", {}))[0] == 400
    async with site.session.delete(where) as response:
        assert await response.json() == {"id": body["id"], "object": "response", "deleted": True}
    for method, path in (
        ("GET", where),
        ("DELETE", where),
        ("POST", f"{where}/cancel"),
        ("GET", f"{where}/input_items"),
    ):
        async with site.session.request(method, path) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"


async def test_what_is_not_stored_cannot_be_continued(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"response_store_entries": 1}) as site:
        unstored = await create(site, store=False)
        assert (await site.get(f"{PATH}/{unstored['id']}"))[0] == 404
        evicted, kept = await create(site), await create(site)
        for body in (unstored, evicted):
            error = await refused(site, {"model": "tiny", "input": "x", "previous_response_id": body["id"]})
            assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
            assert "server.response_store_entries" in error["message"]
        await create(site, previous_response_id=kept["id"])


async def test_references_to_stored_items(site: Site) -> None:
    first = await create(site, "one")
    item = first["output"][0]
    user = {"role": "user", "content": "one"}
    await create(site, [user, {"type": "item_reference", "id": item["id"]}])
    await create(site, [user, {"id": item["id"]}])
    await create(site, [user, item])
    assert prompts(site)[1] == prompts(site)[2] == prompts(site)[3]
    error = await refused(site, {"model": "tiny", "input": [{"type": "item_reference", "id": "msg_none"}]})
    assert (error["code"], error["param"]) == ("item_not_found", "input[0].id")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": {}}, "input"),
        ({"input": None}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": "x"}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "shrill"}}, "text.verbosity"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_illegal_values(site: Site, fields: dict[str, Any], param: str) -> None:
    error = await refused(site, {"model": "tiny", "input": "hi", **fields})
    assert error["param"] == param, error
    assert not site.scheduler.submitted


async def test_unknown_fields_and_kinds_are_no_errors(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        body = await create(
            site,
            [{"role": "user", "content": "hi"}, {"type": "image_generation_call", "id": "ig_1", "result": "x"}],
            tools=[{"type": "web_search"}, {"type": "image_generation"}, {"type": "mcp", "server_label": "x"}],
            include=["web_search_call.action.sources"],
            client_metadata={"session": "x"},
            context_management=[{"type": "compaction"}],
            truncation="auto",
            safety_identifier="u",
            service_tier="flex",
        )
    assert body["tools"] == []
    ignored = [record.getMessage() for record in caplog.records if "event=tool_ignored" in record.getMessage()]
    assert len(ignored) == 3 and all("request=req-" in line for line in ignored)


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(site: Site) -> None:
    for truncation in ("auto", "disabled"):
        error = await refused(site, {"model": "tiny", "input": "x" * 5000, "truncation": truncation, "stream": True})
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]


async def test_failures_end_the_stream_with_one_event(site: Site) -> None:
    failure = RequestFailure("numeric", "not finite")

    def script(request: SubmitRequest) -> list[TokenDelta]:
        begun = TokenDelta(request.request_id, token_ids=tuple(site.ids("hel")))
        return [begun, TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, failure=failure)]

    site.scheduler.script = script
    told = await events(site)
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"] == {"code": "server_error", "message": "not finite"}
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"
    assert (await site.get(f"{PATH}/{told[-1]['response']['id']}"))[0] == 404


async def test_an_internal_error_ends_the_stream_with_one_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from freetoken.serving.responses import writer

    def broken(*_: Any) -> dict[str, Any]:
        raise RuntimeError("a fault")

    monkeypatch.setattr(writer, "usage_object", broken)
    told = await events(site)
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["code"] == "server_error"


async def test_keepalives_are_events(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"keepalive_s": 0.05}) as site:
        site.scheduler.script = None
        async with site.session.post(PATH, json={"model": "tiny", "input": "hi", "stream": True}) as response:
            raw = b""
            while raw.count(b"event: response.in_progress") < 4:
                raw += await response.content.readany()
            request = site.scheduler.submitted[0]
            site.scheduler.send(*scripted_reply(request, site.ids("late"), 8))
            raw += await response.read()
        assert check_responses(raw) == []


async def test_a_lost_client_ends_the_generation(site: Site) -> None:
    site.scheduler.script = None
    async with site.session.post(PATH, json={"model": "tiny", "input": "hi", "stream": True}) as response:
        await response.content.readany()
        response.close()
    await until(lambda: site.scheduler.num_running == 0)
    assert len(site.scheduler.aborted) == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
        {"text": {"format": {"type": "json_object"}}},
        {"tools": [RUN], "tool_choice": "required"},
        {"tools": [RUN], "tool_choice": {"type": "function", "name": "run"}},
        {"tools": [RUN], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [RUN]}},
    ],
)
async def test_what_is_asked_for_is_enforced(site: Site, fields: dict[str, Any]) -> None:
    await create(site, **fields)
    assert site.scheduler.submitted[0].sampling.constraint is not None


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_a_free_choice_is_free(site: Site, choice: Any) -> None:
    site.reply = CALL
    body = await create(site, tools=[RUN], tool_choice=choice)
    assert site.scheduler.submitted[0].sampling.constraint is None
    assert body["output"][0]["type"] == ("message" if choice == "none" else "function_call")


async def test_a_schema_that_cannot_be_enforced_is_refused(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    error = await refused(
        site,
        {"model": "tiny", "input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    )
    assert str(error["param"]).startswith("text.format"), error


async def test_named_conversations_with_tools_come_back(site: Site) -> None:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    body = {"model": "tiny", "input": "x", "tools": tools}
    await site.post(PATH, {**body, "prompt_cache_key": "thread-1"})
    await site.post(PATH, body, headers={"session-id": "s-2"})
    await site.post(PATH, body)
    assert [request.comes_back for request in site.scheduler.submitted] == [True, True, None]


async def test_the_sdk(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.front.url}/v1", api_key="none", max_retries=0) as client:
        site.reply = "<think>\nhm\n</think>\n\nhello" + CALL
        tools: Any = [{**RUN, "strict": False}]
        async with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output_text.strip() == "hello"
        site.reply = "hello"
        answer = await client.responses.create(model="tiny", input="go on", previous_response_id=final.id)
        assert answer.output_text == "hello"
        assert (await client.responses.retrieve(final.id)).id == final.id
        listed = await client.responses.input_items.list(answer.id)
        assert [item.type for item in listed.data] == ["message"]
        await client.responses.delete(final.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(final.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="x", previous_response_id=final.id)
        assert caught.value.code == "previous_response_not_found"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "x", "user", "{}", "input_text", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name", "id"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KINDS = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "tool_search_call", "tool_search_output", "additional_tools",
    "item_reference", "shell_call_output", "web_search_call", "compaction", "unheard_of",
]  # fmt: skip
KEYS = [
    "role", "content", "id", "call_id", "name", "arguments", "input", "output", "summary", "encrypted_content",
    "action", "tools", "namespace", "status",
]  # fmt: skip
ITEM = st.builds(
    lambda kind, rest: {"type": kind, **rest},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(KEYS), ANY, max_size=5),
)
FIELDS = [
    "tools", "tool_choice", "instructions", "reasoning", "text", "include", "metadata", "max_output_tokens",
    "truncation", "stream", "store", "parallel_tool_calls", "background", "previous_response_id", "prompt_cache_key",
]  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    value=st.one_of(ANY, st.lists(st.one_of(ITEM, ANY), max_size=4)),
    fields=st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=3),
)
def test_malformed_requests_are_never_a_fault_of_ours(fuzzed: Any, value: Any, fields: dict[str, Any]) -> None:
    status, text = fuzzed({"model": "tiny", "input": value, **fields})
    assert status in (200, 400), text


@pytest.fixture
def fuzzed(checkpoint: Path) -> Any:
    """A function that posts to a front in a loop of its own (hypothesis drives synchronous tests)."""
    import asyncio

    with asyncio.Runner() as runner:
        opened = open_site(checkpoint)
        site = runner.run(opened.__aenter__())

        async def post(body: Any) -> tuple[int, str]:
            async with site.session.post(PATH, json=body) as response:
                return response.status, await response.text()

        try:
            yield lambda body: runner.run(post(body))
        finally:
            runner.run(opened.__aexit__(None, None, None))
