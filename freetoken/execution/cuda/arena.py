"""The arena in device memory: expert slots, KV block records, staging for prefill."""

from __future__ import annotations

import uuid

import torch
from torch import Tensor

from freetoken.errors import CapacityError
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.kernels.triton.rope_kv import PagedKV
from freetoken.launch_spec import LaunchSpec
from freetoken.units import format_bytes

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class CudaArena:
    """Slots and KV die with this process; ``arena_id`` tells their users whether they are still the same.

    All addresses that kernels get come from here. They do not change while the object lives.
    """

    def __init__(
        self, kv: KVGeometry, num_slots: int, slot_stride_bytes: int, staging_bytes: int, device: torch.device
    ) -> None:
        """Raises ``CapacityError`` naming what to lower when device memory is short."""
        self.arena_id = uuid.uuid4().hex
        self.kv = kv
        self.device = device
        self.num_slots = num_slots
        self.slot_stride_bytes = slot_stride_bytes
        dtype = TORCH_DTYPES[kv.dtype]
        # Zeros, so that no stale bit pattern is ever read as NaN.
        self.kv_data = _allocate("KV blocks", kv.size_bytes, "--set kv.num_tokens", device).view(dtype).zero_()
        self.slots = _allocate("expert slots", num_slots * slot_stride_bytes, "--vram", device)
        self.staging = _allocate("prefill staging", staging_bytes, "--vram", device)

    @classmethod
    def of(cls, launch: LaunchSpec, device: torch.device) -> CudaArena:
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
        return cls(geometry, plan.num_slots, plan.slot_stride_bytes, plan.staging_bytes, device)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything."""
        return sum(t.numel() * t.element_size() for t in (self.kv_data, self.slots, self.staging))

    @property
    def slots_address(self) -> int:
        """Device address of slot 0 (0 when there are none)."""
        return self.slots.data_ptr() if self.slots.numel() else 0

    @property
    def staging_address(self) -> int:
        """Device address of the staging buffer (0 when there is none)."""
        return self.staging.data_ptr() if self.staging.numel() else 0

    def layer_kv(self, layer: int) -> PagedKV:
        """One layer of the paged KV, as kernels take it."""
        kv = self.kv
        size = self.kv_data.element_size()
        return PagedKV(
            data=self.kv_data,
            layer_offset=layer * kv.layer_bytes // size,
            block_stride=kv.block_bytes // size,
            block_size=kv.block_size,
            num_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
        )


def _allocate(what: str, size_bytes: int, flag: str, device: torch.device) -> Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        raise CapacityError(
            f"{format_bytes(size_bytes)} of device memory for {what} are not available ({format_bytes(free)} of "
            f"{format_bytes(total)} are free); lower {flag}"
        ) from error
