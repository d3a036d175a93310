"""How each coding agent is started on a server of ours. One file an agent; ``AGENTS`` is the list."""

from __future__ import annotations

import importlib

from freetoken.cli.agents.client import Agent

AGENTS = ("claude", "codex", "opencode", "openclaw", "dsh")


def agent_named(name: str) -> Agent:
    """The agent called ``name``, one of ``AGENTS``."""
    agent: Agent = importlib.import_module(f"freetoken.cli.agents.{name}").AGENT
    return agent
