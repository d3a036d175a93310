"""The supervisor's record of each actor, and its limits."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from dataclasses import dataclass, field

from freetoken.config.schema import HealthConfig
from freetoken.engine.lifecycle import ActorHandle, Progress
from freetoken.messages import ActorName, ActorState, ActorStatus

RESTART_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class SupervisionPolicy:
    """Time limits in seconds; nothing the supervisor awaits is without one. ``ping_interval_s`` None: no pings.

    ``start_attempts``: how often one actor may die before the group was ready for the first time.
    """

    ping_interval_s: float | None = 2.0
    ping_timeout_s: float = 10.0
    loading_silence_s: float = 60.0
    create_timeout_s: float = 60.0
    load_timeout_s: float = 3600.0
    pause_timeout_s: float = 10.0
    first_wire_timeout_s: float = 600.0
    wire_timeout_s: float = 60.0
    share_timeout_s: float = 20.0
    resume_timeout_s: float = 10.0
    close_timeout_s: float = 10.0
    max_restarts: int = 16
    start_attempts: int = 3

    @classmethod
    def from_config(cls, health: HealthConfig) -> SupervisionPolicy:
        """The limits a user sets, and the defaults of the others."""
        return cls(
            ping_interval_s=health.ping_interval_s,
            ping_timeout_s=health.ping_timeout_s,
            loading_silence_s=max(60.0, health.ping_timeout_s),
            pause_timeout_s=max(10.0, health.ping_timeout_s),
            load_timeout_s=health.load_timeout_s,
            max_restarts=health.max_restarts,
        )


@dataclass(slots=True)
class Member:
    """One actor. ``handle`` is None while there is no process; ``loaded`` when it can be wired; ``touched`` when it was
    wired since it last was paused; ``holds_store`` when it could hand the store to a new WeightStreamer;
    ``awaits_store`` when it is such a new WeightStreamer."""

    name: ActorName
    handle: ActorHandle | None = None
    preparing: asyncio.Task[None] | None = None
    loaded: bool = False
    touched: bool = False
    holds_store: bool = False
    awaits_store: bool = False
    must_read_store: bool = False
    restarts: int = 0
    deaths: deque[float] = field(default_factory=deque)
    reason: str = ""
    progress: Progress = (0, 0, "")
    status: ActorStatus | None = None
    last_status: ActorStatus | None = None
    status_s: float = 0.0
    led_to: ActorState = ActorState.LOADING
    led_s: float = 0.0
    pinging: bool = False

    def record_status(self, status: ActorStatus, asked_s: float) -> None:
        """The actor's account of itself in answer to a question of ``asked_s``, unless a newer one came first;
        ``last_status`` outlives its process."""
        if self.status is None or asked_s >= self.status_s:
            self.status = self.last_status = status
            self.status_s = asked_s

    def record_transition(self, state: ActorState, now: float) -> None:
        """The actor has told that it did what brings it into ``state``: accounts from before that are out of date."""
        self.led_to, self.led_s = state, now

    def record_death(self, reason: str, now: float) -> None:
        """Forget the process and count it."""
        self.handle = None
        self.preparing = None
        self.status = None
        self.led_to = ActorState.LOADING
        self.loaded = self.touched = self.holds_store = self.awaits_store = False
        self.progress = (0, 0, "")
        self.reason = reason
        self.restarts += 1
        self.deaths.append(now)

    def recent_deaths(self, now: float) -> int:
        """Deaths within the restart window."""
        while self.deaths and self.deaths[0] < now - RESTART_WINDOW_S:
            self.deaths.popleft()
        return len(self.deaths)

    def restart_delay_s(self, now: float) -> float:
        """Grows with every death within the window; the first restart is immediate."""
        return 0.0 if (recent := self.recent_deaths(now)) <= 1 else min(5.0, 0.05 * 2.0 ** (recent - 2))

    def describe(self, epoch: int) -> ActorStatus:
        """What can be said without asking the actor. One that is busy owes the newest figures, not what it is."""
        if self.status is not None and self.status_s >= self.led_s:
            return self.status
        if self.status is not None:
            return dataclasses.replace(self.status, state=self.led_to, epoch=epoch)
        state = self.led_to if self.handle or self.preparing else ActorState.DEAD
        return ActorStatus(self.name, state, self.handle.pid if self.handle else 0, epoch, 0.0, detail=self.reason)
