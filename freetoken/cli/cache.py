"""``freetoken cache``: how the running engine's memory is divided, and dividing it anew."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from freetoken.cli.messages import report
from freetoken.cli.server import add_server_arguments, find_server
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.units import format_bytes, parse_bytes

_PLAIN_WIDTH = 160


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("cache", help="show or change how memory is divided between experts and KV")
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument("action", nargs="?", choices=("show", "rebalance"), default="show", help="default: show")
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument("--kv-tokens", type=int, metavar="N", help="rebalance: KV for at least N tokens")
    wish.add_argument("--expert-bytes", metavar="SIZE", help="rebalance: expert slots of at most SIZE, as 2GiB")
    wish.add_argument("--auto", action="store_true", help="rebalance: whatever is worth most now")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 when the engine did as it was told."""
    try:
        body = _wish(args)
        server = find_server(args)
        if body is not None:
            answer = server.ask("POST", "/v1/cache/rebalance", body)
        else:
            answer = server.ask("GET", "/v1/cache/status")
    except FreeTokenError as error:
        return report(error)
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    if body is not None:
        console.print(_sentence(answer), markup=False, highlight=False, soft_wrap=True)
    else:
        _show(console, answer)
    return 0


def _wish(args: argparse.Namespace) -> dict[str, Any] | None:
    given = {
        "kv_tokens": args.kv_tokens,
        "expert_bytes": None if args.expert_bytes is None else _bytes(args.expert_bytes),
        "auto": args.auto or None,
    }
    body = {key: value for key, value in given.items() if value is not None}
    if args.action == "rebalance":
        if not body:
            raise ConfigError("freetoken cache rebalance needs --kv-tokens N, --expert-bytes SIZE or --auto")
        return body
    if body:
        raise ConfigError("--kv-tokens, --expert-bytes and --auto belong to freetoken cache rebalance")
    return None


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--expert-bytes: {error}") from error


def _sentence(decision: dict[str, Any]) -> str:
    slots, tokens = decision["slots"], decision["kv_tokens"]
    if slots["before"] == slots["after"] and tokens["before"] == tokens["after"]:
        return f"nothing has changed: {slots['after']} slots, KV of {tokens['after']} tokens ({decision['reason']})"
    return (
        f"slots {slots['before']} -> {slots['after']}, KV tokens {tokens['before']} -> {tokens['after']}; "
        f"{format_bytes(decision['moved_bytes'])} copied, {decision['duration_ms']:.1f} ms ({decision['reason']})"
    )


def _show(console: Console, status: dict[str, Any]) -> None:
    experts, kv, elastic, plan = status["experts"], status["kv"], status["elastic"], status["plan"]
    table = Table(box=None, pad_edge=False)
    for column in ("pool", "capacity", "bytes", "in use"):
        table.add_column(column, justify="left" if column == "pool" else "right")
    size = format_bytes(int(experts["slots"] * plan["slot_stride_bytes"]))
    table.add_row("expert slots", f"{experts['slots']:.0f}", size, f"{experts.get('resident_slots', 0.0):.0f}")
    size = format_bytes(int(kv.get("blocks", 0.0) * plan["kv_block_bytes"]))
    held = kv.get("held_blocks", 0.0) * plan["kv_block_size"]
    table.add_row("KV tokens", f"{kv['capacity_tokens']:.0f}", size, f"{held:.0f}")
    console.print(table)
    if not elastic["elastic"]:
        why = f"memory cannot move between them: {elastic['idle_reason']}"
        console.print(why, markup=False, highlight=False, soft_wrap=True)
        return
    budget = format_bytes(elastic["granules"] * elastic["granule_bytes"])
    how = "by itself and on request" if elastic["auto"] else "on request"
    console.print(f"they share {budget} in pieces of {format_bytes(elastic['granule_bytes'])}, divided {how}")
    console.print(f"a change ({elastic['mode']}): {elastic['cost']}", markup=False, highlight=False, soft_wrap=True)
    for decision in elastic["decisions"]:
        text = f"{decision['trigger']}: {decision['outcome']}: {_sentence(decision)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
