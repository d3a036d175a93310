"""Recording the routes of a serving engine into a trace file; calls, not messages of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TraceWish:
    """ApiFront -> Controller -> ExpertCache: begin a recording, end it, or tell of the last one. ``name``: of the new
    file in ``experts.trace_dir``, empty: chosen there. ``max_bytes``: the file's limit, unset: as much as is usual."""

    action: Literal["start", "stop", "show"]
    name: str = ""
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TraceRecording:
    """The recording under way, or the last one. ``unrecorded`` publishes found the server's buffer full; ``ended``: why
    it ended, empty while it is under way; ``seconds``: how long it has lasted."""

    path: str
    model: str
    started_s: float
    seconds: float
    num_bytes: int
    max_bytes: int
    publishes: int
    tokens: float
    unrecorded: int
    ended: str = ""

    @property
    def name(self) -> str:
        """Of the file."""
        return self.path.rpartition("/")[2]
