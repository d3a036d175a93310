"""What the handlers of one front share."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from freetoken.launch_spec import LaunchSpec
from freetoken.serving.constraints import Constraints
from freetoken.serving.conversation import Session
from freetoken.serving.dialogue import Dialogue
from freetoken.serving.errors import bad_value, model_not_found, unavailable
from freetoken.serving.generation import Generator
from freetoken.serving.metrics import FrontMetrics
from freetoken.serving.responses.store import ResponseStore
from freetoken.serving.sampling import Limits
from freetoken.serving.status import EngineView
from freetoken.serving.streams import Gate
from freetoken.serving.tokenizer import TextModel

T = TypeVar("T")

INLINE_TEXT_CHARACTERS = 4096
"""Longer texts are tokenised in a thread, so that they do not hold up the streams of others."""

SESSION_HEADERS = (
    "x-session-id",
    "x-session-affinity",
    "session-id",
    "thread-id",
    "x-claude-code-session-id",
    "x-deepseek-harness-session-id",
)
AGENT_HEADERS = ("x-claude-code-agent-id", "x-openai-subagent")
"""A sub-agent's conversation is another one than that of its session."""


@dataclass(slots=True)
class FrontContext:
    """``text`` and ``dialogue`` are None until the tokenizer is loaded, which is before ``gate`` opens."""

    spec: LaunchSpec
    limits: Limits
    gate: Gate
    generator: Generator
    metrics: FrontMetrics
    engine: EngineView
    pool: Executor
    constraints: Constraints
    responses: ResponseStore
    text: TextModel | None = None
    dialogue: Dialogue | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: what besides the request decides the output."""
        return f"ft-{self.spec.fingerprint[:16]}"

    def ready_text(self) -> TextModel:
        """The tokenizer and template. Raises 503 while the engine does not take requests."""
        self.gate.check()
        if self.text is None:
            raise unavailable("the tokenizer is loading", "engine_loading")
        return self.text

    def ready_dialogue(self) -> Dialogue:
        """How conversations become prompts. Raises 503 while the engine does not take requests."""
        self.ready_text()
        if self.dialogue is None:
            raise unavailable("the tokenizer is loading", "engine_loading")
        return self.dialogue

    def check_model(self, name: str) -> None:
        """Raises 404 for a model that is not served here."""
        aliases = self.spec.config.server.model_aliases
        if name != self.spec.served_model_name and name not in aliases and "*" not in aliases:
            raise model_not_found(name, self.spec.served_model_name)

    async def run(self, size_characters: int, function: Callable[[], T]) -> T:
        """``function()`` here when the text is short, else in the pool."""
        if size_characters <= INLINE_TEXT_CHARACTERS:
            return function()
        inside = contextvars.copy_context()  # so that its log lines name the request
        return await asyncio.get_running_loop().run_in_executor(self.pool, inside.run, function)

    def checked_prompt(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """A prompt's ids, never empty. Raises 400 for ids outside the model's vocabulary."""
        text = self.ready_text()
        if not ids:
            start = text.tokenizer.bos_token_id
            start = text.tokenizer.eos_token_id if start is None else start
            if start is None:
                raise bad_value(f"{param} has no tokens, and the model no token to begin with", param)
            return (start,)
        vocab_size = self.limits.vocab_size
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise bad_value(f"{param} contains token id {wrong}; ids must be from 0 to {vocab_size - 1}", param)
        return tuple(ids)


CONTEXT: web.AppKey[FrontContext] = web.AppKey("context", FrontContext)


def session_of(request: web.Request, explicit: str | None) -> Session:
    """What the client says of the request's conversation. ``explicit`` is its name in the body, if it has one there."""
    is_side = any(request.headers.get(name) for name in AGENT_HEADERS)
    return Session(is_named=bool(explicit) or any(map(request.headers.get, SESSION_HEADERS)), is_side=is_side)
