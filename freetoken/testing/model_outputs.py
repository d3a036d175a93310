"""Outputs of models in all formats, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from freetoken.serving.parsers import OutputFormat, render_calls
from freetoken.serving.parsers.select import FORMATS
from freetoken.serving.tools import ToolSpec

TOOLS = (
    ToolSpec(
        "get_weather",
        schema={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": ["string", "null"]},
                "detail": {"type": "object"},
            },
        },
    ),
    ToolSpec(
        "write_file",
        schema={
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}},
        },
    ),
    ToolSpec("get_time", schema={"type": "object", "properties": {}}),
    ToolSpec("apply_patch", kind="custom"),
)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A model's text and what it means. ``calls`` are (name, arguments)."""

    label: str
    format: OutputFormat
    text: str
    prompt_tail: str = ""
    reason: Literal["stop", "length"] = "stop"
    reasoning: str = ""
    answer: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


def whole_output(
    format: OutputFormat, reasoning: str, answer: str, calls: tuple[tuple[str, Any], ...] = ()
) -> tuple[str, str]:
    """(prompt tail, text) of a turn with all of these, in the format's canonical spelling."""
    syntax = format.call_syntax
    assert syntax is not None
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    rendered = render_calls(syntax, written) if written else ""
    tail = format.turn_begin[0]
    if format.channels is None:
        text = ""
        if reasoning and format.reasoning:
            marks = format.reasoning[0]
            text = f"{marks.begin}\n{reasoning}\n{marks.end}\n\n"
        return tail, text + answer + rendered
    channels = format.channels
    messages = []
    for body, to, on in ((reasoning, "self", "analysis"), (answer, "user", "final" if not calls else "commentary")):
        if body:
            header = f"{channels.channel}{on}" if channels.channel else f" to={to}"
            messages.append(f"{header}{channels.message}{body}")
    if rendered:
        messages.append(rendered)
    return tail, f"{channels.ends[0]}{channels.start}assistant".join(messages)


def call_formats() -> Iterator[OutputFormat]:
    """All formats that have calls."""
    yield from (format for format in FORMATS if format.call_syntax is not None)


def canonical_outputs() -> Iterator[ModelOutput]:
    """In each format: an answer, reasoning, one call, calls in a row, awkward arguments."""
    weather = ("get_weather", {"city": "Zürich", "days": 3, "unit": None, "detail": {"a": [1, {"b": "x"}], "c": True}})
    awkward = (
        "write_file",
        {"path": "C:\\tmp\\x.txt", "content": 'a "quote" & <tag> {brace} [x], naïve 🌸\n  indented\n', "mode": 420},
    )
    for format in call_formats():
        thinks = bool(format.reasoning or format.channels)
        assert format.call_syntax is not None
        cases: list[tuple[str, str, str, tuple[tuple[str, Any], ...]]] = [
            ("answer", "", "Hello, 世界 <b>1 < 2</b>.", ()),
            ("call", "", "", (weather,)),
            ("awkward", "", "", (awkward,)),
        ]
        if format.name != "llama3":
            cases.append(("text and call", "", "Let me see.", (weather,)))
        if thinks:
            cases.append(("reasoning", "First\n\nthis, then that.", "It is 4.", ()))
            cases.append(("reasoning and call", "I need the time.", "", (weather,)))
        if format.call_syntax.parallel:
            cases.append(("three calls", "", "", (weather, ("get_time", {}), awkward)))
        for label, reasoning, answer, calls in cases:
            if format.call_syntax.body == "elements":
                calls = tuple((name, {k: v for k, v in args.items() if v is not None}) for name, args in calls)
            tail, text = whole_output(format, reasoning, answer, calls)
            yield ModelOutput(f"{format.name}: {label}", format, text, tail, "stop", reasoning, answer, calls)
