"""A long prefill step on the CUDA device in groups of layers, with decode steps in between: logits and tokens against
`transformers`, buffers and residency that must not mix, and what a failure leaves.

On a GPU, else in Triton's interpreter. Float32, tolerance 1e-4.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from freetoken._native import Mailbox
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.execution.turns import Turn
from freetoken.messages import RequestInit, SamplingParams, StepFailed, StepPlan, StepResult, StepRow
from freetoken.scheduling import SchedulerLimits
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.units import align_up

triton = pytest.importorskip("triton", reason="needs triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)
SLOW_TO_INTERPRET = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the interpreter takes half a minute")

from freetoken.execution.cuda import bounce, device_model, host_memory  # noqa: E402
from freetoken.execution.cuda.executor import Background  # noqa: E402
from freetoken.execution.cuda.prefill_costs import PrefillCosts  # noqa: E402
from freetoken.experts.device_client import plan_mailbox  # noqa: E402
from freetoken.testing.cuda_rig import CudaRig, limited_driver  # noqa: E402
from freetoken.testing.step_engine import StepEngine  # noqa: E402
from tests.gpu.test_cuda_executor import GREEDY, TOLERANCE, launch_of, ok  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.usefixtures("small_sizes"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interleave")


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything beyond 8 tokens is put in place, beyond 16 long."""
    monkeypatch.setattr(device_model, "GEMV_EXPERT_TOKENS", 8)
    monkeypatch.setattr(device_model, "LONG_TOKENS", 16)
    monkeypatch.setattr(device_model, "LONG_STEP", 8)
    monkeypatch.setattr(PrefillCosts, "prefers_streaming", lambda costs, missing, tokens: tokens > 16)


STREAM = [(i * 37 + 5) % 500 for i in range(5)]
PROMPT = [(i * 11 + 3) % 500 for i in range(18)]


def first_row(name: str, prompt: list[int], count: int, blocks: range, sampling: SamplingParams = GREEDY) -> StepRow:
    init = RequestInit(sampling, tuple(prompt), len(prompt))
    return StepRow(name, 0, count, count == len(prompt), False, tuple(blocks), init)


class Stream:
    """A request that decodes between the groups."""

    def __init__(self, rig: CudaRig) -> None:
        self.rig = rig
        self.step = 100
        self.tokens: list[int | None] = []
        result = ok(rig.executor.execute(StepPlan(1, 1, (first_row("s", STREAM, 5, range(8)),))))
        self.tokens.append(result.rows[0].token_id)

    def decode(self) -> StepResult:
        row = StepRow("s", len(STREAM) + len(self.tokens) - 1, 1, True, True)
        self.step += 1
        result = ok(self.rig.executor.execute(StepPlan(self.step, 1, (row,))))
        self.tokens.append(result.rows[0].token_id)
        return result


@pytest.mark.parametrize(
    ("places", "num_slots", "count", "staged"),
    [
        pytest.param(None, 6, 18, True, marks=SLOW_TO_INTERPRET),  # a whole layer fits each half
        pytest.param(10, 6, 18, True, marks=SLOW_TO_INTERPRET),  # it does not
        (0, 4, 18, False),  # no staging at all
        (None, 6, 9, False),  # few tokens: the CPU takes a share
    ],
)
def test_layers_and_decode_steps_alternate(
    directory: Path, places: int | None, num_slots: int, count: int, staged: bool
) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    launch = launch_of("qwen3_moe", directory, num_slots)
    if places is not None:
        size = places * launch.plan.slot_stride_bytes
        launch = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, staging_bytes=size))
    prompt = PROMPT[:count]
    with CudaRig(launch, fetch_fraction=0.5, capture=False) as rig:
        executor, model = rig.executor, rig.runtime.model
        model.costs = None
        stream = Stream(rig)
        plan = StepPlan(2, 1, (first_row("p", prompt, count, range(8, 16)),), background=True)
        assert not executor.must_finish_first(plan)
        pending = executor.begin(plan)
        assert (model.program.reserved is not None) == staged
        decoded = 0
        while not executor.advance(pending, 1):
            stream.decode()
            decoded += 1
        assert decoded == tiny.spec.num_layers - 1 and model.program.reserved is None
        result = ok(executor.finish(pending))
        logits = model.logits[0].cpu()
        assert (logits - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE
        token = result.rows[0].token_id
        assert [token] == tiny.oracle_greedy(prompt, 1)
        assert result.experts.layer_steps == len(tiny.spec.moe_layers)
        assert (result.experts.cpu > 0) == (not staged)
        stream.decode()
        assert stream.tokens == tiny.oracle_greedy(STREAM, len(stream.tokens))
        # Both decode on with what the other has left in the slots.
        counters = rig.cache_server.counters()
        assert counters["publishes"] == len(tiny.spec.moe_layers) * (decoded + 3)
        rows = (StepRow("p", count, 1, True, True), StepRow("s", 5 + len(stream.tokens) - 1, 1, True, True))
        both = ok(executor.execute(StepPlan(900, 1, rows)))
        assert [token, both.rows[0].token_id] == tiny.oracle_greedy(prompt, 2)
        assert both.rows[1].token_id == tiny.oracle_greedy(STREAM, len(stream.tokens) + 1)[-1]


def test_a_chunk_of_a_store_that_is_not_pinned_alternates_with_decode_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps give slots that held such records to others, between their staging and their use."""
    monkeypatch.setattr(host_memory, "HEADROOM_BYTES", 4096)
    monkeypatch.setattr(host_memory, "SMALLEST_PIECE_BYTES", 4096)
    monkeypatch.setattr(bounce, "BUFFER_BYTES", 4096)
    tiny = load_tiny_checkpoint("qwen3_moe")
    launch = launch_of("qwen3_moe", directory, 6)
    limit = align_up(Mailbox.required_bytes(*plan_mailbox(launch)), 4096) + 4096 * (bounce.NUM_BUFFERS + 1)
    limit += FtwIndex.load(launch.checkpoint).expert_bytes // 2
    with CudaRig(launch, driver=limited_driver(limit), fetch_fraction=1.0, capture=False) as rig:
        executor, model = rig.executor, rig.runtime.model
        assert model.plane is not None and model.stager is not None and not model.plane.records.complete
        stream = Stream(rig)
        ok(executor.execute(StepPlan(2, 1, (first_row("p", PROMPT, 18, range(8, 16)),))))
        row = first_row("q", PROMPT, 18, range(16, 24))
        pending = executor.begin(StepPlan(3, 1, (row,), ("p",), background=True))
        assert isinstance(pending, Background)
        while not executor.advance(pending, 1):
            stream.decode()
        result = ok(executor.finish(pending))
        assert (model.logits[0].cpu() - tiny.oracle_logits(PROMPT)[-1]).abs().max() < TOLERANCE
        assert [result.rows[0].token_id] == tiny.oracle_greedy(PROMPT, 1)
        assert result.experts.cpu == 0 and model.stager.moved_bytes > 0
        assert stream.tokens == tiny.oracle_greedy(STREAM, len(stream.tokens))


def test_prompts_that_ride_along_keep_off_the_staged_records(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    short = [(i * 29 + 1) % 500 for i in range(12)]
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=4), fetch_fraction=1.0, capture=False) as rig:
        executor, model = rig.executor, rig.runtime.model
        # Staging would be preferred for the short one as well.
        monkeypatch.setattr(PrefillCosts, "prefers_streaming", lambda costs, missing, tokens: True)
        plan = StepPlan(2, 1, (first_row("p", PROMPT, 18, range(8, 16)),), background=True)
        pending = executor.begin(plan)
        names = []
        while not executor.advance(pending, 1):
            name = f"r{len(names)}"
            names.append(name)
            row = first_row(name, short, 12, range(16 + 2 * len(names), 18 + 2 * len(names)))
            ride = StepPlan(10 + len(names), 1, (row,), tuple(names[-2:-1]))
            assert not executor.must_finish_first(ride)
            result = ok(executor.execute(ride))
            assert (model.logits[0].cpu() - tiny.oracle_logits(short)[-1]).abs().max() < TOLERANCE
            assert result.experts.layer_steps == len(tiny.spec.moe_layers)
        ok(executor.finish(pending))
        assert (model.logits[0].cpu() - tiny.oracle_logits(PROMPT)[-1]).abs().max() < TOLERANCE
        assert names


def test_a_dead_mailbox_fails_the_chunk_and_the_steps_beside_it(directory: Path) -> None:
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), capture=False) as rig:
        executor, model = rig.executor, rig.runtime.model
        stream = Stream(rig)
        pending = executor.begin(StepPlan(2, 1, (first_row("p", PROMPT, 18, range(8, 16)),), background=True))
        assert not executor.advance(pending, 1)
        stream.decode()
        assert rig.mailbox is not None
        rig.mailbox.abort("plan_late")
        assert executor.advance(pending, 1)
        outcome = executor.finish(pending)
        assert isinstance(outcome, StepFailed) and outcome.suspects, outcome
        row = StepRow("s", 5 + len(stream.tokens) - 1, 1, True, True)
        assert isinstance(executor.execute(StepPlan(200, 1, (row,))), StepFailed)
        assert model.program.reserved is None and not executor._walking and not executor._pending


def test_a_chunk_that_cannot_be_launched_fails_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), capture=False) as rig:
        executor, model = rig.executor, rig.runtime.model
        stream = Stream(rig)
        wrong = StepPlan(2, 1, (first_row("p", PROMPT, 18, range(8, 9)),), background=True)
        pending = executor.begin(wrong)
        assert executor.advance(pending, 1) and isinstance(executor.finish(pending), StepFailed)
        pending = executor.begin(StepPlan(3, 1, (first_row("p", PROMPT, 18, range(8, 16)),), ("p",), background=True))
        assert not executor.advance(pending, 1)

        def broken(*arguments: object) -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(model.program, "placed_experts", broken)
            assert executor.advance(pending, 1)
        outcome = executor.finish(pending)
        assert isinstance(outcome, StepFailed) and "no room" in outcome.message
        stream.decode()
        assert stream.tokens == tiny.oracle_greedy(STREAM, len(stream.tokens))
        row = first_row("p", PROMPT, 18, range(8, 16))
        pending = executor.begin(StepPlan(4, 1, (row,), ("p",), background=True))
        while not executor.advance(pending, 5):
            stream.decode()
        assert [ok(executor.finish(pending)).rows[0].token_id] == tiny.oracle_greedy(PROMPT, 1)


def test_a_cancelled_chunk_leaves_nothing_behind(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), capture=False) as rig:
        pending = rig.executor.begin(StepPlan(2, 1, (first_row("p", PROMPT, 18, range(8, 16)),), background=True))
        rig.executor.advance(pending, 1)
        rig.executor.cancel(pending)
        rig.wire()
        assert rig.runtime.model.program.reserved is None
        result = ok(rig.executor.execute(StepPlan(1, 1, (first_row("p", PROMPT, 18, range(8, 16)),))))
        assert [result.rows[0].token_id] == tiny.oracle_greedy(PROMPT, 1)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("qwen3", marks=SLOW_TO_INTERPRET)])
def test_the_scheduler_runs_a_prompt_beside_a_stream(directory: Path, name: str) -> None:
    tiny = load_tiny_checkpoint(name)
    launch = launch_of(name, directory, num_slots=6 if tiny.spec.is_moe else 0)
    limits = dataclasses.replace(
        SchedulerLimits.from_spec(launch), prefill_chunk_tokens=18, max_num_batched_tokens=18, ride_along_tokens=4
    )
    with CudaRig(launch, fetch_fraction=0.5, capture=False) as rig:
        if tiny.spec.is_moe:
            rig.runtime.model.costs = None

        def notice() -> None:
            for server in rig._servers:
                server.notice()

        with StepEngine(limits, rig.executor, pipelined=True, before_step=notice) as engine:
            engine.thread.turns.turn = lambda: Turn(1, 1)  # type: ignore[method-assign]
            engine.submit("s", STREAM, dataclasses.replace(GREEDY, max_tokens=6))
            engine.run_until(lambda: len(engine.tokens["s"]) >= 1)
            engine.submit("p", PROMPT, dataclasses.replace(GREEDY, max_tokens=2))
            engine.run_to_end()
            assert engine.scheduler.background_steps_total >= 1
            assert engine.tokens["s"] == tiny.oracle_greedy(STREAM, 6)
            assert engine.tokens["p"] == tiny.oracle_greedy(PROMPT, 2)
            assert engine.thread.stats.failed_steps == 0
            engine.allocator.check_integrity()
