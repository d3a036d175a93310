"""The boot plan on invented machines."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.config import EngineConfig
from freetoken.elastic.boot_plan import CheckpointSizes, plan_boot, plan_staging_bytes, plan_workspace_bytes
from freetoken.elastic.machine import MachineInfo, read_machine
from freetoken.errors import CapacityError
from freetoken.models.spec import ModelSpec, RopeSpec, RouterSpec
from freetoken.quant.record import plan_record_layout
from freetoken.units import parse_bytes

GIB = 1 << 30
MODEL = ModelSpec(
    family="qwen3", architecture="Qwen3MoeForCausalLM", vocab_size=151936, hidden_size=2048, num_layers=48,
    num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144, max_position_embeddings=40960,
    rms_norm_eps=1e-6, rope=RopeSpec(1e6, rotary_dim=128), dtype="bf16", moe_layers=tuple(range(48)),
    moe_intermediate_size=768, router=RouterSpec(128, 8),
)  # fmt: skip
LAYOUT = plan_record_layout("bf16", 2048, 768)
SIZES = CheckpointSizes(dense_bytes=3 * GIB, expert_bytes=48 * 128 * LAYOUT.stride_bytes)
MACHINE = MachineInfo(tuple(range(8)), 128 * GIB, 120 * GIB)


def plan(machine: MachineInfo = MACHINE, **settings: Any) -> Any:
    return plan_boot(EngineConfig(model="m", **settings), MODEL, [LAYOUT], SIZES, machine)


def used_bytes(result: Any) -> int:
    block = result.kv_block_size * MODEL.kv_bytes_per_token(2)
    return int(
        result.dense_bytes
        + result.workspace_bytes
        + result.num_kv_blocks * block
        + result.num_slots * result.slot_stride_bytes
    )


def test_without_a_budget_experts_are_read_in_place() -> None:
    result = plan()
    assert result.in_place and result.num_slots == 0
    assert result.max_context_tokens == 40960 and result.kv_capacity_tokens >= 32768
    assert result.device_threads == 8 and result.device_core_ids == tuple(range(8))


def test_a_budget_gives_an_agents_context_first_and_the_rest_to_slots() -> None:
    result = plan(vram=12 * GIB)
    assert not result.in_place
    assert result.kv_capacity_tokens == 32768
    assert result.num_slots > 0
    assert used_bytes(result) <= 12 * GIB < used_bytes(result) + result.slot_stride_bytes
    assert set(result.cpu_core_ids).isdisjoint(result.device_core_ids)


def test_explicit_kv_comes_before_experts() -> None:
    small, large = plan(vram=12 * GIB, kv={"num_tokens": 4096}), plan(vram=12 * GIB, kv={"num_tokens": 40000})
    assert small.num_slots > large.num_slots > 0
    assert large.kv_capacity_tokens >= 40000


@pytest.mark.parametrize("settings", [{"vram": 2 * GIB}, {"vram": 3 * GIB + (64 << 20)}])
def test_a_refusal_names_a_budget_that_works(settings: dict[str, Any]) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(**settings)
    match = re.search(r"--vram (\S+) would work", str(caught.value))
    assert match
    assert plan(vram=parse_bytes(match.group(1))).num_kv_blocks > 0


def test_a_refusal_names_a_kv_size_that_works() -> None:
    with pytest.raises(CapacityError) as caught:
        plan(vram=6 * GIB, kv={"num_tokens": 400_000})
    match = re.search(r"kv\.num_tokens=(\d+) would work", str(caught.value))
    assert match
    plan(vram=6 * GIB, kv={"num_tokens": int(match.group(1))})


def test_host_memory_too_small_is_refused() -> None:
    with pytest.raises(CapacityError, match="host memory"):
        plan(MachineInfo((0, 1), 32 * GIB, 30 * GIB))
    with pytest.raises(CapacityError, match="host memory"):
        plan(MachineInfo((0, 1), 64 * GIB, 60 * GIB), vram=12 * GIB)


def test_context_above_the_model_is_refused() -> None:
    with pytest.raises(CapacityError, match="40960"):
        plan(max_context_tokens=50000)


@given(st.integers(4, 64), st.sampled_from([None, 1024, 16384, 40960]), st.sampled_from([256, 512, 2048]))
def test_the_parts_never_exceed_the_budget(gib: int, kv_tokens: int | None, batch: int) -> None:
    settings: dict[str, Any] = {"vram": gib * GIB, "scheduler": {"max_num_batched_tokens": batch}}
    if kv_tokens:
        settings["kv"] = {"num_tokens": kv_tokens}
    try:
        result = plan(MachineInfo(tuple(range(8)), 512 * GIB, 500 * GIB), **settings)
    except CapacityError:
        assert gib < 10
        return
    assert used_bytes(result) <= gib * GIB
    assert result.num_slots <= 48 * 128


def test_more_kv_never_gives_more_slots() -> None:
    slots = [plan(vram=16 * GIB, kv={"num_tokens": n}).num_slots for n in range(1024, 40960, 4096)]
    assert slots == sorted(slots, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_cores_on_small_and_large_machines(count: int) -> None:
    machine = MachineInfo(tuple(range(count)), 128 * GIB, 120 * GIB)
    result = plan(machine, vram=12 * GIB)
    assert result.cpu_threads >= 1 and result.device_threads >= 1
    assert result.cpu_threads + result.device_threads <= max(2, count)
    gpu = plan(machine, vram=12 * GIB, device="cuda")
    assert gpu.cpu_threads == max(1, count - 2)


def test_workspace_grows_with_the_batch() -> None:
    assert plan_workspace_bytes(MODEL, 1024, 8) > plan_workspace_bytes(MODEL, 512, 8)


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.physical_cores and 0 < machine.available_bytes <= machine.total_bytes


def test_a_gpu_gets_staging_out_of_the_budget() -> None:
    layer = 128 * LAYOUT.stride_bytes
    on_cpu, on_gpu = plan(vram=12 * GIB), plan(vram=12 * GIB, device="cuda")
    assert on_cpu.staging_bytes == 0
    assert 0 < on_gpu.staging_bytes <= 12 * GIB // 8 and on_gpu.staging_bytes % LAYOUT.stride_bytes == 0
    assert used_bytes(on_gpu) + on_gpu.staging_bytes <= 12 * GIB
    assert on_gpu.workspace_bytes > on_cpu.workspace_bytes and 0 < on_gpu.num_slots < on_cpu.num_slots
    large = plan(vram=100 * GIB, device="cuda")
    assert 2 * layer < large.staging_bytes <= 2 * layer + 16 * LAYOUT.stride_bytes
    assert plan_staging_bytes(128, LAYOUT.stride_bytes, 5 * LAYOUT.stride_bytes) == 0
