"""What an output parser says about the text of one choice.

The joined texts, the joined reasoning and the calls do not depend on how the text was cut into pieces. A call is told
when it is complete: ``ToolCallStarted``, ``ToolCallDelta``, ``ToolCallEnded`` come in a row, with indexes 0, 1, 2 and
so on. So no client ever sees a part of a call that is then cut off or turns out not to be one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the model's reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call, and the name of its tool as the model wrote it, which need not be a declared one."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next fragment of a call's arguments; never empty.

    For a function, JSON text: the fragments of a call, joined, are its ``ToolCallEnded.arguments``. For a custom tool,
    its input as plain text.
    """

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """A call is complete. ``arguments`` is valid JSON (an object) for a function, the raw input for a custom tool."""

    index: int
    name: str
    arguments: str


OutputEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ToolCallEnded
