"""Hit rate and fills against capacity, as an SVG picture or as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from freetoken.experts.replay import ReplayResult

_COLOURS = {"crf": "#0072b2", "lru": "#d55e00", "belady": "#009e73", "static": "#888888"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 260, 60, 40, 90
_BAR = 40


def by_policy(results: Sequence[ReplayResult]) -> dict[str, list[ReplayResult]]:
    """Results of each policy by capacity."""
    series: dict[str, list[ReplayResult]] = {}
    for result in results:
        series.setdefault(result.policy, []).append(result)
    return {name: sorted(points, key=lambda point: point.num_slots) for name, points in series.items()}


def svg(title: str, results: Sequence[ReplayResult]) -> str:
    """Two panels side by side."""
    most = max((r.fills_per_token for r in results), default=1.0) or 1.0
    width, height = 2 * _WIDTH + _LEFT + _GAP + 20, _HEIGHT + _TOP + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_panel(_LEFT, "hit rate, %", results, lambda r: 100 * r.hit_ratio, 100.0),
        *_panel(_LEFT + _WIDTH + _GAP, "fills per token", results, lambda r: r.fills_per_token, most),
    ]
    x = _LEFT
    for name in by_policy(results):
        parts.append(f'<rect x="{x}" y="{height - 16}" width="12" height="4" fill="{_COLOURS.get(name, "black")}"/>')
        parts.append(f'<text x="{x + 18}" y="{height - 10}">{escape(name)}</text>')
        x += 90
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: float, label: str, results: Sequence[ReplayResult], value: Callable[[ReplayResult], float], top: float
) -> list[str]:
    bottom = _TOP + _HEIGHT
    parts = [f'<text x="{left}" y="{_TOP - 6}">{escape(label)}</text>']
    for i in range(5):
        y = bottom - _HEIGHT * i / 4
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{top * i / 4:.0f}</text>')
    for share in (0, 25, 50, 75, 100):
        x = left + _WIDTH * share / 100
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{share} %</text>')
    parts.append(f'<text x="{left + _WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">experts resident</text>')
    for name, points in by_policy(results).items():
        colour = _COLOURS.get(name, "black")
        places = [(left + _WIDTH * p.capacity, bottom - _HEIGHT * value(p) / top) for p in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    return parts


def bars(results: Sequence[ReplayResult]) -> list[str]:
    """One line for each policy and capacity."""
    most = max((r.fills_per_token for r in results), default=1.0) or 1.0
    lines = []
    for result in sorted(results, key=lambda r: r.num_slots):
        hits = "█" * round(_BAR * result.hit_ratio)
        fills = "▒" * round(_BAR * result.fills_per_token / most)
        lines.append(f"{100 * result.capacity:5.1f} % {result.policy:7}{hits:{_BAR}} {fills}")
    return lines
