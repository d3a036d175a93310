"""The OpenAPI document says what the routes and models say."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import orjson
import pytest

from freetoken import __version__
from freetoken.serving.app import ROUTES
from freetoken.serving.body import parse
from freetoken.serving.openapi import BODIES, QUERIES, openapi_document


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(orjson.dumps(openapi_document(ROUTES, __version__)))


def test_every_route_is_there_once(document: Any) -> None:
    listed = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert len(listed) == len(ROUTES)
    assert ("post", "/v1/messages") in listed
    assert ("get", "/v1/models/{id}") in listed
    assert set(BODIES) | set(QUERIES) <= set(document["paths"])
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] for methods in document["paths"].values() for operation in methods.values())


def test_every_body_is_described(document: Any) -> None:
    posts = {path for method, path, _ in ROUTES if method == "POST"}
    assert posts - set(BODIES) == {"/v1/responses/{id}/cancel"}


def test_every_reference_leads_somewhere(document: Any) -> None:
    schemas = document["components"]["schemas"]

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                assert reference.removeprefix("#/components/schemas/") in schemas
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "x", "stop": "y"}),
        ("/v1/completions", {"model": "m", "prompt": [[1, 2], "x"], "stop": ["y"]}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": []}], "stop": None}),
        ("/v1/responses", {"model": "m", "input": "", "text": {"format": {"type": "json_schema", "schema": {}}}}),
        ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop_sequences": ["y"]}),
        ("/v1/cache/rebalance", {"expert_bytes": "2GiB"}),
        ("/v1/cache/trace", {"action": "start", "max_bytes": "64MiB"}),
    ],
)
def test_forms_that_are_taken_are_described(document: Any, path: str, body: dict[str, Any]) -> None:
    parse(json.dumps(body).encode(), BODIES[path])
    schema = {**document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]}
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)
