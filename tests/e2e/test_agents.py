"""Real coding agents, started by ``freetoken agent``, on whole engines with a scripted model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.testing.agent_sessions import (
    FIRST,
    HABITS,
    SAID,
    SECOND,
    TEXT,
    AgentSession,
    Request,
    main_requests,
    requests_in,
    requests_of_dsh,
    script_for,
)
from freetoken.testing.scripted_engine import ScriptedEngine, scripted_engine
from freetoken.testing.scripted_model import Line, Script
from tests.clients.programs import program_of

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

KEY = "sk-of-the-test"


SETTINGS = {
    "server__api_keys": f"[{KEY}]",
    "kv__num_tokens": 300_000,
    "max_context_tokens": 200_000,
    "scheduler__max_num_batched_tokens": 2048,
    "scheduler__prefill_chunk_tokens": 1024,
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_engine(tmp_path_factory.mktemp("local"), "--runtime", "local", **SETTINGS) as engine:
        yield engine


@pytest.fixture
def on_ray(tmp_path: Path) -> Iterator[ScriptedEngine]:
    ray = {"ray__dashboard": "false", "ray__namespace": "scripted"}
    with scripted_engine(tmp_path, "--runtime", "ray", **SETTINGS, **ray) as engine:
        yield engine


def play(engine: ScriptedEngine, name: str, root: Path) -> str:
    """Two turns: the tool runs and the session resumes. Returns what the agent printed."""
    found = program_of(name)
    engine.play(script_for(name))
    session = AgentSession(name, found.program, root / name, engine.url, KEY, found.path)
    first = session.turn(FIRST)
    assert first.returncode == 0 and SAID[1] in first.stdout, (first.stdout[-3000:], first.stderr[-3000:])
    assert session.note.read_text() == TEXT
    again = session.turn(SECOND)
    assert again.returncode == 0 and SAID[2] in again.stdout, (again.stdout[-3000:], again.stderr[-3000:])
    if HABITS[name].tidy:
        assert session.strangers() == []
    return first.stdout + again.stdout


def check_reuse(name: str, turns: list[Request]) -> None:
    """Every request found all that the one before it left in full blocks, as far as the agent extends it."""
    assert len(turns) == 3, turns
    for earlier, later in itertools.pairwise(turns):
        if HABITS[name].extends:
            assert later.cached_tokens == earlier.reusable_tokens, turns
        else:
            assert later.cached_tokens > 0.95 * later.prompt_tokens, turns


@pytest.mark.parametrize("name", list(HABITS))
def test_an_agent_works_and_goes_on(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    program_of(name)  # no engine is started for an agent that is not there
    local: ScriptedEngine = request.getfixturevalue("local")
    before = len(requests_in(local.process.log))
    play(local, name, tmp_path)
    requests = requests_in(local.process.log)[before:]
    check_reuse(name, main_requests(requests))
    assert all(request.outcome == "ok" for request in main_requests(requests))


def test_claude_code_runs_calls_in_parallel_and_a_sub_agent(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = program_of("claude")
    local: ScriptedEngine = request.getfixturevalue("local")

    def write(name: str) -> tuple[str, dict[str, str]]:
        return ("Bash", {"command": f"echo {name} > {name}.txt", "description": f"Write {name}"})

    helper = {"description": "Write c", "prompt": "as a helper, write c", "subagent_type": "general-purpose"}
    local.play(
        Script(
            (
                Line("write all of them", 0, "I begin.", "", (("Agent", helper), write("a"), write("b"))),
                Line("write all of them", 1, "The helper is at work."),
                Line("as a helper, write c", 0, "I write.", "", (write("c"),)),
                Line("as a helper, write c", 1, "The helper is done."),
            )
        )
    )
    before = len(requests_in(local.process.log))
    session = AgentSession("claude", found.program, tmp_path / "claude", local.url, KEY)
    done = session.turn("write all of them")
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    assert sorted(path.name for path in session.folder.iterdir()) == ["a.txt", "b.txt", "c.txt"]
    requests = requests_in(local.process.log)[before:]
    assert all(done.outcome == "ok" for done in requests) and len(requests) >= 4, requests


def test_an_agent_on_ray(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    program_of("dsh")
    on_ray: ScriptedEngine = request.getfixturevalue("on_ray")
    check_reuse("dsh", requests_of_dsh(play(on_ray, "dsh", tmp_path)))
