"""The aim of the split: on any machine and at any residency, about as good as the best fixed split. Virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken import _native
from freetoken.costs import assumed_costs
from freetoken.testing.split_machine import H200, MACHINES, Record, Routing, beginnings, compare

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
FIXED = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
RESIDENCIES = (0.1, 0.25, 0.4, 0.6)
AIM = 0.97


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("routing", [Routing(num_layers=4, warm_up=1200, measured=800)], ids=["independent"])
def test_live_rates_are_as_good_as_the_best_fixed_split(machine, routing):
    """From wrong beliefs too; more kinds of routing and shares are in bench/system/split_simulated.py."""
    begun = {"assumed": assumed_costs("cuda")}
    for residency in RESIDENCIES:
        found = compare(machine, residency, routing, FIXED, begun)
        assert found.auto_of_best("assumed", machine.rest_us) >= AIM, (residency, found.best_fixed)


def test_tries_cost_no_more_than_they_may():
    """Where parts of records teach the bus's rate, and a whole one takes several times as long as believed."""
    routing = Routing(alpha=0.8, locality=0.3, streams=4, num_layers=4, warm_up=1500, measured=1500)
    machine = next(machine for machine in MACHINES if machine.name == "CPU only")
    found = compare(machine, 0.25, routing, (0.0, 0.1), {"assumed": assumed_costs("cuda")})
    assert found.auto_of_best("assumed", machine.rest_us) >= AIM


@pytest.mark.parametrize("begun", ["profile", "wrong"])
def test_what_was_believed_does_not_matter(begun):
    routing = Routing(alpha=0.8, locality=0.3, num_layers=4, warm_up=1200, measured=1200)
    found = compare(H200, 0.4, routing, (0.2, 0.3, 0.4), {begun: beginnings(H200, Record(), 8)[begun]})
    assert found.auto_of_best(begun, H200.rest_us) >= AIM


def test_the_h200_of_numbers_is_the_one_that_was_measured():
    """Fixed splits at four residencies, measured after the numbers were chosen: within 9 %."""
    runs = json.loads((RESULTS / "gpu_split_h200.json").read_text())["figures"]["runs"]
    shares = {0.0: "q=0", 0.2: "q=0.2", 0.4: "q=0.4", 0.6: "q=0.6", 1.0: "q=1"}
    assert [run["residency"] for run in runs] == [0.6, 0.4, 0.25, 0.1]
    for run in runs:
        found = compare(H200, run["resident"], Routing(num_layers=4, warm_up=100, measured=500), list(shares), {})
        for share, name in shares.items():
            simulated_ms = 48 * (found.fixed[share].layer_us + H200.rest_us) / 1e3
            assert simulated_ms == pytest.approx(run["ways"][name]["ms_per_token"], rel=0.09), (run["residency"], name)


def test_both_share_the_memory():
    alone = H200.layer(_native.LayerShares(0, 4, 0, 2e6)).own_ns, H200.layer(_native.LayerShares(0, 0, 4, 2e6)).cpu_ns
    both = H200.layer(_native.LayerShares(0, 4, 4, 2e6))
    assert both.own_ns > 1.02 * alone[0] and both.cpu_ns > 1.02 * alone[1]


def test_two_runs_are_equal():
    routing = Routing(num_layers=4, warm_up=100, measured=300)
    begun = {"profile": H200.profile(Record())}
    assert compare(H200, 0.4, routing, (0.3,), begun) == compare(H200, 0.4, routing, (0.3,), begun)
