"""Reading calls whose arguments are nested elements, and calls in object notation with bare keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freetoken.serving.parsers.arguments import ToolTable, dump, load, object_text, typed_value
from freetoken.serving.parsers.cursor import Cursor, Delimiter, MalformedError, Markers, Steps
from freetoken.serving.parsers.format import ElementCalls, ObjectCalls
from freetoken.serving.parsers.sink import Sink

_MAX_DEPTH = 200
_EMPTY = {"array": "[]", "object": "{}"}
_STRING_REST = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TAG = re.compile(r"<(/?)([^<>/][^<>]*)>")


@dataclass(slots=True)
class _Element:
    name: str
    text: str = ""
    children: list[_Element] = field(default_factory=list)


class ElementReader:
    """Reads calls of one form, after its ``begin``."""

    def __init__(self, form: ElementCalls) -> None:
        self._form = form
        self._call_end = re.compile(form.call_header_end)
        self._call_header = re.compile(form.call_header, re.DOTALL)
        self._delimiters = {form.call_close: Delimiter(form.call_close), form.end: Delimiter(form.end, keep=True)}
        self._markers = Markers(self._delimiters)

    def read(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """Read a section of calls and put them into ``sink``. Raises ``MalformedError`` and ``CutError``."""
        form = self._form
        calls = 0
        while True:
            yield from cursor.skip_space()
            found = yield from cursor.accept((form.call_open, form.end))
            if found != form.call_open:
                if calls:
                    cursor.require_whole()
                    return
                raise MalformedError
            header = yield from cursor.header(self._call_end)
            match = self._call_header.fullmatch(header)
            if match is None:
                raise MalformedError
            body, _ = yield from cursor.until(self._markers, self._delimiters)
            name = match["name"].strip()
            arguments = self._arguments(sink.tools, name, body)
            cursor.require_whole()
            sink.json_call(name, arguments)
            cursor.mark()
            calls += 1

    def _arguments(self, tools: ToolTable, name: str, body: str) -> str:
        root = self._tree(body)
        tool = tools.find(name)
        schema: Mapping[str, Any] = tool.schema if tool is not None else {}
        properties = tools.parameters(name)
        members: dict[str, str] = {}
        for child in root.children:
            if tool is not None and tool.kind == "custom":
                members[child.name] = dump(child.text)
            else:
                members[child.name] = _nested(child, properties.get(child.name), schema)
        return object_text(members)

    def _tree(self, body: str) -> _Element:
        """Elements that the end of the body closes are complete; so are those that their parent's end closes."""
        root = _Element("")
        stack = [root]
        before, *pieces = body.split(self._form.prefix)
        if before.strip():
            raise MalformedError
        for piece in pieces:
            match = _TAG.match(piece)
            if match is None:
                raise MalformedError
            closing, name = match.groups()
            text = piece[match.end() :]
            if not closing:
                element = _Element(name.strip(), text)
                stack[-1].children.append(element)
                stack.append(element)
            elif any(element.name == name.strip() for element in stack[1:]):
                while stack.pop().name != name.strip():
                    pass
            else:
                raise MalformedError
            if len(stack) > _MAX_DEPTH:
                raise MalformedError
        return root


def _nested(element: _Element, schema: Any, root: Mapping[str, Any]) -> str:
    declared = schema if isinstance(schema, Mapping) else {}
    if not element.children:
        if declared.get("type") in _EMPTY and not element.text.strip():
            return _EMPTY[declared["type"]]
        return typed_value(element.text, schema, root)
    if declared.get("type") == "array" or all(child.name == "item" for child in element.children):
        return "[" + ", ".join(_nested(child, declared.get("items"), root) for child in element.children) + "]"
    properties = declared.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return object_text({child.name: _nested(child, known.get(child.name), root) for child in element.children})


class ObjectReader:
    """Reads one call in object notation, after its ``begin``."""

    def __init__(self, form: ObjectCalls) -> None:
        self._form = form
        self._name_end = re.compile(r"(?=\{)")
        self._structure = Markers((form.quote, "{", "}", "[", "]", '"'))
        self._quotes = Markers((form.quote,))

    def read(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """Read a call and put it into ``sink``. Raises ``MalformedError`` and ``CutError``."""
        form = self._form
        yield from cursor.skip_space()
        yield from cursor.accept((form.name_prefix,))
        name = (yield from cursor.header(self._name_end)).strip()
        if not name or any(character.isspace() for character in name) or form.end in name:
            raise MalformedError
        notation = yield from self._extent(cursor)
        yield from cursor.skip_space()
        closed = yield from cursor.accept((form.end,))
        if closed is None and (cursor.waiting or not cursor.ended):
            raise MalformedError
        members = _Notation(notation, form.quote).members(sink.tools, name)
        cursor.require_whole()
        sink.json_call(name, object_text(members))
        cursor.mark()

    def _extent(self, cursor: Cursor) -> Steps[str]:
        """Consume up to the brace that matches the first one; brackets in strings do not count."""
        parts: list[str] = []
        depth = 0
        closing: str | None = None
        while True:
            text, found = cursor.scan(self._quotes if closing else self._structure)
            parts.append(text)
            if found is None:
                if not (yield from cursor.more()):
                    raise MalformedError
                continue
            parts.append(found)
            if closing:
                closing = None
            elif found == self._form.quote:
                closing = found
            elif found == '"':
                parts.append((yield from _json_string_rest(cursor)))
            elif found in "{[":
                depth += 1
                if depth > _MAX_DEPTH:
                    raise MalformedError
            else:
                depth -= 1
                if depth == 0:
                    return "".join(parts)


def _json_string_rest(cursor: Cursor) -> Steps[str]:
    """Consume what is left of a string in JSON's quotes."""
    parts: list[str] = []
    while True:
        match = _STRING_REST.match(cursor.waiting)
        length = match.end() if match else 0
        parts.append(cursor.take(length))
        if cursor.waiting.startswith('"'):
            parts.append(cursor.take(1))
            return "".join(parts)
        if not (yield from cursor.more()):
            raise MalformedError


class _Notation:
    """A complete object in the notation, read by descent. Raises ``MalformedError``."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._position = 0
        self._bare_end = re.compile(r"[,\]}]")

    def members(self, tools: ToolTable, name: str) -> dict[str, str]:
        """The arguments of a call of ``name``."""
        members = self._members(lambda key, bare: tools.typed(name, key, bare))
        if self._position != len(self._text):
            raise MalformedError
        return members

    def _members(self, typed: Any) -> dict[str, str]:
        members: dict[str, str] = {}
        self._expect("{")
        self._space()
        while not self._text.startswith("}", self._position):
            key = self._key()
            members[key] = self._value(lambda bare, key=key: typed(key, bare))
            self._comma("}")
        self._position += 1
        return members

    def _value(self, typed: Any) -> str:
        self._space()
        text, position = self._text, self._position
        if text.startswith(self._quote, position):
            return dump(self._quoted())
        if text.startswith("{", position):
            return object_text(self._members(lambda _, bare: _bare(bare)))
        if text.startswith("[", position):
            self._position += 1
            items: list[str] = []
            self._space()
            while not self._text.startswith("]", self._position):
                items.append(self._value(_bare))
                self._comma("]")
            self._position += 1
            return "[" + ", ".join(items) + "]"
        if text.startswith('"', position):
            return self._json_string()
        match = self._bare_end.search(text, position)
        if match is None:
            raise MalformedError
        self._position = match.start()
        word = text[position : match.start()].strip()
        result: str = typed(word)
        return result

    def _key(self) -> str:
        self._space()
        if self._text.startswith(self._quote, self._position):
            key = self._quoted()
            self._space()
        elif self._text.startswith('"', self._position):
            key = load(self._json_string())
            self._space()
        else:
            end = self._text.find(":", self._position)
            key = self._text[self._position : end].strip() if end > 0 else ""
            if not key or any(character in key for character in "{}[],"):
                raise MalformedError
            self._position = end
        self._expect(":")
        return key

    def _json_string(self) -> str:
        match = _JSON_STRING.match(self._text, self._position)
        if match is None:
            raise MalformedError
        self._position = match.end()
        try:
            return dump(load(match.group()))
        except ValueError:
            raise MalformedError from None

    def _quoted(self) -> str:
        start = self._position + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise MalformedError
        self._position = end + len(self._quote)
        return self._text[start:end]

    def _comma(self, closer: str) -> None:
        self._space()
        if self._text.startswith(",", self._position):
            self._position += 1
            self._space()
        elif not self._text.startswith(closer, self._position):
            raise MalformedError

    def _expect(self, character: str) -> None:
        if not self._text.startswith(character, self._position):
            raise MalformedError
        self._position += 1

    def _space(self) -> None:
        while self._position < len(self._text) and self._text[self._position].isspace():
            self._position += 1


def _bare(word: str) -> str:
    """A value inside another one that stands there without quotes: JSON, or a string."""
    try:
        load(word)
    except ValueError:
        return dump(word)
    return word
