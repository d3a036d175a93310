"""``freetoken stop``: end the running engine in order."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from typing import Any

from rich.console import Console

from freetoken.cli.messages import report
from freetoken.cli.status import add_engine_arguments, ray_config
from freetoken.errors import FreeTokenError


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    add_engine_arguments(subparsers.add_parser("stop", help="stop the running engine"))


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 when no engine is running afterwards."""
    console = Console()
    try:
        engine = importlib.import_module("actors.runtime").AttachedEngine(ray_config(args))
        try:
            stopped = asyncio.run(engine.stop())
        finally:
            engine.close()
    except FreeTokenError as error:
        return report(error)
    console.print("stopped" if stopped else f"no engine is running in the Ray namespace {engine.namespace!r}")
    return 0
