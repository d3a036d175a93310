"""The arena: expert slots and KV blocks, as two shared segments. Contents live as long as this process.

On the CPU device both are ordinary shared memory, or, where memory can move between them, two ranges of addresses into
which granules of one segment are mapped. A KV block record is ``[layer][k, v][block_size][kv_heads][head_dim]``; blocks
follow each other without gaps.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np

from freetoken import _native
from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit, plan_arena
from freetoken.errors import CapacityError
from freetoken.execution.arena_pools import KV, SLOTS, ArenaPools, Moves
from freetoken.execution.division import Division
from freetoken.execution.granules import GranuleDriver, HostGranules
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.launch_spec import LaunchSpec
from freetoken.units import format_bytes


class Arena:
    """Memory that dies with this process; ``arena_id`` tells its users whether it is still the same."""

    def __init__(
        self,
        kv: KVGeometry,
        num_slots: int,
        slot_stride_bytes: int,
        elastic: tuple[ArenaShape, ArenaSplit] | None = None,
        driver: GranuleDriver | None = None,
        reallocates: bool = False,
    ) -> None:
        """Allocates and populates everything; slow for many gigabytes. ``CapacityError`` when memory is short.
        ``driver`` (of an elastic arena): whose ranges are segments. ``reallocates``: an elastic arena is ordinary
        memory all the same, see ``reallocate``."""
        self.arena_id = ""
        self.kv = kv
        self.slot_stride_bytes = slot_stride_bytes
        self.shape = elastic[0] if elastic is not None else None
        self.pools: ArenaPools | None = None
        self.slot_segment: _native.SharedSegment | None = None
        self._kv_segment: _native.SharedSegment | None = None
        self.division = Division(elastic[1] if elastic is not None else ArenaSplit(0, 0), num_slots, kv.num_blocks)
        if elastic is None or reallocates:
            self.reallocate(self.division)
        else:
            shape, split = elastic
            self.pools = ArenaPools(shape, split, driver or HostGranules(shape.budget_bytes), num_slots, kv.num_blocks)
            self._kv_segment, self.slot_segment = self.pools.where(KV), self.pools.where(SLOTS)
            self.arena_id = uuid.uuid4().hex

    @classmethod
    def of(cls, launch: LaunchSpec) -> Arena:
        """The arena that the boot plan decided on."""
        plan, model = launch.plan, launch.model
        geometry = KVGeometry(
            num_blocks=plan.num_kv_blocks,
            num_layers=model.num_layers,
            block_size=plan.kv_block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=plan.kv_dtype,
        )
        reallocates = launch.config.elastic.mode == "reallocate"
        return cls(geometry, plan.num_slots, plan.slot_stride_bytes, plan_arena(launch), reallocates=reallocates)

    @property
    def num_slots(self) -> int:
        """Slots there are now."""
        return self.pools.num_slots if self.pools is not None else self.division.num_slots

    @property
    def num_blocks(self) -> int:
        """KV blocks there are now."""
        return self.pools.num_blocks if self.pools is not None else self.division.num_blocks

    @property
    def kv_segment(self) -> _native.SharedSegment:
        """The KV blocks."""
        assert self._kv_segment is not None
        return self._kv_segment

    def reallocate(self, division: Division) -> None:
        """See ``DivisibleArena``. Segments that somebody still holds are given up with their last user."""
        assert self.pools is None
        self._kv_segment = self.slot_segment = None
        self.arena_id = uuid.uuid4().hex
        self._kv_segment = _allocate("kv", division.num_blocks * self.kv.block_bytes, "--set kv.num_tokens")
        if division.num_slots * self.slot_stride_bytes:
            self.slot_segment = _allocate("slots", division.num_slots * self.slot_stride_bytes, "--vram")
        self.division = division

    def move(self, pool: str, moves: Moves) -> None:
        """Copy records of ``pool`` (``SLOTS``, ``KV``) to places that hold nothing."""
        pools = self.pools
        assert pools is not None
        pools.check_moves(pool, moves)
        slots = pool == SLOTS
        stride = self.slot_stride_bytes if slots else self.kv.block_bytes
        segment = self.slot_segment if slots else self.kv_segment
        assert segment is not None
        bytes_of = np.frombuffer(memoryview(segment), np.uint8)
        for source, target in moves:
            bytes_of[target * stride : (target + 1) * stride] = bytes_of[source * stride : (source + 1) * stride]

    def commit(self) -> None:
        """Make the prepared division true."""
        assert self.pools is not None
        self.pools.commit()

    def mark(self) -> Callable[[], None]:
        """What waits until everything before was done. Here it was."""
        return lambda: None

    def close(self) -> None:
        """Unmap the granules; nothing may use the arena any more. Segments go with their last user."""
        if self.pools is not None:
            self.pools.granules.close()

    @property
    def size_bytes(self) -> int:
        """Bytes of memory."""
        if self.pools is not None:
            return self.pools.shape.budget_bytes
        return self.num_blocks * self.kv.block_bytes + self.num_slots * self.slot_stride_bytes


def _allocate(what: str, size_bytes: int, flag: str) -> _native.SharedSegment:
    try:
        segment = _native.SharedSegment.create(f"freetoken-{what}", size_bytes)
        segment.populate()
    except (MemoryError, OSError) as error:
        raise CapacityError(
            f"{format_bytes(size_bytes)} for {what} are not available ({error}); lower {flag}"
        ) from error
    return segment
