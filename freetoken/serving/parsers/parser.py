"""A parser for one choice: it runs a program over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from freetoken.serving.parsers.arguments import ToolTable
from freetoken.serving.parsers.channels import ChannelProgram
from freetoken.serving.parsers.cursor import Cursor, Steps
from freetoken.serving.parsers.events import OutputEvent
from freetoken.serving.parsers.format import OutputFormat
from freetoken.serving.parsers.sink import Sink
from freetoken.serving.parsers.tags import TagProgram
from freetoken.serving.tools import ToolSpec


class OutputParser:
    """What a model writes in one choice, as events. Not thread-safe.

    A call is told when it is complete, never in part: one that is cut off, or that turns out not to be one, must leave
    no trace. What looks like a call and is none is text.
    """

    def __init__(self, program: Callable[[Cursor, Sink], Steps[None]], tools: Sequence[ToolSpec]) -> None:
        self._cursor = Cursor()
        self._sink = Sink(ToolTable(tools))
        self._steps = program(self._cursor, self._sink)
        self._running = True
        next(self._steps)

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._sink.calls

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that are certain after ``text``, which may be empty or begin and end anywhere."""
        if text and self._running:
            self._cursor.push(text)
            self._step()
        return self._sink.take()

    def finish(self, reason: Literal["stop", "length"]) -> list[OutputEvent]:
        """The last events. ``stop``: the model ended its turn, so what it forgot to close is closed. ``length``: the
        text was cut off (for whatever reason), so an incomplete call is dropped with its markup."""
        self._cursor.end(cut=reason != "stop")
        while self._running:
            self._step()
        return self._sink.take()

    def forget_prompt(self) -> None:
        """What was fed so far was the prompt's; only the state stays."""
        self._sink.forget_prompt()

    def _step(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._running = False


def open_parser(format: OutputFormat, tools: Sequence[ToolSpec], prompt_tail: str) -> OutputParser:
    """See ``OutputFormat.open``. The state at the start is the one after the prompt's own part of the turn."""
    program = ChannelProgram.of(format) if format.channels else TagProgram.of(format)
    parser = OutputParser(program.run, tools)
    begun = format.begun_turn(prompt_tail)
    if begun:
        parser.feed(begun)
        parser.forget_prompt()
    return parser
