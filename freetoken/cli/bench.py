"""``freetoken bench bandwidth MODEL``: what PCIe, CPU, memory and disk deliver for a model's experts."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from freetoken.cli.convert import progress_bar
from freetoken.cli.launch import add_plan_arguments, overrides_of
from freetoken.cli.messages import report
from freetoken.cli.tables import print_profile
from freetoken.elastic.cost_model import explain
from freetoken.elastic.profile import profile_path
from freetoken.engine.bandwidth import measure_profile
from freetoken.engine.prepare import prepare_launch
from freetoken.errors import FreeTokenError


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("bench", help="measure what this machine delivers for a model")
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    bandwidth = benches.add_parser(
        "bandwidth",
        help="CPU experts, fetches, both at once, memory and disk, for this model's experts",
        description="Measures for a few seconds, with the threads and the device that `launch` would use under the "
        "same flags, and keeps the result for it.",
    )
    bandwidth.add_argument("model", metavar="MODEL", help="as for launch")
    add_plan_arguments(bandwidth)
    bandwidth.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    console = Console(stderr=args.json)
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("", total=None)
            spec = prepare_launch(
                args.model,
                profile=args.profile,
                overrides=overrides_of(args),
                progress=lambda done, total, what: bar.update(
                    task, completed=done, total=total or None, description=what
                ),
            )
            bar.update(task, description="measuring")
            profile = measure_profile(spec)
    except FreeTokenError as error:
        return report(error)
    record_bytes = max(layout.stride_bytes for layout in spec.layouts)
    sentence = explain(profile.costs, spec.model.num_experts_per_tok, record_bytes, spec.config.device)
    if args.json:
        print(json.dumps({**profile.to_json(), "decision": sentence}, indent=1))
        return 0
    sizes = ", ".join(f"{layout.stride_bytes:,} bytes of {layout.format}" for layout in spec.layouts)
    title = f"{spec.served_model_name}: experts of {sizes}"
    print_profile(profile, console, title, sentence)
    kept = profile_path(profile.identity, spec.config.loader.cache_dir)
    console.print(f"kept in {kept}", markup=False, highlight=False, soft_wrap=True)
    return 0
