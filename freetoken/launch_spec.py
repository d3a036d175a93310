"""What every actor is started with: settings, model and resolved plan. Immutable and picklable; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.config import EngineConfig
from freetoken.costs import CostModel
from freetoken.models.spec import ModelSpec
from freetoken.quant.record import RecordLayout


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """The boot plan's outcome; all numbers final. ``in_place``: no VRAM budget on the CPU device, so the device reads
    every record from the store and there are no slots. ``staging_bytes``: of a GPU, for prefill. ``costs``: what misses
    cost, as far as it was measured; None: assume. ``budget_bytes``: of the device, as set or as found free on the card;
    None: it has none of its own."""

    kv_block_size: int
    num_kv_blocks: int
    kv_dtype: str
    max_context_tokens: int
    num_slots: int
    slot_stride_bytes: int
    dense_bytes: int
    workspace_bytes: int
    store_bytes: int
    cpu_threads: int
    device_threads: int
    cpu_core_ids: tuple[int, ...]
    device_core_ids: tuple[int, ...]
    spin_us: int
    max_batch_tokens: int
    in_place: bool = False
    staging_bytes: int = 0
    costs: CostModel | None = None
    budget_bytes: int | None = None

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits."""
        return self.num_kv_blocks * self.kv_block_size


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """``checkpoint`` is the FTW directory (converted first where needed); ``layouts`` its record layouts, and
    ``layer_layout[i]`` the index into them of expert layer ordinal i."""

    config: EngineConfig
    model: ModelSpec
    plan: ResolvedPlan
    checkpoint: str
    fingerprint: str
    served_model_name: str
    layouts: tuple[RecordLayout, ...] = ()
    layer_layout: tuple[int, ...] = ()
