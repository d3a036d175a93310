"""Codex CLI, on the Responses dialect (the only one it speaks)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from freetoken.cli.agents.client import IDLE_MS, KEY_VARIABLE, RETRIES, Agent, ServedModel, Setup

_CONFIG = """\
# Written by `freetoken agent codex` before every run; tables that are not here stay as they are.
model = {model}
model_provider = "freetoken"
model_context_window = {context}
model_auto_compact_token_limit = {compact}
check_for_update_on_startup = false

[model_providers.freetoken]
name = "FreeToken"
base_url = {url}
wire_api = "responses"
env_key = "{key}"
request_max_retries = {retries}
stream_max_retries = {retries}
stream_idle_timeout_ms = {idle_ms}

[analytics]
enabled = false
"""
_HEADER = re.compile(r"^\s*\[+\s*(.+?)\s*\]+\s*(?:#.*)?$")


def _prepare(model: ServedModel, home: Path) -> Setup:
    path = home / "config.toml"
    text = _CONFIG.format(
        model=json.dumps(model.name),
        context=model.context_tokens,
        # It knows no overflow, only the usage of the last answer: leave room for what one turn may add.
        compact=max(1, model.context_tokens - model.reply_tokens),
        url=json.dumps(f"{model.url}/v1"),
        key=KEY_VARIABLE,
        retries=RETRIES,
        idle_ms=IDLE_MS,
    )
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    return Setup({"CODEX_HOME": str(home), KEY_VARIABLE: model.sent_key}, files={path: text + _foreign_tables(before)})


def _foreign_tables(text: str) -> str:
    """Tables that Codex wrote into its file, such as which folders are trusted."""
    kept: list[str] = []
    keeping = False
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header.group(1)
            keeping = name != "analytics" and not name.startswith("model_providers.freetoken")
        if keeping:
            kept.append(line)
    return "\n".join(["", *kept, ""]) if kept else ""


AGENT = Agent(title="Codex", program="codex", install="npm install -g @openai/codex", prepare=_prepare)
