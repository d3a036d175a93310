"""Moving figures of steps."""

from __future__ import annotations


class Ewma:
    """Exponentially weighted mean; the first sample counts in full."""

    __slots__ = ("_alpha", "value")

    def __init__(self, alpha: float = 0.1) -> None:
        self._alpha = alpha
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Take one sample in."""
        self.value = sample if self.value is None else self.value + self._alpha * (sample - self.value)


class StepClock:
    """How long steps take, and how long the device waits between two of them while there is work."""

    def __init__(self) -> None:
        self.step_ms = Ewma()
        self.gap_ms = Ewma()
        self.planning_ms = Ewma()
        self.reservation_ms = Ewma()
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
        }
        return {key: value for key, value in means.items() if value is not None}
