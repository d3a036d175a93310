"""The writer of responses: every order of a reply's events gives a stream that the checker takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.serving.choice import Finish
from freetoken.serving.errors import ApiError, busy, context_overflow, internal, unavailable
from freetoken.serving.reply import (
    CallEnded,
    CallPiece,
    CallStarted,
    ChoiceEnded,
    ReasoningPiece,
    ReplyCall,
    ReplyEvent,
    TextPiece,
)
from freetoken.serving.responses.output_items import unwrapped
from freetoken.serving.responses.sealed import unseal
from freetoken.serving.responses.writer import ResponseWriter, WriterOptions, failure_object
from freetoken.serving.usage import Usage

from .event_frames import frames_of
from .responses_checker import check_response_body, check_responses

HEAD: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "in_progress",
    "error": None,
    "incomplete_details": None,
    "model": "tiny",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": None,
}
USAGE = Usage(prompt_tokens=10, cached_tokens=4, output_tokens=6)


def ended(reason: Any = "stop") -> ChoiceEnded:
    return ChoiceEnded(0, reason, Finish("length" if reason == "length" else "stop"))


def call(name: str = "f", arguments: str = '{"a":1}', **fields: Any) -> list[ReplyEvent]:
    begun = ReplyCall(0, f"call_{name}", name, **fields)
    whole = ReplyCall(0, f"call_{name}", name, arguments=arguments, **fields)
    return [CallStarted(0, begun), CallPiece(0, 0, arguments), CallEnded(0, whole)]


def run(batches: list[list[ReplyEvent]], usage: Usage = USAGE, **options: bool) -> tuple[bytes, dict[str, Any]]:
    """The stream of a reply that one token a batch makes, and the response at its end."""
    count = 0
    writer = ResponseWriter(HEAD, WriterOptions(**options), lambda: count)
    raw = writer.begin()
    for batch in batches:
        count += 1
        raw += writer.deltas(batch)
        raw += writer.keepalive()
    raw += writer.end(usage)
    assert check_responses(raw) == []
    assert check_response_body(writer.response) == []
    return raw, writer.response


def kinds(raw: bytes) -> list[str]:
    names = [str(frame.name).removeprefix("response.") for frame in frames_of(raw)[0]]
    return [name for i, name in enumerate(names) if name != "in_progress" or i == 1]


def test_a_message() -> None:
    raw, response = run([[TextPiece(0, "hel")], [TextPiece(0, "lo")], [ended()]])
    assert kinds(raw) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert response["status"] == "completed"
    assert [part["text"] for part in response["output"][0]["content"]] == ["hello"]
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }


@pytest.mark.parametrize("summaries", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_reasoning_then_text(summaries: bool, sealed: bool) -> None:
    batches: list[list[ReplyEvent]] = [
        [ReasoningPiece(0, "let ")],
        [ReasoningPiece(0, "me")],
        [TextPiece(0, "ok")],
        [ended()],
    ]
    raw, response = run(batches, summaries=summaries, sealed=sealed)
    reasoning, message = response["output"]
    assert [part["text"] for part in reasoning["summary"]] == (["let me"] if summaries else [])
    assert [part["text"] for part in reasoning.get("content", [])] == ([] if summaries else ["let me"])
    assert ("encrypted_content" in reasoning) is sealed
    if sealed:
        assert unseal(reasoning["encrypted_content"]) == "let me"
    assert message["content"][0]["text"] == "ok"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert ("reasoning_summary_text.delta" in kinds(raw)) is summaries


def test_calls_carry_namespace_and_parallel_ids() -> None:
    raw, response = run([call("spawn", namespace="agents"), call("wait", "{}"), [ended("tool_calls")]])
    first, second = response["output"]
    assert (first["type"], first["name"], first["namespace"]) == ("function_call", "spawn", "agents")
    assert "namespace" not in second
    assert first["id"] != second["id"] and first["call_id"] != second["call_id"]
    assert kinds(raw)[2:6] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


def test_custom_calls_are_unwrapped() -> None:
    raw, response = run([call("apply_patch", '{"input": "*** Begin"}', kind="custom"), [ended("tool_calls")]])
    assert response["output"] == [
        {
            "id": "ctc_1_0",
            "type": "custom_tool_call",
            "call_id": "call_apply_patch",
            "name": "apply_patch",
            "input": "*** Begin",
        }
    ]
    assert "custom_tool_call_input.done" in kinds(raw)
    assert unwrapped('{"patch": "x"}') == "x"
    for kept in ("x", '{"input": 5}', '{"input": "x", "more": 1}', '{"other": "x"}', "{", ""):
        assert unwrapped(kept) == kept


def test_a_search_of_the_clients_tools() -> None:
    batches = [call("tool_search", '{"query":"x"}'), [ended("tool_calls")]]
    assert run(batches, searches=True)[1]["output"][0]["type"] == "tool_search_call"
    assert run(batches)[1]["output"][0]["type"] == "function_call"


def test_white_space_alone_is_no_message() -> None:
    _, response = run([[TextPiece(0, "\n\n")], call(), [TextPiece(0, "\n")], [TextPiece(0, "end")], [ended()]])
    assert [item["type"] for item in response["output"]] == ["function_call", "message"]
    assert response["output"][1]["content"][0]["text"] == "\nend"


def test_saying_nothing_is_an_empty_message() -> None:
    _, response = run([[ended()]])
    assert [item["content"][0]["text"] for item in response["output"]] == [""]


def test_a_cut_reply_is_incomplete() -> None:
    cut = ReplyCall(0, "call_f", "f")
    text: list[ReplyEvent] = [TextPiece(0, "so")]
    _, response = run([text, [ended("length")]])
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(item["type"], item["status"]) for item in response["output"]] == [("message", "incomplete")]
    _, response = run([text, [CallStarted(0, cut), CallPiece(0, 0, '{"a"')], [ended("length")]])
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]


def test_arguments_go_out_as_they_come() -> None:
    batches: list[list[ReplyEvent]] = [
        [CallStarted(0, ReplyCall(0, "call_f", "f"))],
        [CallPiece(0, 0, '{"a"')],
        [CallPiece(0, 0, ":1}"), CallEnded(0, ReplyCall(0, "call_f", "f", arguments='{"a":1}'))],
        [ended("tool_calls")],
    ]
    raw, response = run(batches)
    assert kinds(raw).count("function_call_arguments.delta") == 2
    assert response["output"][0]["arguments"] == '{"a":1}'


@pytest.mark.parametrize("before", [[], [TextPiece(0, "so")], [ReasoningPiece(0, "hm")], call()])
def test_a_failure_ends_the_stream(before: list[ReplyEvent]) -> None:
    writer = ResponseWriter(HEAD, WriterOptions(), lambda: 1)
    raw = writer.begin() + writer.deltas(before) + writer.error(internal("req-1"))
    assert check_responses(raw) == []
    last = json.loads(frames_of(raw)[0][-1].data)
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"


def test_codes_of_failures_are_those_that_agents_act_on() -> None:
    def code(error: ApiError) -> str:
        return str(failure_object(error)["code"])

    assert failure_object(busy("the queue is full")) == {
        "code": "rate_limit_exceeded",
        "message": "the queue is full. Please try again in 1s.",
    }
    assert code(context_overflow(10, 20, None, "input")) == "context_length_exceeded"
    assert code(unavailable("gone")) == "server_error"
    assert code(ApiError(400, "no", "constraint")) == "invalid_prompt"


def test_the_end_is_told_before_the_last_event() -> None:
    seen: list[dict[str, Any]] = []
    writer = ResponseWriter(HEAD, WriterOptions(), lambda: 0, seen.append)
    writer.begin()
    writer.end(USAGE)
    assert seen == [writer.response]


EVENTS = st.one_of(
    st.text(st.sampled_from("ab \n"), min_size=1, max_size=4).map(lambda text: [TextPiece(0, text)]),
    st.text(st.sampled_from("ab \n"), min_size=1, max_size=4).map(lambda text: [ReasoningPiece(0, text)]),
    st.just(call()),
    st.just(call("g", "raw", kind="custom")),
)


@given(st.lists(EVENTS, max_size=8), st.sampled_from(["stop", "length"]), st.booleans())
def test_any_reply(batches: list[list[ReplyEvent]], reason: str, summaries: bool) -> None:
    _, response = run([*batches, [ended(reason)]], summaries=summaries, sealed=summaries)
    texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
    said = "".join(event.text for batch in batches for event in batch if isinstance(event, TextPiece))
    assert "".join("".join(texts).split()) == "".join(said.split())
    assert 0 <= response["usage"]["output_tokens_details"]["reasoning_tokens"] <= 6
