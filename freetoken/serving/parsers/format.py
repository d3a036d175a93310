"""What a model family declares of its output: how it marks reasoning and calls. Data only.

``tags`` (marked parts in one text) and ``channels`` (a sequence of addressed messages) have the programs that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from freetoken.serving.tools import ToolSpec

if TYPE_CHECKING:
    from freetoken.serving.parsers.parser import OutputParser


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls whose arguments are JSON.

    ``begin`` opens a call, or a section of calls when there is ``call_begin``; ``end`` closes it (none: the JSON's own
    end does). Between the opening and the JSON's first brace stands what the regular expression ``header`` matches
    as a whole; its group ``name`` is the tool. Without that group the JSON is an object with ``name`` and one of
    ``argument_keys``, or after a header that has matched the group ``list``, a list of such objects. ``fence`` may
    follow the JSON. With ``bare``, a call may also stand unmarked at the very beginning of the answer, if it names a
    declared tool. ``separator`` may stand between unmarked calls.
    """

    begin: str
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    header: str = r"\s*"
    fence: str = ""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    bare: bool = False
    separator: str = ""


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls whose arguments are tagged one by one, their values plain text.

    ``begin`` opens a section of calls that ``end`` closes; where it equals ``call_open`` there are no sections. The
    header of a call goes from ``call_open`` to the first match of ``call_header_end``; the pattern ``call_header``
    must match it as a whole, with the group ``name`` (and ``empty``, where the call is complete at once). Parameters
    likewise; their header may have a group ``string``, whose text ``true`` or ``false`` tells whether the value is a
    string or JSON.

    A value ends at ``parameter_close``, but only before one of ``close_followers`` if there are any. Models forget to
    close: a value also ends at ``implied_open`` if that is followed by the name of a declared parameter that is still
    missing (``implied_name_end`` comes after the name), and at one of ``implied_closes`` (literal, followers).
    With ``newlines``, one line break on either side of a value belongs to the markup.
    """

    begin: str
    end: str
    call_open: str
    call_header_end: str
    call_header: str
    call_close: str
    parameter_open: str
    parameter_header_end: str
    parameter_header: str
    parameter_close: str
    close_followers: tuple[str, ...] = ()
    implied_open: str = ""
    implied_name_end: str = ""
    implied_closes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    newlines: bool = False


@dataclass(frozen=True, slots=True)
class ElementCalls:
    """Calls whose arguments are nested elements, named by parameter; ``prefix`` stands before every tag. Items of a
    list are elements called ``item``."""

    begin: str
    end: str
    call_open: str
    call_header_end: str
    call_header: str
    call_close: str
    prefix: str


@dataclass(frozen=True, slots=True)
class ObjectCalls:
    """Calls like ``name{key:value,...}`` with bare keys, whose strings stand between two ``quote``."""

    begin: str
    end: str
    name_prefix: str
    quote: str


CallForm: TypeAlias = JsonCalls | TaggedCalls | ElementCalls | ObjectCalls


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The canonical spelling of calls: what a grammar that forces calls must allow, and what ``render_calls`` writes.

    The text of one or more calls is ``section_begin``, the calls with ``separator`` between them, ``section_end``. One
    call is ``begin``, the name, ``after_name``, the body, ``end``; where there is an ``address``, that and the name
    stand before ``begin``. ``parallel`` tells whether there may be several calls.
    ``body`` is one of

    - ``json``: the arguments as a JSON object;
    - ``tagged``: for each argument, ``parameter_begin``, its name, ``after_string`` or ``after_json``, the value,
      ``parameter_end``. A string's value is its plain text (which cannot contain ``parameter_end``), any other's is
      JSON;
    - ``elements``: for each argument ``<prefix><name>``, the value, ``<prefix></name>``; objects nest, items of lists
      are called ``item``, strings are plain text, null is left out;
    - ``object``: ``{key:value,...}``, keys bare, strings between two ``quote``, everything else JSON.

    ``ends_turn`` is a token that the model writes after the last call, in formats where that is not the usual end.
    """

    body: Literal["json", "tagged", "elements", "object"]
    begin: str
    after_name: str
    end: str
    section_begin: str = ""
    section_end: str = ""
    separator: str = ""
    parallel: bool = True
    parameter_begin: str = ""
    after_string: str = ""
    after_json: str = ""
    parameter_end: str = ""
    address: str = ""
    prefix: str = ""
    quote: str = ""
    ends_turn: str = ""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning stands between two markers, before the answer. White space inside next to the markers and after them is
    layout."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Channels:
    """A turn of several messages: ``start``, header, ``message``, body, and one of ``ends``.

    A header is a role, ``to=RECIPIENT`` and, in some formats, ``channel`` with a channel's name; a recipient may stand
    in the role's or the channel's part. A message to somebody who is in ``reasoning_to`` or on a channel in
    ``reasoning_on`` is reasoning; one to a tool (``tool_prefix`` before its name, if any) is a call; one to anybody in
    ``text_to``, or to nobody, is the answer; any other is for somebody who is not here, and dropped. ``call_ends`` also
    end a call's message. ``body`` tells how arguments are written: None for JSON.
    """

    start: str
    message: str
    ends: tuple[str, ...]
    call_ends: tuple[str, ...] = ()
    channel: str = ""
    constrain: str = ""
    reasoning_on: tuple[str, ...] = ()
    reasoning_to: tuple[str, ...] = ()
    text_to: tuple[str, ...] = ()
    tool_prefix: str = ""
    body: TaggedCalls | None = None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one kind of model writes.

    ``families`` are names of model families that use it (``ModelSpec.family``); ``detect`` are sets of strings: a chat
    template that has all of one set belongs to this format. ``special_tokens`` are tokens that the tokenizer may call
    special and that must all the same stay in the text that the parser gets; ``stop_tokens`` end the model's turn (they
    are not part of the text). ``turn_begin`` is what a prompt has before the model's turn, or before it goes on after a
    tool's result. The first of ``calls`` is the usual form, the others are variants that models are known to write.
    """

    name: str
    families: tuple[str, ...] = ()
    detect: tuple[tuple[str, ...], ...] = ()
    turn_begin: tuple[str, ...] = ()
    reasoning: tuple[Reasoning, ...] = ()
    calls: tuple[CallForm, ...] = ()
    channels: Channels | None = None
    call_syntax: CallSyntax | None = None
    special_tokens: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    notes: str = field(default="", compare=False)

    def open(self, tools: Sequence[ToolSpec], prompt_tail: str) -> OutputParser:
        """A parser for one choice. ``prompt_tail`` is the end of the rendered prompt, from the beginning of the
        model's turn at least (more does no harm); the turn may already have been begun there. Without ``tools``
        nothing is a call."""
        from freetoken.serving.parsers.parser import open_parser

        return open_parser(self, tools, prompt_tail)

    def begun_turn(self, prompt_tail: str) -> str:
        """What the prompt has of the model's turn already: most often nothing, or an opened or closed reasoning."""
        position = max(
            (prompt_tail.rfind(words) + len(words) for words in self.turn_begin if words in prompt_tail), default=-1
        )
        begun = prompt_tail[position:]
        if position >= 0 and not any(token in begun for token in self.stop_tokens):
            return begun
        # A template with another way to begin a turn: only what it ends with is certain.
        end = prompt_tail.rstrip()
        for reasoning in self.reasoning:
            if end.endswith(reasoning.begin):
                return reasoning.begin
            if end.endswith(reasoning.end):
                return reasoning.begin + reasoning.end
        return ""
