"""Hints and records copied ahead of time, over real servers: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from freetoken.messages import StepPlan, StepRow  # noqa: E402
from freetoken.testing.cuda_rig import CudaRig  # noqa: E402
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint  # noqa: E402
from tests.gpu.test_cuda_executor import PROMPT, first_row, launch_of, ok  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def decode(directory: Path, steps: int, num_slots: int = 3, fetch_fraction: float = 0.5, **experts: Any) -> Any:
    """(tokens, counters, the executor's sums) of a prompt and ``steps`` tokens after it."""
    launch = launch_of("mixtral", directory, num_slots=num_slots, experts=experts)
    with CudaRig(launch, fetch_fraction=fetch_fraction) as rig:
        tokens, total = [], None
        for step in range(steps + 1):
            row = first_row(PROMPT) if step == 0 else StepRow("a", len(PROMPT) + step - 1, 1, True, True)
            result = ok(rig.executor.execute(StepPlan(1 + step, 1, (row,))))
            tokens.append(result.rows[0].token_id)
            total = result.experts if total is None else total + result.experts
        return tokens, rig.cache_server.counters(), total


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lookahead")


@pytest.mark.parametrize("fetch_fraction", [0.0, 0.5, 1.0])
def test_records_copied_ahead_are_used_and_change_no_token(directory: Path, fetch_fraction: float) -> None:
    steps = 8
    tiny = load_tiny_checkpoint("mixtral")
    tokens, counters, total = decode(directory, steps, fetch_fraction=fetch_fraction)
    assert tokens == tiny.oracle_greedy(PROMPT, steps + 1)
    layers = len(tiny.spec.moe_layers)
    assert counters["hints"] == steps * (layers - 1)
    assert 0 < counters["used_ahead"] <= counters["copied_ahead"] <= counters["hints"]
    # The device and ExpertCache count alike; what was copied for nothing is known to ExpertCache alone.
    for name in ("hits", "fetches", "cpu"):
        assert counters[name] == getattr(total, name), name
    wasted = counters["copied_ahead"] - counters["used_ahead"]
    stride = (total.fetched_bytes + total.cpu_bytes) // (total.fetches + total.cpu)
    assert counters["fetched_bytes"] == total.fetched_bytes + wasted * stride
    if fetch_fraction == 0.0:
        assert total.fetches == counters["used_ahead"]


def test_without_lookahead_there_are_no_hints(directory: Path) -> None:
    tokens, counters, _ = decode(directory, 2, lookahead=False)
    assert counters["hints"] == counters["copied_ahead"] == 0
    assert tokens == load_tiny_checkpoint("mixtral").oracle_greedy(PROMPT, 3)


def test_hints_are_answered_when_the_server_does_not_look_ahead(directory: Path) -> None:
    launch = launch_of("mixtral", directory, num_slots=3)
    with CudaRig(launch, fetch_fraction=0.5) as rig:
        rig.cache_server.set_lookahead(False)
        ok(rig.executor.execute(StepPlan(1, 1, (first_row(PROMPT),))))
        for step in range(2):
            ok(rig.executor.execute(StepPlan(2 + step, 1, (StepRow("a", len(PROMPT) + step, 1, True, True),))))
        counters = rig.cache_server.counters()
        assert counters["hints"] > 0 and counters["copied_ahead"] == 0


def test_a_new_epoch_goes_on_counting_hints(directory: Path) -> None:
    launch = launch_of("mixtral", directory, num_slots=3)
    with CudaRig(launch, fetch_fraction=0.5) as rig:
        for _ in range(2):
            ok(rig.executor.execute(StepPlan(1, 1, (first_row(PROMPT),))))
            ok(rig.executor.execute(StepPlan(2, 1, (StepRow("a", len(PROMPT), 1, True, True),))))
            assert rig.cache_server.counters()["hints"] > 0
            rig.wire()
