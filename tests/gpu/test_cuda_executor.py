"""CudaStepExecutor over real servers against `transformers`: on a GPU, else in Triton's interpreter (slow).

Float32 models with float32 KV: tolerance 1e-4, as on the CPU device. BF16: 0.15 on logits with a deviation of about 1.
Tests of what only a GPU does (graphs, BF16) have the marker ``gpu``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.config import EngineConfig
from freetoken.elastic.machine import MachineInfo
from freetoken.engine.prepare import plan_launch
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import RequestInit, SamplingParams, StepFailed, StepPlan, StepResult, StepRow
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint

triton = pytest.importorskip("triton", reason="needs triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from freetoken.testing.cuda_rig import CudaRig  # noqa: E402

PROMPT = [3, 17, 99, 200, 5, 42]
GREEDY = SamplingParams(temperature=0.0, seed=0)
TOLERANCE = 1e-4

# The interpreter divides rows of padding by their temperature of 0.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


def launch_of(
    name: str, directory: Path, num_slots: int, dtype: str = "float32", tile_columns: int | None = None, **settings: Any
) -> LaunchSpec:
    checkpoint = directory / f"{name}-{dtype}-{tile_columns}"
    if not checkpoint.exists():
        convert(load_tiny_checkpoint(name, dtype).path, checkpoint, ConvertOptions(tile_columns=tile_columns))
    config = EngineConfig(
        model=str(checkpoint),
        device="cuda",
        vram=1 << 30,
        kv={"num_tokens": 512, "block_size": 8},
        executor={"wait_timeout_s": 10.0},
        scheduler={"max_num_running": 2, "max_num_batched_tokens": 256, "prefill_chunk_tokens": 64},
        **settings,
    )
    spec = plan_launch(config, checkpoint, MachineInfo((0, 1), 8 << 30, 8 << 30))
    plan = dataclasses.replace(
        spec.plan, num_slots=num_slots, in_place=False, cpu_threads=1, cpu_core_ids=(), device_core_ids=(), spin_us=0
    )
    return dataclasses.replace(spec, plan=plan)


def first_row(prompt: list[int], sampling: SamplingParams = GREEDY, name: str = "a", end: int | None = None) -> StepRow:
    count = len(prompt) if end is None else end
    init = RequestInit(sampling, tuple(prompt), len(prompt))
    blocks = (0, 1, 2, 3) if name == "a" else (4, 5, 6, 7)
    return StepRow(name, 0, count, count == len(prompt), False, blocks, init)


def ok(outcome: StepResult | StepFailed) -> StepResult:
    assert isinstance(outcome, StepResult), outcome
    assert all(row.failure is None for row in outcome.rows), outcome
    return outcome


def test_prompt_and_decode_equal_the_oracle_with_hits_fetches_and_cpu_experts(directory: Path) -> None:
    tiny = load_tiny_checkpoint("mixtral")
    with CudaRig(launch_of("mixtral", directory, num_slots=4), fetch_fraction=0.5) as rig:
        executor, logits = rig.executor, rig.runtime.model.logits
        result = ok(executor.execute(StepPlan(1, 1, (first_row(PROMPT),))))
        error = (logits[0].cpu() - tiny.oracle_logits(PROMPT)[-1]).abs().max()
        assert error < TOLERANCE
        total = result.experts
        tokens = [result.rows[0].token_id]
        under_way = []
        for i in range(2):  # two steps under way: tokens stay on the device
            row = StepRow("a", len(PROMPT) + i, 1, True, True)
            under_way.append(executor.enqueue(StepPlan(2 + i, 1, (row,))))
            if len(under_way) == 2:
                result = ok(executor.finish(under_way.pop(0)))
                tokens.append(result.rows[0].token_id)
                total = total + result.experts
        result = ok(executor.finish(under_way.pop(0)))
        tokens.append(result.rows[0].token_id)
        total = total + result.experts
        assert tokens == tiny.oracle_greedy(PROMPT, 3)
        assert total.hits > 0 and total.fetches > 0 and total.cpu > 0
        stride = rig.index.layouts[0].stride_bytes
        assert total.fetched_bytes + total.cpu_bytes == (total.fetches + total.cpu) * stride
        counters = rig.cache_server.counters()
        assert (counters["hits"], counters["fetches"], counters["cpu"]) == (total.hits, total.fetches, total.cpu)
        assert result.experts.layer_steps == len(tiny.spec.moe_layers)


def test_records_that_are_split_by_their_tiles_give_the_same_tokens(directory: Path) -> None:
    tiny = load_tiny_checkpoint("mixtral")
    launch = launch_of("mixtral", directory, num_slots=3, tile_columns=8, experts={"lookahead": False})
    with CudaRig(launch, fetch_fraction=0.4) as rig:
        executor, total = rig.executor, None
        tokens = []
        for step in range(4):
            row = first_row(PROMPT) if step == 0 else StepRow("a", len(PROMPT) + step - 1, 1, True, True)
            result = ok(executor.execute(StepPlan(1 + step, 1, (row,))))
            tokens.append(result.rows[0].token_id)
            total = result.experts if total is None else total + result.experts
        assert tokens == tiny.oracle_greedy(PROMPT, 4)
        counters = rig.cache_server.counters()
        assert counters["split"] > 0 and total is not None
        for name in ("hits", "fetches", "cpu", "fetched_bytes", "cpu_bytes"):
            assert getattr(total, name) == pytest.approx(counters[name], abs=100), name
        stride = rig.index.layouts[0].stride_bytes
        assert total.fetched_bytes + total.cpu_bytes == pytest.approx((total.fetches + total.cpu) * stride, abs=100)


def test_a_dense_model_with_a_host_sampled_and_a_device_sampled_request(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3")
    penalised = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.5, top_logprobs=2)
    with CudaRig(launch_of("qwen3", directory, num_slots=0)) as rig:
        executor = rig.executor
        rows = (first_row(PROMPT), first_row(PROMPT[:4], penalised, "b"))
        result = ok(executor.execute(StepPlan(1, 1, rows)))
        logits = rig.runtime.model.logits.cpu()
        for row, prompt in enumerate((PROMPT, PROMPT[:4])):
            assert (logits[row] - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE
        entry = result.rows[1].logprob
        assert entry is not None and len(entry.top) == 2 and result.rows[0].logprob is None
        plan = StepPlan(2, 1, (StepRow("a", 6, 1, True, True), StepRow("b", 4, 1, True, True)))
        pending = executor.enqueue(plan)
        assert executor.must_finish_first(StepPlan(3, 1, (StepRow("b", 5, 1, True, True),)))
        assert not executor.must_finish_first(StepPlan(3, 1, (StepRow("a", 7, 1, True, True),)))
        again = ok(executor.finish(pending))
        first = result.rows[0].token_id
        assert first is not None
        assert [first, again.rows[0].token_id] == tiny.oracle_greedy(PROMPT, 2)
        assert executor.requests["b"].tokens[4:] == [result.rows[1].token_id, again.rows[1].token_id]


def test_a_step_that_cannot_be_launched_leaves_nothing_behind_and_a_lost_device_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CudaRig(launch_of("qwen3", directory, num_slots=0), capture=False) as rig:
        executor, table = rig.executor, rig.runtime.model.table
        known = table.slot

        def slot(request_id: str) -> int:
            if request_id == "b":
                raise IndexError
            return known(request_id)

        monkeypatch.setattr(table, "slot", slot)
        full = executor.execute(StepPlan(1, 1, (first_row(PROMPT), first_row(PROMPT, name="b"))))
        assert isinstance(full, StepFailed) and "exceeds the limit" in full.message and full.suspects == ()
        monkeypatch.undo()
        # The slot's next owner has blocks of its own.
        row = dataclasses.replace(first_row(PROMPT, name="b"), request_id="c")
        ok(executor.execute(StepPlan(2, 1, (row,), ("a", "b"))))
        assert table.block_tables[table.slot("c"), :4].tolist() == [4, 5, 6, 7]

        def lost(*args: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(rig.runtime.model.report, "download", lost)
        failed = executor.execute(StepPlan(3, 1, (StepRow("c", 6, 1, True, True),)))
        assert isinstance(failed, StepFailed) and failed.suspects == ("GpuExecutor",)


def test_a_step_that_fails_leaves_the_result_of_the_one_before_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = load_tiny_checkpoint("qwen3")

    def broken(*args: object) -> None:
        raise RuntimeError("cannot be launched")

    with CudaRig(launch_of("qwen3", directory, num_slots=0), capture=False) as rig:
        executor, expected = rig.executor, tiny.oracle_greedy(PROMPT, 3)
        decode = [StepRow("a", len(PROMPT) + i, 1, True, True) for i in range(3)]
        tokens = [ok(executor.execute(StepPlan(1, 1, (first_row(PROMPT),)))).rows[0].token_id]
        good = executor.enqueue(StepPlan(2, 1, (decode[0],)))
        monkeypatch.setattr(rig.runtime.model.report, "download", broken)
        bad = executor.enqueue(StepPlan(3, 1, (decode[1],)))
        monkeypatch.undo()
        after = executor.enqueue(StepPlan(4, 1, (decode[1],)))
        tokens.append(ok(executor.finish(good)).rows[0].token_id)
        assert tokens == expected[:2]
        failed = executor.finish(bad)
        assert isinstance(failed, StepFailed) and "cannot be launched" in failed.message
        refused = executor.finish(after)
        assert isinstance(refused, StepResult) and "step 3 failed" in str(refused.rows[0].failure)


def test_what_follows_from_a_step_that_failed_is_failed_too(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CudaRig(launch_of("qwen3", directory, num_slots=0), capture=False) as rig:
        executor, report = rig.executor, rig.runtime.model.report
        first = executor.enqueue(StepPlan(1, 1, (first_row(PROMPT), first_row(PROMPT, name="b"))))
        rows = tuple(StepRow(name, len(PROMPT), 1, True, True) for name in "ab")
        second = executor.enqueue(StepPlan(2, 1, rows))
        monkeypatch.setattr(report, "download", lambda samples: 1 / 0)
        third = executor.enqueue(StepPlan(3, 1, tuple(StepRow(n, len(PROMPT) + 1, 1, True, True) for n in "ab")))
        monkeypatch.undo()
        assert second.spared == {"a", "b"} and first.report is not None
        if first.event is not None:
            first.event.synchronize()
        first.report.sums[0] = float("nan")
        result, following = executor.finish(first), executor.finish(second)
        assert isinstance(result, StepResult) and isinstance(following, StepResult)
        assert [row.failure is None for row in result.rows] == [False, True]
        assert "not finite" in str(result.rows[0].failure)
        assert [row.failure is None for row in following.rows] == [False, True]
        assert isinstance(executor.finish(third), StepFailed)


def test_wrong_plans_and_an_aborted_mailbox_fail_the_step_only(directory: Path) -> None:
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6)) as rig:
        wrong = rig.executor.execute(StepPlan(1, 1, (StepRow("nobody", 0, 1, True),)))
        assert isinstance(wrong, StepFailed) and "is unknown" in wrong.message and wrong.suspects == ()
        assert rig.mailbox is not None
        rig.mailbox.abort("plan_late")
        late = rig.executor.execute(StepPlan(2, 1, (first_row(PROMPT),)))
        assert isinstance(late, StepFailed) and late.suspects == ("ExpertCache",)
        empty = ok(rig.executor.execute(StepPlan(3, 1, (), ("a", "nobody"))))
        assert empty.rows == ()
        rig.wire()  # the next epoch begins without requests
        assert len(rig.executor.requests) == 0
        assert rig.runtime.model.table.num_free == rig.runtime.model.limits.max_requests


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_moe_mixed", "llama_tied", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_equal_eager_and_the_oracle(directory: Path, name: str, dtype: str) -> None:
    tiny = load_tiny_checkpoint(name, dtype)
    prompt = [(i * 37 + 5) % 500 for i in range(150)]
    num_slots = 8 if tiny.spec.is_moe else 0
    tolerance = TOLERANCE if dtype == "float32" else 0.15
    outcomes = []
    for capture in (False, True):
        with CudaRig(launch_of(name, directory, num_slots, dtype), fetch_fraction=0.5, capture=capture) as rig:
            logits = rig.runtime.model.logits
            init = RequestInit(GREEDY, tuple(prompt), len(prompt))
            row = StepRow("a", 0, len(prompt), True, False, tuple(range(24)), init)
            tokens = [ok(rig.executor.execute(StepPlan(1, 1, (row,)))).rows[0].token_id]
            errors = [float((logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max())]
            for i in range(8):
                row = StepRow("a", len(prompt) + i, 1, True, True)
                tokens.append(ok(rig.executor.execute(StepPlan(2 + i, 1, (row,)))).rows[0].token_id)
                known = [*prompt, *(t for t in tokens[:-1] if t is not None)]
                errors.append(float((logits[0].cpu() - tiny.oracle_logits(known)[-1]).abs().max()))
            assert max(errors) < tolerance, errors
            outcomes.append(tokens)
    if dtype == "float32":
        assert outcomes[0] == outcomes[1] == tiny.oracle_greedy(prompt, 9)
