"""Where the time of eager steps goes, by events on their stream. Off unless a bench asks for it."""

from __future__ import annotations

from collections import defaultdict

import torch


class Trace:
    """``mark`` ends a phase; ``milliseconds`` adds up the phases of each name."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, name: str, stream: torch.cuda.Stream | None = None) -> None:
        """What ran since the last mark is ``name``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        self._marks.append((name, event))

    def milliseconds(self) -> dict[str, float]:
        """Sums by name, after the device is idle; the first mark only starts the clock. Forgets all marks."""
        sums: defaultdict[str, float] = defaultdict(float)
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            sums[name] += before.elapsed_time(after)
        self._marks.clear()
        return dict(sums)
