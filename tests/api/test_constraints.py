"""What a request asks its output to be reaches the engine as a constraint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from freetoken.messages import Constraint, ConstraintKind
from tests.api.conftest import Site

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint(ConstraintKind.JSON_OBJECT)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ),
        ({"type": "regex", "pattern": "[a-z]+"}, Constraint(ConstraintKind.REGEX, "[a-z]+")),
        ({"type": "grammar", "grammar": 'start: "x"'}, Constraint(ConstraintKind.LARK, 'start: "x"')),
    ],
)
async def test_response_formats(site: Site, response_format: dict[str, Any], expected: Constraint | None) -> None:
    status, _ = await site.chat(response_format=response_format, n=2)
    assert status == 200
    if expected is not None:  # the model of these tests may think first
        expected = replace(expected, free_until="</think>", free_opener="<think>")
    assert [request.sampling.constraint for request in site.scheduler.submitted] == [expected] * 2


async def test_a_hostile_schema_ends_with_its_request(site: Site) -> None:
    hostile: dict[str, Any] = {"enum": [f"value {i}" for i in range(60_000)]}
    for schema in (hostile, {"type": "string", "pattern": "(((a{1,200}){1,200}){1,200}){1,200}b(?=c)"}):
        status, body = await site.chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        assert status == 400 and body["error"]["param"].startswith("response_format.json_schema.schema")
    status, _ = await site.chat()
    assert status == 200


async def test_a_schema_that_the_library_panics_at_is_answered(site: Site) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": "😀" * 300}}}
    status, body = await site.chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert (status, body["error"]["code"]) == (400, "invalid_json_schema")
    assert body["error"]["param"] == "response_format.json_schema.schema.properties.n"


TOOL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object"}}}


async def test_forced_calls(site: Site) -> None:
    named = {"type": "function", "function": {"name": "roll"}}
    for choice in ("required", named):
        status, body = await site.chat(tools=[TOOL], tool_choice=choice)
        assert status == 200, body
        constraint = site.scheduler.submitted[-1].sampling.constraint
        assert constraint is not None and constraint.kind is ConstraintKind.LARK and "roll" in constraint.text
    for choice in ("auto", "none"):
        await site.chat(tools=[TOOL], tool_choice=choice)
        assert site.scheduler.submitted[-1].sampling.constraint is None


BAD = {"type": "object", "properties": {"a": {"not": {}}}}
RESPONSES = {"model": "tiny", "input": "hi", "max_output_tokens": 8}
MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def format_of(dialect: str, schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "schema": schema}
    return (
        {"text": {"format": {**form, "name": "n"}}} if dialect == "responses" else {"output_config": {"format": form}}
    )


@pytest.mark.parametrize(("dialect", "body"), [("responses", RESPONSES), ("messages", MESSAGES)])
async def test_the_other_dialects(site: Site, dialect: str, body: dict[str, Any]) -> None:
    status, answer = await site.post(f"/v1/{dialect}", {**body, **format_of(dialect, SCHEMA)})
    assert status == 200, answer
    constraint = site.scheduler.submitted[-1].sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint.text) == SCHEMA
    status, answer = await site.post(f"/v1/{dialect}", {**body, **format_of(dialect, BAD)})
    assert status == 400
    place = "text.format" if dialect == "responses" else "output_config.format"
    assert f"{place}.schema.properties.a.not: 'not' cannot be enforced" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("responses", {**RESPONSES, "tools": [{"type": "function", "name": "roll", "parameters": {"type": "object"}}],
                       "tool_choice": "required"}),
        ("messages", {**MESSAGES, "tools": [{"name": "roll", "input_schema": {"type": "object"}}],
                      "tool_choice": {"type": "any"}}),
        ("messages", {**MESSAGES, "tools": [{"name": "roll", "input_schema": {"type": "object"}}],
                      "tool_choice": {"type": "tool", "name": "roll"}}),
    ],
)  # fmt: skip
async def test_forced_calls_of_the_other_dialects(site: Site, dialect: str, body: dict[str, Any]) -> None:
    status, answer = await site.post(f"/v1/{dialect}", body)
    assert status == 200, answer
    constraint = site.scheduler.submitted[-1].sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.LARK and "roll" in constraint.text
