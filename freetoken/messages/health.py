"""The engine's health as the Controller judges it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class HealthState(str, enum.Enum):
    """The engine as a whole. ``DEGRADED``: not answering now, either recovering or given up."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    STOPPING = "stopping"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class HealthView:
    """The Controller's judgement. ``done_bytes`` of ``total_bytes`` (0: unknown) of ``what`` are loaded."""

    state: HealthState
    detail: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    what: str = ""
