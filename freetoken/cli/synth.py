"""``freetoken synth SHAPE DST``: a checkpoint of random weights whose routing is diverse."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from freetoken.checkpoint.synthetic.generate import FORMATS, SynthOptions, synthesize
from freetoken.checkpoint.synthetic.locality import MAX_LOCALITY
from freetoken.checkpoint.synthetic.routing import WINDOW_TOKENS, LayerRouting, RoutingReport
from freetoken.checkpoint.synthetic.shapes import OVERRIDES, SHAPES
from freetoken.checkpoint.synthetic.weights import DTYPES
from freetoken.cli.convert import progress_bar
from freetoken.errors import FreeTokenError
from freetoken.units import format_bytes, parse_bytes


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "synth", help="make a checkpoint of random weights with the dimensions of a real model"
    )
    parser.add_argument("shape", metavar="SHAPE", choices=SHAPES, help=", ".join(SHAPES))
    parser.add_argument("destination", metavar="DST", help="directory to create; with --format gguf, a file")
    parser.add_argument("--format", choices=FORMATS, default="ftw", help="default: ftw")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of linear layers and experts; q4_0 in safetensors becomes F32"
    )
    for name in OVERRIDES:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"other {name.replace('_', ' ')} than the shape's",
        )
    parser.add_argument(
        "--locality",
        type=float,
        default=0.0,
        metavar="X",
        help="share of experts, beyond chance, that a generated token has in common with the last one: 0 (default) "
        f"to {MAX_LOCALITY}; recorded traces of real models with 128 experts have 0.2 to 0.35",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same weights, in every format (default: 0)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all processors")
    parser.add_argument(
        "--measure-tokens",
        type=int,
        default=128,
        metavar="N",
        help=f"tokens over which routing is measured (default: 128, at least {WINDOW_TOKENS}); 0 measures nothing",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there already")
    parser.add_argument(
        "--max-file-bytes", type=parse_bytes, metavar="BYTES", help="largest FTW data file or safetensors shard"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. An interrupted FTW run is resumed by running the same command again."""
    console, errors = Console(), Console(stderr=True)
    overrides = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    options = SynthOptions(
        format=args.format,
        dtype=args.dtype,
        overrides=overrides,
        locality=args.locality,
        seed=args.seed,
        num_threads=args.threads,
        measure_tokens=args.measure_tokens,
        overwrite=args.overwrite,
        max_file_bytes=args.max_file_bytes,
    )
    started = time.monotonic()
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("measuring the routing" if options.measure_tokens else "", total=None)
            result = synthesize(
                args.shape,
                args.destination,
                options,
                lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
                lambda routing: print_routing(routing, console),
            )
    except FreeTokenError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted; an FTW checkpoint goes on when the same command runs again", markup=False)
        return 130
    console.print(
        f"{result.path}: {result.spec.architecture}, {format_bytes(result.size_bytes)} in "
        f"{time.monotonic() - started:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def print_routing(report: RoutingReport, console: Console) -> None:
    """The measured routing as a table: what a cache will see."""
    if report.walk is not None and report.prompt is not None and report.uniform is not None:
        table = Table(title=f"routing over {report.num_tokens} tokens (experts {report.experts})", title_justify="left")
        table.add_column("")
        table.add_column(f"experts of {WINDOW_TOKENS} tokens", justify="right")
        table.add_column("shared with last", justify="right")
        table.add_column("entropy (bits)", justify="right")
        for title, sequence in (("generation", report.walk), ("random prompt", report.prompt)):
            _add_row(table, title, sequence.mean)
            layers = list(sequence.layers)
            for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
                _add_row(table, f"  layer {layer}", sequence.layers[layer])
        _add_row(table, "uniform choice", report.uniform)
        console.print(table)
    console.print(
        f"greedy generation follows its walk at {100 * report.walk_followed:.0f} % of positions; residual against "
        f"embedding: cosine {report.residual_cosine:.3f}; largest activation {report.largest_activation:.1f}, largest "
        f"logit {report.largest_logit:.1f}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _add_row(table: Table, title: str, routing: LayerRouting) -> None:
    table.add_row(
        title, f"{routing.distinct_experts:.1f}", f"{100 * routing.overlap:.1f} %", f"{routing.entropy_bits:.2f}"
    )
