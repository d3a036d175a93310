"""Boot plans and bandwidth profiles as people read them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from freetoken.costs import CostModel, SideCost
from freetoken.elastic.boot_report import BootReport
from freetoken.elastic.profile import BandwidthProfile
from freetoken.units import format_bytes

_SIDES = (
    ("fetch", "fetch"),
    ("fetch_beside", "fetch, beside the CPU"),
    ("cpu", "CPU experts"),
    ("cpu_beside", "CPU experts, beside fetches"),
)


def print_plan(report: BootReport, console: Console, title: str) -> None:
    """Where every byte goes, the expected speed, and what could be changed."""
    table = Table(title=title, title_justify="left")
    table.add_column("memory")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("")
    places = [place for place in ("device", "host") if any(row.place == place for row in report.rows)]
    for place in places:
        for row in report.rows:
            if row.place == place:
                table.add_row(place, row.what, format_bytes(row.bytes), row.note)
        if place == "device" and report.budget_bytes is not None:
            limit = f"of the budget of {format_bytes(report.budget_bytes)}"
        else:
            limit = f"{format_bytes(report.available_bytes)} available"
        table.add_row(place, "total", format_bytes(report.total(place)), limit, style="bold", end_section=True)
    console.print(table)
    _say(console, f"context: up to {report.plan.max_context_tokens:,} tokens a request")
    decode = report.decode
    if report.num_records and not report.plan.in_place:
        _say(
            console,
            f"decode, one stream: about {decode.tokens_per_s:.1f} tokens/s at {decode.hit_rate:.0%} hits (a layer "
            f"fetches {decode.fetches_per_layer:.1f} experts, the CPU runs {decode.cpu_per_layer:.1f}); "
            f"{decode.worst_tokens_per_s:.1f} tokens/s at {decode.worst_hit_rate:.0%}, if routing had no locality",
        )
    else:
        _say(console, f"decode, one stream: about {decode.tokens_per_s:.1f} tokens/s")
    _say(console, f"costs behind these figures: {report.costs.source}")
    for lever in report.levers:
        _say(
            console,
            f"{lever.setting}: {lever.slots:,} slots, {lever.kv_tokens:,} tokens of KV, about "
            f"{lever.tokens_per_s:.1f} tokens/s ({lever.note})",
        )
    for note in report.notes:
        _say(console, f"note: {note}")


def print_profile(profile: BandwidthProfile, console: Console, title: str, sentence: str) -> None:
    """Every sample, the fitted costs, and what follows."""
    counts = sorted(
        {int(s["records"]) for samples in profile.figures["samples"].values() for s in samples if s["tokens"] == 1}
    )
    table = Table(title=title, title_justify="left")
    table.add_column("GB/s")
    for count in counts:
        table.add_column(f"{count} expert{'s' if count > 1 else ''}", justify="right")
    table.add_column("fixed", justify="right")
    table.add_column("rate", justify="right")
    for name, what in _SIDES:
        side: SideCost = getattr(profile.costs, name)
        cells = []
        for count in counts:
            found = [
                float(s["gbps"]) for s in profile.figures["samples"][name] if s["records"] == count and s["tokens"] == 1
            ]
            cells.append(f"{sum(found) / len(found):.1f}" if found else "")
        table.add_row(what, *cells, f"{side.fixed_ns / 1e3:.1f} us", f"{side.gbps:.1f}")
    console.print(table)
    disk = f", disk {profile.disk_gbps:.2f} GB/s past the page cache" if profile.disk_gbps else ""
    _say(console, f"memory read by CpuExecutor's threads: {profile.dram_gbps:.1f} GB/s{disk}")
    _say(console, f"a further token of the same expert costs the CPU {_route_share(profile.costs):.0%} of the first")
    _say(console, sentence)


def _route_share(costs: CostModel) -> float:
    return costs.cpu.route_byte_ns / costs.cpu.byte_ns


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
