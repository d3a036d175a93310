"""``freetoken plan MODEL``: where a model's bytes would go, before anything is downloaded or loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from freetoken.checkpoint.synthetic.shapes import SHAPES
from freetoken.checkpoint.synthetic.weights import DTYPES
from freetoken.cli.launch import add_plan_arguments, overrides_of
from freetoken.cli.messages import report
from freetoken.cli.tables import print_plan
from freetoken.engine.plan_model import plan_model
from freetoken.errors import FreeTokenError


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "plan", help="show how a model would be laid out in memory, and what speed to expect"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"FTW or Hugging Face directory, GGUF file, demo, or without weights one of: {', '.join(SHAPES)}",
    )
    add_plan_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of a model by name (default: bf16)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 2 when the model does not fit; then the message says what would."""
    try:
        found = plan_model(args.model, dtype=args.dtype, profile=args.profile, overrides=overrides_of(args))
    except FreeTokenError as error:
        return report(error)
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print_plan(found, Console(), f"{args.model} on {found.device}")
    return 0
