"""The boot plan on invented machines."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.config import EngineConfig
from freetoken.elastic.arena_shape import divide_arena, why_rigid
from freetoken.elastic.boot_needs import CARD_RESERVE_BYTES
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
    match = re.search(r"; kv\.num_tokens=(\d+) or --vram \d+MiB would work", str(caught.value))
    assert match
    plan(vram=6 * GIB, kv={"num_tokens": int(match.group(1))})


def refused(machine: MachineInfo = MACHINE, **settings: Any) -> str:
    with pytest.raises(CapacityError) as caught:
        plan(machine, **settings)
    return str(caught.value)


def test_host_memory_too_small_is_refused_with_what_would_work() -> None:
    text = refused(MachineInfo((0, 1), 32 * GIB, 30 * GIB))
    match = re.search(r"^host memory.* there are 30.00 GiB.*; (\d+)MiB of it or a checkpoint with smaller", text)
    assert match
    plan(MachineInfo((0, 1), 128 * GIB, int(match.group(1)) << 20))

    text = refused(MachineInfo((0, 1), 72 * GIB, 68 * GIB), vram=12 * GIB)
    match = re.search(r"^host memory.* --vram (\d+)MiB would work", text)
    assert match
    plan(MachineInfo((0, 1), 72 * GIB, 68 * GIB), vram=int(match.group(1)) << 20)

    machine = MachineInfo((0, 1), 64 * GIB, 60 * GIB)
    assert "no --vram, with experts read in place, would work" in refused(machine, vram=12 * GIB)
    assert plan(machine).in_place

    # A budget too small, and host memory too small for the one it takes: that one is not named.
    assert "no --vram, with" in refused(machine, vram=2 * GIB)
    text = refused(MachineInfo((0, 1), 64 * GIB, 50 * GIB), vram=12 * GIB, device="cuda")
    assert text.startswith("host memory") and "budget" not in text and re.search(r"\d+MiB of it", text)


def test_kv_in_place_beyond_host_memory_is_refused_with_what_would_work() -> None:
    machine = MachineInfo((0, 1), 64 * GIB, 60 * GIB)
    for setting in ("kv.num_tokens", "max_context_tokens"):
        settings: Any = {"kv": {"num_tokens": 40000}} if setting.startswith("kv") else {"max_context_tokens": 40000}
        match = re.search(rf"{setting}=(\d+) would work", refused(machine, **settings))
        assert match
        value = int(match.group(1))
        plan(machine, **({"kv": {"num_tokens": value}} if setting.startswith("kv") else {setting: value}))


def test_a_card_has_what_it_has() -> None:
    card = dataclasses.replace(MACHINE, device_total_bytes=24 * GIB, device_free_bytes=20 * GIB)
    text = refused(card, vram=900_000 << 40, device="cuda")
    match = re.search(r"^the card's memory.* --vram (\d+)MiB would work", text)
    assert match and plan(card, vram=int(match.group(1)) << 20, device="cuda").num_slots > 0
    small = dataclasses.replace(MACHINE, device_total_bytes=3 * GIB, device_free_bytes=3 * GIB)
    for vram in (4 * GIB, 2 * GIB, None):
        assert re.search(
            r"^the card's memory.*; \d+MiB of it or a checkpoint", refused(small, vram=vram, device="cuda")
        )


def test_a_gpu_without_a_budget_gets_what_is_free() -> None:
    card = dataclasses.replace(MACHINE, device_total_bytes=24 * GIB, device_free_bytes=20 * GIB)
    result = plan(card, device="cuda")
    assert not result.in_place and result.num_slots > 0
    assert result.budget_bytes == 20 * GIB - CARD_RESERVE_BYTES
    assert dataclasses.replace(result, budget_bytes=0) == dataclasses.replace(
        plan(vram=result.budget_bytes, device="cuda"), budget_bytes=0
    )
    text = refused(device="cuda")
    match = re.search(r"no GPU could be asked.* --vram (\d+)MiB would work", text)
    assert match
    assert plan(vram=int(match.group(1)) << 20, device="cuda").kv_capacity_tokens == 32768


def test_context_above_the_model_is_refused() -> None:
    with pytest.raises(CapacityError, match="40960"):
        plan(max_context_tokens=50000)


def is_sound(config: EngineConfig, model: ModelSpec, result: Any) -> bool:
    """Pools within the budget, also as granules; a step's experts have slots."""
    block = result.kv_block_size * model.kv_bytes_per_token(2)
    fixed = result.dense_bytes + result.workspace_bytes + result.staging_bytes
    pools = result.num_kv_blocks * block + result.num_slots * result.slot_stride_bytes
    arena = divide_arena(config, model, result)
    if arena is not None:
        pools = max(pools, arena[0].budget_bytes)
        assert arena[1].total <= arena[0].num_granules
    return fixed + pools <= result.budget_bytes and result.num_slots >= model.num_experts_per_tok


BUDGETS = st.one_of(
    st.integers(4 << 10, 72 << 10),  # MiB
    st.integers(4 << 10, 9 << 10),
    st.integers(7080, 7110),
    st.integers(60 << 10, 64 << 10),
)
DEVICES = st.sampled_from(["cpu", "cuda"])
LARGE = MachineInfo(tuple(range(8)), 512 * GIB, 500 * GIB)


@given(BUDGETS, st.sampled_from([None, 1024, 16384, 40960]), st.sampled_from([None, 256, 512, 2048]), DEVICES)
def test_the_parts_never_exceed_the_budget(mib: int, kv_tokens: int | None, batch: int | None, device: Any) -> None:
    config = EngineConfig(
        model="m",
        vram=mib << 20,
        device=device,
        kv={"num_tokens": kv_tokens},
        scheduler={"max_num_batched_tokens": batch, "prefill_chunk_tokens": 256},
    )
    try:
        result = plan_boot(config, MODEL, [LAYOUT], SIZES, LARGE)
    except CapacityError as error:
        match = re.search(r"--vram (\d+)MiB would work", str(error))
        assert match and int(match.group(1)) > mib and mib < 10 << 10
        config = config.model_copy(update={"vram": int(match.group(1)) << 20})
        result = plan_boot(config, MODEL, [LAYOUT], SIZES, LARGE)
        assert divide_arena(config, MODEL, result) is not None
    assert is_sound(config, MODEL, result)
    assert result.num_slots <= 48 * 128
    if kv_tokens is None:
        assert divide_arena(config, MODEL, result) is not None or result.kv_capacity_tokens <= 2048


@given(BUDGETS, st.integers(1, 6000), st.integers(1, 500), DEVICES)
def test_more_kv_never_gives_more_slots(mib: int, blocks: int, more: int, device: Any) -> None:
    def slots(num_blocks: int) -> int | None:
        try:
            result = plan(LARGE, vram=mib << 20, device=device, kv={"num_tokens": 16 * num_blocks})
        except CapacityError:
            return None
        return int(result.num_slots)

    least, next_one, most = slots(blocks), slots(blocks + 1), slots(blocks + more)
    for fewer, greater in ((least, next_one), (least, most)):
        assert greater is None or (fewer is not None and greater <= fewer)


@given(BUDGETS, st.integers(1, 64), st.sampled_from([None, 16, 1024, 16384, 40960]))
def test_a_larger_budget_never_gives_shorter_steps(mib: int, more: int, kv_tokens: int | None) -> None:
    def longest(size: int) -> int:
        try:
            result = plan(LARGE, vram=size << 20, device="cuda", kv={"num_tokens": kv_tokens})
        except CapacityError:
            return 0
        # As long as they may be, of what 512 tokens leave, and no longer than KV.
        assert 512 <= result.max_batch_tokens <= 4096 and result.max_batch_tokens % 512 == 0
        assert result.max_batch_tokens <= max(512, result.kv_capacity_tokens)
        more_bytes = plan_workspace_bytes(MODEL, result.max_batch_tokens, 0) - plan_workspace_bytes(MODEL, 512, 0)
        assert more_bytes <= (result.budget_bytes - result.dense_bytes) // 8
        return int(result.max_batch_tokens)

    assert longest(mib) <= longest(mib + 1) and longest(mib) <= longest(mib + more)


@given(st.integers(4 << 10, 9 << 10), st.sampled_from([None, 16, 1024, 16384, 40960]))
def test_longer_steps_are_no_reason_to_refuse(mib: int, kv_tokens: int | None) -> None:
    def kv(**scheduler: int) -> int | None:
        try:
            result = plan(LARGE, vram=mib << 20, device="cuda", kv={"num_tokens": kv_tokens}, scheduler=scheduler)
        except CapacityError:
            return None
        return int(result.kv_capacity_tokens)

    assert kv() == kv(max_num_batched_tokens=512)


def test_steps_are_as_long_as_the_settings_say_or_the_card_allows() -> None:
    def longest(gib: int, **scheduler: int) -> tuple[int, int]:
        result = plan(LARGE, vram=gib * GIB, device="cuda", scheduler=scheduler)
        return result.max_batch_tokens, result.workspace_bytes

    assert [longest(gib)[0] for gib in (5, 9, 24, 100)] == [512, 1024, 4096, 4096]
    for tokens in (64, 512, 4096, 8192):
        assert longest(24, max_num_batched_tokens=tokens)[0] == tokens
    assert longest(24) == longest(24, max_num_batched_tokens=4096)
    for settings in ({}, {"vram": 24 * GIB}):
        assert plan(LARGE, **settings).max_batch_tokens == 512
    assert plan(vram=24 * GIB, device="cuda", kv={"num_tokens": 1000}).max_batch_tokens == 1024


def test_more_kv_gives_no_more_slots_where_staging_ends() -> None:
    slots = [plan(vram=8 * GIB, device="cuda", kv={"num_tokens": n}).num_slots for n in range(43200, 44816, 16)]
    assert slots == sorted(slots, reverse=True)


@given(BUDGETS, st.integers(1, 64), DEVICES)
def test_a_larger_budget_never_gives_fewer_slots(mib: int, more: int, device: Any) -> None:
    def slots(size: int) -> int:
        try:
            return int(plan(LARGE, vram=size << 20, device=device).num_slots)
        except CapacityError:
            return -1

    assert slots(mib) <= slots(mib + 1) and slots(mib) <= slots(mib + more)


@pytest.mark.parametrize("vram, device", [(4 * GIB, "cpu"), (5 * GIB, "cpu"), (5 * GIB, "cuda")])
def test_a_tight_budget_is_elastic_with_slots_for_a_step(vram: int, device: Any) -> None:
    config = EngineConfig(model="m", vram=vram, device=device)
    result = plan_boot(config, MODEL, [LAYOUT], SIZES, MACHINE)
    assert result.kv_capacity_tokens < 32768 and is_sound(config, MODEL, result)
    assert divide_arena(config, MODEL, result) is not None and why_rigid(config, MODEL, result) == ""


def test_why_memory_cannot_move() -> None:
    def why(**settings: Any) -> str:
        config = EngineConfig(model="m", **settings)
        return why_rigid(config, MODEL, plan_boot(config, MODEL, [LAYOUT], SIZES, MACHINE))

    assert "--vram" in why() and "elastic.enabled" in why(vram=12 * GIB, elastic={"enabled": False})
    assert "a larger --vram" in why(vram=12 * GIB, elastic={"granule_bytes": GIB})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_announced_context_has_its_kv_or_is_refused(device: Any) -> None:
    small = plan(vram=12 * GIB, device=device)
    asked = plan(vram=12 * GIB, device=device, max_context_tokens=40000)
    assert asked.kv_capacity_tokens == 40000 and asked.max_context_tokens == 40000
    assert 0 < asked.num_slots < small.num_slots
    match = re.search(
        r"max_context_tokens=(\d+) or --vram (\d+)MiB would work",
        refused(vram=5 * GIB, device=device, max_context_tokens=40000),
    )
    assert match
    plan(vram=5 * GIB, device=device, max_context_tokens=int(match.group(1)))
    plan(vram=int(match.group(2)) << 20, device=device, max_context_tokens=40000)
    text = refused(vram=12 * GIB, device=device, max_context_tokens=40000, kv={"num_tokens": 4096})
    assert "max_context_tokens=4096 would work" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_gets_what_resident_experts_leave(device: Any) -> None:
    config = EngineConfig(model="m", vram=100 * GIB, device=device)
    result = plan_boot(config, MODEL, [LAYOUT], SIZES, LARGE)
    assert result.num_slots == 48 * 128 and result.max_context_tokens == 40960
    used = used_bytes(result) + result.staging_bytes
    assert used <= 100 * GIB < used + (128 << 20)
    arena = divide_arena(config, MODEL, result)
    assert arena is not None and arena[0].slots_in(arena[1].slot_granules) == 48 * 128
    one = plan(LARGE, vram=100 * GIB, device=device, scheduler={"max_num_running": 1})
    assert one.kv_capacity_tokens == 40960
    assert plan(LARGE, vram=100 * GIB, device=device, kv={"num_tokens": 4096}).kv_capacity_tokens == 4096


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


def test_the_gpu_is_asked_through_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\n[ "$1" = "--id=3" ] && echo "24576, 20480"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    machine = read_machine("cuda")
    assert (machine.device_total_bytes, machine.device_free_bytes) == (24 * GIB, 20 * GIB)
    assert read_machine().device_total_bytes is None
    script.write_text("#!/bin/sh\necho '[N/A], [N/A]'\n")
    assert read_machine("cuda").device_free_bytes is None


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
