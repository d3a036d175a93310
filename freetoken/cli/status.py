"""``freetoken status``: the running engine's account of itself."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import json
from typing import Any

from rich.console import Console

from freetoken.cli.figures import experts_line, kv_line, requests_line
from freetoken.cli.live import actor_table
from freetoken.cli.messages import report
from freetoken.config.loader import load_config, merge, settings_from_flags
from freetoken.config.schema import RayConfig
from freetoken.engine.runtime import Overview
from freetoken.errors import FreeTokenError

_PLAIN_WIDTH = 160


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("status", help="show the running engine")
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """How to say which engine is meant."""
    parser.add_argument("--profile", metavar="NAME", help="settings profile that the engine was launched with")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="ray.address or ray.namespace, where they differ from the default",
    )


def ray_config(args: argparse.Namespace) -> RayConfig:
    """Where the engine is to be found. Raises ``ConfigError``."""
    flags = merge({"model": "-"}, settings_from_flags(args.settings))
    return load_config(profile=args.profile, flags=flags).ray


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 when an engine answered."""
    try:
        engine = importlib.import_module("actors.runtime").AttachedEngine(ray_config(args))
        try:
            overview: Overview = asyncio.run(engine.overview())
        finally:
            engine.close()
    except FreeTokenError as error:
        return report(error)
    if args.json:
        print(json.dumps(dataclasses.asdict(dataclasses.replace(overview, failure=None)), default=str, indent=2))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    health = overview.health
    lines = [f"{health.state} {health.detail}".rstrip(), f"API: {overview.url}/v1" if overview.url else ""]
    scheduler_lines = [requests_line(overview, 0.0), experts_line(overview), kv_line(overview)]
    for text in (*lines, *scheduler_lines):
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(actor_table(overview))
    return 0
