"""From the text a model writes to reasoning, answer and tool calls.

``format_for`` chooses the ``OutputFormat`` of a model; ``OutputFormat.open`` gives a parser for one choice.
"""

from freetoken.serving.parsers.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from freetoken.serving.parsers.format import CallSyntax, OutputFormat
from freetoken.serving.parsers.parser import OutputParser
from freetoken.serving.parsers.render import render_call, render_calls
from freetoken.serving.parsers.select import PLAIN, PLAIN_THINKING, format_for, format_named

__all__ = [
    "PLAIN",
    "PLAIN_THINKING",
    "CallSyntax",
    "OutputEvent",
    "OutputFormat",
    "OutputParser",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallDelta",
    "ToolCallEnded",
    "ToolCallStarted",
    "format_for",
    "format_named",
    "render_call",
    "render_calls",
]
