"""How the arena's memory is divided: granules of one physical budget, dealt to pools of records. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.config import EngineConfig
from freetoken.launch_spec import LaunchSpec, ResolvedPlan
from freetoken.models.spec import ModelSpec
from freetoken.units import align_up

DEFAULT_GRANULE_BYTES = 32 << 20
"""Moving 1 GiB from pool to pool takes 2 ms in granules of this size on an H200, 29 ms in granules of 2 MiB."""
CUDA_ALIGNMENT_BYTES = 2 << 20
HOST_ALIGNMENT_BYTES = 4096
LEAST_GRANULES = 16
"""With fewer, nothing is traded."""
_MIN_GRANULES = 64
"""Small budgets get smaller granules, until so many fit: what cannot be dealt is lost."""


@dataclass(frozen=True, slots=True)
class ArenaSplit:
    """Granules of each pool."""

    slot_granules: int
    kv_granules: int

    @property
    def total(self) -> int:
        """Granules in use."""
        return self.slot_granules + self.kv_granules


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """What does not change while the engine lives. ``max_slots``: records of the model; ``min_slots``: of one layer's
    top-k. ``min_blocks``: of KV, whatever is asked for; ``context_blocks``: of one request of the longest context that
    was announced, which no automatic decision takes away."""

    granule_bytes: int
    num_granules: int
    slot_stride_bytes: int
    block_bytes: int
    block_size: int
    max_slots: int
    min_slots: int
    min_blocks: int
    context_blocks: int = 0

    @property
    def budget_bytes(self) -> int:
        """What all pools together never exceed."""
        return self.num_granules * self.granule_bytes

    def slots_in(self, granules: int) -> int:
        """Whole slots in so many granules; never more than there are records."""
        return min(granules * self.granule_bytes // self.slot_stride_bytes, self.max_slots)

    def blocks_in(self, granules: int) -> int:
        """Whole KV blocks in so many granules."""
        return granules * self.granule_bytes // self.block_bytes

    def granules_for_slots(self, num_slots: int) -> int:
        """Fewest granules that hold so many slots."""
        return -(-num_slots * self.slot_stride_bytes // self.granule_bytes)

    def granules_for_blocks(self, num_blocks: int) -> int:
        """Fewest granules that hold so many KV blocks."""
        return -(-num_blocks * self.block_bytes // self.granule_bytes)

    @property
    def min_kv_granules(self) -> int:
        """Fewest granules of KV."""
        return max(self.granules_for_blocks(self.min_blocks), 1)

    @property
    def max_kv_granules(self) -> int:
        """All granules but those of the fewest slots."""
        return self.num_granules - self.granules_for_slots(self.min_slots)

    def split(self, kv_granules: int) -> ArenaSplit:
        """So many granules of KV; slots get the others, but no more than all records take."""
        slots = min(self.num_granules - kv_granules, self.granules_for_slots(self.max_slots))
        return ArenaSplit(slots, kv_granules)

    def figures(self, split: ArenaSplit) -> dict[str, float]:
        """A division in numbers, by the naming rule of ``ActorStatus.metrics``."""
        return {
            "granule_bytes": float(self.granule_bytes),
            "granules": float(self.num_granules),
            "slot_granules": float(split.slot_granules),
            "kv_granules": float(split.kv_granules),
            "budget_bytes": float(self.budget_bytes),
        }


def is_elastic(config: EngineConfig, plan: ResolvedPlan) -> bool:
    """Whether pools trade memory: with a budget, and slots to trade with."""
    return config.elastic.enabled and plan.budget_bytes is not None and plan.num_slots > 0


def why_rigid(config: EngineConfig, model: ModelSpec, plan: ResolvedPlan) -> str:
    """Why slots and KV of a launch share no memory; "" where they do."""
    if not model.is_moe:
        return "the model has no experts"
    if plan.budget_bytes is None:
        return "there is no VRAM budget (--vram), and experts are read in place"
    if not config.elastic.enabled:
        return "elastic.enabled is false"
    if divide_arena(config, model, plan) is None:
        return (
            f"--vram leaves {plan.num_slots} expert slots beside KV of {plan.kv_capacity_tokens} tokens, too little to "
            f"trade; a larger --vram or a smaller kv.num_tokens is needed"
        )
    return ""


def plan_arena(spec: LaunchSpec) -> tuple[ArenaShape, ArenaSplit] | None:
    """The arena of a launch and how it begins; None where it is not elastic, see ``why_rigid``."""
    return divide_arena(spec.config, spec.model, spec.plan)


def divide_arena(config: EngineConfig, model: ModelSpec, plan: ResolvedPlan) -> tuple[ArenaShape, ArenaSplit] | None:
    """The budget is what the boot plan gave to slots and KV, in whole granules that fit the device's; KV gets what was
    planned for it, slots the rest. None too when so few granules remain that nothing could be traded."""
    if not is_elastic(config, plan) or plan.budget_bytes is None:
        return None
    block_bytes = plan.kv_block_size * model.kv_bytes_per_token({"f32": 4, "bf16": 2}[plan.kv_dtype])
    total = plan.num_slots * plan.slot_stride_bytes + plan.num_kv_blocks * block_bytes
    granule = choose_granule(total, alignment_of(config.device), config.elastic.granule_bytes)
    # What the boot plan left over may complete the last granules, so that experts which all fit still do.
    left = plan.budget_bytes - plan.dense_bytes - plan.workspace_bytes - plan.staging_bytes
    needed = -(-plan.num_slots * plan.slot_stride_bytes // granule) - (-plan.num_kv_blocks * block_bytes // granule)
    shape = ArenaShape(
        granule_bytes=granule,
        num_granules=min(max(left, total) // granule, needed),
        slot_stride_bytes=plan.slot_stride_bytes,
        block_bytes=block_bytes,
        block_size=plan.kv_block_size,
        max_slots=len(model.moe_layers) * model.num_experts,
        min_slots=min(model.num_experts_per_tok, plan.num_slots),
        min_blocks=min(2, plan.num_kv_blocks),
        context_blocks=min(-(-plan.max_context_tokens // plan.kv_block_size), plan.num_kv_blocks),
    )
    kv = shape.granules_for_blocks(plan.num_kv_blocks)
    if shape.num_granules < LEAST_GRANULES or not shape.min_kv_granules <= kv <= shape.max_kv_granules:
        return None
    return shape, shape.split(kv)


def alignment_of(device: str) -> int:
    """Bytes of what a device can map at once."""
    return CUDA_ALIGNMENT_BYTES if device == "cuda" else HOST_ALIGNMENT_BYTES


def choose_granule(total_bytes: int, alignment_bytes: int, wanted_bytes: int | None = None) -> int:
    """Bytes of a granule: a multiple of what the device can map."""
    if wanted_bytes is not None:
        return align_up(max(wanted_bytes, 1), alignment_bytes)
    granule = max(DEFAULT_GRANULE_BYTES, alignment_bytes)
    while granule > alignment_bytes and total_bytes // granule < _MIN_GRANULES:
        granule //= 2
    return granule
