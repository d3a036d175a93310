"""What a launch cannot do without, in bytes, and what it is refused with when the machine has less. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.config import EngineConfig
from freetoken.elastic.arena_shape import LEAST_GRANULES, alignment_of, choose_granule
from freetoken.elastic.machine import MachineInfo
from freetoken.errors import CapacityError
from freetoken.models.spec import ModelSpec
from freetoken.units import align_up, format_bytes

HOST_RESERVE_BYTES = 1 << 30
CARD_RESERVE_BYTES = 512 << 20
"""Of a card's free memory, left to fragmentation and other processes. CUDA itself is part of the plan's workspace."""

AGENT_CONTEXT_TOKENS = 32768
"""What a coding agent's first request needs."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BootNeeds:
    """``context``: tokens of the longest request. ``slot_bytes``: of one expert slot, 0 without experts."""

    config: EngineConfig
    model: ModelSpec
    dense_bytes: int
    expert_bytes: int
    workspace_bytes: int
    slot_bytes: int
    block_bytes: int
    context: int

    @property
    def store_bytes(self) -> int:
        """All weights, in host memory."""
        return self.dense_bytes + self.expert_bytes

    @property
    def is_in_place(self) -> bool:
        """Whether the device has no budget, and reads experts where they are."""
        return self.config.device == "cpu" and self.config.vram is None

    @property
    def fixed_bytes(self) -> int:
        """Of a budget, whatever becomes of the rest."""
        return self.dense_bytes + self.workspace_bytes

    @property
    def num_records(self) -> int:
        """Experts of all layers."""
        return len(self.model.moe_layers) * self.model.num_experts if self.model.is_moe else 0

    @property
    def least_blocks(self) -> int:
        """Of KV: what was asked for, else enough to run at all."""
        return self.blocks_of(self._asked[1]) if self._asked[1] else self._usable_blocks

    @property
    def _asked(self) -> tuple[str, int | None]:
        """The setting that KV must hold."""
        if self.config.kv.num_tokens is not None:
            return "kv.num_tokens", self.config.kv.num_tokens
        return "max_context_tokens", self.config.max_context_tokens

    @property
    def _usable_blocks(self) -> int:
        return min(self.blocks_of(self.context), 2)

    def blocks_of(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.config.kv.block_size)

    @property
    def wanted_blocks(self) -> int:
        """Of KV: what was asked for, else an agent's context."""
        return self.blocks_of(self._asked[1] or min(self.context, AGENT_CONTEXT_TOKENS))

    # ------------------------------------------------------------------------------------------ slots

    @property
    def _step_bytes(self) -> int:
        """Slots of one token's experts in one layer."""
        top_k = self.model.num_experts_per_tok if self.model.is_moe else 0
        return min(top_k, self.num_records) * self.slot_bytes

    def granule_bytes(self, room: int) -> int:
        """Of an arena in so much memory, at most; 0 where none is built."""
        elastic = self.config.elastic
        if not elastic.enabled or not self.model.is_moe:
            return 0
        return choose_granule(room, alignment_of(self.config.device), elastic.granule_bytes)

    def _beside_kv(self, room: int) -> int:
        """A step's slots in whole granules, and what KV's last granule may take more than KV."""
        granule = self.granule_bytes(room)
        return align_up(self._step_bytes, granule) + granule if granule else self._step_bytes

    def _elastic_bytes(self, room: int, kv_bytes: int) -> int:
        """Of slots, beside so much KV: with less the arena would not be elastic."""
        granule = self.granule_bytes(room)
        least = (LEAST_GRANULES + 1) * granule + self.slot_bytes - kv_bytes if granule else 0
        return max(self._beside_kv(room), least)

    def slot_reserve(self, room: int, kv_bytes: int) -> int:
        """Of ``room`` for slots and KV, what slots keep beside so much KV: a step's experts, and what makes the arena
        elastic where that fits."""
        elastic = self._elastic_bytes(room, kv_bytes)
        return elastic if kv_bytes + elastic <= room else self._step_bytes

    def most_slot_reserve(self, kv_bytes: int) -> int:
        """No ``room`` makes ``slot_reserve`` greater."""
        return self._elastic_bytes(1 << 62, kv_bytes)

    def kv_blocks(self, room: int, wanted: int) -> int:
        """As many of the wanted blocks as fit beside the slots' reserve."""
        reserve = self.slot_reserve(room, self._usable_blocks * self.block_bytes)
        return min(wanted, max(0, room - min(reserve, self._beside_kv(room))) // self.block_bytes)

    def budget_for(self, num_blocks: int) -> int:
        """A budget that holds so much KV and an elastic arena, in whole MiB."""
        kv_bytes = num_blocks * self.block_bytes
        budget = align_up(self.fixed_bytes + kv_bytes + self._step_bytes, _MIB)
        while True:
            needed = self.fixed_bytes + kv_bytes + self._elastic_bytes(budget - self.fixed_bytes, kv_bytes)
            if needed <= budget:
                return budget
            budget = align_up(needed, _MIB)

    # ------------------------------------------------------------------------------------------ refusals

    def check_in_place(self, machine: MachineInfo) -> int:
        """Host memory for KV, with experts read in place. Raises ``CapacityError``."""
        have = machine.available_bytes
        room = have - self._in_place_bytes(0)
        if room < self.least_blocks * self.block_bytes:
            ways = self._smaller_kv(room // self.block_bytes)
            raise self._refusal("host memory", have, self._in_place_bytes(self.least_blocks), ways)
        return room

    def check_budget(self, machine: MachineInfo) -> int:
        """The budget: what was asked for, or what is free on the card. Raises ``CapacityError``."""
        on_gpu = self.config.device == "cuda"
        host, card = machine.available_bytes, machine.device_total_bytes
        beside = self.store_bytes + HOST_RESERVE_BYTES  # in host memory, also where the budget is a card's
        if on_gpu and host < beside:
            raise self._refusal("host memory", host, beside, [])
        budget, limit = self.config.vram, card if on_gpu else host - beside
        if budget is None:
            limit = machine.device_free_bytes
            if limit is None:
                raise CapacityError(
                    "device=cuda without --vram takes what is free on the card, and no GPU could be asked for that; "
                    f"--vram {self.budget_for(self.wanted_blocks) // _MIB}MiB would work"
                )
            budget = max(limit - CARD_RESERVE_BYTES, 0) // _MIB * _MIB
        needed = self.budget_for(self.least_blocks)
        room = budget - self.fixed_bytes
        what, have, takes = f"the VRAM budget of {format_bytes(budget)}", budget, needed
        ways = []
        if limit is not None and budget > limit:
            most = (limit - CARD_RESERVE_BYTES if on_gpu else limit) // _MIB
            ways = [f"--vram {most}MiB"] if most * _MIB >= needed else []
            what, have, takes = (
                ("the card's memory", limit, budget) if on_gpu else ("host memory", host, budget + beside)
            )
        elif room < self.least_blocks * self.block_bytes + self._step_bytes:
            ways = self._smaller_kv(self.kv_blocks(room, self.least_blocks))
            ways += [f"--vram {needed // _MIB}MiB"] if limit is None or needed <= limit else []
        else:
            return budget
        if not ways and not on_gpu and host >= self._in_place_bytes(self.least_blocks):
            ways = ["no --vram, with experts read in place,"]
        if not ways:
            what, have, takes = (
                ("the card's memory", limit or 0, needed) if on_gpu else ("host memory", host, needed + beside)
            )
        raise self._refusal(what, have, takes, ways)

    def _in_place_bytes(self, num_blocks: int) -> int:
        return self.store_bytes + self.workspace_bytes + HOST_RESERVE_BYTES + num_blocks * self.block_bytes

    def _smaller_kv(self, num_blocks: int) -> list[str]:
        """The setting that would make KV so small, if it is set and that is enough to run."""
        name, asked = self._asked
        return (
            [f"{name}={num_blocks * self.config.kv.block_size}"] if asked and num_blocks >= self._usable_blocks else []
        )

    def _refusal(self, what: str, have: int, takes: int, ways: list[str]) -> CapacityError:
        name, asked = self._asked
        kv_bytes = self.least_blocks * self.block_bytes
        parts = [
            f"{format_bytes(self.dense_bytes)} dense weights",
            f"{format_bytes(self.expert_bytes)} experts in host memory",
            f"{format_bytes(self.workspace_bytes)} workspace",
            f"{format_bytes(kv_bytes)} KV" + (f" of {name}={asked}" if asked else ""),
        ]
        if self.num_records and not self.is_in_place:
            slots = self.budget_for(self.least_blocks) - self.fixed_bytes - kv_bytes
            parts.append(f"{format_bytes(slots)} for a step's expert slots and to trade with KV")
        text = (
            f"{what} is too little: the model takes {format_bytes(takes)} and there are {format_bytes(have)} "
            f"({', '.join(parts)})"
        )
        if not ways:
            ways = [f"{-(-takes // _MIB)}MiB of it", "a checkpoint with smaller weights"]
        return CapacityError(f"{text}; {' or '.join(ways)} would work")
