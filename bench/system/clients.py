"""What coding agents do with a whole engine: whether their tool runs, whether their session goes on, and how much of
each request's prompt was cached. The model is scripted, so times are those of agents, front and scheduling.

    python bench/system/clients.py claude=PROGRAM codex=PROGRAM ... [--path DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from freetoken.cli.agents import agent_named
from freetoken.testing.agent_sessions import (
    FIRST,
    HABITS,
    SAID,
    SECOND,
    TEXT,
    AgentSession,
    main_requests,
    requests_in,
    script_for,
)
from freetoken.testing.scripted_engine import ScriptedEngine, scripted_engine


def version_of(program: Path, path: str) -> str:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "DSH_HOME": "/nonexistent"}
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, env=environment)
    return next((line.strip() for line in done.stdout.splitlines() if any(c.isdigit() for c in line)), "unknown")


def play(engine: ScriptedEngine, name: str, program: Path, path: str, root: Path) -> dict[str, Any]:
    engine.play(script_for(name))
    before = len(requests_in(engine.process.log))
    session = AgentSession(name, program, root, engine.url, path=path)
    turns = []
    for prompt, answer in ((FIRST, SAID[1]), (SECOND, SAID[2])):
        started = time.monotonic()
        done = session.turn(prompt)
        told = answer in done.stdout
        turns.append({"seconds": round(time.monotonic() - started, 1), "status": done.returncode, "answered": told})
    requests = requests_in(engine.process.log)[before:]
    main = main_requests(requests)
    rows: list[dict[str, Any]] = []
    for index, request in enumerate(main):
        possible = main[index - 1].reusable_tokens if index else 0
        rows.append(
            {
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "left_by_the_one_before": possible,
                "output_tokens": request.output_tokens,
            }
        )
    return {
        "agent": agent_named(name).title,
        "version": version_of(program, path),
        "turns": turns,
        "tool_ran": session.note.is_file() and session.note.read_text() == TEXT,
        "requests": rows,
        "side_requests": len(requests) - len(main),
        "written_outside_its_directory": session.strangers(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "programs", nargs="+", metavar="AGENT=PROGRAM", help=f"one of {', '.join(HABITS)}, and where it is"
    )
    parser.add_argument("--path", default="", help="what PATH should have in front")
    parser.add_argument("--out")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        settings = {"kv__num_tokens": 400_000, "max_context_tokens": 200_000, "scheduler__max_num_batched_tokens": 2048}
        with scripted_engine(Path(scratch) / "engine", "--runtime", "local", **settings) as engine:
            for given in args.programs:
                name, _, program = given.partition("=")
                figures[name] = play(engine, name, Path(program), args.path, Path(scratch) / name)
    write_result(args.out, "clients", figures)


if __name__ == "__main__":
    main()
