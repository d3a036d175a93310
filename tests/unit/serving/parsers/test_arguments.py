"""Types of values that models write as plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freetoken.serving.parsers.arguments import custom_input, json_members, object_arguments, typed_value
from freetoken.serving.parsers.cursor import MalformedError

ROOT = {
    "$defs": {
        "Count": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Circle": {"anyOf": [*[{"$ref": "#/$defs/Circle"}] * 40, {"type": "integer"}]},
    }
}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        # Strings stay what they are.
        ("02134", {"type": "string"}, "02134"),
        ("1e5", {"type": "string"}, "1e5"),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": "string"}, "null"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("  two  \n", {"type": "string"}, "  two  \n"),
        ("5", {"type": "string", "enum": ["5", "6"]}, "5"),
        # Nullable strings are strings or null.
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("true", {"anyOf": [{"type": "null"}, {"type": "string"}]}, "true"),
        ("x", {"type": "string", "nullable": True}, "x"),
        ("null", {"type": "string", "nullable": True}, None),
        # Numbers.
        ("5", {"type": "integer"}, 5),
        (" 5\n", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("007", {"type": "integer"}, 7),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("1e20", {"type": "number"}, 1e20),
        ("100000000000000000000", {"type": "number"}, 10**20),
        ("-0.5", {"type": "number"}, -0.5),
        ("NaN", {"type": "number"}, "NaN"),
        ("9" * 500, {"type": "integer"}, "9" * 500),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("5", {"$ref": "#/$defs/Count"}, 5),
        ("5", {"allOf": [{"$ref": "#/$defs/Count"}]}, 5),
        # Booleans.
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["boolean", "null"]}, None),
        # Objects and arrays.
        ('{"b": 1, "a": [true]}', {"type": "object"}, {"b": 1, "a": [True]}),
        ("{'a': True, 'b': None}", {"type": "object"}, {"a": True, "b": None}),
        ('{"a": 1', {"type": "object"}, '{"a": 1'),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": 1}', {"type": "array"}, '{"a": 1}'),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ('{"a": 1}', {"properties": {"a": {}}}, {"a": 1}),
        ("[1]", {"items": {}}, [1]),
        # Several types: structures first, then the schema's order.
        ("5", {"type": ["string", "integer"]}, "5"),
        ("5", {"type": ["integer", "string"]}, 5),
        ("x", {"type": ["integer", "string"]}, "x"),
        ('["a"]', {"oneOf": [{"type": "string"}, {"type": "array"}]}, ["a"]),
        ("5", {"enum": [5, "x"]}, 5),
        ("x", {"enum": [5, "x"]}, "x"),
        ("3", {"const": 3}, 3),
        # Nothing declared: what JSON would write.
        ("5", {}, 5),
        ("5", None, 5),
        ("5", True, 5),
        ("02134", {}, "02134"),
        ("1e5", {}, "1e5"),
        ("12345678901234567890", {}, "12345678901234567890"),
        ("true", {}, True),
        ("True", {}, "True"),
        ('{"a": 1}', {}, {"a": 1}),
        ("[not json", {}, "[not json"),
        ("", {}, ""),
        ("x", {"$ref": "#/$defs/Loop"}, "x"),
        ("x", {"$ref": "#/nowhere"}, "x"),
        ("5", {"$ref": "#/$defs/Circle"}, 5),
        ("x", {"$ref": "http://elsewhere"}, "x"),
    ],
)
def test_typed_value(text: str, schema: Any, expected: Any) -> None:
    value = json.loads(typed_value(text, schema, ROOT))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"b": 1e5, "a": {"x": [ 1 ]}}', {"b": "1e5", "a": '{"x": [ 1 ]}'}),
        ('{"a": "x\ny"}', {"a": '"x\\ny"'}),
        ('{"a": 1, "a": 2}', {"a": "2"}),
        (" {} ", {}),
    ],
)
def test_members_keep_their_spelling(text: str, expected: dict[str, str]) -> None:
    assert json_members(text) == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a"}', '{"a": 1,}', '{"a": 1 "b": 2}', "{1: 2}", '{"a": NaN}', '{"a": 1} x', '{"a":']
)
def test_what_is_no_object_is_malformed(text: str) -> None:
    with pytest.raises(MalformedError):
        json_members(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1}', '{"a":1}'),
        ("null", "{}"),
        ("", "{}"),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('{"a": "x\ty"}', '{"a": "x\\ty"}'),
    ],
)
def test_object_arguments(text: str, expected: str) -> None:
    assert object_arguments(text) == expected


@pytest.mark.parametrize("text", ["[1]", "3", '"text"', '"\\"{}\\""'])
def test_arguments_that_are_no_object_are_malformed(text: str) -> None:
    with pytest.raises(MalformedError):
        object_arguments(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "p", "reason": "r"}', "p"),
        ('{"whatever": "x"}', "x"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('"text"', "text"),
        ("{}", "{}"),
    ],
)
def test_custom_input(arguments: str, expected: str) -> None:
    assert custom_input(arguments) == expected
