"""The boot plan: how the memory budget and the cores are divided before anything is loaded. Pure.

Order: explicit settings first; then dense weights and workspace; then slots for one token's experts, and a context that
an agent needs; a GPU's workspace for longer steps gets a share of what is left of a VRAM budget, expert slots the rest,
and once all experts have one, KV. A plan that cannot work is refused with the flag and the value that would
(``boot_needs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetoken.config import EngineConfig
from freetoken.elastic.boot_needs import BootNeeds
from freetoken.elastic.machine import MachineInfo
from freetoken.errors import CapacityError
from freetoken.launch_spec import ResolvedPlan
from freetoken.models.spec import ModelSpec
from freetoken.quant.record import RecordLayout
from freetoken.units import align_up

_DTYPE_BYTES = {"f32": 4, "bf16": 2}
# CUDA's context and modules, cuBLAS's workspace, memory of the graphs: measured about 0.5 GB on an H200.
_CUDA_RESERVE_BYTES = 600 << 20
_STAGING_SPARES = 16
LEAST_BATCH_TOKENS = 512
"""Of a step, where no setting says how many; also the steps in which a GPU's plan makes it longer."""
MOST_BATCH_TOKENS = 4096
"""A pass over all experts takes as long for fewer tokens: 0.23 s on an H200 with 25 % of Qwen3-30B-A3B resident."""
LONGER_STEPS_SHARE = 16
"""One part in so many of what KV and the slots' reserve leave may go to longer steps."""


def kv_dtype_bytes(dtype: str) -> int:
    """Of one element of the KV cache."""
    return _DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """Bytes of a converted checkpoint, from its index."""

    dense_bytes: int
    expert_bytes: int


def plan_boot(
    config: EngineConfig,
    model: ModelSpec,
    layouts: Sequence[RecordLayout],
    sizes: CheckpointSizes,
    machine: MachineInfo,
) -> ResolvedPlan:
    """Divide memory and cores. Raises ``CapacityError`` naming the setting to change and a value that works."""
    kv_dtype = model.dtype if config.kv.dtype == "auto" else config.kv.dtype
    context = min(config.max_context_tokens or model.max_position_embeddings, model.max_position_embeddings)
    if config.max_context_tokens and config.max_context_tokens > model.max_position_embeddings:
        raise CapacityError(
            f"max_context_tokens {config.max_context_tokens} is above the model's limit of "
            f"{model.max_position_embeddings} positions; set max_context_tokens={model.max_position_embeddings} or less"
        )
    block_size = config.kv.block_size
    batch_tokens = config.scheduler.max_num_batched_tokens or LEAST_BATCH_TOKENS
    workspace = plan_workspace_bytes(model, batch_tokens, config.scheduler.max_num_running)
    if config.device == "cuda":
        workspace += plan_cuda_bytes(model, config.scheduler.max_num_running)
    needs = BootNeeds(
        config=config,
        model=model,
        dense_bytes=sizes.dense_bytes,
        expert_bytes=sizes.expert_bytes,
        workspace_bytes=workspace,
        slot_bytes=max((layout.stride_bytes for layout in layouts), default=0),
        block_bytes=block_size * model.kv_bytes_per_token(_DTYPE_BYTES[kv_dtype]),
        context=context,
    )
    if needs.is_in_place:
        budget, pools = None, _Pools(_plan_kv_in_place(needs, needs.check_in_place(machine)), 0, 0, 0)
    else:
        budget = needs.check_budget(machine)
        pools = _divide(needs, budget)
        batch_tokens += pools.more_batch_tokens
        workspace += pools.more_batch_tokens * _token_bytes(model)
    capacity = pools.num_blocks * block_size
    if config.max_context_tokens and capacity < config.max_context_tokens:
        raise CapacityError(
            f"kv.num_tokens={config.kv.num_tokens} holds no request of max_context_tokens={config.max_context_tokens}; "
            f"max_context_tokens={capacity} would work"
        )
    cpu_cores, device_cores = plan_cores(
        config, machine.physical_cores, needs_cpu_executor=model.is_moe and budget is not None
    )
    parties = 3 if model.is_moe else 1
    spin = config.executor.spin_us
    return ResolvedPlan(
        kv_block_size=block_size,
        num_kv_blocks=pools.num_blocks,
        kv_dtype=kv_dtype,
        max_context_tokens=min(context, capacity),
        num_slots=pools.num_slots,
        slot_stride_bytes=needs.slot_bytes,
        dense_bytes=sizes.dense_bytes,
        workspace_bytes=workspace,
        store_bytes=needs.store_bytes,
        cpu_threads=config.executor.cpu_threads or len(cpu_cores),
        device_threads=config.executor.device_threads or len(device_cores),
        cpu_core_ids=cpu_cores if config.executor.pin and not config.executor.cpu_threads else (),
        device_core_ids=device_cores if config.executor.pin and not config.executor.device_threads else (),
        spin_us=spin if spin is not None else _spin_us(config, len(machine.physical_cores), parties),
        max_batch_tokens=batch_tokens,
        in_place=model.is_moe and budget is None,
        staging_bytes=pools.staging_bytes,
        budget_bytes=budget,
    )


@dataclass(frozen=True, slots=True)
class _Pools:
    """What a budget has beside weights and workspace."""

    num_blocks: int
    num_slots: int
    staging_bytes: int
    more_batch_tokens: int
    """Of the longest step, beyond those that ``BootNeeds`` counts."""


def _divide(needs: BootNeeds, budget: int) -> _Pools:
    """KV first, up to what was asked for or an agent's context, beside the slots' reserve; then longer steps, staging
    and slots; and what all experts leave is KV again, up to as many requests of full length as may run."""
    config, block_bytes = needs.config, needs.block_bytes
    room = budget - needs.fixed_bytes
    wanted = needs.wanted_blocks
    blocks = needs.kv_blocks(room, wanted) if needs.least_blocks < wanted else wanted
    num_slots = staging = 0
    longer = _longer_steps_bytes(needs, room)
    more_tokens = longer // _token_bytes(needs.model) // LEAST_BATCH_TOKENS * LEAST_BATCH_TOKENS
    if needs.num_records:
        reserve = needs.slot_reserve(room, blocks * block_bytes)
        # Less KV than wanted: its last block's remainder is not for slots, or they would come and go with the budget.
        left = room - longer - blocks * block_bytes if blocks == wanted else reserve
        share = 0
        if config.device == "cuda":
            # Taken from slots also where it is too little for staging: more KV must not mean more slots.
            limit = min(budget // 8, (left - reserve) // 2)
            share = min(limit, staging_cap_bytes(needs.model.num_experts, needs.slot_bytes))
            staging = plan_staging_bytes(needs.model.num_experts, needs.slot_bytes, share)
        num_slots = min((left - share) // needs.slot_bytes, needs.num_records)
    if config.kv.num_tokens is None and num_slots == needs.num_records:
        spare = room - longer - num_slots * needs.slot_bytes - staging - 2 * needs.granule_bytes(room)
        useful = needs.blocks_of(needs.context) * config.scheduler.max_num_running
        blocks = max(blocks, min(spare // block_bytes, useful))
    return _Pools(blocks, num_slots, staging, more_tokens)


def _longer_steps_bytes(needs: BootNeeds, room: int) -> int:
    """Of a GPU's ``room``, for steps of more than ``LEAST_BATCH_TOKENS``, where no setting says how many: up to
    ``MOST_BATCH_TOKENS`` or what KV holds, from a sixteenth of what KV and the slots' reserve leave. All of it is kept
    from slots, also what is not a whole step: more KV must not mean more slots, nor a larger budget fewer."""
    if needs.config.device != "cuda" or needs.config.scheduler.max_num_batched_tokens is not None:
        return 0
    most = min(MOST_BATCH_TOKENS, align_up(needs.wanted_blocks * needs.config.kv.block_size, LEAST_BATCH_TOKENS))
    kv_bytes = needs.wanted_blocks * needs.block_bytes
    share = max(room - kv_bytes - needs.most_slot_reserve(kv_bytes), 0) // LONGER_STEPS_SHARE
    return min(share, (most - LEAST_BATCH_TOKENS) * _token_bytes(needs.model))


def _plan_kv_in_place(needs: BootNeeds, room: int) -> int:
    """Several requests at once, bounded by a quarter of what is free: nothing else competes for it in place."""
    wanted = needs.wanted_blocks
    if needs.config.kv.num_tokens is None:
        wanted = min(4 * wanted, max(wanted, room // 4 // needs.block_bytes))
    return min(wanted, room // needs.block_bytes)


def _spin_us(config: EngineConfig, num_cores: int, parties: int) -> int:
    """How long native waits spin before they park: not at all where parties share cores; over the gap between two
    layers of a GPU step, which cannot wake a sleeper."""
    if num_cores < parties + 2:
        return 0
    return 2000 if config.device == "cuda" else 50


def plan_workspace_bytes(model: ModelSpec, batch_tokens: int, sampled_rows: int) -> int:
    """Peak activations of the largest step, float32: residual, normed, q/k/v, MLP or expert rows, sampled logits."""
    return batch_tokens * _token_bytes(model) + 3 * 4 * sampled_rows * model.vocab_size


def _token_bytes(model: ModelSpec) -> int:
    """Of the workspace, for each token of a step."""
    inner = max(model.intermediate_size if len(model.moe_layers) < model.num_layers else 0, model.moe_intermediate_size)
    qkv = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    routed = model.num_experts_per_tok * model.hidden_size
    return 4 * (4 * model.hidden_size + qkv + 3 * inner + 2 * routed)


def plan_cuda_bytes(model: ModelSpec, sampled_rows: int) -> int:
    """What a GPU needs beside the activations: CUDA itself, the sampler's state, routers in float32."""
    routers = len(model.moe_layers) * model.num_experts * model.hidden_size * 2 if model.is_moe else 0
    return _CUDA_RESERVE_BYTES + routers + sampled_rows * 49_152


def plan_staging_bytes(num_experts: int, stride_bytes: int, limit_bytes: int) -> int:
    """Of a GPU's prefill: two halves, each at best a layer's records, and a few spare places; what fits the limit, in
    whole records; nothing when that is less than a handful."""
    if stride_bytes == 0:
        return 0
    places = min(staging_cap_bytes(num_experts, stride_bytes), limit_bytes) // stride_bytes
    return places * stride_bytes if places >= 6 else 0


def staging_cap_bytes(num_experts: int, stride_bytes: int) -> int:
    """More than that staging has no use for."""
    return (2 * num_experts + _STAGING_SPARES) * stride_bytes


def plan_cores(
    config: EngineConfig, cores: Sequence[int], *, needs_cpu_executor: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(CpuExecutor's cores, device cores). Disjoint when there are enough; with few cores both share them unpinned.

    On the CPU device the cores are halved between the two when misses go to CpuExecutor, else the device takes all.
    On a GPU two cores stay free for the threads that drive it: the mailbox server spins, the step threads launch and
    wait, and a CPU worker that has to share its core delays a whole layer. More would cost memory bandwidth: with 12,
    14 and 15 of a host's 16 cores one run decoded 102, 106 and 88 tokens/s.
    """
    cores = tuple(cores)
    if config.device == "cuda":
        return (cores[: max(1, len(cores) - 2)], cores[-1:])
    if not needs_cpu_executor:
        return (cores[-1:], cores)
    half = max(1, len(cores) // 2)
    return (cores[half:] or cores[-1:], cores[:half])
