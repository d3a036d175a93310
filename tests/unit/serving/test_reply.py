"""From the deltas of choices to events, and to whole messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, cast

import pytest

from freetoken.messages import LogprobEntry
from freetoken.serving.choice import ChoiceDelta, Finish, TokenLogprob
from freetoken.serving.generation import Generation
from freetoken.serving.parsers.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from freetoken.serving.reply import (
    CallEnded,
    CallPiece,
    CallStarted,
    ChoiceEnded,
    PlainParser,
    ReasoningPiece,
    Reply,
    ReplyCall,
    ReplyEvent,
    ReplyMessage,
    ReplyOptions,
    ReplyReasoning,
    ReplyText,
    TextPiece,
)
from freetoken.serving.tools import ToolSpec
from freetoken.serving.toolset import Toolset

STOP = Finish("stop")


class LineParser:
    """A toy format: each line is reasoning (``?``), a call (``!name {..}``) or text; a call starts at its name."""

    def __init__(self) -> None:
        self.line = ""
        self.calls = 0
        self.name: str | None = None

    def feed(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for character in text:
            self.line += character
            if self.line[0] == "!" and character == " " and self.name is None:
                self.name = self.line[1:-1]
                events.append(ToolCallStarted(self.calls, self.name))
            if character == "\n":
                events += self._end_line()
        return events

    def _end_line(self) -> list[OutputEvent]:
        line, self.line = self.line[:-1], ""
        if self.name is not None:
            name, self.name, arguments = self.name, None, line.partition(" ")[2]
            self.calls += 1
            index = self.calls - 1
            return [ToolCallDelta(index, arguments), ToolCallEnded(index, name, arguments)]
        return [ReasoningDelta(line[1:])] if line.startswith("?") else [TextDelta(line)]

    def finish(self, reason: Literal["stop", "length"]) -> list[OutputEvent]:
        if not self.line or (self.name is not None and reason == "length"):
            return []
        return self.feed("\n")


class FakeGeneration:
    """Hands out prepared deltas."""

    request_id = "r"

    def __init__(self, deltas: Sequence[list[ChoiceDelta]]) -> None:
        self._deltas = list(deltas)
        self.ended_early: list[int] = []

    async def next(self, silence_s: float) -> list[ChoiceDelta]:
        return self._deltas.pop(0)

    async def settle(self) -> None:
        pass

    def token_ids(self, index: int) -> tuple[int, ...]:
        return (1, 2, 3)

    def end_choice(self, index: int) -> Finish:
        self.ended_early.append(index)
        return STOP


def reply_of(
    deltas: Sequence[list[ChoiceDelta]], tools: Sequence[ToolSpec] = (), remember: Any = None, **options: Any
) -> tuple[Reply, FakeGeneration]:
    fake = FakeGeneration(deltas)
    choices = 1 + max(delta.index for news in deltas for delta in news)
    parsers = [LineParser() for _ in range(choices)]
    reply = Reply(cast(Generation, fake), parsers, Toolset(tools), ReplyOptions(**options), remember)
    return reply, fake


async def events_of(reply: Reply) -> list[ReplyEvent]:
    events: list[ReplyEvent] = []
    while not reply.done:
        events += await reply.next(1.0)
    return events


SAID = '?hm\nI look.\n!ls {"path": "/"}\n!cat {}\nbye\n'


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_pieces_do_not_matter(size: int) -> None:
    deltas = [[ChoiceDelta(0, SAID[i : i + size])] for i in range(0, len(SAID), size)]
    deltas.append([ChoiceDelta(0, finish=STOP)])
    reply, _ = reply_of(deltas)
    events = await events_of(reply)
    message = ReplyMessage(0)
    for event in events:
        message.add(event)
    assert (message.reasoning, message.text) == ("hm", "I look.bye")
    assert [(call.index, call.name, call.arguments) for call in message.calls] == [
        (0, "ls", '{"path": "/"}'),
        (1, "cat", "{}"),
    ]
    assert [type(part) for part in message.parts] == [ReplyReasoning, ReplyText, ReplyCall, ReplyCall, ReplyText]
    assert message.ended == ChoiceEnded(0, "tool_calls", STOP)
    for call in message.calls:
        pieces = [event.arguments for event in events if isinstance(event, CallPiece) and event.index == call.index]
        assert "".join(pieces) == call.arguments
        assert [e.call.call_id for e in events if isinstance(e, CallStarted) and e.call.index == call.index] == [
            call.call_id
        ]
    whole, _ = reply_of([[ChoiceDelta(0, SAID, finish=STOP)]])
    collected = (await whole.collect())[0]
    assert [(p.name, p.arguments) if isinstance(p, ReplyCall) else p for p in collected.parts] == [
        (p.name, p.arguments) if isinstance(p, ReplyCall) else p for p in message.parts
    ]


async def test_a_cut_call_is_never_seen() -> None:
    seen: list[Any] = []
    reply, _ = reply_of(
        [[ChoiceDelta(0, 'so\n!write {"te')], [ChoiceDelta(0, "xt", finish=Finish("length"))]],
        remember=lambda *arguments: seen.append(arguments),
    )
    assert await events_of(reply) == [TextPiece(0, "so"), ChoiceEnded(0, "length", Finish("length"))]
    assert seen == [], "what was cut is not what the model would have said"


@pytest.mark.parametrize(("text", "told"), [("so\n", 1), ("so\n!a {}\n", 1), ("!a {}\n!b {", 0)])
async def test_what_was_cut_between_calls_is_remembered(text: str, told: int) -> None:
    seen: list[Any] = []
    reply, _ = reply_of(
        [[ChoiceDelta(0, text, finish=Finish("length"))]], remember=lambda *arguments: seen.append(arguments)
    )
    await events_of(reply)
    assert len(seen) == told


async def test_a_stop_string_inside_a_call_ends_it_without_the_call() -> None:
    finish = Finish("stop", stop_string="X")
    reply, _ = reply_of([[ChoiceDelta(0, 'so\n!write {"te', finish=finish)]])
    assert await events_of(reply) == [TextPiece(0, "so"), ChoiceEnded(0, "stop", finish)]


async def test_complete_calls_before_a_cut_remain_and_the_reason_is_length() -> None:
    reply, _ = reply_of([[ChoiceDelta(0, "!a {}\n!b {", finish=Finish("length"))]])
    events = await events_of(reply)
    assert [event.call.name for event in events if isinstance(event, CallEnded)] == ["a"]
    assert events[-1] == ChoiceEnded(0, "length", Finish("length"))


@pytest.mark.parametrize("together", [True, False])
async def test_without_parallel_calls_the_first_ends_the_choice(together: bool) -> None:
    text = "!a {}\n!b {}\ntext\n"
    deltas = [[ChoiceDelta(0, text)]] if together else [[ChoiceDelta(0, c)] for c in text]
    reply, fake = reply_of(deltas, parallel_calls=False)
    events = await events_of(reply)
    assert [event.call.name for event in events if isinstance(event, CallEnded)] == ["a"]
    assert [type(event) for event in events] == [CallStarted, CallPiece, CallEnded, ChoiceEnded]
    assert fake.ended_early == [0]


@pytest.mark.parametrize(
    ("rest", "told"), [("", True), ("\n \n", True), ("!b {}\n", False), ("so\n", False), (" " * 80 + "\n", False)]
)
async def test_the_only_call_is_remembered_if_nothing_else_was_said(rest: str, told: bool) -> None:
    seen: list[Any] = []
    deltas = [[ChoiceDelta(0, "!a {}\n")], *([ChoiceDelta(0, c)] for c in rest), [ChoiceDelta(0, finish=STOP)]]
    reply, _ = reply_of(deltas, parallel_calls=False, remember=lambda *arguments: seen.append(arguments))
    events = await events_of(reply)
    assert [event.call.name for event in events if isinstance(event, CallEnded)] == ["a"]
    assert isinstance(events[-1], ChoiceEnded) and events[-1].reason == "tool_calls"
    assert not any(isinstance(event, TextPiece) for event in events)
    assert bool(seen) == told


async def test_the_only_call_counts_although_the_length_cuts_what_closes_it() -> None:
    deltas = [[ChoiceDelta(0, "!a {}\n")], [ChoiceDelta(0, finish=Finish("length"))]]
    reply, _ = reply_of(deltas, parallel_calls=False)
    assert (await events_of(reply))[-1] == ChoiceEnded(0, "tool_calls", STOP)


async def test_calls_are_named_as_the_client_named_them() -> None:
    tools = [ToolSpec("spawn", namespace="agents"), ToolSpec("patch", kind="custom")]
    reply, _ = reply_of([[ChoiceDelta(0, "!agents.spawn {}\n!patch *** Begin\n!other {}", finish=STOP)]], tools)
    calls = (await reply.collect())[0].calls
    assert [(call.name, call.namespace, call.kind, call.arguments) for call in calls] == [
        ("spawn", "agents", "function", "{}"),
        ("patch", None, "custom", "*** Begin"),
        ("other", None, "function", "{}"),
    ]
    assert len({call.call_id for call in calls}) == 3
    assert all(call.call_id.startswith("call_") for call in calls)


async def test_choices_are_told_apart_and_remembered() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    deltas = [
        [ChoiceDelta(0, "a\n"), ChoiceDelta(1, "?b\n")],
        [ChoiceDelta(1, finish=STOP), ChoiceDelta(0, finish=STOP)],
    ]
    reply, _ = reply_of(deltas, remember=lambda message, ids: seen.append((message.text, ids)))
    events = await events_of(reply)
    assert events[:2] == [TextPiece(0, "a"), ReasoningPiece(1, "b")]
    assert json.dumps(seen) == '[["", [1, 2, 3]], ["a", [1, 2, 3]]]'


async def test_logprobs_go_with_the_next_text_or_alone() -> None:
    one, two = TokenLogprob(LogprobEntry(1, -1.0), 0), TokenLogprob(LogprobEntry(2, -1.0), 1)
    deltas = [[ChoiceDelta(0, "?b\n", [one])], [ChoiceDelta(0, "ab\n", [two], STOP)]]
    reply, _ = reply_of(deltas)
    assert await events_of(reply) == [
        TextPiece(0, "", (one,)),
        ReasoningPiece(0, "b"),
        TextPiece(0, "ab", (two,)),
        ChoiceEnded(0, "stop", STOP),
    ]


def test_without_a_format_everything_is_text() -> None:
    parser = PlainParser()
    assert parser.feed("<think>") == [TextDelta("<think>")]
    assert parser.feed("") == [] == parser.finish("stop")
