"""What of a conversation is still there when its client comes back: through whole engines with a scripted model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from freetoken.testing.scripted_engine import ScriptedEngine, scripted_engine
from freetoken.testing.scripted_model import Line, Script
from tests.e2e.conftest import get

pytestmark = pytest.mark.e2e

LIMIT_S = 60.0
WORDS = "the quick brown fox jumps over the lazy dog "
TOOL_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def until(url: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The figures of the KV cache, once they are as wanted."""
    deadline = time.monotonic() + LIMIT_S
    while not condition(kv := get(url, "/v1/cache/status")["kv"]):
        assert time.monotonic() < deadline, kv
        time.sleep(0.02)
    return dict(kv)


@contextlib.contextmanager
def opened(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------ a lost client


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    """It prefills 64 tokens a step."""
    with scripted_engine(
        tmp_path_factory.mktemp("slow"),
        *("--runtime", "local"),
        server__keepalive_s=0.2,
        kv__num_tokens=60_000,
        max_context_tokens=20_000,
        scheduler__max_num_batched_tokens=64,
        scheduler__prefill_chunk_tokens=64,
    ) as engine:
        yield engine


def body_for(dialect: str, text: str) -> tuple[str, dict[str, Any]]:
    message = [{"role": "user", "content": text}]
    if dialect == "responses":
        return "/v1/responses", {"model": "tiny", "input": message}
    if dialect == "messages":
        return "/v1/messages", {"model": "tiny", "messages": message, "max_tokens": 100}
    return "/v1/chat/completions", {"model": "tiny", "messages": message}


def cached_tokens(dialect: str, usage: dict[str, Any]) -> int:
    if dialect == "messages":
        return int(usage["cache_read_input_tokens"])
    details = usage["input_tokens_details" if dialect == "responses" else "prompt_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_prompt_that_was_cut_off_goes_on_where_it_was(slow: ScriptedEngine, dialect: str) -> None:
    """An agent that has waited too long closes the connection and sends the same again."""
    path, body = body_for(dialect, dialect + " " + WORDS * 600)
    slow.play(Script(otherwise="Here it is.", step_s=0.02))
    with opened(slow.url, path, {**body, "stream": True}, {}) as response:
        assert response.readline().startswith((b"event: ", b"data: "))  # long before the prompt is read
        before = until(slow.url, lambda kv: kv["held_blocks"] >= 60)
    left = until(slow.url, lambda kv: kv["held_blocks"] == 0)
    slow.play(Script(otherwise="Here it is."))
    with opened(slow.url, path, body, {}) as response:
        answer = json.loads(response.read())
    assert "Here it is." in json.dumps(answer)
    # Of what was held, the two steps under way and the one being planned were not computed yet.
    computed = before["held_blocks"] - 3 * 64 // 16
    assert left["cached_blocks"] >= computed
    assert cached_tokens(dialect, answer["usage"]) >= computed * 16


# ------------------------------------------------------------------------------------------------ side requests


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    """Its KV holds the main conversation and about as much again."""
    with scripted_engine(
        tmp_path_factory.mktemp("small"),
        *("--runtime", "local"),
        kv__num_tokens=20_000,
        max_context_tokens=16_000,
        scheduler__max_num_batched_tokens=1024,
        scheduler__prefill_chunk_tokens=512,
    ) as engine:
        engine.play(
            Script(
                (
                    *(Line(f"question {i}.", 0, "I look.", "", (("look", {"path": "/"}),)) for i in range(9)),
                    *(Line(f"question {i}.", 1, "It is empty.") for i in range(9)),
                ),
                otherwise="A title",
            )
        )
        yield engine


class Agent:
    """A conversation on the Messages dialect that uses a tool, as Claude Code has it."""

    def __init__(self, url: str, system: str, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self.headers = {"x-claude-code-session-id": "3f0c", **(headers or {})}
        self.body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 200,
            "system": system,
            "messages": [],
            "tools": [{"name": "look", "input_schema": TOOL_SCHEMA}],
        }

    def say(self, content: Any) -> dict[str, Any]:
        """The next request; returns its usage."""
        messages = self.body["messages"]
        messages.append({"role": "user", "content": content})
        with opened(self.url, "/v1/messages", self.body, self.headers) as response:
            answer = json.loads(response.read())
        messages.append({"role": "assistant", "content": answer["content"]})
        usage: dict[str, Any] = answer["usage"]
        return usage

    def turn(self, number: int) -> list[dict[str, Any]]:
        """A question, a call, its result, an answer."""
        first = self.say(f"question {number}.")
        call = next(part for part in self.body["messages"][-1]["content"] if part["type"] == "tool_use")
        return [first, self.say([{"type": "tool_result", "tool_use_id": call["id"], "content": "nothing"}])]


def title(url: str, number: int) -> None:
    ask = f"A title of five words for conversation {number}: " + WORDS * 8
    with opened(url, *body_for("messages", ask), {}) as response:
        response.read()


def reusable(usage: dict[str, Any]) -> int:
    total = usage["cache_read_input_tokens"] + usage["input_tokens"] + usage["output_tokens"]
    return int((total - 1) // 16 * 16)


def test_titles_and_sub_agents_leave_the_main_conversation(small: ScriptedEngine) -> None:
    main = Agent(small.url, "main " + WORDS * 900)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(title, small.url, 0)
        _, last = main.turn(0)
        asked.result()
    for number in range(1, 5):  # each alone has room beside it, two have not
        helper = Agent(small.url, f"helper {number} " + WORDS * 600, {"x-claude-code-agent-id": f"agent-{number}"})
        usages = [*helper.turn(number), *helper.turn(number + 4)]
        title(small.url, number)
        for earlier, later in itertools.pairwise(usages):
            assert later["cache_read_input_tokens"] == reusable(earlier)
    (again, _) = main.turn(5)
    assert again["cache_read_input_tokens"] == reusable(last)
