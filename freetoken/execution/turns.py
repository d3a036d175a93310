"""Whose turn it is on a device that runs a background step between ordinary ones, a group of layers at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

from freetoken.telemetry import Ewma

_ALPHA = 0.2
_MAX_STEPS = 16
_FALLBACK_LAYERS = 4


class Turn(NamedTuple):
    """``layers`` of the background step, then ``steps`` ordinary ones if there are so many."""

    layers: int
    steps: int


def plan_turn(layer_s: float | None, step_s: float | None, share: float) -> Turn:
    """As many layers as leave one ordinary step ``share`` of the turn's time; where a single layer takes longer than
    that, so many steps for each layer. One layer while nothing is known of layers, or of steps a few."""
    if layer_s is None:
        return Turn(1, 1)
    if step_s is None or layer_s <= 0.0:
        return Turn(_FALLBACK_LAYERS, 1)
    allowed_s = step_s * (1.0 - share) / share
    if allowed_s >= layer_s:
        return Turn(int(allowed_s / layer_s), 1)
    return Turn(1, min(math.ceil(layer_s / max(allowed_s, 1e-9) - 1e-6), _MAX_STEPS))


class TurnClock:
    """Measured times behind ``plan_turn``. Written by one thread at a time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._layer_s = Ewma(_ALPHA)
        self._alone_s = Ewma(_ALPHA)
        self._beside_s = Ewma(_ALPHA)

    def layers_done(self, layers: int, seconds: float) -> None:
        """A group of layers took so long."""
        self._layer_s.add(seconds / layers)

    def step_done(self, seconds: float, beside: bool) -> None:
        """A decode step took so long, ``beside`` a background step or not."""
        (self._beside_s if beside else self._alone_s).add(seconds)

    def turn(self) -> Turn:
        """The next turn. Steps beside a background step may be slowed down by it (its copies share the bus), and what
        decoding is to keep is a share of its pace alone: the shorter time counts."""
        times = [mean.value for mean in (self._alone_s, self._beside_s) if mean.value is not None]
        return plan_turn(self._layer_s.value, min(times, default=None), self._share)

    def metrics(self) -> dict[str, float]:
        """Means in milliseconds of what has been measured so far."""
        means = {"layer_ms": self._layer_s, "decode_alone_ms": self._alone_s, "decode_beside_ms": self._beside_s}
        return {name: mean.value * 1e3 for name, mean in means.items() if mean.value is not None}
