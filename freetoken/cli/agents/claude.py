"""Claude Code, on the Messages dialect."""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.cli.agents.client import IDLE_MS, Agent, ServedModel, Setup

_MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
_QUIET = (
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_AUTOUPDATER",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
)
# Each would lead to another provider or be sent instead of the key.
_UNSET = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_CUSTOM_HEADERS",
    "ANTHROPIC_BETAS",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
)


def _prepare(model: ServedModel, home: Path) -> Setup:
    environment = {
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": model.url,
        # A bearer token: of an ANTHROPIC_API_KEY it asks whether to use it.
        "ANTHROPIC_AUTH_TOKEN": model.sent_key,
        **dict.fromkeys(_MODEL_VARIABLES, model.name),
        # Of a model it does not know it assumes a million tokens, and would never summarise.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(model.context_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(model.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(model.reply_tokens),
        # A line of its system prompt that differs from session to session; nothing behind it could be reused.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "API_TIMEOUT_MS": str(IDLE_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(IDLE_MS),
        **dict.fromkeys(_QUIET, "1"),
    }
    first = json.dumps({"hasCompletedOnboarding": True}, indent=2)
    return Setup(environment, first_files={home / ".claude.json": first}, unset=_UNSET)


AGENT = Agent(
    title="Claude Code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code (Node 22 or newer), or https://code.claude.com/docs/en/setup",
    prepare=_prepare,
)
