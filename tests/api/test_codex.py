"""Codex CLI against the front: a tool call that changes a file, the answer, and the session taken up again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken.messages import FinishReason, RequestFailure, SubmitRequest, TokenDelta
from freetoken.testing.front_fakes import scripted_reply

from ..clients.codex import Codex, codex_binary
from .conftest import Site, open_site

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def binary() -> Path:
    return codex_binary()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(site: Site, *replies: str) -> None:
    """The model's answers, one a request."""
    left: Iterator[str] = iter(replies)

    def script(request: SubmitRequest) -> Any:
        return scripted_reply(request, site.ids(next(left)), 8)

    site.scheduler.script = script


def common_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def test_a_tool_runs_and_the_session_resumes(checkpoint: Path, binary: Path, tmp_path: Path) -> None:
    async with open_site(checkpoint, context_tokens=200_000) as site:
        codex = Codex(binary, tmp_path, site.front.url, "tiny")
        play(
            site,
            "<think>\nA file is wanted.\n</think>\n\n"
            "I write the file." + call("exec_command", cmd="echo changed > note.txt"),
            "The file is written.",
            "I wrote note.txt before.",
        )
        first = await codex.run("write changed into note.txt")
        assert (first.status, first.errors) == (0, []), first
        assert (codex.work / "note.txt").read_text() == "changed\n"
        assert first.messages == ["I write the file.", "The file is written."]
        assert [item["text"].strip() for item in first.items("reasoning")] == ["A file is wanted."]
        again = await codex.run("what did you do?", resume=True)
        assert (again.status, again.errors) == (0, []), again
        assert again.messages == ["I wrote note.txt before."]
        prompts = [request.prompt_token_ids for request in site.scheduler.submitted]
        assert len(prompts) == 3
        assert "A file is wanted." in site.tokenizer.decode(prompts[2])
        assert again.usage["input_tokens"] >= len(prompts[2])
        for earlier, later in itertools.pairwise(prompts):
            assert common_tokens(earlier, later) == len(earlier)


async def test_a_namespaced_tool_is_found(checkpoint: Path, binary: Path, tmp_path: Path) -> None:
    async with open_site(checkpoint, context_tokens=200_000) as site:
        codex = Codex(binary, tmp_path, site.front.url, "tiny")
        play(site, call("close_agent", target="00000000-0000-4000-8000-000000000000"), "There was none.")
        run = await codex.run("close the agent")
        assert (run.status, run.messages) == (0, ["There was none."]), run
        prompt = site.tokenizer.decode(site.scheduler.submitted[1].prompt_token_ids, skip_special_tokens=False)
        assert "unsupported call" not in prompt


PATCH = """\
*** Begin Patch
*** Update File: note.txt
@@
-old line
+new line
*** End Patch
"""


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_freeform_tool_edits_a_file(checkpoint: Path, binary: Path, tmp_path: Path, wrapped: bool) -> None:
    """Codex declares apply_patch as a custom tool for models it knows by name."""
    async with open_site(checkpoint, context_tokens=200_000, server={"model_aliases": ("*",)}) as site:
        codex = Codex(binary, tmp_path, site.front.url, "gpt-5.5")
        (codex.work / "note.txt").write_text("old line\n")
        text = json.dumps({"input": PATCH}) if wrapped else PATCH
        play(site, call("apply_patch", input=text), "The line is new.")
        run = await codex.run("replace the line")
        assert (run.status, run.messages) == (0, ["The line is new."]), run
        assert (codex.work / "note.txt").read_text() == "new line\n"


async def test_silence_is_bridged_by_events(checkpoint: Path, binary: Path, tmp_path: Path) -> None:
    async with open_site(checkpoint, context_tokens=200_000, server={"keepalive_s": 0.2}) as site:
        codex = Codex(binary, tmp_path, site.front.url, "tiny", idle_timeout_s=1.0)
        waited: list[TokenDelta] = []

        def script(request: SubmitRequest) -> list[TokenDelta]:
            import asyncio

            waited.extend(scripted_reply(request, site.ids("late"), 8))
            asyncio.get_running_loop().call_later(2.5, lambda: site.scheduler.send(*waited))
            return []

        site.scheduler.script = script
        run = await codex.run("wait")
        assert (run.status, run.messages) == (0, ["late"]), run
        assert len(site.scheduler.submitted) == 1


async def test_a_failed_response_is_tried_again(checkpoint: Path, binary: Path, tmp_path: Path) -> None:
    async with open_site(checkpoint, context_tokens=200_000) as site:
        codex = Codex(binary, tmp_path, site.front.url, "tiny", stream_retries=2)
        failure = RequestFailure("numeric", "not finite")

        def script(request: SubmitRequest) -> list[TokenDelta]:
            if len(site.scheduler.submitted) > 1:
                return scripted_reply(request, site.ids("now"), 8)
            begun = TokenDelta(request.request_id, token_ids=tuple(site.ids("hel")))
            return [begun, TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, failure=failure)]

        site.scheduler.script = script
        run = await codex.run("try")
        assert (run.status, run.messages[-1]) == (0, "now"), run
        assert len(site.scheduler.submitted) == 2
