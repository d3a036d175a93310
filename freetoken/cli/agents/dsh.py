"""DeepSeek Harness, on the Messages dialect, its default."""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.cli.agents.client import KEY_VARIABLE, Agent, ServedModel, Setup

_PROFILE = "web"


def _prepare(model: ServedModel, home: Path) -> Setup:
    path = home / "freetoken.patch.yml"
    entry = {
        "id": model.name,
        "name": model.name,
        "contextWindow": model.context_tokens,
        "maxTokens": model.reply_tokens,
        "input": ["text"],
    }
    provider = {
        "displayName": "FreeToken",
        "api": "anthropic-messages",
        "baseURL": model.url,
        "apiKeyEnv": KEY_VARIABLE,
        "models": [entry],
    }
    patch = [
        {"id": "llm-pi-ai", "config": {"providers": {"freetoken": provider}}},
        {"id": "agent-default-model", "config": {"provider": "freetoken", "model": model.name}},
        {"id": "session-log-deepseek", "config": {"enabled": False}},
    ]

    def arrange(arguments: list[str]) -> list[str]:
        # The overlay is an option of the launcher, which reads it behind the profile's name only.
        named = bool(arguments) and not arguments[0].startswith("-")
        profile, rest = (arguments[0], arguments[1:]) if named else (_PROFILE, arguments)
        return [profile, "--patch", str(path), *rest]

    environment = {"DSH_HOME": str(home), "DSH_TELEMETRY_DISABLED": "1", KEY_VARIABLE: model.sent_key}
    # JSON is YAML.
    return Setup(environment, {path: json.dumps(patch, indent=2) + "\n"}, arrange=arrange)


AGENT = Agent(
    title="DeepSeek Harness",
    program="dsh",
    install="pip install --pre deepseek-harness-runtime-bin",
    prepare=_prepare,
)
