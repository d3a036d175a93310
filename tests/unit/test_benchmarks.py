"""Bandwidths and bounds of the benchmarks: that they are measured and what follows from them; no rate is judged."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench.common import write_partial
from bench.system import bandwidth, prefill
from bench.system.bandwidth import Bandwidths, Traffic, bounds, with_shares
from freetoken.kernels.triton.common import INTERPRETED
from freetoken.messages import ExpertCounters
from freetoken.quant.formats import plan_layout

LAYOUT = plan_layout("q4_0", 64, 64)
INDEX = SimpleNamespace(layouts=(LAYOUT,), expert_bytes=1 << 16, spec=SimpleNamespace(num_experts_per_tok=2))
RATES = Bandwidths(
    1000.0, 100.0, 90.0, 50.0, 52.0, {"fetch beside experts": (40.0, 80.0), "copy beside read": (30, 60)}
)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(bandwidth, "_WINDOW_S", 0.001)
    monkeypatch.setattr(bandwidth, "_ROUNDS", 1)


@pytest.mark.skipif(not INTERPRETED, reason="runs the kernel in Triton's interpreter (TRITON_INTERPRET=1)")
def test_every_pair_of_buses_is_measured_side_by_side():
    rates = bandwidth.measure("cuda", INDEX, 1, ())
    assert set(rates.together) == {f"{bus} beside {work}" for bus in ("fetch", "copy") for work in ("experts", "read")}
    assert all(rate > 0 for pair in rates.together.values() for rate in pair)
    assert rates.fetch > 0 and rates.copy > 0 and rates.dram >= rates.experts > 0
    json.dumps(rates.to_json())


def test_the_cpu_device_has_one_memory():
    rates = bandwidth.measure("cpu", INDEX, 1, ())
    assert rates.device >= rates.dram > 0 and rates.pcie == 0 and rates.missing == rates.dram


def test_the_best_pair_counts_unless_one_bus_alone_is_better():
    assert RATES.missing == 120.0
    assert Bandwidths(1000.0, 100.0, 90.0, 50.0, 52.0, {"fetch beside read": (20.0, 30.0)}).missing == 100.0


def test_bounds_add_what_cannot_overlap():
    limits = bounds(Traffic(1e9, 5e8, 2e8, 4e8), RATES, True, 3.0)
    assert limits == pytest.approx({"bound_ms": 1.0 + 5.0, "overhead_bound_ms": 3.0 + 5.0})


def test_a_figure_better_than_its_bound_is_flagged_and_no_share():
    figures = with_shares({"bound_ms": 6.0, "overhead_bound_ms": 8.0}, 7.0)
    assert figures["share_of_bound"] == pytest.approx(6 / 7) and "share_of_overhead_bound" not in figures
    assert figures["bound_exceeded"] is True and figures["bound_exceeded_by"] == {"overhead_bound_ms": 8 / 7}
    assert "bound_exceeded" not in with_shares({"bound_ms": 6.0}, 7.0)


def test_a_streaming_pass_is_bound_by_pcie_and_a_short_turn_by_both_buses():
    touched = prefill.bound(Traffic(0.0, 1e9, 4e9, 8e9), RATES, True)
    assert touched == pytest.approx({"bound_s": 0.1})
    streamed = prefill.bound(Traffic(2e9, 1e9, 13e9, 0.0), RATES, True)
    assert streamed == pytest.approx({"bound_s": 0.002 + 0.25})


def test_prefill_figures_are_of_one_prompt_and_of_the_median_time():
    figures = prefill.describe(
        [0.3, 0.1, 0.2], 16, 0, ExpertCounters(hits=30, fetches=60, layer_steps=6), None, None, True
    )
    assert (figures["median_s"], figures["best_s"], figures["worst_s"]) == (0.2, 0.1, 0.3)
    assert figures["tokens_per_s"] == 80 and figures["resident_per_layer"] == 5 and figures["hit_rate"] == 0.33333


def test_partial_results_say_so_and_name_machine_and_commit(tmp_path):
    write_partial(str(tmp_path / "r.json"), "split", {"runs": []})
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["unfinished"] is True and result["commit"] and result["cpu"] and result["command"]
