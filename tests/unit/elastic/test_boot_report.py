"""What a boot plan is explained as, for models that are not there."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.cli.main import main
from freetoken.elastic.machine import MachineInfo
from freetoken.engine.plan_model import plan_model, read_index
from freetoken.errors import CapacityError, CheckpointError
from freetoken.units import parse_bytes

GIB = 1 << 30
MACHINE = MachineInfo(tuple(range(16)), 128 * GIB, 120 * GIB)


def report(vram: str, model: str = "qwen3-30b-a3b", dtype: str = "q4_0", **settings):
    return plan_model(model, dtype=dtype, overrides={"vram": parse_bytes(vram), **settings}, machine=MACHINE)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("freetoken.elastic.profile.gpu_identity", lambda: None)


def test_eight_gigabytes_hold_a_model_by_name_alone():
    found = report("8GiB", device="cuda")
    assert found.total("device") <= 8 * GIB < found.total("device") + 4 * found.plan.slot_stride_bytes
    assert found.plan.max_context_tokens >= 32768
    assert found.num_records == 48 * 128 and 0 < found.plan.num_slots < found.num_records
    assert found.decode.worst_tokens_per_s < found.decode.tokens_per_s
    assert not found.costs.measured
    names = [row.what for row in found.rows if row.place == "device"]
    fixed = ["dense weights", "CUDA, sampler, routers", "workspace"]
    assert names == [*fixed, "KV cache", "expert slots", "staging", "snapshots"]
    snapshots = next(row for row in found.rows if row.what == "snapshots")
    assert (snapshots.bytes, snapshots.note) == (0, "no recurrent state in this model")
    json.dumps(found.to_json())


def test_experts_that_will_not_be_pinned_are_told():
    def told(host_gib, **settings):
        machine = MachineInfo(tuple(range(16)), host_gib * GIB, 120 * GIB)
        overrides = {"vram": 8 * GIB, "device": "cuda", **settings}
        found = plan_model("qwen3-30b-a3b", dtype="q4_0", overrides=overrides, machine=machine)
        return [note for note in found.notes if "will not be pinned" in note]

    assert told(64) == [] and told(18, device="cpu") == []
    (note,) = told(18)
    assert "no more than 14.40 GiB are, of 18.00 GiB" in note


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 40), st.sampled_from(["cpu", "cuda"]))
def test_more_memory_is_never_slower_and_never_over_budget(gib, device):
    less, more = report(f"{gib}GiB", device=device), report(f"{gib + 1}GiB", device=device)
    for found in (less, more):
        assert found.total("device") <= found.budget_bytes
    assert more.plan.num_slots >= less.plan.num_slots
    assert device == "cpu" or more.decode.tokens_per_s >= 0.999 * less.decode.tokens_per_s


def test_the_kv_dtype_is_a_lever_with_its_trade():
    found = report("12GiB", device="cuda", kv={"dtype": "f32"})
    lever = next(lever for lever in found.levers if lever.setting == "kv.dtype=bf16")
    assert lever.slots > found.plan.num_slots and lever.kv_tokens == found.plan.kv_capacity_tokens
    assert lever.tokens_per_s > found.decode.tokens_per_s
    assert not any("kv.dtype" in lever.setting for lever in report("12GiB", device="cuda").levers)


def test_levers_say_what_they_change():
    notes = {lever.setting: lever.note for lever in report("12GiB", device="cuda").levers}
    assert notes["kv.num_tokens=16384"] == "a context of 16,384 tokens, more experts resident"
    assert notes["kv.num_tokens=65536"] == "a context of 40,960 tokens, fewer experts resident"
    notes = {lever.setting: lever.note for lever in report("16GiB", device="cuda", max_context_tokens=40960).levers}
    assert notes == {"kv.num_tokens=81920": "more requests at once, fewer experts resident"}
    # All experts have slots and KV has the rest: there is nothing to trade.
    assert not report("48GiB", device="cuda").levers


def test_a_budget_that_kv_is_kept_from_is_noted():
    found = report("48GiB", device="cuda", kv={"num_tokens": 32768})
    assert any("of the budget are not used" in note for note in found.notes)
    assert not any("not used" in note for note in report("48GiB", device="cuda").notes)


def test_the_budget_of_a_card_is_noted():
    card = dataclasses.replace(MACHINE, device_total_bytes=24 * GIB, device_free_bytes=20 * GIB)

    def notes(machine, **settings):
        return " ".join(plan_model("qwen3-30b-a3b", dtype="q4_0", overrides=settings, machine=machine).notes)

    found = plan_model("qwen3-30b-a3b", dtype="q4_0", overrides={"device": "cuda"}, machine=card)
    assert found.budget_bytes == (20 << 30) - (512 << 20) >= found.total("device")
    assert "free on the card, less 512.00 MiB" in " ".join(found.notes)
    assert "only 20.00 GiB are free" in notes(card, device="cuda", vram=22 * GIB)
    assert "no GPU could be asked" in notes(MACHINE, device="cuda", vram=22 * GIB)


def test_the_length_of_steps_is_told_with_its_reason():
    def told(vram, **settings):
        return next(row.note for row in report(vram, **settings).rows if row.what == "workspace")

    assert told("24GiB", device="cuda") == "steps of up to 4096 tokens, the longest chosen"
    assert told("8GiB", device="cuda") == "steps of up to 1536 tokens, what 1/16 of the memory left beside KV allows"
    assert told("24GiB", device="cuda", kv={"num_tokens": 1024}) == "steps of up to 1024 tokens, as many as KV holds"
    explicit = {"max_num_batched_tokens": 1024}
    assert told("8GiB", device="cuda", scheduler=explicit) == (
        "steps of up to 1024 tokens (scheduler.max_num_batched_tokens)"
    )
    assert told("24GiB", device="cpu") == "steps of up to 512 tokens"
    assert report("24GiB", device="cuda").to_json()["max_batch_tokens"] == 4096


def test_numbers_beyond_all_memory_are_refused(capsys):
    for setting in ("kv.num_tokens", "max_context_tokens", "vram"):
        assert main(["plan", "qwen3-moe-tiny", "--set", f"{setting}=1{'0' * 400}"]) == 2
        assert "less than or equal to" in capsys.readouterr().err


def test_too_little_names_what_would_work(capsys):
    with pytest.raises(CapacityError, match=r"--vram (\d+)MiB would work") as caught:
        report("1GiB")
    text = str(caught.value)
    report(text.split("--vram ")[1].split()[0])
    assert main(["plan", "qwen3-30b-a3b", "--vram", "1GiB"]) == 2
    assert "would work" in capsys.readouterr().err


def test_unknown_models_and_misplaced_dtypes(tmp_path):
    with pytest.raises(CheckpointError, match="none of the known shapes"):
        read_index("qwen4-900b")
    with pytest.raises(CheckpointError, match="--dtype q4_0 is for models by name"):
        read_index(str(tmp_path), "q4_0")


def test_the_command_prints_a_table_or_json(capsys):
    arguments = ["plan", "qwen3-moe-tiny", "--vram", "64MiB", "--set", "kv.num_tokens=1024"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "expert slots" in text and "tokens/s" in text and "assumed" in text
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kv_tokens"] == 1024 and data["budget_bytes"] == 64 << 20
    assert main(["plan", "llama-tiny"]) == 0
    assert "tokens/s" in capsys.readouterr().out
