"""Where programs put what they found: events, with the layout around reasoning and calls taken off."""

from __future__ import annotations

from freetoken.serving.parsers.arguments import ToolTable, custom_input
from freetoken.serving.parsers.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)

_OPENING = frozenset("“‘«")
_EITHER = ("`", '"')


class Sink:
    """Collects the events of one choice.

    Reasoning has no white space at either end. The answer has none at its beginning if reasoning or a call came before.
    There is none between calls, and none before the first of them, unless the answer goes on after the calls and what
    stood before them has no line break (line breaks are markup in all formats). All other white space is the model's.
    """

    def __init__(self, tools: ToolTable) -> None:
        self.tools = tools
        self.calls = 0
        self._events: list[OutputEvent] = []
        self._space = ""
        self._before_calls = ""
        self._text_seen = False
        self._since_call = False
        self._strip_text = False
        self._reasoning_seen = False
        self._reasoning_space = ""
        self._paragraph = ""
        self._last = ""
        self._line = ""

    def take(self) -> list[OutputEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    @property
    def text_seen(self) -> bool:
        """Whether the answer has begun."""
        return self._text_seen

    @property
    def after_call(self) -> bool:
        """Whether nothing but white space came after the last call."""
        return self._since_call

    @property
    def in_quotes(self) -> bool:
        """Whether the answer's last character so far opens a quotation: what follows is spoken of, not meant."""
        if self._space or self._since_call:
            return False
        return self._last in _OPENING or (self._last in _EITHER and self._line.count(self._last) % 2 == 1)

    def text(self, text: str) -> None:
        """The answer goes on."""
        body = text.rstrip()
        if not body:
            self._space += text
            return
        if self._text_seen:
            body = self._before_calls + self._space + body
            if self._paragraph:
                body = self._paragraph + body.lstrip()
        elif self._strip_text:
            body = body.lstrip()
        else:
            body = self._space + body
        self._space = text[len(text.rstrip()) :]
        self._text_seen = True
        self._since_call = False
        self._paragraph = ""
        self._before_calls = ""
        self._last = body[-1]
        self._note_quotes(body)
        self._events.append(TextDelta(body))

    def _note_quotes(self, text: str) -> None:
        """Keep the quotation marks of the answer's last line."""
        line_break = text.rfind("\n")
        if line_break >= 0:
            self._line = ""
        for mark in _EITHER:
            self._line += mark * text.count(mark, line_break + 1)

    def new_text_message(self) -> None:
        """What follows is a message of its own: it is set off from text before it."""
        self._space = self._before_calls = ""
        if self._text_seen:
            self._paragraph = "\n\n"

    def reasoning(self, text: str) -> None:
        """The reasoning goes on."""
        body = text.rstrip()
        if not body:
            self._reasoning_space += text
            return
        body = self._reasoning_space + body
        if not self._reasoning_seen:
            body = body.lstrip()
        self._reasoning_space = text[len(text.rstrip()) :]
        self._reasoning_seen = True
        self._events.append(ReasoningDelta(body))

    def end_reasoning(self, goes_on: bool = False) -> None:
        """The reasoning is over; ``goes_on`` if there may be another part of it."""
        self._reasoning_space = "\n\n" if goes_on and self._reasoning_seen else ""
        self._strip_text = True

    def call(self, name: str, arguments: str) -> None:
        """A complete call. ``arguments`` is the JSON text of an object, or plain text for a custom tool."""
        if self._text_seen and not self._since_call and "\n" not in self._space:
            self._before_calls = self._space
        self._space = ""
        self._since_call = True
        self._strip_text = True
        index = self.calls
        self.calls += 1
        self._events.append(ToolCallStarted(index, name))
        if arguments:
            self._events.append(ToolCallDelta(index, arguments))
        self._events.append(ToolCallEnded(index, name, arguments))

    def json_call(self, name: str, arguments: str) -> None:
        """A complete call with the JSON text of an object; a custom tool's input is taken out of it."""
        tool = self.tools.find(name)
        self.call(name, custom_input(arguments) if tool is not None and tool.kind == "custom" else arguments)

    def close(self) -> None:
        """The text is over."""
        if self._space and not self._since_call and not (self._strip_text and not self._text_seen):
            self._events.append(TextDelta(self._space))
        self._space = ""

    def forget_prompt(self) -> None:
        """What came so far was the prompt's own part of the turn."""
        self._events.clear()
        self.calls = 0
        self._space = ""
        self._reasoning_space = ""
