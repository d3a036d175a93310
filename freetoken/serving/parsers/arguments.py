"""From what a model wrote as arguments to the JSON text that clients get.

Formats that write values as plain text leave their types to the tool's schema. The rules, for a value and the schema
of its parameter:

1. Only strings allowed: the text as it is.
2. ``null`` where null is allowed: null.
3. One type: the value of that type that the text spells, otherwise (the model was wrong) the text as a string.
4. Several types, of ``anyOf``, ``oneOf``, ``type`` lists or ``enum``: objects and arrays that the text spells come
   first, then the first alternative, in the schema's order, that the text spells. Any text spells a string.
5. Nothing declared: JSON if the text is spelled as JSON would be written, otherwise a string. ``1e5``, ``02134`` and
   numbers too large to be exact everywhere are strings.

Numbers keep the model's spelling.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from freetoken.serving.parsers.cursor import MalformedError
from freetoken.serving.tools import ToolSpec

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOOSE_INTEGER = re.compile(r"[+-]?\d+")
_SEPARATORS = re.compile(r"__|[./:]")
_EXACT_INTEGER = 2**53
_MAX_NUMBER_CHARACTERS = 400
_MAX_SCHEMA_DEPTH = 16
_INPUT_KEYS = ("input", "patch", "text", "content")


class ToolTable:
    """The tools of a request under the names that the model knows them by (``Toolset.flat``)."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._by_name: dict[str, ToolSpec] = {}
        for tool in tools:
            self._by_name.setdefault(tool.name, tool)

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def find(self, name: str) -> ToolSpec | None:
        """The tool, also under its name with a namespace before it; None for a name that nobody declared."""
        found = self._by_name.get(name)
        if found is None:
            found = next((self._by_name[rest] for rest in _without_namespace(name) if rest in self._by_name), None)
        return found

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Schemas of the declared parameters of a tool; empty where nothing is known."""
        tool = self.find(name)
        properties = tool.schema.get("properties") if tool is not None else None
        return properties if isinstance(properties, Mapping) else {}

    def typed(self, name: str, parameter: str, text: str) -> str:
        """JSON text of a parameter's value that was written as plain text."""
        tool = self.find(name)
        if tool is None:
            return typed_value(text, None, {})
        if tool.kind == "custom":
            return dump(text)
        return typed_value(text, self.parameters(name).get(parameter), tool.schema)


def _without_namespace(name: str) -> Iterator[str]:
    for match in _SEPARATORS.finditer(name):
        yield name[match.end() :]


def dump(value: Any) -> str:
    """JSON text as all calls have it."""
    return json.dumps(value, ensure_ascii=False)


def object_text(members: Mapping[str, str]) -> str:
    """JSON text of an object whose values are JSON text."""
    return "{" + ", ".join(f"{dump(key)}: {value}" for key, value in members.items()) + "}"


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant)
_STRICT_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def load(text: str) -> Any:
    """The value of a JSON text, control characters in strings allowed. Raises ``ValueError``."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_members(text: str) -> dict[str, str]:
    """The members of a JSON object, their values as JSON text in the model's spelling (written anew only where it is
    not strict JSON). Raises ``MalformedError`` if it is no object."""
    try:
        members = dict(_members(text))
    except (ValueError, RecursionError):
        raise MalformedError from None
    return members


def _members(text: str) -> Iterator[tuple[str, str]]:
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        raise ValueError("not an object")
    position = _skip(text, position + 1)
    while text[position : position + 1] != "}":
        key, position = _DECODER.raw_decode(text, position)
        if not isinstance(key, str):
            raise ValueError("a key that is no string")
        position = _skip(text, position)
        if text[position : position + 1] != ":":
            raise ValueError("no colon after a key")
        start = _skip(text, position + 1)
        value, position = _DECODER.raw_decode(text, start)
        yield key, _spelling(text[start:position], value)
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
            if text[position : position + 1] == "}":
                raise ValueError("a comma before the end")
        elif text[position : position + 1] != "}":
            raise ValueError("no comma between members")
    if _skip(text, position + 1) != len(text):
        raise ValueError("text after the object")


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _spelling(text: str, value: Any) -> str:
    try:
        _STRICT_DECODER.decode(text)
    except ValueError:
        return dump(value)
    return text


def object_arguments(text: str) -> str:
    """The arguments of a call that were written as JSON: an object, possibly inside a string, or nothing. Raises
    ``MalformedError`` for anything else."""
    stripped = text.strip()
    if stripped in ("", "null"):
        return "{}"
    if stripped.startswith('"'):
        try:
            inner = load(stripped)
        except ValueError:
            raise MalformedError from None
        return object_arguments(inner) if not inner.lstrip().startswith('"') else _fail()
    members = json_members(stripped)
    try:
        _STRICT_DECODER.decode(stripped)
    except ValueError:
        return object_text(members)
    return stripped


def _fail() -> str:
    raise MalformedError


def custom_input(arguments: str) -> str:
    """The plain text that a custom tool gets: the only argument, or the one with a usual name, if it is a string;
    otherwise the JSON text as it is."""
    try:
        value = load(arguments)
    except ValueError:
        return arguments
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        names = [name for name in _INPUT_KEYS if name in value] or (list(value) if len(value) == 1 else [])
        if names and isinstance(value[names[0]], str):
            text: str = value[names[0]]
            return text
    return arguments


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """JSON text of a value that a model wrote as plain text. ``root`` is where the schema's references lead."""
    alternatives = list(dict.fromkeys(_alternatives(schema, root, _MAX_SCHEMA_DEPTH, set())))
    if not alternatives:
        return _untyped(text)
    if all(kind == "string" for kind in alternatives):
        return dump(text)
    word = text.strip()
    if "null" in alternatives and word in ("null", "None"):
        return "null"
    for kind in sorted(alternatives, key=lambda kind: kind not in ("object", "array")):
        spelled = _as_type(text, word, kind)
        if spelled is not None:
            return spelled
    return dump(text)


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int, followed: set[str]) -> Iterator[str]:
    """Names of the types that a schema allows, in its order; none if it does not say. Each reference is followed once
    (``followed`` has those that were), so circles end."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in followed:
            followed.add(reference)
            yield from _alternatives(_resolve(reference, root), root, depth - 1, followed)
        return
    kinds = schema.get("type")
    if isinstance(kinds, str):
        yield kinds
    elif isinstance(kinds, Sequence):
        yield from (kind for kind in kinds if isinstance(kind, str))
    elif isinstance(schema.get("enum"), Sequence):
        yield from dict.fromkeys(map(_type_of, schema["enum"]))
    elif "const" in schema:
        yield _type_of(schema["const"])
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, Sequence):
                for part in parts:
                    yield from _alternatives(part, root, depth - 1, followed)
        if "properties" in schema:
            yield "object"
        elif "items" in schema:
            yield "array"
    if schema.get("nullable") is True:
        yield "null"


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].strip("/").split("/"):
        if part:
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def _as_type(text: str, word: str, kind: str) -> str | None:
    if kind == "string":
        return dump(text)
    if kind == "boolean":
        return word.lower() if word.lower() in ("true", "false") else None
    if kind in ("integer", "number"):
        return _number(word, kind)
    if kind in ("object", "array"):
        return _structure(word, dict if kind == "object" else list)
    return None


def _number(word: str, kind: str) -> str | None:
    if len(word) > _MAX_NUMBER_CHARACTERS:
        return None
    if _NUMBER.fullmatch(word):
        if kind == "number" or not set(".eE") & set(word):
            return word
        value = float(word)
        return str(int(value)) if value.is_integer() and abs(value) < _EXACT_INTEGER else None
    if _LOOSE_INTEGER.fullmatch(word):
        return str(int(word))
    return None


def _structure(word: str, kind: type) -> str | None:
    opener = "{" if kind is dict else "["
    if not word.startswith(opener):
        return None
    try:
        value = load(word)
        return _spelling(word, value) if isinstance(value, kind) else None
    except ValueError:
        pass
    try:
        # Some templates show the model its own earlier arguments as Python writes them.
        value = ast.literal_eval(word)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, kind) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _untyped(text: str) -> str:
    word = text.strip()
    if word[:1] in ("{", "["):
        return _structure(word, dict if word[0] == "{" else list) or dump(text)
    if word in ("true", "false", "null"):
        return word
    if len(word) <= 40 and _NUMBER.fullmatch(word):
        value = load(word)
        if abs(value) <= _EXACT_INTEGER and dump(value) == word:
            return word
    return dump(text)
