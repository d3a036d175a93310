"""``freetoken trace``: which experts a model routed to, recorded, and replayed through the slot policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from freetoken.cli import trace_record
from freetoken.cli.messages import report
from freetoken.cli.trace_plot import bars, svg
from freetoken.errors import FreeTokenError
from freetoken.experts.replay import BASELINES, POLICIES, PolicySettings, ReplayResult, parse_capacities, replay
from freetoken.experts.route_trace import RouteTrace, read_trace, write_trace
from freetoken.experts.trace_sources import SyntheticRoutes, draw_trace, import_csv

_PLAIN_WIDTH = 160


def add_parser(subparsers: Any) -> None:
    """Register the sub-commands."""
    parser = subparsers.add_parser("trace", help="record expert routing, and replay it through the slot policy")
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    trace_record.add_arguments(commands.add_parser("record", help="record the routing of the running engine"))
    _add_replay(commands.add_parser("replay", help="hit rate and fills of a trace at any number of slots"))
    importing = commands.add_parser("import", help="convert a routing CSV into a trace")
    importing.add_argument("csv", metavar="CSV", help="CSV file, also .gz")
    importing.add_argument("trace", metavar="TRACE", help="file to write")
    _add_synth(commands.add_parser("synth", help="draw a random trace"))


def _add_replay(parser: argparse.ArgumentParser) -> None:
    everything = ",".join((*POLICIES, *BASELINES))
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="files of 'record', 'import' or 'synth'")
    parser.add_argument("--policy", default=everything, metavar="LIST", help=f"of {everything} (default: all)")
    parser.add_argument(
        "--capacity", default="5%,10%,20%,40%,60%", metavar="LIST", help="slots, or percentages of all experts"
    )
    parser.add_argument("--fetch", type=float, default=1.0, metavar="Q", help="fetched share of misses (default 1)")
    for name in ("half-life-tokens", "long-half-life-tokens", "margin", "floor"):
        parser.add_argument(f"--{name}", type=float, metavar="X", help=f"of crf, as in experts.{_setting(name)}")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - prints them instead of the table")
    parser.add_argument("--svg", metavar="FILE", help="draw them there (of several traces: FILE-1.svg and so on)")


def _setting(name: str) -> str:
    name = name.replace("-", "_")
    return name if name.endswith("tokens") else f"admission_{name}"


def _add_synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="file to write")
    shape = SyntheticRoutes()
    for name, what in (
        ("num_tokens", "steps"),
        ("num_layers", "expert layers"),
        ("num_experts", "experts of a layer"),
        ("top_k", "experts a token"),
        ("alpha", "popularity falls as 1 / rank^ALPHA"),
        ("locality", "chance that an expert is used again by the next token"),
        ("drift_tokens", "popularity is drawn anew after so many tokens; 0: never"),
        ("streams", "tokens of a step, each of a sequence of its own"),
        ("seed", "of the random numbers"),
    ):
        default = getattr(shape, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=type(default),
            default=default,
            metavar=name.split("_")[-1].upper(),
            help=f"{what} (default {default})",
        )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if args.action == "record":
        return trace_record.run(args)
    try:
        if args.action == "replay":
            return _replay(args)
        if args.action == "import":
            trace = import_csv(args.csv)
        else:
            names = SyntheticRoutes.__dataclass_fields__
            trace = draw_trace(SyntheticRoutes(**{name: getattr(args, name) for name in names}))
        write_trace(args.trace, trace)
    except FreeTokenError as error:
        return report(error)
    except OSError as error:
        return report(FreeTokenError(f"{error.filename or args.action}: {error.strerror or error}"))
    Console().print(f"{args.trace}: {_describe(trace)}", markup=False, highlight=False)
    return 0


def _describe(trace: RouteTrace) -> str:
    info = trace.info
    return (
        f"{info.model}: {trace.num_publishes} publishes, {trace.num_tokens:.0f} tokens, {info.num_layers} layers of "
        f"{info.num_experts} experts, {info.top_k} a token{', truncated' if trace.truncated else ''}"
    )


# --- replay ----------------------------------------------------------------------------------------------------------


def _replay(args: argparse.Namespace) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    settings = PolicySettings(args.half_life_tokens, args.long_half_life_tokens, args.margin, args.floor)
    figures = []
    for number, path in enumerate(args.traces, 1):
        trace = read_trace(path)
        capacities = parse_capacities(args.capacity, trace.info.num_layers * trace.info.num_experts)
        with console.status("", spinner="dots") as status:
            results = replay(
                trace,
                capacities,
                [name.strip() for name in args.policy.split(",")],
                settings,
                args.fetch,
                lambda policy, num_slots: status.update(f"{policy} with {num_slots} slots"),
            )
        figures.append({"trace": Path(path).name, "model": trace.info.model, "results": [r.as_dict() for r in results]})
        if args.json != "-":
            console.print(_table(f"{path}\n{_describe(trace)}", results))
            for line in bars(results):
                console.print(line, markup=False, highlight=False)
        if args.svg:
            target = Path(args.svg)
            if len(args.traces) > 1:
                target = target.with_stem(f"{target.stem}-{number}")
            target.write_text(svg(_describe(trace), results))
    if args.json == "-":
        print(json.dumps(figures, indent=1))
    elif args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _table(title: str, results: list[ReplayResult]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("resident", "slots", "policy", "hit rate", "fills/token", "replacements/token", "2nd half: hit rate"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    last = None
    for r in results:
        if last is not None and r.num_slots != last:
            table.add_section()
        last = r.num_slots
        table.add_row(
            f"{100 * r.capacity:.1f} %",
            str(r.num_slots),
            r.policy,
            f"{100 * r.hit_ratio:.1f} %",
            f"{r.fills_per_token:.1f}",
            f"{r.replacements_per_token:.1f}",
            f"{100 * r.late_hit_ratio:.1f} %",
        )
    return table
