"""What a turn of a long agent session costs before its first token: template and tokenisation, turn by turn.

``python bench/micro/prompts.py [--characters 120000] [--turns 10] [--out FILE]``

A system prompt of the given size and ten tools; each turn adds a call and a result of 1,200 characters. ``recognised``:
answers are known by what was generated, so a turn extends the ids of the last one, and only new text is encoded.
``cold``: a renderer that has seen nothing (a restarted server). The tokenizer is a small byte-level one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from freetoken.serving.conversation import Conversation, TextPart, ToolCallPart, ToolResultPart, Turn
from freetoken.serving.output_memory import OutputMemory
from freetoken.serving.prompt import PromptRenderer
from freetoken.serving.reply import ReplyCall, ReplyMessage
from freetoken.serving.tokenizer import TextModel, load_text_model
from freetoken.serving.tools import ToolSpec
from freetoken.testing.chat_templates import THINKING
from freetoken.testing.front_fakes import write_text_checkpoint

WORDS = "the quick brown fox jumps over the lazy dog "
SCHEMA = {"type": "object", "properties": {"command": {"type": "string", "description": WORDS * 4}}}


def renderer(text: TextModel) -> PromptRenderer:
    """One that has seen nothing."""
    return PromptRenderer(text, OutputMemory(1_000_000), (2,))


def session(text: TextModel, characters: int, num_turns: int) -> list[dict[str, Any]]:
    """One row a turn."""
    tools = tuple(ToolSpec(f"tool{i}", description=WORDS * 10, schema=SCHEMA) for i in range(10))
    turns = [Turn("system", (TextPart((WORDS * characters)[:characters]),)), Turn("user", (TextPart("Begin."),))]
    warm, rows = renderer(text), []
    raw = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "tool0", "arguments": {"command": "ls %d"}}\n</tool_call>'
    for turn in range(num_turns):
        conversation = Conversation(tuple(turns), tools)
        began = time.perf_counter()
        prompt = warm.render(conversation)
        recognised_s = time.perf_counter() - began
        cold = renderer(text)
        began = time.perf_counter()
        cold.render(conversation)
        cold_s = time.perf_counter() - began
        rows.append(
            {
                "turn": turn + 1,
                "characters": prompt.num_characters,
                "tokens": len(prompt.token_ids),
                "recognised_ms": round(recognised_s * 1e3, 2),
                "cold_ms": round(cold_s * 1e3, 2),
            }
        )
        arguments = {"command": f"ls {turn}"}
        message = ReplyMessage(0, [ReplyCall(0, f"call_{turn}", "tool0", arguments=json.dumps(arguments))])
        warm.remember(prompt, message, text.tokenizer.encode(raw % turn, add_special_tokens=False))
        turns.append(Turn("assistant", (ToolCallPart(f"call_{turn}", "tool0", arguments),)))
        turns.append(Turn("tool", (ToolResultPart.of_text(f"call_{turn}", (WORDS * 30)[:1200]),)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--characters", type=int, default=120_000, help="of the system prompt")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        text = load_text_model(write_text_checkpoint(Path(directory), THINKING))
        rows = session(text, arguments.characters, arguments.turns)
    write_result(arguments.out, "prompts", {"turns": rows})


if __name__ == "__main__":
    main()
