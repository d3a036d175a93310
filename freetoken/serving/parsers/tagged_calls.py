"""Reading calls whose arguments are tagged one by one."""

from __future__ import annotations

import re

from freetoken.serving.parsers.arguments import ToolTable, dump, load, object_text
from freetoken.serving.parsers.cursor import Cursor, Delimiter, MalformedError, Markers, Steps
from freetoken.serving.parsers.format import TaggedCalls
from freetoken.serving.parsers.sink import Sink


class TaggedReader:
    """Reads calls of one form, after its ``begin``."""

    def __init__(self, form: TaggedCalls) -> None:
        self._form = form
        self._call_end = re.compile(form.call_header_end)
        self._call_header = re.compile(form.call_header, re.DOTALL)
        self._parameter_end = re.compile(form.parameter_header_end)
        self._parameter_header = re.compile(form.parameter_header, re.DOTALL)
        close = Delimiter(form.parameter_close, form.close_followers)
        implied = [Delimiter(literal, followers, keep=True) for literal, followers in form.implied_closes]
        self._delimiters = {delimiter.literal: delimiter for delimiter in (*implied, close)}
        self._markers = Markers((*self._delimiters, form.implied_open))

    def read(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """Read a call, or a section of calls, and put them into ``sink``. Raises ``MalformedError`` (the calls before
        the malformed one stand, and ``cursor.mark`` is set after them) and ``CutError``."""
        form = self._form
        if form.begin == form.call_open:
            yield from self._call(cursor, sink)
            return
        calls = 0
        while True:
            yield from cursor.skip_space()
            found = yield from cursor.accept((form.call_open, form.end))
            if found == form.call_open:
                section_closed = yield from self._call(cursor, sink)
                calls += 1
                if section_closed:
                    return
            elif calls:
                cursor.require_whole()
                return
            else:
                raise MalformedError

    def _call(self, cursor: Cursor, sink: Sink) -> Steps[bool]:
        """One call after its ``call_open``. Returns whether the section was closed instead of the call."""
        form = self._form
        header = yield from cursor.header(self._call_end)
        match = self._call_header.fullmatch(header)
        if match is None:
            raise MalformedError
        name = match["name"].strip()
        members: dict[str, str] = {}
        section_closed = False
        complete = bool(match.groupdict().get("empty"))
        while not complete:
            yield from cursor.skip_space()
            found = yield from cursor.accept((form.parameter_open, form.call_close, form.end))
            if found == form.parameter_open:
                key, value = yield from self._parameter(cursor, sink.tools, name, members)
                members[key] = value
            elif found is not None:
                section_closed = found == form.end and form.end != form.call_close
                complete = True
            elif members and cursor.ended and not cursor.waiting:
                complete = True
            else:
                raise MalformedError
        cursor.require_whole()
        sink.json_call(name, object_text(members))
        cursor.mark()
        return section_closed

    def _parameter(
        self, cursor: Cursor, tools: ToolTable, name: str, members: dict[str, str]
    ) -> Steps[tuple[str, str]]:
        form = self._form
        header = yield from cursor.header(self._parameter_end)
        match = self._parameter_header.fullmatch(header)
        if match is None:
            raise MalformedError
        key = match["name"].strip()
        delimiters = self._delimiters
        missing = [other for other in tools.parameters(name) if other != key and other not in members]
        if form.implied_open and missing:
            followers = tuple(other + form.implied_name_end for other in missing)
            delimiters = {**delimiters, form.implied_open: Delimiter(form.implied_open, followers, keep=True)}
        value, closed_by = yield from cursor.until(self._markers, delimiters)
        if form.newlines:
            value = value.removeprefix("\n")
            # The line break before an implied end is part of its literal.
            if closed_by == form.parameter_close or closed_by is None:
                value = value.removesuffix("\n")
        return key, self._typed(tools, name, key, value, match.groupdict().get("string"))

    @staticmethod
    def _typed(tools: ToolTable, name: str, key: str, value: str, is_string: str | None) -> str:
        if is_string == "true":
            return dump(value)
        if is_string == "false":
            try:
                load(value)
            except ValueError:
                return tools.typed(name, key, value)
            return value.strip()
        return tools.typed(name, key, value)
