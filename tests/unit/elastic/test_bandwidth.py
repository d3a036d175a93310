"""Measuring on this machine (no figure is judged), and profiles that count only where they were measured."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from freetoken import _native
from freetoken.config import EngineConfig
from freetoken.elastic import profile as profiles
from freetoken.elastic.bandwidth import CpuFetchProbe, ProbeStore, measure_bandwidth, measure_disk
from freetoken.elastic.boot_plan import CheckpointSizes, plan_boot
from freetoken.elastic.machine import MachineInfo
from freetoken.elastic.profile import identify, load_profile, make_profile, profile_path, save_profile
from freetoken.engine.bandwidth import check_gpu
from freetoken.errors import ConfigError
from freetoken.execution.cuda.fetch_probe import CudaFetchProbe
from freetoken.kernels.triton.common import INTERPRETED
from freetoken.models.spec import ModelSpec, RopeSpec, RouterSpec
from freetoken.quant.formats import plan_layout
from freetoken.testing.cuda_rig import HostDriver

LAYOUTS = (plan_layout("f32", 32, 32), plan_layout("q4_0", 64, 64))


@pytest.fixture
def measured(monkeypatch):
    for name in ("_WINDOW_S", "_BESIDE_S"):
        monkeypatch.setattr(f"freetoken.elastic.bandwidth.{name}", 0.002)
    return measure_bandwidth(
        LAYOUTS,
        4,
        cpu_threads=1,
        cpu_cores=(),
        isa="auto",
        make_fetch_probe=lambda store, most: CpuFetchProbe(store, 1, (), most),
        hits_load_memory=True,
        disk_file=None,
        source="",
        probe_bytes=1 << 20,
    )


def test_every_part_is_measured(measured):
    costs = measured.costs
    assert costs.measured and costs.hits_load_memory and costs.hit_byte_ns > 0
    assert measured.dram_gbps > 0 and measured.disk_gbps == 0
    for name in ("fetch", "fetch_beside", "cpu", "cpu_beside"):
        assert getattr(costs, name).byte_ns > 0
        counts = {sample.records for sample in measured.samples[name]}
        assert {1, 4} <= counts and len({sample.record_bytes for sample in measured.samples[name]}) == 2
    json.dumps(measured.to_json())


def test_timed_experts_check_their_arguments():
    store = ProbeStore(LAYOUTS[:1], 1 << 20)
    pool = _native.WorkerPool(1)
    assert len(_native.time_experts(pool, store.store, 0, 2, 3, 0.0)) >= 2
    with pytest.raises(ValueError, match="num_experts must be"):
        _native.time_experts(pool, store.store, 0, 10**6, 1, 0.0)
    with pytest.raises(ValueError, match="layer must be"):
        _native.time_experts(pool, store.store, 1, 1, 1, 0.0)
    small = _native.SharedSegment.create("small", 4096)
    with pytest.raises(ValueError, match="slots' bytes"):
        _native.time_experts(pool, store.store, 0, 4, 1, 0.0, small)
    pool.close()


@pytest.mark.skipif(not INTERPRETED, reason="runs the kernel in Triton's interpreter (TRITON_INTERPRET=1)")
def test_a_gpu_fetch_reads_the_records_into_slots():
    store = ProbeStore(LAYOUTS[:1], 1 << 16)
    driver = HostDriver()
    probe = CudaFetchProbe(store, driver, torch.device("cpu"), 2)
    assert (probe.time(0, 2, 1, 0.0) > 0).all() and (probe.time(0, 2, 2, 0.0) > 0).all()
    stride, payload = LAYOUTS[0].stride_bytes, LAYOUTS[0].payload_bytes
    expected = np.frombuffer(memoryview(store.segment), np.uint8)[:payload]
    assert (probe._slots[:payload].numpy() == expected).all() and stride >= payload
    assert probe.hit_byte_ns(0) > 0
    probe.close()
    assert driver.ranges == {}


def test_the_disk_is_read_past_the_page_cache_where_it_can_be(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    assert measure_disk(path, chunk_bytes=1 << 20) >= 0
    assert measure_disk(tmp_path / "none") == 0
    (tmp_path / "empty").touch()
    assert measure_disk(tmp_path / "empty") == 0


MODEL = ModelSpec(
    family="qwen3", architecture="Qwen3MoeForCausalLM", vocab_size=512, hidden_size=32, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, max_position_embeddings=4096,
    rms_norm_eps=1e-6, rope=RopeSpec(1e6, rotary_dim=8), dtype="f32", moe_layers=(0, 1),
    moe_intermediate_size=32, router=RouterSpec(8, 4),
)  # fmt: skip


def identity_of(**settings):
    config = EngineConfig(model="m", vram=1 << 30, **settings)
    machine = MachineInfo((0, 1), 8 << 30, 8 << 30)
    plan = plan_boot(config, MODEL, LAYOUTS[:1], CheckpointSizes(1 << 20, 1 << 20), machine)
    return identify(config, plan, LAYOUTS[:1], 4)


def test_a_profile_is_found_only_by_what_it_was_measured_for(measured, tmp_path, monkeypatch, caplog):
    identity = identity_of()
    kept = make_profile(identity, measured, "today")
    assert load_profile(identity, str(tmp_path)) is None
    path = save_profile(kept, str(tmp_path))
    found = load_profile(identity, str(tmp_path))
    assert found is not None and found.costs == kept.costs and "today" in found.costs.source
    for field, value in (("build", "newer"), ("gpu", "GPU-1, 570.1"), ("layouts", "other"), ("cores", 64)):
        assert load_profile(dataclasses.replace(identity, **{field: value}), str(tmp_path)) is None
    assert load_profile(identity_of(executor={"cpu_threads": 3}), str(tmp_path)) is None

    # A file under the right name that says it is of another build, and damaged ones.
    other = dataclasses.replace(identity, build="older")
    profile_path(other, str(tmp_path)).write_text(path.read_text())
    assert load_profile(other, str(tmp_path)) is None and "profile_ignored" in caplog.text
    for text in ("", "[]", "{}", path.read_text().replace('"byte_ns": ', '"byte_ns": -')):
        path.write_text(text)
        assert load_profile(identity, str(tmp_path)) is None


def test_a_gpu_that_nobody_names_has_no_profile(monkeypatch):
    monkeypatch.setattr(profiles, "gpu_identity", lambda: None)
    assert identity_of(device="cuda") is None
    monkeypatch.setattr(profiles, "gpu_identity", lambda: "GPU-7, 570.86")
    assert identity_of(device="cuda").gpu == "GPU-7, 570.86"


def test_a_profile_is_of_the_gpu_that_is_measured():
    check_gpu("GPU-7a, 570.86, NVIDIA", "7a")
    check_gpu("GPU-7a, 570.86, NVIDIA", "")  # a PyTorch that does not tell
    with pytest.raises(ConfigError, match="GPU-8b, but nvidia-smi's first is GPU-7a; set CUDA_DEVICE_ORDER"):
        check_gpu("GPU-7a, 570.86, NVIDIA", "GPU-8b")
