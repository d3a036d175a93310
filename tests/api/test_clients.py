"""What coding agents send, answered on a real socket: whole requests, and the turns of their sessions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from freetoken.testing.chat_templates import ALL
from freetoken.testing.front_fakes import write_text_checkpoint

from .conftest import Site, open_site
from .stream_checker import check_chat, check_messages, check_whole

FIXTURES = Path(__file__).parents[1] / "fixtures" / "clients"
CHAT = sorted((FIXTURES / "chat").glob("*.json"))
MESSAGES = sorted(path for path in (FIXTURES / "messages").glob("*.json") if "count-tokens" not in path.name)

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SAID = "<think>\nI think.\n</think>\n\nI look.\n" + CALL % ("ls", '{"path": "/"}') + "\n" + CALL % ("pwd", "{}")


@pytest.fixture(params=["plain", "thinking", "channels"])
async def agents(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    checkpoint = write_text_checkpoint(tmp_path, ALL[request.param])
    async with open_site(checkpoint, context_tokens=32768, server={"model_aliases": ["*"]}) as site:
        site.reply = SAID
        yield site


@pytest.fixture
async def thinking(tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(write_text_checkpoint(tmp_path, ALL["thinking"]), context_tokens=32768) as site:
        yield site


def load(path: Path) -> dict[str, Any]:
    fixture: dict[str, Any] = json.loads(path.read_text())
    return fixture


async def raw_post(site: Site, fixture: dict[str, Any], **fields: Any) -> bytes:
    body = {**fixture["body"], **fields}
    async with site.session.post(fixture["path"], json=body, headers=fixture["headers"]) as response:
        data = await response.read()
        assert response.status == 200, data
        return data


@pytest.mark.parametrize("path", CHAT, ids=lambda path: path.stem)
async def test_chat_requests(agents: Site, path: Path) -> None:
    fixture = load(path)
    wants_usage = "stream_options" in fixture["body"]
    complaints, choices = check_chat(await raw_post(agents, fixture, stream=True), wants_usage)
    assert complaints == []
    whole = json.loads(await raw_post(agents, fixture, stream=False, stream_options=None))
    assert check_whole("chat", whole) == []
    message, seen = whole["choices"][0]["message"], choices[0]
    assert (message["content"] or "", message.get("reasoning_content", "")) == (seen.text, seen.reasoning)
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])] == [
        (call["name"], call["arguments"]) for call in seen.calls.values()
    ]
    assert whole["choices"][0]["finish_reason"] == seen.finish


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: path.stem)
async def test_messages_requests(agents: Site, path: Path) -> None:
    fixture = load(path)
    complaints, seen = check_messages(await raw_post(agents, fixture, stream=True))
    assert complaints == []
    whole = json.loads(await raw_post(agents, fixture, stream=False))
    assert check_whole("messages", whole) == []
    assert whole["id"] != seen.id
    blank = {"id": ""}
    assert [block | (blank if "id" in block else {}) for block in whole["content"]] == [
        block | (blank if "id" in block else {}) for block in seen.blocks
    ]
    assert whole["stop_reason"] == seen.stop_reason


async def test_count_tokens_is_the_prompts_length(agents: Site) -> None:
    fixture = load(FIXTURES / "messages" / "claude-count-tokens.json")
    counted = json.loads(await raw_post(agents, fixture))
    await raw_post(agents, {**fixture, "path": "/v1/messages"}, max_tokens=1)
    assert counted == {"input_tokens": len(agents.scheduler.submitted[0].prompt_token_ids)}


def said_by(message: dict[str, Any]) -> str:
    """The text a model may have written for an echoed answer of either dialect."""
    blocks = message["content"] if isinstance(message["content"], list) else []
    text = message["content"] if isinstance(message["content"], str) else ""
    thought = message.get("reasoning_content", "")
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    for block in blocks:
        text += block.get("text", "")
        thought += block.get("thinking", "")
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return thinking + "\n".join([*([text] if text else []), *(CALL % call for call in calls)])


SESSIONS = {
    "claude": ("messages", ["claude-local-turn1", "claude-local-turn2-toolresult", "claude-local-turn3-continue"]),
    "dsh": ("messages", ["dsh-messages-turn1", "dsh-messages-turn2-toolresult"]),
    "opencode": ("chat", ["opencode-chat-turn1", "opencode-chat-turn2-toolresult", "opencode-chat-turn3-continue"]),
}


@pytest.mark.parametrize("client", SESSIONS)
async def test_each_turn_of_a_session_extends_the_one_before(thinking: Site, client: str) -> None:
    site = thinking
    kind, names = SESSIONS[client]
    fixtures = [load(FIXTURES / kind / f"{name}.json") for name in names]
    known: tuple[int, ...] = ()
    for i, fixture in enumerate(fixtures):
        echoed: list[Any] = []
        if i + 1 < len(fixtures):
            echoed = fixtures[i + 1]["body"]["messages"][len(fixture["body"]["messages"]) :]
        site.reply = said_by(
            next((message for message in echoed if message["role"] == "assistant"), {"content": "end"})
        )
        await raw_post(site, fixture, stream=True)
        prompt = site.scheduler.submitted[-1].prompt_token_ids
        assert prompt[: len(known)] == known, f"turn {i + 1} does not extend the one before"
        known = prompt + tuple(site.ids(site.reply))
    assert all(request.comes_back for request in site.scheduler.submitted)


async def test_what_clients_change_without_meaning_leaves_no_trace(thinking: Site) -> None:
    fixture = load(FIXTURES / "messages" / "claude-local-turn1.json")
    body = fixture["body"]
    variants = [json.loads(json.dumps(body)) for _ in range(4)]
    variants[1]["system"][0]["text"] = "x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=cli;"
    for block in variants[2]["system"]:
        block.pop("cache_control", None)
    content = body["messages"][1]["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}]
    else:
        content = "\n".join(block["text"] for block in content)
    variants[2]["messages"][1]["content"] = content
    variants[3]["system"].append({"type": "text", "text": "<total_tokens>12345 tokens left</total_tokens>"})
    for variant in variants:
        await raw_post(thinking, fixture, **variant)
    assert len({request.prompt_token_ids for request in thinking.scheduler.submitted}) == 1
    quoted = json.loads(json.dumps(body))
    quoted["messages"][0]["content"][0]["text"] = body["system"][0]["text"]
    await raw_post(thinking, fixture, **quoted)
    text = thinking.tokenizer.decode(thinking.scheduler.submitted[-1].prompt_token_ids)
    assert "x-anthropic-billing-header" in text


async def test_deferred_tools_appear_where_they_are_referenced(thinking: Site) -> None:
    fixture = load(FIXTURES / "messages" / "claude-local-turn2-toolresult.json")
    body = fixture["body"]
    name = next(tool["name"] for tool in body["tools"] if tool.get("defer_loading"))
    await raw_post(thinking, fixture)
    referring = json.loads(json.dumps(body["messages"]))
    referring[-1]["content"][0]["content"] = [{"type": "tool_reference", "tool_name": name}]
    await raw_post(thinking, fixture, messages=referring)
    plain, referred = (
        thinking.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        for request in thinking.scheduler.submitted
    )
    assert name not in plain
    assert referred.index(name) > referred.index("Say hello using bash")
    common = referred.index("<tool_response>")
    assert plain[:common] == referred[:common]


@pytest.fixture
async def claude(thinking: Site) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=thinking.front.url, api_key="none", max_retries=0) as client:
        yield client


async def test_the_anthropic_client_streams(thinking: Site, claude: anthropic.AsyncAnthropic) -> None:
    thinking.reply, thinking.num_cached_tokens = SAID, 16
    tools: Any = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("ls", "pwd")]
    ask: Any = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "hi " * 20}]}
    async with claude.messages.stream(**ask, tools=tools) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == {"path": "/"}  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    prompt = len(thinking.scheduler.submitted[0].prompt_token_ids)
    assert message.usage.input_tokens == prompt - 16 and message.usage.cache_read_input_tokens == 16
    assert message.usage.output_tokens == len(thinking.ids(SAID)) + 1
    counted = await claude.messages.count_tokens(model="tiny", messages=ask["messages"], tools=tools)
    assert counted.input_tokens == prompt
    assert [model.id async for model in claude.models.list()] == ["tiny"]


async def test_stop_reasons(thinking: Site, claude: anthropic.AsyncAnthropic) -> None:
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    thinking.reply = "hello STOP world"
    stopped = await claude.messages.create(**ask, max_tokens=100, stop_sequences=["STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    cut = await claude.messages.create(**ask, max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    done = await claude.messages.create(**ask, max_tokens=100)
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)


async def test_errors_of_the_anthropic_dialect(thinking: Site, claude: anthropic.AsyncAnthropic) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError) as overflow:
        await claude.messages.create(**ask, messages=[{"role": "user", "content": "word " * 40000}])
    body: Any = overflow.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == "context_length_exceeded"
    assert "prompt is too long: " in body["error"]["message"]
    assert "tokens > 32768 maximum context length" in body["error"]["message"]
    assert overflow.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        await claude.messages.create(**ask, messages=[{"role": "user", "content": ["x"]}])  # type: ignore[list-item]


async def test_the_openai_client_streams_calls(thinking: Site) -> None:
    thinking.reply = SAID
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("ls", "pwd")
    ]
    async with (
        openai.AsyncOpenAI(base_url=f"{thinking.front.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "hi"}], tools=tools
        ) as stream,
    ):
        events = [event.type async for event in stream]
        completion = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    calls = completion.choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["ls", "pwd"]
    assert completion.choices[0].finish_reason == "tool_calls"
