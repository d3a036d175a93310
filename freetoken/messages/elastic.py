"""Moving memory between the arena's pools: a change of capacities that all owners of tables take part in.

Each actor keeps its tables as they are until the device has copied what moves (``ArenaResized``), so a change that ends
anywhere before has never happened. ``resize_id`` names one change and is not reused.
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
class ArenaPrepared:
    """GpuExecutor -> Scheduler: the memory is mapped where it will be used, the old division still serves. Capacities
    after the change; the change needs a moment without steps."""

    epoch: int
    resize_id: int
    num_slots: int
    num_kv_blocks: int


@dataclass(frozen=True, slots=True)
class VacatePool:
    """Scheduler -> ExpertCache (slots) and KVAllocator (blocks): no step runs or is planned. Say what has to move so
    that all records lie below ``capacity``, and wait for ``ArenaResized``."""

    epoch: int
    resize_id: int
    capacity: int


@dataclass(frozen=True, slots=True)
class PoolVacated:
    """ExpertCache, KVAllocator -> GpuExecutor: the records to be copied, as two lists of places. ``refusal`` when it is
    not possible, with the reason. ``evicted``: records that go."""

    epoch: int
    resize_id: int
    sender: str
    moved_from: tuple[int, ...] = ()
    moved_to: tuple[int, ...] = ()
    evicted: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ArenaResized:
    """GpuExecutor -> ExpertCache, KVAllocator, Controller: the change was made, or (``failure``) it was not and all is
    as before. Capacities as they are now."""

    epoch: int
    resize_id: int
    num_slots: int
    num_kv_blocks: int
    failure: str = ""
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResizeApplied:
    """ExpertCache, KVAllocator -> Scheduler: its table is true to the arena again. From KVAllocator: where blocks went
    (none when the change failed), and its figures."""

    epoch: int
    resize_id: int
    sender: str
    moved_from: tuple[int, ...] = ()
    moved_to: tuple[int, ...] = ()
    stats: KVStats | None = None


@dataclass(frozen=True, slots=True)
class BlocksShort:
    """Scheduler -> Controller, at most every 250 ms: so many requests wait for KV blocks while there is a place for
    them, and together lack so many blocks."""

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
    """One decision and what became of it. ``outcome`` is "done", "unchanged", or why it failed (all is as before then).
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
    look changed nothing."""

    elastic: bool
    auto: bool
    busy: bool
    granule_bytes: int
    granules: int
    decisions: tuple[RebalanceRecord, ...] = ()
    idle_reason: str = ""
    mode: str = ""
    cost: str = ""
