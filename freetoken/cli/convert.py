"""``freetoken convert SRC DST``: a checkpoint into the FTW format."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.errors import FreeTokenError
from freetoken.units import format_bytes, parse_bytes


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("convert", help="convert a checkpoint into the FTW format")
    parser.add_argument("source", metavar="SRC", help="Hugging Face checkpoint directory or GGUF file")
    parser.add_argument("destination", metavar="DST", help="directory to create")
    parser.add_argument(
        "--dtype",
        choices=("keep", "f32", "bf16"),
        default="keep",
        help="keep: BF16, F32 and Q4_0 stay what they are, other formats become --fallback-dtype (default)",
    )
    parser.add_argument(
        "--fallback-dtype",
        choices=("f32", "bf16"),
        default="f32",
        help="of formats that cannot be kept (F16, Q8_0, Q6_K, ...): f32 keeps every value (default), bf16 rounds",
    )
    parser.add_argument(
        "--split-dense-into-experts",
        type=int,
        metavar="E",
        help="turn a dense Llama into a Mixtral with E experts a layer and the same function (E a power of two)",
    )
    parser.add_argument(
        "--tile-columns", type=int, metavar="N", help="intermediate columns of a tile (default: up to 64; 32 for Q4_0)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there already")
    parser.add_argument(
        "--max-file-bytes", type=parse_bytes, metavar="BYTES", help="largest data file (default: by size, up to 8GiB)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. An interrupted run is resumed by running the same command again."""
    console = Console()
    options = ConvertOptions(
        dtype=args.dtype,
        fallback_dtype=args.fallback_dtype,
        split_dense_into_experts=args.split_dense_into_experts,
        tile_columns=args.tile_columns,
        max_file_bytes=args.max_file_bytes,
        overwrite=args.overwrite,
    )
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("", total=None)

            def show(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total or None, description=what)

            index = convert(args.source, args.destination, options, show)
    except FreeTokenError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; run the same command again to go on", markup=False)
        return 130
    console.print(
        f"{index.path}: {index.spec.architecture}, {len(index.tensors)} tensors ({format_bytes(index.dense_bytes)}), "
        f"{index.num_records} records ({format_bytes(index.expert_bytes)}) in {len(index.files)} files",
        markup=False,
        highlight=False,
    )
    return 0


def progress_bar(console: Console) -> Progress:
    """Bytes, rate and time left beside what is being worked on."""
    return Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
