"""OpenCode as a user runs it: private home, a working folder, one server, any of the three dialects."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from .install import npm_package
from .process import run_program

VERSION = "1.18.33"
DIALECTS = {"responses": "@ai-sdk/openai", "chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic"}
OFFLINE = (
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
)


def opencode_binary() -> Path:
    """The program. Skips the test when it cannot be installed."""
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    if platform.system() != "Linux" or machine is None:
        pytest.skip(f"OpenCode is not known to run on {platform.system()} {platform.machine()}")
    binary = npm_package("opencode-ai", VERSION) / f"opencode-linux-{machine}" / "bin" / "opencode"
    if not binary.is_file():
        pytest.skip(f"the package of OpenCode {VERSION} has no program for linux-{machine}")
    return binary


@dataclass(frozen=True)
class OpenCodeRun:
    """One run's end. ``events`` are what it printed with ``--format json``."""

    status: int
    events: list[dict[str, Any]]
    stderr: str

    @property
    def messages(self) -> list[str]:
        """What the model said."""
        return [str(event["part"]["text"]) for event in self.events if event["type"] == "text"]

    @property
    def tools(self) -> list[tuple[str, str]]:
        """(tool, how its call ended) of each call."""
        parts = [event["part"] for event in self.events if event["type"] == "tool_use"]
        return [(part["tool"], part["state"]["status"]) for part in parts]

    @property
    def tokens(self) -> dict[str, Any]:
        """Of the last step, as OpenCode counts them."""
        return next(dict(e["part"]["tokens"]) for e in reversed(self.events) if e["type"] == "step_finish")


@dataclass
class OpenCode:
    """A user of OpenCode. ``root`` is an empty folder; ``work`` in it is where the agent works."""

    binary: Path
    root: Path
    url: str
    model: str
    dialect: Literal["responses", "chat", "messages"] = "responses"
    key: str = "sk-local"
    context_tokens: int = 200_000
    output_tokens: int = 4096
    work: Path = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.root / "work"
        self.work.mkdir(parents=True)
        limit = {"context": self.context_tokens, "output": self.output_tokens}
        provider = {
            "npm": DIALECTS[self.dialect],
            "options": {"baseURL": f"{self.url}/v1", "apiKey": self.key},
            "models": {self.model: {"name": self.model, "reasoning": True, "limit": limit}},
        }
        config = {"provider": {"local": provider}, "model": f"local/{self.model}"}
        (self.work / "opencode.json").write_text(json.dumps(config))

    async def run(self, prompt: str, resume: bool = False) -> OpenCodeRun:
        """``opencode run PROMPT``, or with ``resume`` the next turn of the last session. With a title of its own, so
        that none is asked of the model."""
        start = ["-c"] if resume else ["--title", "test"]
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(self.root)}
        environment |= dict.fromkeys(OFFLINE, "1")
        arguments = ["run", *start, "--format", "json", prompt]
        return OpenCodeRun(*await run_program(self.binary, arguments, self.work, environment))
