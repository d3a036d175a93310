"""A step whose launches end between an expert layer's publish and its end: slots that were promised a record and never
got one must not count as filled.

On a GPU, else in Triton's interpreter. Float32, tolerance 1e-4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.execution.cuda import program
from freetoken.messages import ActorName, StepFailed, StepPlan
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint

triton = pytest.importorskip("triton", reason="needs triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)
SLOW_TO_INTERPRET = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the interpreter takes half a minute")

from freetoken.execution.cuda import device_model  # noqa: E402
from freetoken.testing.cuda_rig import CudaRig  # noqa: E402
from tests.gpu.test_cuda_executor import TOLERANCE, first_row, launch_of, ok  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

SHORT = [(i * 37 + 5) % 500 for i in range(3)]
LONG = [(i * 11 + 3) % 500 for i in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


def refuse(*arguments: Any, **more: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        pytest.param(SHORT, "plane.await_plan", marks=SLOW_TO_INTERPRET),
        (SHORT, "expert_gemv"),
        pytest.param(SHORT, "combine", marks=SLOW_TO_INTERPRET),
        pytest.param(LONG, "plane.await_placed_plan", marks=SLOW_TO_INTERPRET),
        (LONG, "copy_records"),
        pytest.param(LONG, "fill_block_table", marks=SLOW_TO_INTERPRET),
        pytest.param(LONG, "expert_gemm", marks=SLOW_TO_INTERPRET),
        pytest.param(LONG, "plane.await_part", marks=SLOW_TO_INTERPRET),
        pytest.param(LONG, "combine", marks=SLOW_TO_INTERPRET),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}-tokens",
)
def test_slots_that_were_not_filled_are_emptied(
    directory: Path, monkeypatch: pytest.MonkeyPatch, prompt: list[int], where: str
) -> None:
    monkeypatch.setattr(device_model, "GEMV_EXPERT_TOKENS", 8)
    tiny = load_tiny_checkpoint("qwen3_moe")
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=16), fetch_fraction=1.0, capture=False) as rig:
        owner = rig.runtime.model.plane if where.startswith("plane.") else program
        with monkeypatch.context() as patch:
            patch.setattr(owner, where.removeprefix("plane."), refuse)
            failed = rig.executor.execute(StepPlan(1, 1, (first_row(prompt),)))
        assert isinstance(failed, StepFailed) and "no room" in failed.message
        assert failed.suspects == (ActorName.GPU_EXECUTOR.value,)
        assert rig.mailbox is not None and rig.mailbox.abort_reason == "GpuExecutor failed within a layer"
        again = rig.executor.execute(StepPlan(2, 1, (first_row(prompt, name="b"),)))
        assert isinstance(again, StepFailed) and again.suspects == (ActorName.GPU_EXECUTOR.value,)

        rig.wire()  # what follows from suspects: the next epoch
        result = ok(rig.executor.execute(StepPlan(1, 1, (first_row(prompt),))))
        error = (rig.runtime.model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max()
        assert error < TOLERANCE
        assert [result.rows[0].token_id] == tiny.oracle_greedy(prompt, 1)


def test_a_launch_that_fails_between_layers_fails_its_step_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=16), fetch_fraction=1.0, capture=False) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.runtime.model.program, "logits", refuse)
            failed = rig.executor.execute(StepPlan(1, 1, (first_row(SHORT),)))
        assert isinstance(failed, StepFailed) and not failed.suspects
        assert rig.mailbox is not None and not rig.mailbox.aborted
        ok(rig.executor.execute(StepPlan(2, 1, (first_row(SHORT, name="b"),), ("a",))))
        error = (rig.runtime.model.logits[0].cpu() - tiny.oracle_logits(SHORT)[-1]).abs().max()
        assert error < TOLERANCE
