"""The arena in device memory: expert slots, KV block records, staging for prefill."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import torch
from torch import Tensor

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit, plan_arena
from freetoken.errors import CapacityError
from freetoken.execution.arena_pools import KV, SLOTS, ArenaPools, Moves
from freetoken.execution.cuda.vmm import open_vmm, tensor_over
from freetoken.execution.division import Division
from freetoken.execution.granules import GranuleDriver, HostGranules
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.kernels.triton.placed_plan import move_records
from freetoken.kernels.triton.rope_kv import PagedKV
from freetoken.launch_spec import LaunchSpec
from freetoken.units import format_bytes

_MOVE_PROGRAMS = 512
TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class CudaArena:
    """Slots and KV die with this process; ``arena_id`` tells their users whether they are still the same.

    All addresses that kernels get come from here. They do not change but by ``reallocate``.
    """

    def __init__(
        self,
        kv: KVGeometry,
        num_slots: int,
        slot_stride_bytes: int,
        staging_bytes: int,
        device: torch.device,
        elastic: tuple[ArenaShape, ArenaSplit] | None = None,
        driver: GranuleDriver | None = None,
    ) -> None:
        """Raises ``CapacityError`` naming what to lower when device memory is short. ``driver`` of an elastic arena:
        where its granules come from; without one it is ordinary memory, see ``reallocate``."""
        self.arena_id = uuid.uuid4().hex
        self.kv = kv
        self.device = device
        self.slot_stride_bytes = slot_stride_bytes
        self.stream: torch.cuda.Stream | None = None
        """That of the steps; copies and clearing go to it."""
        self.shape = elastic[0] if elastic is not None else None
        self.pools: ArenaPools | None = None
        self.division = Division(elastic[1] if elastic is not None else ArenaSplit(0, 0), num_slots, kv.num_blocks)
        if elastic is not None and driver is not None:
            shape, split = elastic
            pools = self.pools = ArenaPools(shape, split, driver, num_slots, kv.num_blocks)
            self._kv_bytes = tensor_over(pools.where(KV), pools.capacity_bytes(KV), device)
            self.slots = tensor_over(pools.where(SLOTS), pools.capacity_bytes(SLOTS), device)
            self._clear_kv()
        else:
            self.reallocate(self.division)
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
        elastic, mode = plan_arena(launch), launch.config.elastic.mode
        driver = cls._driver(elastic, device) if mode != "reallocate" else None
        if driver is None and mode == "virtual":
            elastic = None
        return cls(geometry, plan.num_slots, plan.slot_stride_bytes, plan.staging_bytes, device, elastic, driver)

    @staticmethod
    def _driver(elastic: tuple[ArenaShape, ArenaSplit] | None, device: torch.device) -> GranuleDriver | None:
        if elastic is None:
            return None
        return open_vmm(device) if device.type == "cuda" else HostGranules(elastic[0].budget_bytes)

    @property
    def num_slots(self) -> int:
        """Slots there are now."""
        return self.pools.num_slots if self.pools is not None else self.division.num_slots

    @property
    def num_blocks(self) -> int:
        """KV blocks there are now."""
        return self.pools.num_blocks if self.pools is not None else self.division.num_blocks

    @property
    def size_bytes(self) -> int:
        """Bytes of memory."""
        staging = self.staging.numel()
        if self.pools is not None:
            return self.pools.shape.budget_bytes + staging
        return self.num_blocks * self.kv.block_bytes + self.num_slots * self.slot_stride_bytes + staging

    def reallocate(self, division: Division) -> None:
        """See ``DivisibleArena``. Nothing may use the memory any more, on any stream; whoever has its addresses needs
        the new ones. The staging buffer stays."""
        assert self.pools is None
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._kv_bytes = self.kv_data = self.slots = nothing
        if self.device.type == "cuda":  # blocks of torch's cache have the sizes of before
            torch.cuda.empty_cache()
        self.arena_id = uuid.uuid4().hex
        num_kv_bytes, num_slot_bytes = (
            division.num_blocks * self.kv.block_bytes,
            division.num_slots * self.slot_stride_bytes,
        )
        self._kv_bytes = _allocate("KV blocks", num_kv_bytes, "--set kv.num_tokens", self.device)
        self.slots = _allocate("expert slots", num_slot_bytes, "--vram", self.device)
        self.division = division
        self._clear_kv()

    def _clear_kv(self) -> None:
        """Zeros, so that no stale bit pattern is ever read as NaN."""
        self._kv_bytes[: self.num_blocks * self.kv.block_bytes].zero_()
        self.kv_data = self._kv_bytes.view(TORCH_DTYPES[self.kv.dtype])

    def move(self, pool: str, moves: Moves) -> None:
        """Copy records of ``pool`` (``SLOTS``, ``KV``) to places that hold nothing, on the steps' stream; awaits
        nothing."""
        pools = self.pools
        assert pools is not None
        pools.check_moves(pool, moves)
        with torch.cuda.stream(self.stream):
            if pool == SLOTS:
                self._move(self.slots, self.slot_stride_bytes, moves)
            else:
                self._move(self._kv_bytes, self.kv.block_bytes, moves)

    def commit(self) -> None:
        """Make the prepared division true, and clear the blocks that are new on the steps' stream; awaits nothing."""
        pools = self.pools
        assert pools is not None
        before = pools.num_blocks
        pools.commit()
        with torch.cuda.stream(self.stream):
            self._kv_bytes[before * self.kv.block_bytes : pools.num_blocks * self.kv.block_bytes].zero_()

    def mark(self) -> Callable[[], None]:
        """What waits, on any thread, until the steps' stream has done everything enqueued so far."""
        if self.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream or torch.cuda.current_stream(self.device))
        return event.synchronize

    def _move(self, data: Tensor, stride_bytes: int, moves: Moves) -> None:
        if moves:
            copies = torch.tensor(moves, dtype=torch.int64) * stride_bytes + data.data_ptr()
            # From pageable memory, and small: the driver takes its copy before the call returns, and the steps under
            # way are not waited for.
            move_records(copies.to(self.device, non_blocking=True), stride_bytes, _MOVE_PROGRAMS)

    def warm_up(self) -> None:
        """Compile what ``move`` launches: records are copied onto themselves."""
        if self.pools is not None:
            with torch.cuda.stream(self.stream):
                self._move(self.slots, self.slot_stride_bytes, [(0, 0)])
                self._move(self._kv_bytes, self.kv.block_bytes, [(0, 0)])

    def close(self) -> None:
        """Give granules and addresses back; nothing may use the arena any more."""
        if self.pools is not None:
            self.pools.granules.close()

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
