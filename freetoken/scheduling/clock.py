"""Moving figures of steps."""

from __future__ import annotations

from freetoken.scheduling.chunk_costs import ChunkCosts
from freetoken.telemetry import Ewma


class StepClock:
    """How long steps take, and how long the device waits between two of them while there is work."""

    def __init__(self) -> None:
        self.step_ms = Ewma()
        self.gap_ms = Ewma()
        self.planning_ms = Ewma()
        self.reservation_ms = Ewma()
        self.chunk_costs = ChunkCosts()
        self._busy_since_ns: int | None = None

    def step_done(self, started_ns: int, finished_ns: int, more_work: bool) -> None:
        """One result. A gap is measured from the end of the step before, unless that one left nothing to do."""
        self.step_ms.add((finished_ns - started_ns) / 1e6)
        if self._busy_since_ns is not None:
            self.gap_ms.add(max(started_ns - self._busy_since_ns, 0) / 1e6)
        self._busy_since_ns = finished_ns if more_work else None

    def reset(self) -> None:
        """Forget the step before (a new epoch)."""
        self._busy_since_ns = None

    def metrics(self) -> dict[str, float]:
        """Means in milliseconds of what has been measured so far."""
        means = {
            "step_ms": self.step_ms.value,
            "step_gap_ms": self.gap_ms.value,
            "planning_ms": self.planning_ms.value,
            "reservation_ms": self.reservation_ms.value,
            **self.chunk_costs.metrics(),
        }
        return {key: value for key, value in means.items() if value is not None}
