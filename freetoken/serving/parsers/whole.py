"""All events of one choice folded into what a response without streaming shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from freetoken.serving.parsers.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallEnded
from freetoken.serving.parsers.format import OutputFormat
from freetoken.serving.tools import ToolSpec


@dataclass(slots=True)
class ParsedOutput:
    """What a model wrote in one choice. ``calls`` are (name, arguments) in order."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def extend(self, events: Iterable[OutputEvent]) -> None:
        """Add what came after this."""
        for event in events:
            if isinstance(event, TextDelta):
                self.text += event.text
            elif isinstance(event, ReasoningDelta):
                self.reasoning += event.text
            elif isinstance(event, ToolCallEnded):
                self.calls.append((event.name, event.arguments))


def parse_output(
    format: OutputFormat,
    tools: Sequence[ToolSpec],
    prompt_tail: str,
    pieces: Iterable[str],
    reason: Literal["stop", "length"] = "stop",
) -> ParsedOutput:
    """What a model wrote, from all pieces of its text."""
    parser = format.open(tools, prompt_tail)
    output = ParsedOutput()
    for piece in pieces:
        output.extend(parser.feed(piece))
    output.extend(parser.finish(reason))
    return output
