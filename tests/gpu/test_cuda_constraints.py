"""Constrained rows on the CUDA device: on a GPU, else in Triton's interpreter. A dense model, two steps under way."""

from __future__ import annotations

import queue
import re
from pathlib import Path
from typing import Any

import pytest

from freetoken.execution.pipelined_thread import PipelinedStepThread
from freetoken.messages import (
    Constraint,
    ConstraintKind,
    RequestInit,
    RowResult,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepResult,
    StepRow,
)
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.testing.tiny_models import IM_END_ID, write_tiny_tokenizer
from tests.gpu.test_cuda_executor import GREEDY, PROMPT, launch_of, ok

pytest.importorskip("triton", reason="needs triton")

from freetoken.testing.cuda_rig import CudaRig

# The interpreter divides rows of padding by their temperature of 0.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
PATTERN = "[ab]=[0-9]"
STEPS = 5
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("cuda-constraints")
    launch = launch_of("qwen3", directory, num_slots=0)
    write_tiny_tokenizer(launch.checkpoint)
    with CudaRig(launch) as found:
        yield found


def sampling(seed: int, pattern: str = PATTERN, **more: Any) -> SamplingParams:
    constraint = Constraint(ConstraintKind.REGEX, pattern)
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "constraint": constraint, **more})


def first_rows(*wanted: SamplingParams) -> tuple[StepRow, ...]:
    return tuple(
        StepRow(
            name, 0, len(PROMPT), True, False, tuple(range(4 * i, 4 * i + 4)),
            RequestInit(params, tuple(PROMPT), len(PROMPT), (IM_END_ID,)),
        )
        for i, (name, params) in enumerate(zip("ab", wanted, strict=False))
    )  # fmt: skip


def decode_rows(names: str, number: int) -> tuple[StepRow, ...]:
    return tuple(StepRow(name, len(PROMPT) + number, 1, True, True) for name in names)


def check(rig: Any, tokens: list[int]) -> None:
    """They match the pattern, and then the text ends."""
    from tokenizers import Tokenizer

    ends = {IM_END_ID, *rig.launch.model.eos_token_ids}
    at = next(i for i, token in enumerate(tokens) if token in ends)
    text = Tokenizer.from_file(f"{rig.launch.checkpoint}/tokenizer.json").decode(tokens[:at])
    assert re.fullmatch(PATTERN, text) and set(tokens[at:]) <= ends, tokens


def overlapped(rig: Any, first: StepPlan, steps: int, names: str) -> list[StepResult | StepFailed]:
    """``first`` and decode steps, each enqueued before the one before it is finished."""
    executor, results = rig.executor, []
    under_way = [executor.enqueue(first)]
    for number in range(steps):
        under_way.append(executor.enqueue(StepPlan(2 + number, 1, decode_rows(names, number))))
        results.append(executor.finish(under_way.pop(0)))
    results.append(executor.finish(under_way.pop(0)))
    return results


def test_a_sampled_row_obeys_while_its_greedy_neighbour_stays_what_it_is(rig: Any) -> None:
    rig.wire()
    outcomes: queue.Queue[StepResult | StepFailed] = queue.Queue()
    thread = PipelinedStepThread(lambda plan, outcome: outcomes.put(outcome))  # as in a running engine
    try:
        thread.submit(rig.executor, StepPlan(1, 1, first_rows(sampling(5), GREEDY)))
        for number in range(STEPS - 1):
            thread.submit(rig.executor, StepPlan(2 + number, 1, decode_rows("ab", number)))
        results = [ok(outcomes.get(timeout=LIMIT_S)) for _ in range(STEPS)]
    finally:
        thread.close(LIMIT_S)
    assert [result.step_id for result in results] == list(range(1, STEPS + 1))
    check(rig, [result.rows[0].token_id for result in results])
    free = [result.rows[1].token_id for result in results]
    assert free[:4] == load_tiny_checkpoint("qwen3").oracle_greedy(PROMPT, 4)


def test_host_sampled_rows_obey_too_and_wait_for_each_other(rig: Any) -> None:
    rig.wire()
    executor = rig.executor
    both = first_rows(sampling(1, repetition_penalty=1.3, top_logprobs=1), sampling(2, temperature=0.0))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    plan = StepPlan(1, 1, both)
    for number in range(STEPS):
        pending = executor.enqueue(plan)
        plan = StepPlan(2 + number, 1, decode_rows("ab", number))
        assert executor.must_finish_first(plan)
        for row in ok(executor.finish(pending)).rows:
            tokens[row.request_id].append(row.token_id)
            assert (row.logprob is not None) == (row.request_id == "a")
    for found in tokens.values():
        check(rig, found)


def test_a_grammar_at_fault_ends_its_request_only(rig: Any) -> None:
    rig.wire()
    rows: list[RowResult] = []
    tokens = []
    for result in overlapped(rig, StepPlan(1, 1, first_rows(sampling(0, "a(?=b)"), GREEDY)), 1, "ab"):
        assert isinstance(result, StepResult)
        rows.append(result.rows[0])
        tokens.append(result.rows[1].token_id)
    assert all(row.failure_kind == "constraint" and "look-around" in str(row.failure) for row in rows)
    assert tokens == load_tiny_checkpoint("qwen3").oracle_greedy(PROMPT, 2)


def test_sampling_that_cannot_be_launched_fails_its_step_only(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.wire()
    executor, masks = rig.executor, rig.runtime.model.masks

    def broken(*args: object) -> None:
        raise RuntimeError("cannot be launched")

    first = executor.enqueue(StepPlan(1, 1, first_rows(sampling(5), GREEDY)))
    second = executor.enqueue(StepPlan(2, 1, decode_rows("ab", 0)))  # launches the sampling of the first
    monkeypatch.setattr(masks, "apply", broken)
    ok(executor.finish(first))
    failed = executor.finish(second)
    assert isinstance(failed, StepFailed) and "cannot be launched" in failed.message
    monkeypatch.undo()
    fresh = tuple(StepRow("c" if r.request_id == "a" else "d", *_rest(r)) for r in first_rows(sampling(5), GREEDY))
    ok(executor.execute(StepPlan(3, 1, fresh, ("a", "b"))))


def _rest(row: StepRow) -> tuple[Any, ...]:
    return (row.start, row.num_tokens, row.sample, row.use_last_sampled, row.new_block_ids, row.init)
