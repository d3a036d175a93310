"""Descriptors of shared memory. The file descriptors themselves travel beside the message (SCM_RIGHTS), in the order of
the segments; the receiver owns the duplicates it gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One memfd segment. ``file_name`` is the FTW data file whose bytes it mirrors, at the same offsets."""

    file_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreShared:
    """WeightStreamer -> CpuExecutor, GpuExecutor, Controller (holder), and Controller -> a new WeightStreamer: the
    whole expert store and the dense weights, loaded and complete. ``checkpoint`` is the FTW directory it was read
    from."""

    epoch: int
    checkpoint: str
    fingerprint: str
    segments: tuple[SegmentInfo, ...]


@dataclass(frozen=True, slots=True)
class MailboxShared:
    """ExpertCache -> GpuExecutor, CpuExecutor: a fresh mailbox for this epoch (one descriptor)."""

    epoch: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaReady:
    """GpuExecutor -> ExpertCache, KVAllocator, Scheduler at every wiring. ``arena_id`` changes when the arena's
    contents were lost, and then the receiver empties its tables. ``resize_id`` is the last change of its division that
    was made (0: none): a table whose own change is still open makes it too if it is this one, else drops it.

    ``fetchable``: per store segment, the number of leading bytes that the device can read (a GPU: what CUDA could
    register); None means all of every segment.
    """

    epoch: int
    arena_id: str
    num_slots: int
    num_kv_blocks: int
    fetchable: tuple[int, ...] | None = None
    resize_id: int = 0
