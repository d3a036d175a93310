"""Sessions of real coding agents with a scripted model: the same two turns with each of them.

The first turn asks for a note, the model calls the agent's tool and then says that it is done; the second turn takes
the session up again. ``FIRST`` and ``SECOND`` are the user's words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.testing.scripted_model import Line, Script

FIRST, SECOND = "please write the note", "what did you do with it"
SAID = ("I write it.", "It is written.", "I wrote it before.")
THOUGHT = "A note is wanted."
NOTE, TEXT = "note.txt", "changed by the agent\n"
RUN_TIMEOUT_S = 240.0

_COMMAND = f"echo {TEXT.strip()} > {NOTE}"
_ENDED = re.compile(
    r"event=generation_ended .*?outcome=(\w+) .*?prompt_tokens=(\d+) cached_tokens=(\d+) output_tokens=(\d+)"
)
_SESSION = re.compile(r"session-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class AgentHabits:
    """``tool`` is how this agent runs a command; ``first`` and ``again`` are its arguments, where ``PROMPT`` and
    ``SESSION`` stand for the user's words and the session's name. ``extends``: every request extends the one before.
    ``tidy``: it writes nothing outside its directory."""

    tool: tuple[str, dict[str, Any]]
    first: tuple[str, ...]
    again: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    extends: bool = True
    tidy: bool = False
    in_workspace: bool = False
    """It works in a folder of its own and not where it is started."""


_CLAUDE = ("-p", "PROMPT", "--dangerously-skip-permissions", "--output-format", "json")
_CODEX = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "PROMPT")
_OPENCLAW = ("agent", "--local", "--session-id", "note", "-m", "PROMPT", "--json")
HABITS: dict[str, AgentHabits] = {
    "claude": AgentHabits(
        tool=("Bash", {"command": _COMMAND, "description": "Write the note"}),
        first=_CLAUDE,
        again=("-c", *_CLAUDE),
        environment={"IS_SANDBOX": "1"},
        tidy=True,
    ),
    "codex": AgentHabits(
        tool=("exec_command", {"cmd": _COMMAND}),
        first=("exec", *_CODEX),
        again=("exec", "resume", "--last", *_CODEX),
        tidy=True,
    ),
    "dsh": AgentHabits(
        tool=("bash", {"command": _COMMAND, "description": "Write the note"}),
        first=("headless", "--json", "PROMPT"),
        again=("headless", "--json", "--session-id", "SESSION", "PROMPT"),
        environment={"DSH_PERMISSION_MODE": "danger-full-access"},
    ),
    "opencode": AgentHabits(
        tool=("bash", {"command": _COMMAND, "description": "Write the note"}),
        first=("run", "--format", "json", "PROMPT"),
        again=("run", "-c", "--format", "json", "PROMPT"),
    ),
    "openclaw": AgentHabits(
        tool=("exec", {"command": _COMMAND}), first=_OPENCLAW, again=_OPENCLAW, extends=False, in_workspace=True
    ),
}


def script_for(name: str) -> Script:
    """What the model says in both turns."""
    return Script(
        (
            Line(FIRST, 0, SAID[0], THOUGHT, (HABITS[name].tool,)),
            Line(FIRST, 1, SAID[1]),
            Line(SECOND, 0, SAID[2]),
        ),
        otherwise="A note",
    )


@dataclass(frozen=True)
class Request:
    """One generation, by the engine's own account."""

    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def reusable_tokens(self) -> int:
        """Tokens whose KV lies in full blocks of 16 when it has ended: of the last one there is none."""
        return (self.prompt_tokens + self.output_tokens - 1) // 16 * 16


def requests_in(log: str) -> list[Request]:
    """The generations that a log tells of, in the order in which they ended."""
    return [Request(found[1], *map(int, found.groups()[1:])) for found in _ENDED.finditer(log)]


_DSH_USAGE = re.compile(
    r'"usage":{"inputTokens":(\d+),"outputTokens":(\d+),"totalTokens":\d+(?:,"cacheReadTokens":(\d+))?'
)


def requests_of_dsh(printed: str) -> list[Request]:
    """The generations of its conversation, as DeepSeek Harness counts them with ``--json``."""
    return [
        Request("ok", int(new) + int(cached or 0), int(cached or 0), int(output))
        for new, output, cached in _DSH_USAGE.findall(printed)
    ]


def main_requests(requests: list[Request]) -> list[Request]:
    """Those of the conversation. What agents ask beside it, such as for a title, has no tools and is short."""
    longest = max(request.prompt_tokens for request in requests)
    return [request for request in requests if request.prompt_tokens > longest // 2]


@dataclass
class AgentSession:
    """A user of an agent through ``freetoken agent``, with a home of his own. ``root`` is an empty folder; ``path`` is
    what ``PATH`` has in front."""

    name: str
    program: Path
    root: Path
    url: str
    key: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        self.habits = HABITS[self.name]
        self.private = self.root / "private"
        self.folder = self.root / "work"
        self.folder.mkdir(parents=True)
        self._session = ""

    @property
    def note(self) -> Path:
        """Where the note will be."""
        return (self.private / "workspace" if self.habits.in_workspace else self.folder) / NOTE

    def strangers(self) -> list[str]:
        """What lies in the user's home and was not there before."""
        return sorted(path.name for path in self.root.iterdir() if path not in (self.private, self.folder))

    def turn(self, prompt: str) -> subprocess.CompletedProcess[str]:
        """The user says ``prompt``: in a new session the first time, then in the same."""
        arguments = self.habits.again if self._session else self.habits.first
        words = {"PROMPT": prompt, "SESSION": self._session}
        here = Path(__file__).resolve().parents[2]
        environment = {
            "PATH": os.pathsep.join(filter(None, (self.path, os.environ.get("PATH", "/usr/bin:/bin")))),
            "HOME": str(self.root),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH", "")))),
            "FREETOKEN_API_KEY": self.key,
            **self.habits.environment,
        }
        command = [sys.executable, "-m", "freetoken.cli.main", "agent", self.name, "--url", self.url]
        command += ["--program", str(self.program), "--home", str(self.private), "--"]
        done = subprocess.run(
            [*command, *(words.get(argument, argument) for argument in arguments)],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        found = _SESSION.search(done.stdout)
        self._session = self._session or (found.group() if found else "same")
        return done
