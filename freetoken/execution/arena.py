"""The arena: expert slots and KV blocks, as two shared segments. Contents live as long as this process.

On the CPU device both are ordinary shared memory. A KV block record is
``[layer][k, v][block_size][kv_heads][head_dim]``; blocks follow each other without gaps.
"""

from __future__ import annotations

import uuid

from freetoken import _native
from freetoken.errors import CapacityError
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.launch_spec import LaunchSpec
from freetoken.units import format_bytes


class Arena:
    """Memory that dies with this process; ``arena_id`` tells its users whether it is still the same."""

    def __init__(self, kv: KVGeometry, num_slots: int, slot_stride_bytes: int) -> None:
        """Allocates and populates everything; slow for many gigabytes. ``CapacityError`` when memory is short."""
        self.arena_id = uuid.uuid4().hex
        self.kv = kv
        self.num_slots = num_slots
        self.slot_stride_bytes = slot_stride_bytes
        self.kv_segment = _allocate("kv", kv.size_bytes, "--set kv.num_tokens")
        self.slot_segment = (
            _allocate("slots", num_slots * slot_stride_bytes, "--vram") if num_slots * slot_stride_bytes else None
        )

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
        return cls(geometry, plan.num_slots, plan.slot_stride_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of both segments."""
        return self.kv.size_bytes + (self.slot_segment.size_bytes if self.slot_segment else 0)


def _allocate(what: str, size_bytes: int, flag: str) -> _native.SharedSegment:
    try:
        segment = _native.SharedSegment.create(f"freetoken-{what}", size_bytes)
        segment.populate()
    except (MemoryError, OSError) as error:
        raise CapacityError(
            f"{format_bytes(size_bytes)} for {what} are not available ({error}); lower {flag}"
        ) from error
    return segment
