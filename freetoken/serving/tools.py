"""What a request says about tools, in one form for all API dialects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """The language that the input of a custom tool must belong to."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool that the model may call.

    ``schema`` is the JSON schema of a function's arguments, in the client's own key order; ``{}`` accepts anything. A
    custom tool takes one text, which ``grammar`` may restrict; its schema is empty. A member of a namespace keeps its
    inner name in ``name``. A deferred tool is not part of the prompt until the conversation refers to it, and can be
    called all the same.
    """

    name: str
    kind: Literal["function", "custom"] = "function"
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    namespace: str | None = None
    grammar: ToolGrammar | None = None
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call tools.

    ``none``: no calls. ``auto``: the model decides. ``required``: at least one call. ``named``: a call of one of
    ``names`` (for ``auto`` and ``required``, non-empty ``names`` restrict which tools may be called).
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: tuple[str, ...] = ()
