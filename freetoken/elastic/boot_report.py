"""What a boot plan means: where every byte goes, what speed to expect, and which setting would change that. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.config import EngineConfig
from freetoken.costs import CostModel
from freetoken.elastic.arena_shape import why_rigid
from freetoken.elastic.boot_needs import CARD_RESERVE_BYTES
from freetoken.elastic.boot_plan import (
    LONGER_STEPS_SHARE,
    MOST_BATCH_TOKENS,
    CheckpointSizes,
    kv_dtype_bytes,
    plan_boot,
    plan_cuda_bytes,
)
from freetoken.elastic.machine import MachineInfo, pinnable_bytes
from freetoken.errors import CapacityError
from freetoken.launch_spec import ResolvedPlan
from freetoken.models.spec import ModelSpec
from freetoken.quant.record import RecordLayout
from freetoken.units import format_bytes

# Of a layer beside its experts (attention, router, hand-off), nanoseconds: measured with Qwen3-30B-A3B on an H200
# (bench/results/gpu_decode_h200.json: 2.85 ms a token with everything resident); on the CPU device a guess.
_LAYER_NS = {"cuda": 36e3, "cpu": 40e3}
# Recorded routing traces of models with 128 experts: admission by recency and frequency has 91 % hits at 40 %
# residency. 1 - (1 - residency)^k through that point.
_LOCALITY = 4.7
_KV_DTYPES = ("f32", "bf16")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """``place``: device or host. ``note``: what the bytes are made of."""

    place: str
    what: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class DecodeEstimate:
    """Tokens/s of one stream, at a hit rate of ``hit_rate`` and as routing of real models has it, or as independent
    choices would (``worst``)."""

    tokens_per_s: float
    hit_rate: float
    worst_tokens_per_s: float
    worst_hit_rate: float
    fetches_per_layer: float
    cpu_per_layer: float


@dataclass(frozen=True, slots=True)
class Lever:
    """A setting that would move memory, and what that does."""

    setting: str
    slots: int
    kv_tokens: int
    tokens_per_s: float
    note: str


@dataclass(frozen=True, slots=True)
class BootReport:
    """``budget_bytes``: of the device; None when it has none of its own."""

    plan: ResolvedPlan
    device: str
    budget_bytes: int | None
    available_bytes: int
    rows: tuple[PlanRow, ...]
    num_records: int
    decode: DecodeEstimate
    costs: CostModel
    levers: tuple[Lever, ...]
    notes: tuple[str, ...]

    def total(self, place: str) -> int:
        """Bytes of one place."""
        return sum(row.bytes for row in self.rows if row.place == place)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        plan = self.plan
        return {
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "available_host_bytes": self.available_bytes,
            "rows": [{"place": r.place, "what": r.what, "bytes": r.bytes, "note": r.note} for r in self.rows],
            "total_bytes": {place: self.total(place) for place in ("device", "host")},
            "num_slots": plan.num_slots,
            "num_records": self.num_records,
            "kv_tokens": plan.kv_capacity_tokens,
            "kv_dtype": plan.kv_dtype,
            "max_batch_tokens": plan.max_batch_tokens,
            "max_context_tokens": plan.max_context_tokens,
            "cpu_threads": plan.cpu_threads,
            "decode": {
                "tokens_per_s": round(self.decode.tokens_per_s, 2),
                "hit_rate": round(self.decode.hit_rate, 4),
                "worst_tokens_per_s": round(self.decode.worst_tokens_per_s, 2),
                "worst_hit_rate": round(self.decode.worst_hit_rate, 4),
                "fetches_per_layer": round(self.decode.fetches_per_layer, 2),
                "cpu_per_layer": round(self.decode.cpu_per_layer, 2),
            },
            "costs": self.costs.to_json(),
            "levers": [
                {
                    "setting": lever.setting,
                    "num_slots": lever.slots,
                    "kv_tokens": lever.kv_tokens,
                    "tokens_per_s": round(lever.tokens_per_s, 2),
                    "note": lever.note,
                }
                for lever in self.levers
            ],
            "notes": list(self.notes),
        }


def report_boot(
    config: EngineConfig,
    model: ModelSpec,
    layouts: Sequence[RecordLayout],
    sizes: CheckpointSizes,
    machine: MachineInfo,
    costs: CostModel,
    plan: ResolvedPlan | None = None,
) -> BootReport:
    """Plan, unless there is a ``plan``, and explain. Raises what ``plan_boot`` raises."""
    plan = plan or plan_boot(config, model, layouts, sizes, machine)
    budget = plan.budget_bytes
    num_records = len(model.moe_layers) * model.num_experts if model.is_moe else 0
    shared = budget is None
    context = min(config.max_context_tokens or model.max_position_embeddings, model.max_position_embeddings)
    rows = _rows(config, model, sizes, plan, num_records, shared)
    estimate = estimate_decode(config.device, model, sizes, plan, costs)

    def try_setting(section: str, values: dict[str, Any]) -> tuple[ResolvedPlan, float] | None:
        part = getattr(config, section).model_copy(update=values)
        try:
            other = plan_boot(config.model_copy(update={section: part, "vram": budget}), model, layouts, sizes, machine)
        except CapacityError:
            return None
        return other, estimate_decode(config.device, model, sizes, other, costs).tokens_per_s

    notes = []
    if budget is not None and config.vram is None:
        notes.append(f"no --vram: the budget is what was free on the card, less {format_bytes(CARD_RESERVE_BYTES)}")
    elif budget is not None and machine.device_free_bytes is not None and budget > machine.device_free_bytes:
        notes.append(
            f"only {format_bytes(machine.device_free_bytes)} are free on the card now: too little for a launch"
        )
    elif config.device == "cuda" and machine.device_total_bytes is None:
        notes.append("no GPU could be asked for its memory: whether a card has so much is not known")
    pinnable = pinnable_bytes(machine.total_bytes)
    if config.device == "cuda" and sizes.expert_bytes > pinnable:
        notes.append(
            f"{format_bytes(sizes.expert_bytes - pinnable)} of the experts will not be pinned (no more than "
            f"{format_bytes(pinnable)} are, of {format_bytes(machine.total_bytes)}): they get slots by long prefill "
            f"only and run on the CPU otherwise, so decoding may be slower than estimated"
        )
    if budget is not None and model.is_moe and config.elastic.enabled:
        why = why_rigid(config, model, plan)
        notes += [f"memory cannot move between slots and KV: {why}"] if why else []
    if budget is not None and plan.num_slots == num_records and config.kv.num_tokens is not None:
        unused = budget - sum(row.bytes for row in rows if row.place == "device")
        if unused > budget // 16:
            notes.append(
                f"{format_bytes(unused)} of the budget are not used: all experts have slots, and KV is kv.num_tokens; "
                f"without that setting it takes the rest"
            )
    if num_records and not shared and plan.num_slots < model.num_experts_per_tok:
        notes.append(
            f"{plan.num_slots} expert slots are fewer than the {model.num_experts_per_tok} experts of one token and "
            f"layer: nothing will stay cached; a larger --vram helps"
        )
    return BootReport(
        plan,
        config.device,
        budget,
        machine.available_bytes,
        rows,
        num_records,
        estimate,
        costs,
        _levers(plan, num_records, context * config.scheduler.max_num_running, try_setting)
        if not shared and model.is_moe
        else (),
        tuple(notes),
    )


def _rows(
    config: EngineConfig, model: ModelSpec, sizes: CheckpointSizes, plan: ResolvedPlan, num_records: int, shared: bool
) -> tuple[PlanRow, ...]:
    kv_bytes = plan.num_kv_blocks * plan.kv_block_size * model.kv_bytes_per_token(kv_dtype_bytes(plan.kv_dtype))
    fixed = plan_cuda_bytes(model, config.scheduler.max_num_running) if config.device == "cuda" else 0
    place = "host" if shared else "device"
    rows = []
    if not shared:
        rows.append(PlanRow("device", "dense weights", sizes.dense_bytes))
    if fixed:
        rows.append(PlanRow("device", "CUDA, sampler, routers", fixed))
    rows.append(
        PlanRow(
            place,
            "workspace",
            plan.workspace_bytes - fixed,
            f"steps of up to {plan.max_batch_tokens} tokens{_why_so_long(config, plan)}",
        )
    )
    rows.append(PlanRow(place, "KV cache", kv_bytes, f"{plan.kv_capacity_tokens:,} tokens of {plan.kv_dtype}"))
    if model.is_moe and not shared:
        share = plan.num_slots / num_records if num_records else 0.0
        rows.append(
            PlanRow(
                "device",
                "expert slots",
                plan.num_slots * plan.slot_stride_bytes,
                f"{plan.num_slots:,} of {num_records:,} records ({share:.0%}), {format_bytes(plan.slot_stride_bytes)} "
                f"each",
            )
        )
        if config.device == "cuda":
            rows.append(PlanRow("device", "staging", plan.staging_bytes, "for prefill"))
    rows.append(PlanRow(place, "snapshots", 0, "no recurrent state in this model"))
    rows.append(PlanRow("host", "dense weights", sizes.dense_bytes))
    if sizes.expert_bytes:
        pinned = ", pinned as far as the driver allows" if config.device == "cuda" else ""
        rows.append(PlanRow("host", "experts", sizes.expert_bytes, f"{num_records:,} records{pinned}"))
    return tuple(rows)


def _why_so_long(config: EngineConfig, plan: ResolvedPlan) -> str:
    """Of the longest step, where the plan chose it."""
    if config.scheduler.max_num_batched_tokens is not None:
        return " (scheduler.max_num_batched_tokens)"
    if config.device != "cuda":
        return ""
    if plan.max_batch_tokens == MOST_BATCH_TOKENS:
        return ", the longest chosen"
    if plan.max_batch_tokens >= plan.kv_capacity_tokens:
        return ", as many as KV holds"
    return f", what 1/{LONGER_STEPS_SHARE} of the memory left beside KV allows"


def _levers(
    plan: ResolvedPlan,
    num_records: int,
    useful_tokens: int,
    try_setting: Callable[[str, dict[str, Any]], tuple[ResolvedPlan, float] | None],
) -> tuple[Lever, ...]:
    """Narrower KV; half of it where experts lack slots; twice of it. What each gains is read off its own plan."""
    found = []

    def consider(name: str, value: Any, note: str = "") -> None:
        tried = try_setting("kv", {name: value})
        if tried is None:
            return
        other, speed = tried
        if other.num_slots == plan.num_slots and other.kv_capacity_tokens == plan.kv_capacity_tokens:
            return
        said = [note] if note else []
        if other.max_context_tokens != plan.max_context_tokens:
            said.append(f"a context of {other.max_context_tokens:,} tokens")
        elif other.kv_capacity_tokens != plan.kv_capacity_tokens:
            more = other.kv_capacity_tokens > plan.kv_capacity_tokens
            said.append(f"{'more' if more else 'fewer'} requests at once")
        if other.num_slots != plan.num_slots:
            said.append(f"{'more' if other.num_slots > plan.num_slots else 'fewer'} experts resident")
        found.append(Lever(f"kv.{name}={value}", other.num_slots, other.kv_capacity_tokens, speed, ", ".join(said)))

    for dtype in _KV_DTYPES[_KV_DTYPES.index(plan.kv_dtype) + 1 :]:
        consider("dtype", dtype, "half the bytes of a token's KV; keys and values are rounded")
    half = plan.kv_capacity_tokens // 2
    if plan.num_slots < num_records and half >= 2 * plan.kv_block_size:
        consider("num_tokens", half)
    if plan.kv_capacity_tokens < useful_tokens:
        consider("num_tokens", plan.kv_capacity_tokens * 2)
    return tuple(found)


def estimate_decode(
    device: str, model: ModelSpec, sizes: CheckpointSizes, plan: ResolvedPlan, costs: CostModel
) -> DecodeEstimate:
    """By the cost model: dense weights at the device's rate, and in each layer the mean over how many of the K experts
    miss, split as ``split=auto`` does."""
    embedding = 0 if model.tie_word_embeddings else sizes.dense_bytes * _embedding_share(model)
    fixed_ns = (sizes.dense_bytes - embedding) * costs.hit_byte_ns + model.num_layers * _LAYER_NS[device]
    moe_layers = len(model.moe_layers)
    if not model.is_moe or plan.slot_stride_bytes == 0:
        speed = 1e9 / fixed_ns
        return DecodeEstimate(speed, 1.0, speed, 1.0, 0.0, 0.0)
    share = 1.0 if plan.in_place else min(1.0, plan.num_slots / (moe_layers * model.num_experts))
    likely = 1.0 - (1.0 - share) ** _LOCALITY
    record = plan.slot_stride_bytes
    top_k = model.num_experts_per_tok

    def layer(hit_rate: float) -> tuple[float, float, float]:
        ns = fetched = computed = 0.0
        for misses in range(top_k + 1):
            chance = math.comb(top_k, misses) * (1.0 - hit_rate) ** misses * hit_rate ** (top_k - misses)
            hits = top_k - misses
            fetches = costs.best_fetches(misses, record, hits)
            ns += chance * costs.layer_ns(hits, fetches, misses - fetches, record)
            fetched += chance * fetches
            computed += chance * (misses - fetches)
        return ns, fetched, computed

    likely_ns, fetched, computed = layer(likely)
    worst_ns, _, _ = layer(share)
    return DecodeEstimate(
        1e9 / (fixed_ns + moe_layers * likely_ns),
        likely,
        1e9 / (fixed_ns + moe_layers * worst_ns),
        share,
        fetched,
        computed,
    )


def _embedding_share(model: ModelSpec) -> float:
    """Of the dense weights, about: embedding tables are stored like the rest."""
    table = model.vocab_size * model.hidden_size
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.hidden_size
    dense_layers = model.num_layers - len(model.moe_layers)
    mlp = 3 * model.intermediate_size * model.hidden_size
    return table / (2 * table + model.num_layers * heads + dense_layers * mlp)
