"""What is common to all agents: the model they are given, and what is prepared for a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEY_VARIABLE = "FREETOKEN_API_KEY"
NO_KEY = "none"
_MOST_REPLY_TOKENS = 32_000

RETRIES = 10
IDLE_MS = 3_600_000
"""How long an agent should wait for a server that is busy with a long prompt. The server sends events meanwhile; this
is for agents that do not count them."""


@dataclass(frozen=True)
class ServedModel:
    """``url`` is the server's, without ``/v1`` and without a slash at the end. ``key`` is empty without one."""

    url: str
    name: str
    context_tokens: int
    output_tokens: int
    key: str = ""

    @property
    def sent_key(self) -> str:
        """What to send: agents insist on some key."""
        return self.key or NO_KEY

    @property
    def reply_tokens(self) -> int:
        """What an agent should reserve for an answer. The server's own limit is the whole context, and agents subtract
        this from the context to know when to summarise a conversation."""
        return max(1, min(self.output_tokens, self.context_tokens // 4, _MOST_REPLY_TOKENS))


@dataclass(frozen=True)
class Setup:
    """``files`` are written before every run, ``first_files`` only where there is none. Variables in ``unset`` would
    lead the agent elsewhere. ``arrange`` puts together the agent's arguments from those of the user."""

    environment: Mapping[str, str]
    files: Mapping[Path, str] = field(default_factory=dict)
    first_files: Mapping[Path, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    arrange: Callable[[list[str]], list[str]] = list

    def write(self) -> None:
        """Make the files, each at once; directories are for this user only. Raises ``OSError``."""
        missing = {path: text for path, text in self.first_files.items() if not path.exists()}
        for path, text in {**missing, **self.files}.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)

    def apply(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` as the agent should have it."""
        kept = {name: value for name, value in environment.items() if name not in self.unset}
        return {**kept, **self.environment}


@dataclass(frozen=True)
class Agent:
    """``install`` is how to get ``program``. ``prepare`` is given the model and the agent's private directory; it may
    read there what an earlier run left, and writes nothing."""

    title: str
    program: str
    install: str
    prepare: Callable[[ServedModel, Path], Setup]
