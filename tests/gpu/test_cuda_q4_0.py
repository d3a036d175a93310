"""Q4_0 on the CUDA path, end to end: logits against `transformers` in float32 on the dequantised weights, and how far
the ways of a missing expert are from each other.

The device computes with exact weights and float32 activations; CpuExecutor rounds activations to 8 bits before every
product, as on the CPU device. In Triton's interpreter only a small part runs: a model takes half a minute there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from freetoken.config import EngineConfig  # noqa: E402
from freetoken.elastic.machine import MachineInfo  # noqa: E402
from freetoken.engine.prepare import plan_launch  # noqa: E402
from freetoken.messages import ExpertCounters, StepPlan, StepRow  # noqa: E402
from freetoken.testing.cuda_rig import CudaRig  # noqa: E402
from freetoken.testing.q4_0_models import Q4_0Model, load_q4_0_model  # noqa: E402
from tests.gpu.test_cuda_executor import ON_GPU, first_row, ok  # noqa: E402

PROMPT = [3, 17, 99]
DEVICE_TOLERANCE, CPU_TOLERANCE = 0.01, 0.15
DEVICE_KL, CPU_KL = 1e-5, 1e-3

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_q4_0")


@pytest.fixture(scope="module")
def model(directory: Path) -> Q4_0Model:
    return load_q4_0_model("qwen3_moe", directory / "made")


def run(directory: Path, num_slots: int, fetched: float, steps: int) -> tuple[list[int], Tensor, ExpertCounters]:
    """The prompt and greedy tokens after it: all tokens, the logits of each step, and where experts ran."""
    checkpoint = directory / "made" / "ftw"
    config = EngineConfig(
        model=str(checkpoint),
        device="cuda",
        vram=1 << 30,
        kv={"num_tokens": 512, "block_size": 8, "dtype": "f32"},  # BF16 is nothing for the interpreter
        executor={"wait_timeout_s": 60.0},  # nor are its layers quick
        scheduler={"max_num_running": 2, "max_num_batched_tokens": 256, "prefill_chunk_tokens": 64},
    )
    launch = plan_launch(config, checkpoint, MachineInfo((0, 1), 8 << 30, 8 << 30))
    plan = dataclasses.replace(
        launch.plan, num_slots=num_slots, in_place=False, cpu_threads=1, cpu_core_ids=(), device_core_ids=(), spin_us=0
    )
    launch = dataclasses.replace(launch, plan=plan)
    tokens, logits, total = list(PROMPT), [], ExpertCounters()
    with CudaRig(launch, fetch_fraction=fetched, capture=ON_GPU) as rig:
        for step in range(steps):
            row = first_row(PROMPT) if step == 0 else StepRow("a", len(tokens) - 1, 1, True, True)
            result = ok(rig.executor.execute(StepPlan(1 + step, 1, (row,))))
            logits.append(rig.runtime.model.logits[0].float().cpu().clone())
            assert result.rows[0].token_id is not None
            tokens.append(result.rows[0].token_id)
            total = total + result.experts
    return tokens, torch.stack(logits), total


def expected(model: Q4_0Model, tokens: list[int]) -> Tensor:
    return model.oracle_logits(tokens[:-1])[len(PROMPT) - 1 :]


def divergence(logits: Tensor, other: Tensor) -> float:
    """The greatest KL divergence of a step's distribution from the other's."""
    first, second = torch.log_softmax(logits.double(), -1), torch.log_softmax(other.double(), -1)
    return float((first.exp() * (first - second)).sum(-1).max())


def test_logits_where_the_cpu_has_a_share(directory: Path, model: Q4_0Model) -> None:
    tokens, logits, total = run(directory, 6, 0.5, 8 if ON_GPU else 1)
    assert total.fetches > 0 and total.cpu > 0
    error = float((logits - expected(model, tokens)).abs().max())
    assert error < CPU_TOLERANCE, error


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_hits_fetches_and_cpu_experts_are_near_each_other(directory: Path, model: Q4_0Model) -> None:
    ways = {"hit": (model.index.num_records, 1.0), "fetch": (1, 1.0), "cpu": (1, 0.0)}
    steps = 12
    done = {name: run(directory, *way, steps) for name, way in ways.items()}
    assert done["hit"][2].hits > 0 and done["fetch"][2].fetches > 0 and done["cpu"][2].cpu > 0
    errors, divergences = {}, {}
    for name, (tokens, logits, _) in done.items():
        errors[name] = float((logits - expected(model, tokens)).abs().max())
        # Where the greedy tokens part, what follows is of another text.
        same = next((i for i, pair in enumerate(zip(tokens, done["hit"][0], strict=True)) if pair[0] != pair[1]), None)
        count = steps if same is None else same - len(PROMPT) + 1
        divergences[name] = divergence(done["hit"][1][:count], logits[:count])
    print(f"errors {errors}, KL from hits {divergences}")
    assert max(errors["hit"], errors["fetch"]) < DEVICE_TOLERANCE and errors["cpu"] < CPU_TOLERANCE, errors
    assert divergences["fetch"] < DEVICE_KL and divergences["cpu"] < CPU_KL, divergences
