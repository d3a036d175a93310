"""``freetoken agent NAME``: a coding agent on the running server, with a private configuration."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from freetoken.cli.agents import AGENTS, agent_named
from freetoken.cli.agents.client import KEY_VARIABLE, Agent, ServedModel, Setup
from freetoken.cli.messages import FAILED, report
from freetoken.cli.server import DEFAULT_URL, EngineServer
from freetoken.errors import ConfigError, FreeTokenError

_TIMEOUT_S = 10.0


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "agent",
        help="start a coding agent on the running server",
        usage="freetoken agent [options] NAME [-- ARGUMENTS]",
        description="Starts a coding agent that is installed on this machine on the running server. Its configuration "
        "and sessions are in a directory of their own; the user's are not touched. What follows -- goes to the agent, "
        "and its exit status is this command's.",
    )
    parser.add_argument("name", metavar="NAME", choices=AGENTS, help=f"the agent: {', '.join(AGENTS)}")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"where the server wants one (default: {KEY_VARIABLE} of the environment)"
    )
    parser.add_argument("--model", metavar="MODEL", help="one of the served names (default: the first)")
    parser.add_argument("--program", metavar="PATH", help="the agent's program (default: found in PATH)")
    parser.add_argument(
        "--home", type=Path, metavar="DIR", help="configuration and sessions (default: ~/.local/state/freetoken/agents)"
    )
    parser.add_argument(
        "--print-env", action="store_true", help="write the configuration, and show it instead of starting the agent"
    )


def run(args: argparse.Namespace) -> int:
    """Becomes the agent; returns an exit status only when it does not. ``args.arguments`` are the agent's."""
    agent = agent_named(args.name)
    try:
        program = _find_program(agent, args.program, required=not args.print_env)
        key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE, "")
        model = read_model(args.url, key, args.model)
        setup = agent.prepare(model, private_directory(args.name, args.home))
        setup.write()
    except FreeTokenError as error:
        return report(error)
    except OSError as error:
        return report(FreeTokenError(f"the agent's configuration cannot be written: {error}"))
    command = [program, *setup.arrange(args.arguments)]
    if args.print_env:
        print(describe(setup, command))
        return 0
    try:
        os.execve(program, command, setup.apply(os.environ))
    except OSError as error:
        report(FreeTokenError(f"{program} cannot be started: {error.strerror}"))
    return FAILED


def private_directory(name: str, given: Path | None) -> Path:
    """Where an agent's configuration and sessions are, absolute."""
    if given is not None:
        return given.expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "freetoken" / "agents" / name


def describe(setup: Setup, command: list[str]) -> str:
    """What is set, for a shell to read; files and the command as comments."""
    lines = [f"unset {name}" for name in setup.unset]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.environment.items()]
    for path in [*setup.files, *setup.first_files]:
        lines += ["", f"# {path}", *(f"#   {line}" for line in path.read_text(encoding="utf-8").splitlines())]
    return "\n".join([*lines, "", f"# {shlex.join(command)}"])


def _find_program(agent: Agent, given: str | None, required: bool) -> str:
    program = shutil.which(given or agent.program)
    if program is not None:
        return program
    if not required:
        return given or agent.program
    if given is not None:
        raise ConfigError(f"--program {given!r} is no program that can be run")
    raise FreeTokenError(
        f"{agent.title} is not installed: there is no {agent.program!r} in PATH. Install it: {agent.install}; or say "
        "where it is: --program PATH"
    )


def read_model(url: str, key: str = "", name: str | None = None) -> ServedModel:
    """What the server at ``url`` serves. Raises ``FreeTokenError`` when it is not there, not ready, wants another key,
    or does not know ``name``."""
    server = EngineServer(url, key, _TIMEOUT_S)
    url = server.url
    status, health = server.look("/health")
    if status == 503:
        detail = ": ".join(filter(None, (str(health.get("status", "")), str(health.get("detail", "")))))
        raise FreeTokenError(f"the server at {url} is not ready ({detail or 'no reason given'}); try again later")
    status, models = server.look("/v1/models")
    if status in (401, 403):
        raise FreeTokenError(
            f"the server at {url} wants an API key: --api-key KEY, or {KEY_VARIABLE} in the environment"
        )
    found = [entry for entry in models.get("data") or [] if isinstance(entry, dict) and entry.get("id")]
    if status != 200 or not found:
        raise FreeTokenError(f"{url}/v1/models answered {status} and names no model: is this a FreeToken server?")
    chosen = next((entry for entry in found if name in (None, entry["id"])), None)
    if chosen is None:
        names = ", ".join(entry["id"] for entry in found)
        raise ConfigError(f"the server at {url} has no model {name!r}; it has: {names}")
    context = int(chosen.get("context_window") or chosen.get("max_model_len") or 0)
    if context <= 0:
        raise FreeTokenError(f"{url}/v1/models does not tell the context of {chosen['id']!r}")
    return ServedModel(url, chosen["id"], context, int(chosen.get("max_output_tokens") or context), key)
