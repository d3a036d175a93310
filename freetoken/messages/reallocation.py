"""Dividing anew an arena that is ordinary memory: it is given up and allocated again; its contents and addresses go.

``ResizeArena`` begins it and ``ArenaResized`` answers the Controller, as where memory is moved (see
``messages/elastic.py``). In between requests hold no KV and no step runs. What GpuExecutor announces last is true of
the arena, by ``arena_id``, as at a wiring; so an epoch that ends in the middle needs no more than the next one's
``ArenaReady``.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.messages.kv import KVStats


@dataclass(frozen=True, slots=True)
class VacateArena:
    """GpuExecutor -> Scheduler: plan nothing until both tables are empty, and preempt every request. KV will have
    ``num_kv_blocks`` blocks."""

    epoch: int
    resize_id: int
    num_kv_blocks: int


@dataclass(frozen=True, slots=True)
class ArenaVacated:
    """Scheduler -> GpuExecutor: no step is under way and no request holds a block. Or why that is not wanted
    (``refusal``); then planning goes on at once."""

    epoch: int
    resize_id: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ArenaReplaced:
    """GpuExecutor -> ExpertCache, KVAllocator: the arena is another one, which holds nothing."""

    epoch: int
    resize_id: int
    arena_id: str
    num_slots: int
    num_kv_blocks: int


@dataclass(frozen=True, slots=True)
class PoolEmptied:
    """ExpertCache, KVAllocator -> Scheduler: its table is empty and true to the new arena. ``stats``: KVAllocator's."""

    epoch: int
    resize_id: int
    sender: str
    stats: KVStats | None = None
