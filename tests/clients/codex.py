"""Codex CLI as a user runs it: private home, a working folder, one server."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .install import npm_package
from .process import run_program

VERSION = "0.171.0"

CONFIG = """\
model = "{model}"
model_provider = "local"
check_for_update_on_startup = false

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
request_max_retries = 1
stream_max_retries = {stream_retries}
stream_idle_timeout_ms = {idle_ms}
"""


def codex_binary() -> Path:
    """The program. Skips the test when it cannot be installed."""
    names = {("Linux", "x86_64"): "x86_64-unknown-linux-musl", ("Linux", "aarch64"): "aarch64-unknown-linux-musl"}
    triple = names.get((platform.system(), platform.machine()))
    if triple is None:
        pytest.skip(f"Codex is not known to run on {platform.system()} {platform.machine()}")
    modules = npm_package("@openai/codex", VERSION)
    found = sorted(path for path in modules.rglob(f"{triple}/bin/codex") if path.is_file())
    if not found:
        pytest.skip(f"the package of Codex {VERSION} has no program for {triple}")
    return found[0]


@dataclass(frozen=True)
class CodexRun:
    """One run's end. ``events`` are what it printed with ``--json``."""

    status: int
    events: list[dict[str, Any]]
    stderr: str

    def items(self, kind: str) -> list[dict[str, Any]]:
        """Completed items of a kind (``agent_message``, ``command_execution``, ``reasoning``, ...)."""
        items = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item for item in items if item["type"] == kind]

    @property
    def messages(self) -> list[str]:
        """What the model said."""
        return [str(item["text"]) for item in self.items("agent_message")]

    @property
    def usage(self) -> dict[str, int]:
        """Of the last turn."""
        return next(dict(event["usage"]) for event in reversed(self.events) if event["type"] == "turn.completed")

    @property
    def errors(self) -> list[str]:
        """What went wrong, as Codex tells it (items of type ``error`` are its warnings)."""
        return [json.dumps(event) for event in self.events if event["type"] in ("error", "turn.failed")]


@dataclass
class Codex:
    """A user of Codex. ``root`` is an empty folder; ``work`` in it is where the agent works."""

    binary: Path
    root: Path
    url: str
    model: str
    key: str = "sk-local"
    stream_retries: int = 0
    idle_timeout_s: float = 60.0
    work: Path = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.root / "work"
        self.work.mkdir(parents=True)
        self.home = self.root / "codex"
        self.home.mkdir()
        config = CONFIG.format(
            model=self.model,
            url=self.url,
            stream_retries=self.stream_retries,
            idle_ms=int(self.idle_timeout_s * 1000),
        )
        (self.home / "config.toml").write_text(config)

    async def run(self, prompt: str, resume: bool = False) -> CodexRun:
        """``codex exec PROMPT``, or with ``resume`` the next turn of the last session."""
        arguments = ["exec", *(["resume", "--last"] if resume else [])]
        arguments += ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self.root),
            "CODEX_HOME": str(self.home),
            "LOCAL_KEY": self.key,
        }
        return CodexRun(*await run_program(self.binary, arguments, self.work, environment))
