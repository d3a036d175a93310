"""``freetoken trace record``: the routes of a live engine, as a trace file."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from freetoken.cli.messages import report
from freetoken.cli.server import EngineServer, add_server_arguments, find_server
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.units import format_bytes, parse_bytes

POLL_INTERVAL_S = 1.0
_PATH = "/v1/cache/trace"
_PLAIN_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``freetoken trace record``."""
    add_server_arguments(parser)
    parser.add_argument("--seconds", type=float, metavar="N", help="record for N seconds (default: until Ctrl-C)")
    parser.add_argument(
        "--out", metavar="FILE", help="move the trace there (default: it stays where the engine keeps it)"
    )
    parser.add_argument("--max-bytes", metavar="SIZE", help="end at this size, as 64MiB (default: 256MiB)")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 when there is a whole trace."""
    try:
        summary = _record(args)
    except FreeTokenError as error:
        return report(error)
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_PLAIN_WIDTH)
        console.print(_sentence(summary), markup=False, highlight=False, soft_wrap=True)
    return 0


def _record(args: argparse.Namespace) -> dict[str, Any]:
    if args.seconds is not None and not 0 < args.seconds < float("inf"):
        raise ConfigError(f"--seconds {args.seconds:g} is not above 0")
    target = None if args.out is None else Path(args.out)
    if target is not None and target.exists():  # rather than after an hour
        raise ConfigError(f"--out {target} exists already")
    if target is not None and not target.absolute().parent.is_dir():
        raise ConfigError(f"--out {target}: there is no directory {target.absolute().parent}")
    body: dict[str, Any] = {"action": "start"}
    if args.max_bytes is not None:
        body["max_bytes"] = _bytes(args.max_bytes)
    server = find_server(args)
    with _interruptible():
        begun = server.ask("POST", _PATH, body)
        try:
            _wait(server, begun["path"], args.seconds, quiet=args.json)
        except KeyboardInterrupt:
            pass
    now = server.ask("GET", _PATH)
    if now.get("path") == begun["path"]:
        now = server.ask("POST", _PATH, {"action": "stop"})
    if now.get("path") != begun["path"]:
        raise FreeTokenError(f"the engine does not know of {begun['path']} any more; the file may be incomplete")
    if target is not None:
        server.fetch(f"{_PATH}/{now['name']}", target)
        server.ask("DELETE", f"{_PATH}/{now['name']}")
        now["path"] = str(target)
    return now


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--max-bytes: {error}") from error


def _wait(server: EngineServer, path: str, seconds: float | None, quiet: bool) -> None:
    """Until the time is over or the recording has ended by itself. An engine that is being repaired is asked again."""
    console = Console(stderr=True)
    end_s = None if seconds is None else time.monotonic() + seconds
    with (
        console.status("", spinner="dots") if console.is_terminal and not quiet else contextlib.nullcontext() as status
    ):
        while True:
            left_s = POLL_INTERVAL_S if end_s is None else min(end_s - time.monotonic(), POLL_INTERVAL_S)
            if left_s <= 0:
                return
            time.sleep(left_s)
            try:
                now = server.ask("GET", _PATH)
            except FreeTokenError as error:
                if status is not None:
                    status.update(str(error))
                continue
            if now.get("path") != path or not now["recording"]:
                return
            if status is not None:
                status.update(f"{_amount(now)}; {'Ctrl-C ends it' if end_s is None else f'of {seconds:g} s'}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is like Ctrl-C here: the engine must be told to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _amount(recording: dict[str, Any]) -> str:
    return (
        f"{recording['publishes']} publishes, {recording['tokens']:.0f} tokens, {format_bytes(recording['bytes'])} in "
        f"{recording['seconds']:.0f} s"
    )


def _sentence(recording: dict[str, Any]) -> str:
    text = f"{recording['path']}: {recording['model']}: {_amount(recording)}"
    if recording["unrecorded"]:
        text += f"; {recording['unrecorded']} publishes are missing, because the disk was too slow"
    return text if recording["ended"] == "stopped" else f"{text}; {recording['ended']}"
