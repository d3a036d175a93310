"""Moving memory between the arena's pools while steps run: the pool that shrinks is vacated, then the other grows.

``resize_id`` names one change; later ones have higher ids. Until ``ArenaResized`` the change may still be undone, and
the pool that was vacated gets its places back then.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.messages.kv import KVStats


@dataclass(frozen=True, slots=True)
class ResizeArena:
    """Controller -> GpuExecutor: divide the arena like this (granules)."""

    epoch: int
    resize_id: int
    slot_granules: int
    kv_granules: int


@dataclass(frozen=True, slots=True)
class ShrinkKV:
    """GpuExecutor -> Scheduler: have KV blocks vacated, at a moment when no background step writes any."""

    epoch: int
    resize_id: int
    num_kv_blocks: int


@dataclass(frozen=True, slots=True)
class VacatePool:
    """GpuExecutor -> ExpertCache (slots), Scheduler -> KVAllocator (blocks): name no place from ``capacity`` on for
    anything new."""

    epoch: int
    resize_id: int
    capacity: int


@dataclass(frozen=True, slots=True)
class PoolVacated:
    """What has to be copied, as two lists of places. ``refusal``: why it is not possible;
    nothing was changed then.

    ExpertCache -> GpuExecutor: it goes on naming the old places until ``RecordsMoved``. KVAllocator -> Scheduler ->
    GpuExecutor: whatever comes after it, grants and plans, names the new places, and nothing before it does;
    ``stats`` are the figures since.
    """

    epoch: int
    resize_id: int
    sender: str
    moved_from: tuple[int, ...] = ()
    moved_to: tuple[int, ...] = ()
    refusal: str = ""
    stats: KVStats | None = None


@dataclass(frozen=True, slots=True)
class RecordsMoved:
    """GpuExecutor -> ExpertCache: the copies are complete, name the new places from now on; or (``made`` false) nothing
    moves after all."""

    epoch: int
    resize_id: int
    made: bool


@dataclass(frozen=True, slots=True)
class PlacesLeft:
    """ExpertCache -> GpuExecutor: no plan from now on names an old place."""

    epoch: int
    resize_id: int


@dataclass(frozen=True, slots=True)
class ArenaResized:
    """GpuExecutor -> ExpertCache, KVAllocator, Controller: the change was made, or (``failure``) it was not. There is
    room for so many records now; owners with a smaller table grow to it."""

    epoch: int
    resize_id: int
    num_slots: int
    num_kv_blocks: int
    failure: str = ""
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVResized:
    """KVAllocator -> Scheduler: it has more blocks now."""

    epoch: int
    stats: KVStats


@dataclass(frozen=True, slots=True)
class BlocksShort:
    """Scheduler -> Controller, at most every 250 ms: so many requests wait for KV blocks while there is a place for
    them, and together lack so many blocks; or so many have longer prompts than KV holds, and the longest lacks so
    many."""

    epoch: int
    num_requests: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RebalanceWish:
    """ApiFront -> Controller (a call): exactly one of KV for at least so many tokens, slots of at most so many bytes,
    and ``auto``: whatever is worth most."""

    kv_tokens: int | None = None
    expert_bytes: int | None = None
    auto: bool = False


@dataclass(frozen=True, slots=True)
class RebalanceRecord:
    """One decision and what became of it. ``outcome`` is "done", "unchanged", "held back: " and why, or why it failed
    (all is as before then).
    ``slot_ms_per_s`` and ``kv_ms_per_s``: what one more granule on that side was estimated to save."""

    time_s: float
    trigger: str
    reason: str
    outcome: str
    slots_before: int
    slots_after: int
    kv_tokens_before: int
    kv_tokens_after: int
    slot_ms_per_s: float = 0.0
    kv_ms_per_s: float = 0.0
    moved_bytes: int = 0
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ElasticView:
    """The Controller's account of moving memory; decisions newest first. ``mode``: "virtual" or "reallocate" (see
    ``elastic.mode``), or "" where memory cannot move; ``cost``: what a change takes then. ``idle_reason``: why the last
    look changed nothing, or why memory cannot move."""

    elastic: bool
    auto: bool
    busy: bool
    granule_bytes: int
    granules: int
    decisions: tuple[RebalanceRecord, ...] = ()
    idle_reason: str = ""
    mode: str = ""
    cost: str = ""
