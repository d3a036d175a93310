"""From a generation to what its choices say: text, reasoning and tool calls, the same in streams and whole responses.

A dialect iterates over ``Reply.next`` and writes each event; ``Reply.collect`` folds the same events into whole
messages, so that both modes tell the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

from freetoken.serving.choice import ChoiceDelta, Finish, TokenLogprob
from freetoken.serving.generation import COLLECT_WAIT_S, Generation
from freetoken.serving.parsers.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from freetoken.serving.tools import ToolSpec
from freetoken.serving.toolset import Toolset
from freetoken.serving.usage import Usage


class OutputParser(Protocol):
    """Takes the text of one choice apart. Independent of how the text is cut."""

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """The events that are certain after this text."""
        ...

    def finish(self, reason: Literal["stop", "length"]) -> Sequence[OutputEvent]:
        """The rest. With ``length`` the text was cut: a call that is not complete yields nothing."""
        ...


class PlainParser:
    """For models without reasoning and tools: everything is text."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [TextDelta(text)] if text else []

    def finish(self, reason: Literal["stop", "length"]) -> list[OutputEvent]:
        return []


# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """One call. ``name`` and ``namespace`` are the client's (a namespace's member has its inner name). ``arguments`` is
    JSON text, or the raw input of a custom tool; empty until the call has ended."""

    index: int
    call_id: str
    name: str
    namespace: str | None = None
    kind: Literal["function", "custom"] = "function"
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the answer's text. ``logprobs`` are those of all tokens since the last piece that had any; ``text`` may
    be empty when only they are news."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the reasoning."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call with its name and id."""

    choice: int
    call: ReplyCall


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a call's arguments (see ``ReplyCall.arguments``)."""

    choice: int
    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete; the pieces since its start, joined, are its arguments."""

    choice: int
    call: ReplyCall


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """The last event of a choice. ``reason`` is ``tool_calls`` when it stopped by itself and has called."""

    choice: int
    reason: Literal["stop", "length", "tool_calls"]
    finish: Finish


ReplyEvent: TypeAlias = TextPiece | ReasoningPiece | CallStarted | CallPiece | CallEnded | ChoiceEnded


@dataclass(slots=True)
class ReplyText:
    """A run of text of a whole message."""

    text: str


@dataclass(slots=True)
class ReplyReasoning:
    """A run of reasoning of a whole message."""

    text: str


@dataclass(slots=True)
class ReplyMessage:
    """Everything one choice said, in order."""

    choice: int
    parts: list[ReplyText | ReplyReasoning | ReplyCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: ChoiceEnded | None = None

    @property
    def text(self) -> str:
        """All runs of text, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, ReplyText))

    @property
    def reasoning(self) -> str:
        """All runs of reasoning, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, ReplyReasoning))

    @property
    def calls(self) -> list[ReplyCall]:
        """The calls in order."""
        return [part for part in self.parts if isinstance(part, ReplyCall)]

    def add(self, event: ReplyEvent) -> None:
        """Fold in the next event of this choice."""
        last = self.parts[-1] if self.parts else None
        if isinstance(event, TextPiece):
            self.logprobs += event.logprobs
            if isinstance(last, ReplyText):
                last.text += event.text
            elif event.text:
                self.parts.append(ReplyText(event.text))
        elif isinstance(event, ReasoningPiece):
            if isinstance(last, ReplyReasoning):
                last.text += event.text
            else:
                self.parts.append(ReplyReasoning(event.text))
        elif isinstance(event, CallEnded):
            self.parts.append(event.call)
        elif isinstance(event, ChoiceEnded):
            self.ended = event


# ----------------------------------------------------------------------------------------------------------- reply


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How a reply is told.

    ``parallel_calls`` False ends a choice where its model goes on after the first call. A call is told as soon as it is
    complete, and one that ``max_tokens`` cut is never seen.
    """

    call_id_prefix: str = "call_"
    parallel_calls: bool = True


MAX_SPACE = 64
"""Characters of white space after the only call that is wanted, before the choice is ended."""


class _Choice:
    """The state of one choice."""

    def __init__(self, index: int, parser: OutputParser, toolset: Toolset, options: ReplyOptions) -> None:
        self.message = ReplyMessage(index)
        self.complete = True
        self.goes_on = False
        """It makes more than the one call that is wanted."""
        self._space_after = 0
        self._index = index
        self._parser = parser
        self._toolset = toolset
        self._options = options
        self._calls: dict[int, ReplyCall] = {}
        self._waiting: list[TokenLogprob] = []

    def _satisfied(self, events: list[ReplyEvent]) -> bool:
        """One call was made and no second one is wanted."""
        return not self._options.parallel_calls and (
            bool(self.message.calls) or any(isinstance(event, CallEnded) for event in events)
        )

    def take(self, delta: ChoiceDelta) -> list[ReplyEvent]:
        """The events of a delta."""
        events: list[ReplyEvent] = []
        self._waiting += delta.logprobs
        if delta.text:
            self._translate(self._parser.feed(delta.text), events)
        if delta.finish is not None:
            self.end(delta.finish, events)
        if self._waiting:
            self._place_logprobs(events)
        for event in events:
            self.message.add(event)
        return events

    def end(self, finish: Finish, events: list[ReplyEvent]) -> None:
        """The choice is over. A stop string cuts what it stands in as the length does."""
        cut = finish.reason == "length" or finish.stop_string is not None
        self._translate(self._parser.finish("length" if cut else "stop"), events)
        called_to_end = len(self.message.calls) + sum(isinstance(event, CallEnded) for event in events)
        self.complete = self.complete and finish.stop_string is None and called_to_end == len(self._calls)
        called = any(isinstance(event, CallEnded) for event in events) or bool(self.message.calls)
        if finish.reason == "length" and self._satisfied(events):
            self.complete, finish = False, Finish("stop")
        reason: Literal["stop", "length", "tool_calls"] = "length" if finish.reason == "length" else "stop"
        events.append(ChoiceEnded(self._index, "tool_calls" if called and reason == "stop" else reason, finish))

    def _translate(self, output: Sequence[OutputEvent], events: list[ReplyEvent]) -> None:
        for item in output:
            if self._satisfied(events):
                # The markup around the call is still to be closed, as the next turn's prompt shows it.
                blank = isinstance(item, TextDelta) and not item.text.strip()
                self._space_after += len(item.text) if isinstance(item, TextDelta) and blank else MAX_SPACE
                if self._space_after < MAX_SPACE:
                    continue
                self.goes_on, self.complete = True, False
                return
            if isinstance(item, TextDelta):
                last = events[-1] if events else None
                if isinstance(last, TextPiece):
                    events[-1] = TextPiece(self._index, last.text + item.text)
                else:
                    events.append(TextPiece(self._index, item.text))
            elif isinstance(item, ReasoningDelta):
                last = events[-1] if events else None
                if isinstance(last, ReasoningPiece):
                    events[-1] = ReasoningPiece(self._index, last.text + item.text)
                else:
                    events.append(ReasoningPiece(self._index, item.text))
            elif isinstance(item, ToolCallStarted):
                self._calls[item.index] = self._name(len(self._calls), item.name)
            elif isinstance(item, ToolCallEnded):
                self._end_call(item, events)

    def _name(self, index: int, written: str) -> ReplyCall:
        call_id = f"{self._options.call_id_prefix}{secrets.token_hex(12)}"
        tool: ToolSpec | None = self._toolset.find(written)
        if tool is None:
            return ReplyCall(index, call_id, written)
        return ReplyCall(index, call_id, tool.name, tool.namespace, tool.kind)

    def _end_call(self, item: ToolCallEnded, events: list[ReplyEvent]) -> None:
        begun = self._calls[item.index]
        events.append(CallStarted(self._index, begun))
        if item.arguments:
            events.append(CallPiece(self._index, begun.index, item.arguments))
        call = ReplyCall(begun.index, begun.call_id, begun.name, begun.namespace, begun.kind, item.arguments)
        events.append(CallEnded(self._index, call))

    def _place_logprobs(self, events: list[ReplyEvent]) -> None:
        """Log probabilities go out with the first text of the delta; alone where it has none."""
        logprobs, self._waiting = tuple(self._waiting), []
        for i, event in enumerate(events):
            if isinstance(event, TextPiece):
                events[i] = TextPiece(self._index, event.text, logprobs)
                return
        events.insert(0, TextPiece(self._index, "", logprobs))


Remember = Callable[[ReplyMessage, Sequence[int]], None]
"""Called once for each choice that was told as it was generated (no call or stop string was cut off): its message and
the ids it generated (without the one that ended it)."""


class Reply:
    """What a generation says; an async context manager around it.

    ``parsers`` has one parser for each choice. After the last event of the last choice, ``usage`` is complete once
    ``settle`` has returned.
    """

    def __init__(
        self,
        generation: Generation,
        parsers: Sequence[OutputParser],
        toolset: Toolset,
        options: ReplyOptions,
        remember: Remember | None = None,
    ) -> None:
        self._generation = generation
        self._choices = [_Choice(i, parser, toolset, options) for i, parser in enumerate(parsers)]
        self._remember = remember

    @property
    def request_id(self) -> str:
        """Unique in this server's life, and in others' with great probability."""
        return self._generation.request_id

    @property
    def num_choices(self) -> int:
        """Choices are numbered from 0."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """Every choice has ended, and its ``ChoiceEnded`` was returned."""
        return all(choice.message.ended is not None for choice in self._choices)

    async def __aenter__(self) -> Reply:
        await self._generation.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, traceback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when too much is waiting for ``next``. After entering."""
        self._generation.on_unread(callback)

    async def next(self, silence_s: float) -> list[ReplyEvent]:
        """News; empty after ``silence_s`` without any, or when what came is not to be told yet. Raises ``ApiError``
        when the engine could not go on."""
        events: list[ReplyEvent] = []
        for delta in await self._generation.next(silence_s):
            choice = self._choices[delta.index]
            if choice.message.ended is not None:
                continue
            news = choice.take(delta)
            if choice.message.ended is None and choice.goes_on:
                ended = ChoiceEnded(delta.index, "tool_calls", self._generation.end_choice(delta.index))
                choice.message.add(ended)
                news.append(ended)
            if choice.message.ended is not None and choice.complete and self._remember is not None:
                self._remember(choice.message, self._generation.token_ids(delta.index))
            events += news
        return events

    async def settle(self) -> None:
        """After ``done``: wait briefly for the engine's last figures."""
        await self._generation.settle()

    def usage(self) -> Usage:
        """What is known by now; complete after ``settle``."""
        return self._generation.usage()

    async def collect(self) -> list[ReplyMessage]:
        """Run to the end; everything each choice said."""
        while not self.done:
            await self.next(COLLECT_WAIT_S)
        await self.settle()
        return [choice.message for choice in self._choices]
