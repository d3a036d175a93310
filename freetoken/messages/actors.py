"""Names, states and wiring of the eight actors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ActorName(str, enum.Enum):
    """The eight actors; the value is the actor's name in the ``freetoken`` namespace."""

    CONTROLLER = "Controller"
    SCHEDULER = "Scheduler"
    KV_ALLOCATOR = "KVAllocator"
    EXPERT_CACHE = "ExpertCache"
    WEIGHT_STREAMER = "WeightStreamer"
    CPU_EXECUTOR = "CpuExecutor"
    GPU_EXECUTOR = "GpuExecutor"
    API_FRONT = "ApiFront"

    def __str__(self) -> str:
        return self.value


ACTOR_NAMES: tuple[ActorName, ...] = tuple(ActorName)


class ActorState(str, enum.Enum):
    """What an actor is doing. ``created -> loading -> wired -> serving``, ``paused`` during recovery."""

    CREATED = "created"
    LOADING = "loading"
    WIRED = "wired"
    SERVING = "serving"
    PAUSED = "paused"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One actor's own account of itself, for ``/v1/actors`` and the live view.

    ``metrics`` holds numbers whose keys carry their unit and end up as Prometheus samples
    (``freetoken_<actor>_<key>``); keys ending in ``_total`` are counters, all others gauges.
    """

    name: ActorName
    state: ActorState
    pid: int
    epoch: int
    uptime_s: float
    restarts: int = 0
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Who can be reached where, for one epoch. Addresses are transport specific and opaque to the actors.

    An epoch is one uninterrupted life of the whole group; the Controller raises it at every recovery and messages
    of an older epoch are dropped by the receiver.
    """

    epoch: int
    addresses: dict[ActorName, str]
