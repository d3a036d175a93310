"""Chat completions over HTTP, without and with streaming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetoken.messages import SamplingParams, TokenDelta
from freetoken.testing.front_fakes import write_text_checkpoint

from .conftest import Site, open_site


async def chunks(site: Site, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream; checks framing and the end."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    if path == "/v1/completions":
        body.pop("messages")
    async with site.session.post(path, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        events = (await response.read()).decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    found = [c for e in events for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in found)


async def test_prompt_is_the_rendered_template(site: Site) -> None:
    status, body = await site.chat("größe")
    assert status == 200
    prompt = "<|im_start|>user\ngröße<|im_end|>\n<|im_start|>assistant\n"
    ids = site.scheduler.submitted[0].prompt_token_ids
    assert list(ids) == site.ids(prompt)
    assert body["usage"]["prompt_tokens"] == len(ids)


async def test_whole_answer(site: Site) -> None:
    site.num_cached_tokens = 16
    status, body = await site.chat()
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == len(site.ids("hello world")) + 1  # the end-of-sequence token counts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["freetoken"] == {
        "queue_s": 0.25,
        "prefill_s": 0.5,
        "decode_s": 1.0,
        "decode_tokens_per_s": usage["completion_tokens"] - 1.0,
        "cached_tokens": 16,
    }


async def test_stream(site: Site) -> None:
    events = await chunks(site, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "hello world"
    assert [c["finish_reason"] for e in events for c in e["choices"]].count("stop") == 1
    assert events[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(site.ids("hello world")) + 1
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


async def test_stream_without_usage(site: Site) -> None:
    events = await chunks(site)
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in events)


async def test_deltas_of_one_step_are_one_chunk(site: Site) -> None:
    site.tokens_per_step = 100
    events = await chunks(site)
    assert [c["delta"].get("content") for e in events for c in e["choices"]] == ["", "hello world", None]


async def test_n_choices(site: Site) -> None:
    _, body = await site.chat(n=3, seed=7)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in site.scheduler.submitted] == [7, 8, 9]
    assert body["usage"]["prompt_tokens"] == len(site.scheduler.submitted[0].prompt_token_ids)
    assert body["usage"]["completion_tokens"] == 3 * (len(site.ids("hello world")) + 1)
    events = await chunks(site, n=2)
    assert text_of(events, 0) == text_of(events, 1) == "hello world"


async def test_sampling_parameters_arrive(site: Site) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
        "presence_penalty": 1,
        "frequency_penalty": -2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 10, "3": -100},
        "max_completion_tokens": 9,
        "max_tokens": 5,
        "min_tokens": 3,
        "stop_token_ids": [7, 7],
        "ignore_eos": True,
    }
    status, _ = await site.chat(**fields)
    assert status == 200
    assert site.scheduler.submitted[0].sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=2**63 - 1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-2.0,
        logit_bias=((3, -100.0), (5, 10.0)),
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(7,),
        ignore_eos=True,
    )


async def test_defaults(site: Site) -> None:
    await site.chat(top_k=-1, temperature=None, stop=None, logit_bias=None, unknown_field={"x": 1})
    request = site.scheduler.submitted[0]
    room = 512 - len(request.prompt_token_ids)
    assert request.sampling == SamplingParams(max_tokens=room)


async def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 0]}
    directory = write_text_checkpoint(tmp_path, generation_config=config)
    async with open_site(directory, server={"max_tokens_default": 4}) as site:
        await site.chat()
        await site.chat(temperature=0, top_k=-1, ignore_eos=True)
    first, second = (request.sampling for request in site.scheduler.submitted)
    assert first == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, stop_token_ids=(0,), max_tokens=4)
    assert second == SamplingParams(temperature=0.0, top_p=0.95, ignore_eos=True, max_tokens=4)


async def test_stop_strings(site: Site) -> None:
    site.reply = "the quick brown fox stop here"
    _, body = await site.chat(stop=["k br", "never"])
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("the quic", "stop")
    assert [message.reason for message in site.scheduler.aborted] == ["stop"]
    assert site.scheduler.num_running == 0
    assert body["usage"]["freetoken"]["prefill_s"] == 0.5  # from the answer to the abort
    events = await chunks(site, stop="k br")
    assert text_of(events) == "the quic"
    assert len(site.scheduler.aborted) == 2


async def test_stop_string_at_the_very_start_and_kept(site: Site) -> None:
    _, body = await site.chat(stop="he")
    assert body["choices"][0]["message"]["content"] == ""
    _, body = await site.chat(stop="lo", include_stop_str_in_output=True)
    assert body["choices"][0]["message"]["content"] == "hello"


async def test_stop_string_found_with_the_last_token_needs_no_abort(site: Site) -> None:
    site.tokens_per_step = 100
    _, body = await site.chat(stop="world")
    assert body["choices"][0]["message"]["content"] == "hello "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert site.scheduler.aborted == []


async def test_usage_does_not_need_the_answer_to_an_abort(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.serving.generation.SETTLE_TIMEOUT_S", 0.01)
    site.scheduler.answers_aborts = False
    ids = tuple(site.ids("hello world"))
    site.scheduler.script = lambda request: [TokenDelta(request.request_id, ids)]
    _, body = await site.chat(stop="world")
    assert body["choices"][0]["message"]["content"] == "hello "
    assert body["usage"]["freetoken"]["decode_s"] == 0.0


async def test_min_tokens_comes_before_stop_strings(site: Site) -> None:
    site.reply = "hello hello hello"
    first = len(site.ids("hello"))
    _, body = await site.chat(stop="hello", min_tokens=first)
    assert body["choices"][0]["message"]["content"] == "hello "


async def test_text_withheld_for_a_stop_string_comes_at_the_end(site: Site) -> None:
    site.reply = "hello wor"
    events = await chunks(site, stop="world")
    assert text_of(events) == "hello wor"


async def test_length(site: Site) -> None:
    _, body = await site.chat(max_tokens=1)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


async def test_characters_are_never_broken(site: Site) -> None:
    site.reply = "größe 你好 😀 日本"
    events = await chunks(site)
    assert text_of(events) == site.reply
    assert not any("\ufffd" in c["delta"].get("content", "") for e in events for c in e["choices"])


async def test_logprobs(site: Site) -> None:
    site.reply = "日 hello"
    _, body = await site.chat(logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == site.reply
    assert len(content) == len(site.ids(site.reply))  # not the end-of-sequence token
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["token"] == "bytes:\\xe6"
    assert content[0]["top_logprobs"][0] == {"token": "bytes:\\xe6", "logprob": -0.5, "bytes": [0xE6]}
    events = await chunks(site, logprobs=True, top_logprobs=2)
    streamed = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part] == content
    _, body = await site.chat(logprobs=True)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_logprobs_end_where_a_stop_string_begins(site: Site) -> None:
    site.reply = "hello world hello"
    _, body = await site.chat(logprobs=True, stop=" world")
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b"hello"


async def test_special_tokens_in_the_text(site: Site) -> None:
    site.reply = "hello<|endoftext|>world"
    _, body = await site.chat()
    assert body["choices"][0]["message"]["content"] == "helloworld"
    _, body = await site.chat(skip_special_tokens=False)
    assert body["choices"][0]["message"]["content"] == "hello<|endoftext|>world"


async def test_parts_and_roles(site: Site) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    status, _ = await site.chat(messages=messages)
    assert status == 200
    text = site.tokenizer.decode(site.scheduler.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_string_and_part_give_the_same_tokens(site: Site) -> None:
    await site.chat("same")
    await site.chat([{"type": "text", "text": "same"}])
    first, second = site.scheduler.submitted
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}{{ add_generation_prompt }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": {}, "a": {"z": 1, "y": 2}}}}]
    async with open_site(write_text_checkpoint(tmp_path, template)) as site:
        await site.chat(tools=tools, chat_template_kwargs={"mood": "calm"}, add_generation_prompt=False)
        await site.chat(tools=tools, tool_choice="none")
        first, second = (site.tokenizer.decode(r.prompt_token_ids) for r in site.scheduler.submitted)
    assert first == json.dumps(tools) + "calmFalse"
    assert second == "True"


async def test_long_prompts_are_encoded_off_the_loop(checkpoint: Path) -> None:
    async with open_site(checkpoint, context_tokens=65536) as site:
        text = "the quick brown fox " * 4000
        status, body = await site.chat(text, max_tokens=5)
        assert status == 200
        expected = site.ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        assert body["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("header", ["x-session-id", "X-Claude-Code-Session-Id"])
async def test_named_conversations_with_tools_come_back(site: Site, header: str) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    await site.post("/v1/chat/completions", body, headers={header: "abc"})
    await site.post("/v1/chat/completions", {**body, "prompt_cache_key": "k"})
    await site.post("/v1/chat/completions", body)
    assert [request.comes_back for request in site.scheduler.submitted] == [True, True, None]
