"""``freetoken verify DST``: read an FTW checkpoint and check every checksum."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console

from freetoken.checkpoint.verify import verify_checkpoint
from freetoken.cli.convert import progress_bar
from freetoken.errors import FreeTokenError
from freetoken.units import format_bytes


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("verify", help="check every checksum of an FTW checkpoint")
    parser.add_argument("checkpoint", metavar="DST", help="FTW directory")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 when anything is damaged; every damaged record or tensor is named with its file."""
    console, errors = Console(), Console(stderr=True)
    started = time.monotonic()
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("", total=None)
            report = verify_checkpoint(
                args.checkpoint, lambda done, total, what: bar.update(task, completed=done, total=total)
            )
    except FreeTokenError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    for problem in report.problems:
        errors.print(f"error: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
    elapsed = time.monotonic() - started
    console.print(
        f"{report.num_tensors} tensors and {report.num_records} records, {format_bytes(report.num_bytes)} in "
        f"{elapsed:.1f} s: {f'{len(report.problems)} damaged' if report.problems else 'all sound'}",
        markup=False,
        highlight=False,
    )
    return 1 if report.problems else 0
