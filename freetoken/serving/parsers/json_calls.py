"""Reading calls whose arguments are JSON."""

from __future__ import annotations

import json
import re

from freetoken.serving.parsers.arguments import json_members, load, object_arguments
from freetoken.serving.parsers.cursor import MAX_HEADER_CHARACTERS, Cursor, MalformedError, Steps
from freetoken.serving.parsers.format import JsonCalls
from freetoken.serving.parsers.sink import Sink

_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\d:,.+\-eEtrufalsn"{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_CLOSER = {"{": "}", "[": "]"}
_MAX_DEPTH = 200


def read_json_value(cursor: Cursor) -> Steps[str]:
    """Consume an object or array, with marks of any kind inside its strings. What stands outside strings need only
    look like JSON. Raises ``MalformedError``, also where the text ends before the value does."""
    parts: list[str] = []
    open_brackets: list[str] = []
    in_string = False
    while True:
        text = cursor.waiting
        position = 0
        while True:
            match = (_INSIDE if in_string else _OUTSIDE).search(text, position)
            if match is None:
                position = len(text)
                break
            character = match.group()
            position = match.end()
            if character == '"':
                in_string = not in_string
            elif character == "\\":
                if position == len(text):
                    position -= 1  # what is escaped has not arrived
                    break
                position += 1
            elif character in _CLOSER:
                open_brackets.append(_CLOSER[character])
                if len(open_brackets) > _MAX_DEPTH:
                    raise MalformedError
            elif not open_brackets or open_brackets.pop() != character:
                raise MalformedError
            elif not open_brackets:
                parts.append(cursor.take(position))
                return "".join(parts)
        if position and not open_brackets:
            raise MalformedError
        parts.append(cursor.take(position))
        if not (yield from cursor.more()):
            raise MalformedError


class JsonReader:
    """Reads calls of one form, after its ``begin``."""

    def __init__(self, form: JsonCalls) -> None:
        self._form = form
        self._header = re.compile(form.header, re.DOTALL)
        self._first_keys = tuple(f'"{key}"' for key in ("name", "type", "function", *form.argument_keys))
        self._has_names = "name" in self._header.groupindex or "list" in self._header.groupindex

    def read(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """Read a call, or a section of calls, and put them into ``sink``. Raises ``MalformedError`` (the calls before
        the malformed one stand, and ``cursor.mark`` is set after them) and ``CutError``."""
        form = self._form
        if not form.call_begin:
            yield from self._call(cursor, sink, form.end)
            return
        calls = 0
        while True:
            yield from cursor.skip_space()
            if (yield from cursor.accept((form.call_begin, form.end))) == form.call_begin:
                yield from self._call(cursor, sink, form.call_end)
                calls += 1
            elif calls:
                cursor.require_whole()
                return
            else:
                raise MalformedError

    def read_bare(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """Read unmarked calls: objects that name a declared tool."""
        while True:
            cursor.mark()
            yield from cursor.accept(("{",))
            yield from cursor.skip_space()
            if (yield from cursor.accept(self._first_keys)) is None:
                raise MalformedError
            cursor.give_back()
            cursor.mark()
            text = yield from read_json_value(cursor)
            self._emit_object(cursor, sink, text, declared_only=True)
            yield from cursor.skip_space()
            if self._form.separator and (yield from cursor.accept((self._form.separator,))):
                yield from cursor.skip_space()
            if (yield from cursor.peek()) != "{":
                return

    def _call(self, cursor: Cursor, sink: Sink, end: str) -> Steps[None]:
        header = yield from self._read_header(cursor)
        match = self._header.fullmatch(header)
        if match is None:
            raise MalformedError
        groups = match.groupdict()
        if groups.get("list") is not None:
            yield from self._list(cursor, sink)
            return
        text = yield from read_json_value(cursor)
        if self._form.fence:
            yield from cursor.skip_space()
            yield from cursor.accept((self._form.fence,))
        if end:
            yield from cursor.skip_space()
            closed = yield from cursor.accept((end,))
            if closed is None and (cursor.waiting or not cursor.ended):
                raise MalformedError
        name = groups.get("name")
        if name is None:
            self._emit_object(cursor, sink, text)
        else:
            arguments = object_arguments(text)
            cursor.require_whole()
            sink.json_call(name, arguments)
            cursor.mark()
        if self._form.separator:
            yield from self._more_after_separator(cursor, sink)

    def _more_after_separator(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        yield from cursor.skip_space()
        if (yield from cursor.accept((self._form.separator,))):
            yield from cursor.skip_space()
            if (yield from cursor.peek()) == "{":
                yield from self.read_bare(cursor, sink)

    def _list(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """Objects of a list whose bracket is already read; each is a call as soon as it is complete."""
        while True:
            text = yield from read_json_value(cursor)
            self._emit_object(cursor, sink, text)
            yield from cursor.skip_space()
            found = yield from cursor.accept((",", "]"))
            if found == ",":
                yield from cursor.skip_space()
            else:
                return

    def _read_header(self, cursor: Cursor) -> Steps[str]:
        """Everything before the first brace."""
        if not self._has_names:
            header = yield from cursor.skip_space()
            if (yield from cursor.peek()) != "{":
                raise MalformedError
            return header
        while True:
            position = cursor.waiting.find("{")
            if 0 <= position <= MAX_HEADER_CHARACTERS:
                return cursor.take(position)
            if position > 0 or len(cursor.waiting) > MAX_HEADER_CHARACTERS or not (yield from cursor.more()):
                raise MalformedError

    def _emit_object(self, cursor: Cursor, sink: Sink, text: str, declared_only: bool = False) -> None:
        members = json_members(text)
        if "function" in members and "name" not in members and members["function"].startswith("{"):
            members = json_members(members["function"])
        name = self._name(members)
        keys = [key for key in self._form.argument_keys if key in members]
        if declared_only and (not keys or sink.tools.find(name) is None):
            raise MalformedError
        tool = sink.tools.find(name)
        written = members[keys[0]] if keys else "{}"
        if tool is not None and tool.kind == "custom" and written.startswith('"'):
            arguments = load(written)
            cursor.require_whole()
            sink.call(name, arguments)
        else:
            arguments = object_arguments(written)
            cursor.require_whole()
            sink.json_call(name, arguments)
        cursor.mark()

    @staticmethod
    def _name(members: dict[str, str]) -> str:
        name = json.loads(members.get("name", "null"))
        if not isinstance(name, str) or not name.strip():
            raise MalformedError
        return name.strip()
