"""OpenCode against the front, over the Responses dialect: a tool call that changes a file, and the next turn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from freetoken.testing.front_fakes import scripted_reply

from ..clients.opencode import OpenCode, opencode_binary
from .conftest import open_site

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def binary() -> Path:
    return opencode_binary()


async def test_a_tool_runs_and_the_session_goes_on(checkpoint: Path, binary: Path, tmp_path: Path) -> None:
    arguments = {"command": "echo changed > note.txt", "description": "write"}
    call = f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': arguments})}\n</tool_call>"
    async with open_site(checkpoint, context_tokens=200_000) as site:
        agent = OpenCode(binary, tmp_path, site.front.url, "tiny")
        replies = iter(["<think>\nA file.\n</think>\n\nI write it." + call, "It is written.", "I wrote it before."])
        site.scheduler.script = lambda request: scripted_reply(request, site.ids(next(replies)), 8)
        first = await agent.run("write changed into note.txt")
        assert (first.status, first.messages) == (0, ["I write it.", "It is written."]), first
        assert first.tools == [("bash", "completed")]
        assert (agent.work / "note.txt").read_text() == "changed\n"
        again = await agent.run("what did you do?", resume=True)
        assert (again.status, again.messages) == (0, ["I wrote it before."]), again
        prompts = [request.prompt_token_ids for request in site.scheduler.submitted]
        assert again.tokens["input"] == len(prompts[-1])
        for earlier, later in itertools.pairwise(prompts):
            assert later[: len(earlier)] == earlier
        assert "A file." in site.tokenizer.decode(prompts[-1])
