"""Text completions over HTTP."""

from __future__ import annotations

from .conftest import Site
from .test_chat import chunks, text_of


async def test_forms_of_prompt(site: Site) -> None:
    for prompt, expected in [
        ("hi", [site.ids("hi")]),
        (["hi", "there"], [site.ids("hi"), site.ids("there")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ]:
        site.scheduler.submitted.clear()
        status, body = await site.complete(prompt)
        assert status == 200
        assert [list(r.prompt_token_ids) for r in site.scheduler.submitted] == expected
        assert [choice["text"] for choice in body["choices"]] == ["hello world"] * len(expected)
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert body["object"] == "text_completion"


async def test_n_counts_each_prompt_once(site: Site) -> None:
    _, body = await site.complete([[5], [6, 7]], n=2, seed=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [len(r.prompt_token_ids) for r in site.scheduler.submitted] == [1, 1, 2, 2]
    assert [r.sampling.seed for r in site.scheduler.submitted] == [1, 2, 1, 2]
    assert body["usage"]["prompt_tokens"] == 3


async def test_empty_prompt_begins_with_a_special_token(site: Site) -> None:
    status, _ = await site.complete("")
    assert status == 200
    assert site.scheduler.submitted[0].prompt_token_ids == (2,)  # no bos token here, so eos


async def test_logprobs(site: Site) -> None:
    site.reply = "hello world"
    _, body = await site.complete(logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == site.reply
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert [next(iter(top)) for top in logprobs["top_logprobs"]] == logprobs["tokens"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert site.reply[offset:].startswith(token)
    events = await chunks(site, "/v1/completions", prompt="hi", logprobs=2)
    for key in logprobs:
        assert [x for e in events for c in e["choices"] for x in c["logprobs"][key]] == logprobs[key]


async def test_echo(site: Site) -> None:
    _, body = await site.complete("say ", echo=True)
    assert body["choices"][0]["text"] == "say hello world"
    ids = site.ids("say ")
    _, body = await site.complete(ids, echo=True)
    assert body["choices"][0]["text"] == "say hello world"
    events = await chunks(site, "/v1/completions", prompt=["a", "b"], echo=True)
    assert [text_of(events, 0), text_of(events, 1)] == ["ahello world", "bhello world"]


async def test_stream(site: Site) -> None:
    events = await chunks(site, "/v1/completions", prompt="hi", stream_options={"include_usage": True})
    assert text_of(events) == "hello world"
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] == len(site.ids("hi"))


async def test_stop_token_is_not_in_the_text(site: Site) -> None:
    site.reply = "hello"
    _, body = await site.complete(stop_token_ids=[2], ignore_eos=True)
    assert body["choices"][0]["text"] == "hello"
    assert body["choices"][0]["finish_reason"] == "stop"
