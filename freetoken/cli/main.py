"""``freetoken``: finds the command and imports nothing else, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from freetoken import __version__

INTERRUPTED = 130
COMMANDS = {
    "launch": "load a model and serve it",
    "status": "show the running engine",
    "stop": "stop the running engine",
    "agent": "start a coding agent on the running server",
    "plan": "show how a model would be laid out in memory, and what speed to expect",
    "bench": "measure what this machine delivers for a model",
    "cache": "show or change how memory is divided between experts and KV",
    "convert": "convert a checkpoint into the FTW format",
    "verify": "check every checksum of an FTW checkpoint",
    "synth": "make a checkpoint of random weights with the dimensions of a real model",
    "trace": "record expert routing, and replay it through the slot policy",
    "demo": "launch a small real model and ask it a question",
}
"""Command -> help; the module is ``freetoken.cli.<command>``."""
PASSING_ON = frozenset({"agent"})
"""Commands that are given what follows ``--`` as ``arguments``, unread."""


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; with ``only``, the others are known by name alone."""
    parser = argparse.ArgumentParser(
        prog="freetoken", description="Serve Mixture-of-Experts language models that do not fit in VRAM."
    )
    parser.add_argument("--version", action="version", version=f"freetoken {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, summary in COMMANDS.items():
        if only is None or command == only:
            importlib.import_module(f"freetoken.cli.{command}").add_parser(subparsers)
        else:
            subparsers.add_parser(command, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong settings or arguments, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    passed: list[str] = []
    if command in PASSING_ON and "--" in arguments:
        end = arguments.index("--")
        arguments, passed = arguments[:end], arguments[end + 1 :]
    try:
        args = build_parser(only=command).parse_args(arguments, argparse.Namespace(arguments=passed))
        status: int = importlib.import_module(f"freetoken.cli.{args.command}").run(args)
    except KeyboardInterrupt:  # while modules are imported, or in a command that has nothing to clean up
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
