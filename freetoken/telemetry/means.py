"""Moving figures."""

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
