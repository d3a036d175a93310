"""Frozen dataclasses that cross actor boundaries. Standard library only.

Commands are imperative (``ReserveBlocks``), replies and events past tense (``BlocksReserved``). A message never
holds a tensor or a pointer: bulk data lies in shared memory and messages carry descriptors beside them.
"""

from freetoken.messages.actors import ACTOR_NAMES, ActorName, ActorState, ActorStatus, Wiring
from freetoken.messages.elastic import (
    ArenaPrepared,
    ArenaResized,
    BlocksShort,
    ElasticView,
    PoolVacated,
    RebalanceRecord,
    RebalanceWish,
    ResizeApplied,
    ResizeArena,
    VacatePool,
)
from freetoken.messages.health import HealthState, HealthView
from freetoken.messages.kv import (
    BlockCommit,
    BlockGrant,
    BlockNeed,
    BlocksReserved,
    KVStats,
    ReserveBlocks,
)
from freetoken.messages.reallocation import ArenaReplaced, ArenaVacated, PoolEmptied, VacateArena
from freetoken.messages.requests import (
    AbortRequest,
    Constraint,
    ConstraintKind,
    FinishReason,
    LogprobEntry,
    RequestFailure,
    RequestStats,
    SamplingParams,
    SubmitRequest,
    TokenBatch,
    TokenDelta,
)
from freetoken.messages.shared import ArenaReady, MailboxShared, SegmentInfo, StoreShared
from freetoken.messages.steps import (
    ActorsSuspected,
    ExpertCounters,
    RequestInit,
    RowResult,
    StepFailed,
    StepNotice,
    StepPlan,
    StepReport,
    StepResult,
    StepRow,
)
from freetoken.messages.tracing import TraceRecording, TraceWish

__all__ = [
    "ACTOR_NAMES",
    "AbortRequest",
    "ActorName",
    "ActorState",
    "ActorStatus",
    "ActorsSuspected",
    "ArenaPrepared",
    "ArenaReady",
    "ArenaReplaced",
    "ArenaResized",
    "ArenaVacated",
    "BlockCommit",
    "BlockGrant",
    "BlockNeed",
    "BlocksReserved",
    "BlocksShort",
    "Constraint",
    "ConstraintKind",
    "ElasticView",
    "ExpertCounters",
    "FinishReason",
    "HealthState",
    "HealthView",
    "KVStats",
    "LogprobEntry",
    "MailboxShared",
    "PoolEmptied",
    "PoolVacated",
    "RebalanceRecord",
    "RebalanceWish",
    "RequestFailure",
    "RequestInit",
    "RequestStats",
    "ReserveBlocks",
    "ResizeApplied",
    "ResizeArena",
    "RowResult",
    "SamplingParams",
    "SegmentInfo",
    "StepFailed",
    "StepNotice",
    "StepPlan",
    "StepReport",
    "StepResult",
    "StepRow",
    "StoreShared",
    "SubmitRequest",
    "TokenBatch",
    "TokenDelta",
    "TraceRecording",
    "TraceWish",
    "VacateArena",
    "VacatePool",
    "Wiring",
]
