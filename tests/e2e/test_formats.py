"""A tool's loop in the formats of other families, through whole engines with a scripted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from freetoken.testing.chat_templates import CHANNELS, OPENED
from freetoken.testing.scripted_engine import scripted_engine
from freetoken.testing.scripted_model import Line, Script

pytestmark = pytest.mark.e2e

TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
HARMONY = CHANNELS
for _ours, _theirs in (("im_start", "start"), ("im_end", "end"), ("c", "channel"), ("m", "message")):
    HARMONY = HARMONY.replace(f"<|{_ours}|>", f"<|{_theirs}|>")
CASES = {"opened": (OPENED, "<tool_response>"), "harmony": (HARMONY, "to=assistant")}


@pytest.mark.parametrize(("template", "result"), CASES.values(), ids=CASES)
def test_a_tool_is_called_and_answered(template: str, result: str, tmp_path: Path) -> None:
    settings = {"kv__num_tokens": 20_000, "max_context_tokens": 8_000}
    with (
        scripted_engine(tmp_path, "--runtime", "local", template=template, **settings) as engine,
        openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        engine.play(
            Script(
                (
                    Line("please look", 0, "", "Where?", (("look", {"path": "/ü"}),)),
                    Line("please look", 1, "It is empty.", "Nothing there."),
                ),
                otherwise="A title.",
                result=result,
            )
        )
        messages: list[Any] = [{"role": "user", "content": "please look"}]
        ask: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "temperature": 1.0}
        first = client.chat.completions.create(**ask, messages=messages).choices[0]
        assert first.finish_reason == "tool_calls", first
        (call,) = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", '{"path": "/ü"}')
        assert first.message.reasoning_content == "Where?"
        messages += [first.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "nothing"}]
        again = client.chat.completions.create(**ask, messages=messages)
        assert again.choices[0].finish_reason == "stop"
        assert again.choices[0].message.content == "It is empty."
        assert again.choices[0].message.reasoning_content == "Nothing there."
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        format_: Any = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
        bound = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a title"}], response_format=format_
        ).choices[0]
        assert bound.finish_reason == "stop" and '"title"' in bound.message.content
