"""Where the programs of the agents are, installed if need be. Every function skips the test when there is none."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import pytest

from .codex import codex_binary
from .install import npm_package, pypi_wheel
from .opencode import opencode_binary

CLAUDE_VERSION = "2.1.332"
DSH_VERSION = "0.2.1rc2"
OPENCLAW_VERSION, OPENCLAW_NODE_VERSION = "2026.9.6", "26.12.1"


@dataclass(frozen=True)
class Program:
    """``path`` is what it needs in front of ``PATH``."""

    program: Path
    version: str
    path: str = ""


def program_of(name: str) -> Program:
    """The program of one of ``freetoken agent``'s agents."""
    if name in ("opencode", "openclaw") and os.environ.get("FREETOKEN_INSTALL_CLIENTS") != "all":
        pytest.skip(f"{name} takes long: it runs only with FREETOKEN_INSTALL_CLIENTS=all")
    return {"claude": _claude, "codex": _codex, "dsh": _dsh, "opencode": _opencode, "openclaw": _openclaw}[name]()


def _machine(agent: str) -> str:
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    if platform.system() != "Linux" or machine is None:
        pytest.skip(f"{agent} is not known to run on {platform.system()} {platform.machine()}")
    return machine


def _claude() -> Program:
    name = f"claude-code-linux-{_machine('Claude Code')}"
    # The program is a package of its own, which needs no Node; the main package would choose an older one with Node 20.
    program = npm_package(f"@anthropic-ai/{name}", CLAUDE_VERSION) / "@anthropic-ai" / name / "claude"
    if not program.is_file():
        pytest.skip(f"the package {name} {CLAUDE_VERSION} has no program")
    return Program(program, CLAUDE_VERSION)


def _codex() -> Program:
    from .codex import VERSION

    return Program(codex_binary(), VERSION)


def _opencode() -> Program:
    from .opencode import VERSION

    return Program(opencode_binary(), VERSION)


def _dsh() -> Program:
    machine = _machine("DeepSeek Harness")
    runtime = pypi_wheel("deepseek-harness-runtime-bin", DSH_VERSION) / "deepseek_harness_runtime" / "runtime"
    program = runtime / f"deepseek-harness-sdk-runtime-linux-{machine}"
    if not program.is_file():
        pytest.skip(f"the wheel of DeepSeek Harness {DSH_VERSION} has no program for linux-{machine}")
    for file in runtime.glob(f"{program.name}*"):
        file.chmod(0o755)
    return Program(program, DSH_VERSION)


def _openclaw() -> Program:
    package = f"node-linux-{_machine('OpenClaw')}"
    node = npm_package(package, OPENCLAW_NODE_VERSION) / package / "bin"
    program = npm_package("openclaw", OPENCLAW_VERSION) / ".bin" / "openclaw"
    if not program.exists() or not (node / "node").is_file():
        pytest.skip(f"OpenClaw {OPENCLAW_VERSION} or its Node is incomplete")
    return Program(program, OPENCLAW_VERSION, str(node))
