"""The group's phases, and the order in which actors are resumed and closed."""

from __future__ import annotations

import enum

from freetoken.messages import ACTOR_NAMES, ActorName, HealthState


class Phase(str, enum.Enum):
    """``FAILED``: the first start ended with an error for the user. ``GAVE_UP``: an actor died too often."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    GAVE_UP = "gave_up"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


HEALTH = {
    Phase.STARTING: HealthState.LOADING,
    Phase.READY: HealthState.READY,
    Phase.RECOVERING: HealthState.DEGRADED,
    Phase.GAVE_UP: HealthState.DEGRADED,
    Phase.FAILED: HealthState.DEGRADED,
    Phase.STOPPING: HealthState.STOPPING,
    Phase.STOPPED: HealthState.STOPPING,
}

STORE_HOLDERS = (ActorName.CONTROLLER, ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR)
"""Who can hand the store to a new WeightStreamer once wired, in the order they are asked."""

RESUME_STAGES = (
    tuple(name for name in ACTOR_NAMES if name not in (ActorName.SCHEDULER, ActorName.API_FRONT)),
    (ActorName.SCHEDULER,),
    (ActorName.API_FRONT,),
)
CLOSE_STAGES = (
    (ActorName.API_FRONT,),
    (ActorName.SCHEDULER,),
    (ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR),
    (ActorName.WEIGHT_STREAMER, ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR),
)
