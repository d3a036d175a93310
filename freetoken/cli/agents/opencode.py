"""OpenCode, on the chat dialect, where its history is what the model said, reasoning included."""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.cli.agents.client import IDLE_MS, KEY_VARIABLE, Agent, ServedModel, Setup

_OFFLINE = (
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
)


def _prepare(model: ServedModel, home: Path) -> Setup:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "FreeToken",
        "options": {
            "baseURL": f"{model.url}/v1",
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
            "timeout": False,
            "headerTimeout": False,
            "chunkTimeout": IDLE_MS,
        },
        "models": {
            model.name: {
                "name": model.name,
                "reasoning": True,
                "tool_call": True,
                "limit": {"context": model.context_tokens, "output": model.reply_tokens},
            }
        },
    }
    reference = f"freetoken/{model.name}"
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"freetoken": provider},
        "enabled_providers": ["freetoken"],
        "model": reference,
        "small_model": reference,
        "autoupdate": False,
        "share": "disabled",
    }
    path = home / "opencode.json"
    environment = {
        "OPENCODE_CONFIG": str(path),
        "OPENCODE_DB": str(home / "opencode.db"),
        KEY_VARIABLE: model.sent_key,
        **dict.fromkeys(_OFFLINE, "1"),
    }
    files = {path: json.dumps(config, indent=2) + "\n"}
    return Setup(environment, files, unset=("OPENCODE_CONFIG_CONTENT", "OPENCODE_CONFIG_DIR"))


AGENT = Agent(title="OpenCode", program="opencode", install="npm install -g opencode-ai", prepare=_prepare)
