"""The official client against a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from freetoken.messages import FinishReason, RequestFailure, TokenDelta

from .conftest import Site, open_site

HI: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(site: Site, **fields: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, **fields}
    async with openai.AsyncOpenAI(base_url=f"{site.front.url}/v1", **options) as client:
        yield client


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(site) as opened:
        yield opened


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    model = await client.models.retrieve("tiny")
    assert model.model_extra is not None and model.model_extra["context_length"] == 512


async def test_chat(client: openai.AsyncOpenAI, site: Site) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=2, seed=3, temperature=0.5
    )
    assert [choice.message.content for choice in answer.choices] == ["hello world", "hello world"]
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "hello world"
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == 2 * (len(site.ids("hello world")) + 1)
    assert answer.usage.model_extra is not None
    assert set(answer.usage.model_extra["freetoken"]) == {
        "queue_s",
        "prefill_s",
        "decode_s",
        "decode_tokens_per_s",
        "cached_tokens",
    }


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert (text, reasons[-1]) == ("hello world", "stop")
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_chat_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=HI) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.done" in kinds
    assert final.choices[0].message.content == "hello world"


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", [5, 6]], logprobs=1, echo=False)  # type: ignore[list-item]
    assert [choice.text for choice in answer.choices] == ["hello world"] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == "hello world"
    assert logprobs.text_offset[0] == 0
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"


Create = Callable[[openai.AsyncOpenAI], Any]


@pytest.mark.parametrize(
    ("create", "kind", "code"),
    [
        (
            lambda c: c.chat.completions.create(model="other", messages=HI),
            openai.NotFoundError,
            "model_not_found",
        ),
        (
            lambda c: c.chat.completions.create(model="tiny", messages=HI, temperature=-1),
            openai.BadRequestError,
            "invalid_value",
        ),
        (
            lambda c: c.completions.create(model="tiny", prompt=[5] * 600),
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (lambda c: c.embeddings.create(model="tiny", input="x"), openai.NotFoundError, "not_found"),
    ],
)
async def test_errors(client: openai.AsyncOpenAI, create: Create, kind: type[openai.APIStatusError], code: str) -> None:
    with pytest.raises(kind) as caught:
        await create(client)
    assert caught.value.code == code
    assert caught.value.request_id is not None and caught.value.request_id.startswith("req-")
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (RequestFailure("queue_full", "full", True), openai.RateLimitError),
        (RequestFailure("engine_restarted", "restarted", True), openai.InternalServerError),
        (RequestFailure("numeric", "nan"), openai.InternalServerError),
    ],
)
async def test_failures(
    client: openai.AsyncOpenAI, site: Site, failure: RequestFailure, kind: type[openai.APIStatusError]
) -> None:
    site.scheduler.script = lambda r: [TokenDelta(r.request_id, finish_reason=FinishReason.ERROR, failure=failure)]
    with pytest.raises(kind, match=failure.message):
        await client.chat.completions.create(model="tiny", messages=HI)
    with pytest.raises(kind, match=failure.message):
        await client.chat.completions.create(model="tiny", messages=HI, stream=True)


async def test_failure_in_a_stream(client: openai.AsyncOpenAI, site: Site) -> None:
    site.scheduler.script = None
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    await site.front.pause("GpuExecutor died")
    with pytest.raises(openai.APIError, match="GpuExecutor died"):
        async for _ in stream:
            pass


async def test_retries_after_429(site: Site) -> None:
    failures = [RequestFailure("queue_full", "full", True)]

    def script(request: Any) -> Any:
        if failures:
            return [TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, failure=failures.pop())]
        return site.script(request)

    site.scheduler.script = script
    async with client_of(site, max_retries=1) as client:
        answer = await client.completions.create(model="tiny", prompt="x")
    assert answer.choices[0].text == "hello world"
    assert len(site.scheduler.submitted) == 2


async def test_keys(checkpoint: Path) -> None:
    async with open_site(checkpoint, server={"api_keys": ("secret",)}) as site:
        async with client_of(site, api_key="secret") as client:
            assert (await client.completions.create(model="tiny", prompt="x")).choices[0].text == "hello world"
        async with client_of(site, api_key="guess") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_closing_a_stream_aborts(client: openai.AsyncOpenAI, site: Site) -> None:
    from freetoken.testing.waiting import until

    site.scheduler.script = None
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    await stream.close()
    await until(lambda: site.scheduler.num_running == 0)
    assert len(site.scheduler.aborted) == 1
