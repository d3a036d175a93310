"""The program for formats that mark reasoning and calls within one text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from freetoken.serving.parsers.cursor import Cursor, CutError, MalformedError, Markers, Steps
from freetoken.serving.parsers.element_calls import ElementReader, ObjectReader
from freetoken.serving.parsers.format import CallForm, ElementCalls, JsonCalls, ObjectCalls, OutputFormat, TaggedCalls
from freetoken.serving.parsers.json_calls import JsonReader
from freetoken.serving.parsers.sink import Sink
from freetoken.serving.parsers.tagged_calls import TaggedReader

_MAX_RETRIES = 8

Reader = JsonReader | TaggedReader | ElementReader | ObjectReader


@lru_cache(maxsize=256)
def reader_for(form: CallForm) -> Reader:
    """The reader of a form; shared, as readers keep no state."""
    if isinstance(form, JsonCalls):
        return JsonReader(form)
    if isinstance(form, TaggedCalls):
        return TaggedReader(form)
    if isinstance(form, ElementCalls):
        return ElementReader(form)
    assert isinstance(form, ObjectCalls)
    return ObjectReader(form)


class TagProgram:
    """Reasoning, if the text begins with it; then the answer, with calls in it."""

    def __init__(self, format: OutputFormat) -> None:
        self._reasoning = {reasoning.begin: Markers((reasoning.end,)) for reasoning in format.reasoning}
        self._readers = {form.begin: reader_for(form) for form in format.calls}
        self._closers = frozenset(form.end for form in format.calls if form.end) - set(self._readers)
        self._markers = Markers((*self._readers, *self._closers))
        bare = [reader_for(form) for form in format.calls if isinstance(form, JsonCalls) and form.bare]
        self._bare = bare[0] if bare else None

    @staticmethod
    @lru_cache(maxsize=64)
    def of(format: OutputFormat) -> TagProgram:
        """The program of a format; shared, as it keeps no state."""
        return TagProgram(format)

    def run(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        """See ``cursor``: a generator over the whole text."""
        yield
        lead = yield from cursor.skip_space()
        if self._reasoning and (begin := (yield from cursor.accept(tuple(self._reasoning)))):
            yield from self._read_reasoning(cursor, sink, self._reasoning[begin])
            lead = ""
            if self._bare:
                lead = yield from cursor.skip_space()
        elif cursor.cut and cursor.hit_end:
            return  # white space, or a part of the marker
        if lead:
            sink.text(lead)
        try:
            if sink.tools:
                if self._bare and (yield from cursor.peek()) == "{":
                    yield from self._read_call(cursor, sink, "")
                yield from self._read_answer(cursor, sink)
            else:
                yield from self._read_plain(cursor, sink)
        except CutError:
            return
        sink.close()

    @staticmethod
    def _read_reasoning(cursor: Cursor, sink: Sink, end: Markers) -> Steps[None]:
        """Everything up to the first end marker, whatever it looks like."""
        while True:
            text, found = cursor.scan(end)
            if text:
                sink.reasoning(text)
            if found is not None:
                sink.end_reasoning()
                return
            if not (yield from cursor.more()):
                flush(cursor, sink.reasoning)
                return

    @staticmethod
    def _read_plain(cursor: Cursor, sink: Sink) -> Steps[None]:
        while True:
            if cursor.waiting:
                sink.text(cursor.take(len(cursor.waiting)))
            if not (yield from cursor.more()):
                return

    def _read_answer(self, cursor: Cursor, sink: Sink) -> Steps[None]:
        retries = 0
        while True:
            text, found = cursor.scan(self._markers)
            if text:
                sink.text(text)
            if found is None:
                if not (yield from cursor.more()):
                    flush(cursor, sink.text)
                    return
            elif found in self._closers:
                # Left over after a call that was not opened as it should be.
                if not sink.after_call:
                    sink.text(found)
            elif sink.in_quotes or retries >= _MAX_RETRIES:
                sink.text(found)
            elif not (yield from self._read_call(cursor, sink, found)) and cursor.hit_end:
                retries += 1

    def _read_call(self, cursor: Cursor, sink: Sink, begin: str) -> Steps[bool]:
        """Read what ``begin`` opens (nothing: unmarked calls). False if it is no call: then it is text."""
        calls = sink.calls
        cursor.mark()
        try:
            if begin:
                yield from self._readers[begin].read(cursor, sink)
            else:
                assert isinstance(self._bare, JsonReader)
                yield from self._bare.read_bare(cursor, sink)
        except MalformedError:
            cursor.require_whole()
            cursor.give_back()
            if sink.calls == calls:
                sink.text(begin if begin else cursor.take(1))
            return False
        cursor.release()
        return True


def flush(cursor: Cursor, put: Callable[[str], None]) -> None:
    """The end of the text may be the beginning of a marker. If the text was cut there, that is markup."""
    rest = cursor.take(len(cursor.waiting))
    if rest and not cursor.cut:
        put(rest)
