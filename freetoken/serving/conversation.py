"""A conversation as every API dialect means it: what the adapters produce and ``canonical`` renders.

Everything here is immutable. Adapters translate, they do not tidy up: volatile lines, deferred tools, order and merging
are the business of ``freetoken.serving.canonical``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from freetoken.serving.tools import ToolChoice, ToolSpec

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text that the model reads or wrote."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thought before it answered. ``opaque`` is whatever the client sent along to prove or restore it
    (a signature, encrypted content, an item's id); empty when it sent nothing."""

    text: str
    opaque: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """An earlier call. ``arguments`` is the parsed object, its keys in the client's order; raw text for ``custom``
    tools, and for a function whose arguments were no JSON object."""

    call_id: str
    name: str
    arguments: Mapping[str, Any] | str
    namespace: str | None = None
    kind: Literal["function", "custom"] = "function"


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture, which no model here can see: a placeholder stands in its place. ``media_type`` may be empty."""

    media_type: str = ""


@dataclass(frozen=True, slots=True)
class ToolReferencePart:
    """Here a deferred tool becomes known to the model."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """What a call returned. ``is_error`` is None where the dialect does not say."""

    call_id: str
    content: tuple[TextPart | ImagePart | ToolReferencePart, ...] = ()
    is_error: bool | None = None

    @classmethod
    def of_text(cls, call_id: str, text: str, is_error: bool | None = None) -> ToolResultPart:
        """A result that is one string."""
        return cls(call_id, (TextPart(text),) if text else (), is_error)


Part: TypeAlias = TextPart | ReasoningPart | ToolCallPart | ToolResultPart | ImagePart | ToolReferencePart


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. ``tool`` turns hold only ``ToolResultPart``; only ``assistant`` turns hold reasoning and calls.
    ``extra`` are fields of the message that the template may know and this module does not (``name``, ...)."""

    role: Role
    parts: tuple[Part, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReasoningRequest:
    """How much the client wants the model to think.

    ``mode``: ``default`` leaves it to server and template, ``auto`` lets the model decide. ``effort`` is the client's
    own word (``low``, ``high``, ``xhigh``, ...), ``budget_tokens`` its limit for the thinking.
    """

    mode: Literal["default", "off", "auto", "on"] = "default"
    effort: str | None = None
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the answer must look like. ``schema`` is for ``json_schema``, ``source`` for ``regex`` and ``grammar``."""

    kind: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    schema: Mapping[str, Any] | bool | None = None
    source: str = ""
    name: str = ""
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """What a client says of the conversation that a request belongs to. ``is_named``: it has a name for it; which one
    does not matter, since what a conversation has cached is found by its tokens. ``is_side``: it is a sub-agent's, for
    which another conversation waits."""

    is_named: bool = False
    is_side: bool = False

    def comes_back(self, has_tools: bool) -> bool | None:
        """Whether a request of it is to be expected that goes on with this one; None: there is no telling. Agents ask
        without tools for titles and the like, once."""
        if self.is_side:
            return False
        return True if self.is_named and has_tools else None


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request. ``continue_final`` asks for the continuation of the last (assistant) turn instead of a new one.

    ``template_variables`` are further names for the chat template.
    """

    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = field(default_factory=lambda: ToolChoice("auto"))
    parallel_tool_calls: bool = True
    reasoning: ReasoningRequest = field(default_factory=ReasoningRequest)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    session: Session = Session()
    add_generation_prompt: bool = True
    continue_final: bool = False


def join_assistant_turns(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Neighbouring assistant turns as one, for dialects that send reasoning, text and calls of one answer as separate
    items. A new turn begins where reasoning follows a call or text: that is the next answer."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last is None or last.role != "assistant" or turn.role != "assistant" or _is_next_answer(last, turn):
            joined.append(turn)
        else:
            joined[-1] = replace(last, parts=(*last.parts, *turn.parts), extra={**last.extra, **turn.extra})
    return tuple(joined)


def _is_next_answer(last: Turn, turn: Turn) -> bool:
    starts_thinking = bool(turn.parts) and isinstance(turn.parts[0], ReasoningPart)
    return starts_thinking and any(not isinstance(part, ReasoningPart) for part in last.parts)
