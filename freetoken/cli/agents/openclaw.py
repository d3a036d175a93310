"""OpenClaw, on the Responses dialect: on the others a message floats at the end of its history, so no turn extends the
one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freetoken.cli.agents.client import IDLE_MS, KEY_VARIABLE, Agent, ServedModel, Setup
from freetoken.config.loader import merge


def _prepare(model: ServedModel, home: Path) -> Setup:
    path = home / "openclaw.json"
    entry = {
        "id": model.name,
        "name": model.name,
        "reasoning": True,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": model.context_tokens,
        "maxTokens": model.reply_tokens,
    }
    provider = {
        "baseUrl": f"{model.url}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "api": "openai-responses",
        "timeoutSeconds": IDLE_MS // 1000,
        "models": [entry],
    }
    defaults = {
        "model": {"primary": f"freetoken/{model.name}"},
        "workspace": str(home / "workspace"),
        "timeoutSeconds": IDLE_MS // 1000,
    }
    config = {"models": {"providers": {"freetoken": provider}}, "agents": {"defaults": defaults}}
    environment = {
        "OPENCLAW_STATE_DIR": str(home),
        "OPENCLAW_CONFIG_PATH": str(path),
        "OPENCLAW_NO_AUTO_UPDATE": "1",
        KEY_VARIABLE: model.sent_key,
    }
    text = json.dumps(merge(_kept(path), config), indent=2) + "\n"
    return Setup(environment, {path: text}, unset=("OPENCLAW_PROFILE", "OPENCLAW_HOME"))


def _kept(path: Path) -> dict[str, Any]:
    """What OpenClaw wrote into its file itself."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


AGENT = Agent(
    title="OpenClaw",
    program="openclaw",
    install="npm install -g openclaw (Node 24.16 or newer)",
    prepare=_prepare,
)
