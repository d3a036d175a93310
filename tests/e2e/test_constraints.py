"""A random model under constraints, through the whole engine in one process: it says what it must."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from freetoken.cli.process import EngineProcess
from tests.e2e.conftest import TINY_SETTINGS

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(tiny_checkpoint: Path, cache_dir: Path) -> Iterator[openai.OpenAI]:
    arguments = (*TINY_SETTINGS, "--runtime", "local", "--set", f"loader.cache_dir={cache_dir}")
    with (
        EngineProcess(str(tiny_checkpoint), *arguments) as engine,
        openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def ask(client: openai.OpenAI, seed: int, **more: Any) -> Any:
    return client.chat.completions.create(
        **{
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": "Where to?"}],
            "max_tokens": 300,
            "temperature": 1.0,
            "seed": seed,
            **more,
        }
    )


def is_trip(text: str) -> bool:
    trip = json.loads(text)
    return set(trip) == {"city", "days"} and trip["city"] in ("Paris", "Rome") and 1 <= trip["days"] <= 99


def test_answers_follow_their_schema_beside_free_ones(client: openai.OpenAI) -> None:
    bound = {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}}
    free: dict[str, Any] = {"max_tokens": 24}
    alone = [ask(client, seed, **free).choices[0].message.content for seed in range(2)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        bounds = [pool.submit(ask, client, seed, **bound) for seed in range(4)]
        frees = [pool.submit(ask, client, seed, **free) for seed in range(2)]
        answers = [future.result().choices[0] for future in bounds]
        assert [future.result().choices[0].message.content for future in frees] == alone
    for answer in answers:
        assert answer.finish_reason == "stop" and is_trip(answer.message.content), answer


def test_forced_calls_are_calls(client: openai.OpenAI) -> None:
    for seed in range(2):
        choice = ask(client, seed, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0]
        assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, choice
        assert choice.message.tool_calls[0].function.name == "trip"
        assert is_trip(choice.message.tool_calls[0].function.arguments)


def test_a_hostile_schema_ends_with_its_request(client: openai.OpenAI) -> None:
    for schema in ({"not": {}}, {"enum": [f"value {i}" for i in range(60_000)]}):
        with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema"):
            ask(client, 0, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert ask(client, 0, max_tokens=3).usage.completion_tokens == 3
