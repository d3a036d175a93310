"""``freetoken demo``: launch the demo model, ask it a question over HTTP, print the answer and the engine's figures.

Everything goes through the same doors as a user's program: a ``freetoken launch`` process, the HTTP port, an orderly
stop. Only the standard library speaks HTTP here.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from freetoken.cli.process import EngineProcess, LaunchFailedError
from freetoken.units import format_bytes

QUESTION = "What is the capital of France, and what is it known for?"
REQUEST_TIMEOUT_S = 300.0


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("demo", help="launch a small real model and ask it a question")
    parser.add_argument("question", nargs="?", default=os.environ.get("FREETOKEN_DEMO_QUESTION", QUESTION))
    parser.add_argument("--model", default="demo", help="model to launch (default: the bundled SmolLM2 demo model)")
    parser.add_argument("--profile", default="demo", help="settings profile (default: demo)")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 when the model answered."""
    console = Console()
    arguments = ["--profile", args.profile, "--runtime", args.runtime, "--set", "server.port=0"]
    for setting in args.settings:
        arguments += ["--set", setting]
    console.print(f"[dim]$ freetoken launch {args.model} {' '.join(arguments)}[/dim]")
    started = time.monotonic()
    engine = EngineProcess(args.model, *arguments)
    try:
        with console.status("converting, loading and starting the actors"):
            engine.__enter__()
    except LaunchFailedError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    try:
        console.print(f"ready after {time.monotonic() - started:.1f} s at {engine.url}\n")
        return _converse(engine.url, args.question, args.max_tokens, console)
    finally:
        engine.__exit__(None, None, None)
        if not engine.stopped_cleanly:
            console.print("[yellow]the engine did not stop in order[/yellow]")


def _converse(url: str, question: str, max_tokens: int, console: Console) -> int:
    model = _get(url, "/v1/models")["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.7,
        "seed": 7,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    console.print(f"[bold]you[/bold]    {question}\n[bold]model[/bold]  ", end="")
    usage: dict[str, Any] = {}
    answered = False
    for event in _stream(url, "/v1/chat/completions", body):
        if "error" in event:
            console.print(f"\n[red]{event['error']['message']}[/red]")
            return 1
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content") or ""
            answered |= bool(text)
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        usage = event.get("usage") or usage
    console.print("\n")
    _print_figures(usage, _get(url, "/v1/cache/status"), _get(url, "/v1/actors"), console)
    return 0 if answered else 1


def _print_figures(usage: dict[str, Any], cache: dict[str, Any], actors: dict[str, Any], console: Console) -> None:
    engine = usage.get("freetoken", {})
    experts, store = cache.get("experts", {}), cache.get("store", {})
    uses = {kind: int(experts.get(f"{kind}_total", 0)) for kind in ("hits", "fetches", "cpu")}
    total = sum(uses.values()) or 1
    table = Table(title="the engine's own figures", show_header=False)
    table.add_row("prompt / answer", f"{usage.get('prompt_tokens')} / {usage.get('completion_tokens')} tokens")
    table.add_row("decode", f"{engine.get('decode_tokens_per_s', 0.0):.1f} tokens/s")
    table.add_row("expert hit rate", f"{100 * uses['hits'] / total:.1f} % of {total} expert uses")
    table.add_row(
        "where experts ran",
        f"slots {uses['hits']}, fetched {uses['fetches']}, CPU executor {uses['cpu']}",
    )
    table.add_row("expert slots", f"{int(experts.get('resident_slots', 0))} of {int(experts.get('slots', 0))} filled")
    table.add_row("weights in host memory", format_bytes(int(store.get("store_bytes", 0))))
    names = ", ".join(f"{a['name']} ({a['pid']})" for a in actors.get("actors", []))
    table.add_row("actors (process)", names)
    console.print(table)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=REQUEST_TIMEOUT_S)


def _get(url: str, path: str) -> dict[str, Any]:
    connection = _connect(url)
    try:
        connection.request("GET", path)
        response: dict[str, Any] = json.loads(connection.getresponse().read())
        return response
    finally:
        connection.close()


def _stream(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = _connect(url)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            yield json.loads(response.read())
            return
        for line in response:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text[len("data: ") :])
    finally:
        connection.close()
