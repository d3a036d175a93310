"""The program for formats in which a turn is a sequence of messages, each to somebody and on some channel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from freetoken.serving.parsers.arguments import object_arguments
from freetoken.serving.parsers.cursor import Cursor, CutError, MalformedError, Markers, Steps
from freetoken.serving.parsers.format import OutputFormat
from freetoken.serving.parsers.json_calls import read_json_value
from freetoken.serving.parsers.sink import Sink
from freetoken.serving.parsers.tagged_calls import TaggedReader
from freetoken.serving.parsers.tags import flush

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MAX_HEADER_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class _Address:
    """What a header says: what kind of message it is, and for a call, to which tool."""

    kind: Literal["reasoning", "text", "call", "other"]
    tool: str = ""
    is_json: bool = True


class ChannelProgram:
    """Headers decide what a body is; calls are only read from messages to tools."""

    def __init__(self, format: OutputFormat) -> None:
        assert format.channels is not None
        self._channels = channels = format.channels
        turn = channels.start + "assistant"
        self._header_markers = Markers((channels.message, channels.start, *channels.ends, *channels.call_ends))
        self._text_ends = Markers((*channels.ends, turn))
        self._call_ends = Markers((*channels.ends, *channels.call_ends, turn))
        self._turn = turn
        self._reader = TaggedReader(channels.body) if channels.body else None

    @staticmethod
    @lru_cache(maxsize=16)
    def of(format: OutputFormat) -> ChannelProgram:
        """The program of a format; shared, as it keeps no state."""
        return ChannelProgram(format)

    def run(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """See ``cursor``: a generator over the whole text."""
        yield
        try:
            while (address := (yield from self._read_header(cursor, sink))) is not None:
                if address.kind == "call":
                    yield from self._read_call(cursor, sink, address)
                elif address.kind == "reasoning":
                    yield from self._read_text(cursor, sink, reasoning=True)
                elif address.kind == "text":
                    yield from self._read_text(cursor, sink, reasoning=False)
                else:
                    yield from self._skip(cursor)
        except CutError:
            return
        sink.close()

    def _read_header(self, cursor: Cursor, sink: Sink) -> Steps[_Address | None]:
        """The next message's address; None at the end. A header that breaks off is dropped; what is too long for one is
        the text of a model that writes none."""
        header = ""
        cursor.mark()
        while True:
            text, found = cursor.scan(self._header_markers)
            header += text
            if len(header) > _MAX_HEADER_CHARACTERS:
                cursor.give_back()
                return _Address("text")
            if found == self._channels.message:
                cursor.release()
                return self._address(header, sink)
            if found is not None:
                header = ""
                cursor.mark()
            elif not (yield from cursor.more()):
                if cursor.cut or self._looks_like_header(header + cursor.waiting):
                    return None
                cursor.give_back()
                return _Address("text")

    def _looks_like_header(self, header: str) -> bool:
        channel = self._channels.channel
        words = header.strip()
        return not words or bool(channel and channel in header) or words == "assistant" or words.startswith("to=")

    def _address(self, header: str, sink: Sink) -> _Address:
        channels = self._channels
        channel = ""
        parts = header.split(channels.channel) if channels.channel else [header]
        rest = parts[-1] if len(parts) > 1 else ""
        is_json = True
        if channels.constrain and channels.constrain in header:
            is_json = header.rsplit(channels.constrain, 1)[1].strip() in ("", "json")
            rest = rest.split(channels.constrain)[0]
        if rest.strip():
            channel = rest.split()[0]
        found = _RECIPIENT.search(rest) or _RECIPIENT.search(parts[0])
        recipient = found.group(1) if found else ""
        tool = recipient.removeprefix(channels.tool_prefix) if channels.tool_prefix else recipient
        if recipient in channels.reasoning_to:
            return _Address("reasoning")
        if not recipient or recipient in channels.text_to:
            return _Address("reasoning" if channel in channels.reasoning_on else "text")
        if not channels.tool_prefix or tool != recipient or sink.tools.find(recipient) is not None:
            return _Address("call", tool, is_json) if sink.tools else _Address("other")
        return _Address("other")

    def _read_text(self, cursor: Cursor, sink: Sink, reasoning: bool) -> Steps[None]:
        put = sink.reasoning if reasoning else sink.text
        if not reasoning:
            sink.new_text_message()
        while True:
            text, found = cursor.scan(self._text_ends)
            if text:
                put(text)
            if found is not None:
                if reasoning:
                    sink.end_reasoning(goes_on=True)
                return
            if not (yield from cursor.more()):
                flush(cursor, put)
                return

    def _skip(self, cursor: Cursor) -> Steps[None]:
        while cursor.scan(self._call_ends)[1] is None:
            if not (yield from cursor.more()):
                return

    def _read_call(self, cursor: Cursor, sink: Sink, address: _Address) -> Steps[None]:
        """Read the body of a message to a tool; if it is no call, it is text."""
        cursor.mark()
        calls = sink.calls
        try:
            if self._reader is not None:
                yield from self._read_tagged(cursor, sink, self._reader)
            elif address.is_json:
                yield from self._read_json(cursor, sink, address)
            else:
                yield from self._read_raw(cursor, sink, address)
            cursor.release()
        except MalformedError:
            cursor.require_whole()
            tool = sink.tools.find(address.tool)
            cursor.give_back()
            if tool is not None and tool.kind == "custom" and self._reader is None:
                cursor.mark()
                yield from self._read_raw(cursor, sink, address)
                cursor.release()
            elif sink.calls == calls:
                yield from self._read_text(cursor, sink, reasoning=False)
            else:
                yield from self._skip(cursor)

    def _read_json(self, cursor: Cursor, sink: Sink, address: _Address) -> Steps[None]:
        yield from cursor.skip_space()
        text = yield from read_json_value(cursor)
        arguments = object_arguments(text)
        yield from cursor.skip_space()
        found = yield from cursor.accept(self._call_ends.literals)
        if found is None and cursor.waiting:
            raise MalformedError
        # The end of the JSON is the end of the call: the token after it ends the turn and is not part of the text.
        sink.json_call(address.tool, arguments)

    def _read_raw(self, cursor: Cursor, sink: Sink, address: _Address) -> Steps[None]:
        parts: list[str] = []
        while True:
            text, found = cursor.scan(self._call_ends)
            parts.append(text)
            if found is None and (yield from cursor.more()):
                continue
            if found is None:
                parts.append(cursor.take(len(cursor.waiting)))
                cursor.require_whole()
            break
        tool = sink.tools.find(address.tool)
        if tool is None or tool.kind != "custom":
            raise MalformedError
        sink.call(address.tool, "".join(parts))

    def _read_tagged(self, cursor: Cursor, sink: Sink, reader: TaggedReader) -> Steps[None]:
        assert self._channels.body is not None
        yield from cursor.skip_space()
        if (yield from cursor.accept((self._channels.body.begin,))) is None:
            raise MalformedError
        yield from reader.read(cursor, sink)
        yield from cursor.skip_space()
        if (yield from cursor.accept(self._call_ends.literals)) is None and cursor.waiting:
            raise MalformedError
