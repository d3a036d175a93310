"""StepExecutor over the reference operations: plans, their checks, and what a failure touches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freetoken.execution.batch_state import InvalidPlanError
from freetoken.execution.experts import NoExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ReferenceOps
from freetoken.execution.step_executor import StepExecutor, StepLimits
from freetoken.messages import (
    ExpertCounters,
    RequestInit,
    RowResult,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepResult,
    StepRow,
)
from freetoken.models.decoder import Decoder, DecoderBatch
from freetoken.testing.tiny_checkpoints import TinyCheckpoint, load_tiny_checkpoint

BLOCK, NUM_BLOCKS = 4, 40
GREEDY = SamplingParams(temperature=0.0, seed=0)


class RecordingOps(ReferenceOps):
    """Remembers batches, and fails on demand."""

    def __init__(self, tiny: TinyCheckpoint) -> None:
        spec = tiny.spec
        super().__init__(
            KVGeometry(NUM_BLOCKS, spec.num_layers, BLOCK, spec.num_kv_heads, spec.head_dim, "f32"), tiny.experts
        )
        self.batches: list[DecoderBatch] = []
        self.error: Exception | None = None
        self.poison_row: int | None = None

    def attention(self, layer: int, queries: Any, batch: DecoderBatch, scale: float, sliding_window: int) -> Any:
        if layer == 0:
            self.batches.append(batch)
        if self.error is not None:
            raise self.error
        out = super().attention(layer, queries, batch, scale, sliding_window)
        if self.poison_row is not None:
            out[int(batch.row_starts[self.poison_row]) : int(batch.row_starts[self.poison_row + 1])] = torch.nan
        return out


class Setup:
    """An executor on a tiny model, with block tables handed out in order."""

    def __init__(self, name: str = "qwen3_moe", seed_tail: int = 2) -> None:
        self.tiny = load_tiny_checkpoint(name)
        self.ops = RecordingOps(self.tiny)
        limits = StepLimits(BLOCK, NUM_BLOCKS, 128, 64, seed_tail)
        self.executor = StepExecutor(
            Decoder(self.tiny.spec, self.tiny.dense, 128, self.ops.prepare), self.ops, NoExperts(), limits
        )
        self.step = 0

    def run(self, *rows: StepRow, retired: tuple[str, ...] = ()) -> StepResult:
        result = self.execute(*rows, retired=retired)
        assert isinstance(result, StepResult), result
        return result

    def execute(self, *rows: StepRow, retired: tuple[str, ...] = ()) -> StepResult | StepFailed:
        self.step += 1
        return self.executor.execute(StepPlan(self.step, 3, rows, retired))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(5 + (seed * 131 + i * 37) % 500 for i in range(length))


def start(
    request_id: str,
    tokens: tuple[int, ...],
    blocks: tuple[int, ...],
    count: int | None = None,
    sampling: SamplingParams = GREEDY,
    num_prompt: int | None = None,
) -> StepRow:
    """A first row: ``count`` tokens (default all) from position 0."""
    count = len(tokens) if count is None else count
    init = RequestInit(sampling, tokens, num_prompt or len(tokens))
    return StepRow(request_id, 0, count, count == len(tokens), new_block_ids=blocks, init=init)


def decode(request_id: str, position: int, blocks: tuple[int, ...] = ()) -> StepRow:
    return StepRow(request_id, position, 1, True, use_last_sampled=True, new_block_ids=blocks)


def token_of(result: StepResult, request_id: str) -> int:
    (row,) = [row for row in result.rows if row.request_id == request_id]
    assert row.token_id is not None, row
    return row.token_id


def test_greedy_generation_in_chunks_next_to_others() -> None:
    setup = Setup()
    a, b = prompt(11, 1), prompt(6, 2)
    expected_a = setup.tiny.oracle_greedy(list(a), 4)
    expected_b = setup.tiny.oracle_greedy(list(b), 3)
    first = setup.run(start("a", a, (7, 3), count=6))
    assert first.rows == (RowResult("a"),) and first.step_id == 1 and first.epoch == 3
    assert first.started_ns <= first.finished_ns
    got_a, got_b = [], []
    result = setup.run(StepRow("a", 6, 5, True, new_block_ids=(21,)), start("b", b, (0, 39)))
    got_a.append(token_of(result, "a"))
    got_b.append(token_of(result, "b"))
    result = setup.run(decode("b", 6), decode("a", 11))
    got_a.append(token_of(result, "a"))
    got_b.append(token_of(result, "b"))
    result = setup.run(decode("a", 12, (5,)), decode("b", 7))
    got_a.append(token_of(result, "a"))
    got_b.append(token_of(result, "b"))
    got_a.append(token_of(setup.run(decode("a", 13), retired=("b",)), "a"))
    assert (got_a, got_b) == (expected_a, expected_b)
    assert len(setup.executor.requests) == 1


def test_a_prefix_that_is_already_in_the_cache_is_not_computed_again() -> None:
    setup = Setup("llama")
    tokens = prompt(10)
    setup.run(start("first", tokens, (4, 5, 6)))
    rest = (*tokens[:8], 77, 78, 79)
    row = StepRow("second", 8, 3, True, new_block_ids=(4, 5, 9), init=RequestInit(GREEDY, rest, len(rest)))
    result = setup.run(row)
    assert token_of(result, "second") == setup.tiny.oracle_greedy(list(rest), 1)[0]


def test_resuming_after_a_preemption_gives_the_same_tokens() -> None:
    setup = Setup("qwen3")
    tokens = prompt(7)
    sampling = SamplingParams(temperature=0.9, seed=11, presence_penalty=0.7)
    straight = [token_of(setup.run(start("a", tokens, (0, 1, 2), sampling=sampling)), "a")]
    straight += [token_of(setup.run(decode("a", 7 + i)), "a") for i in range(4)]
    known = tokens + tuple(straight[:2])
    again = [token_of(setup.run(start("a", known, (9, 8, 7), sampling=sampling, num_prompt=7), retired=("a",)), "a")]
    again += [token_of(setup.run(decode("a", 9 + i)), "a") for i in range(2)]
    assert again == straight[2:]


def test_admission_flags_and_batch_layout() -> None:
    setup = Setup(seed_tail=2)
    setup.run(start("a", prompt(5), (10, 11)))
    setup.run(decode("a", 5), start("b", prompt(6, 2), (2, 1), count=5), start("c", prompt(1, 3), (3,)))
    first, second = setup.ops.batches
    assert first.admit.tolist() == [0, 0, 0, 2, 2]
    assert first.slot_mapping.tolist() == [40, 41, 42, 43, 44]
    assert second.admit.tolist() == [1, 0, 0, 0, 2, 2, 1]
    assert second.positions.tolist() == [5, 0, 1, 2, 3, 4, 0]
    assert second.slot_mapping.tolist() == [45, 8, 9, 10, 11, 4, 12]
    assert second.row_starts.tolist() == [0, 1, 6, 7]
    assert second.block_tables.tolist() == [[10, 11], [2, 1], [3, -1]]
    assert second.logit_tokens.tolist() == [0, 6]


def test_no_seed_tail_admits_decode_rows_only() -> None:
    setup = Setup(seed_tail=0)
    setup.run(start("a", prompt(5), (10, 11)))
    setup.run(decode("a", 5))
    assert [batch.admit.tolist() for batch in setup.ops.batches] == [[0] * 5, [1]]


def test_an_empty_plan_only_retires() -> None:
    setup = Setup("llama")
    setup.run(start("a", prompt(3), (0,)))
    result = setup.run(retired=("a", "never-seen"))
    assert result.rows == () and result.experts == ExpertCounters()
    assert len(setup.executor.requests) == 0


INIT = RequestInit(GREEDY, (5, 6, 7, 8, 9), 5)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (StepRow("x", 0, 1, True), "unknown"),
        (StepRow("a", 7, 1, True), "starts at 7, computed are 5"),
        (StepRow("a", 5, 2, True), "known are 6"),
        (StepRow("a", 5, 0, False), "0 tokens"),
        (StepRow("a", 5, 1, True, use_last_sampled=True, new_block_ids=(99,)), "block 99"),
        (StepRow("n", 0, 5, True, new_block_ids=(1,), init=INIT), "do not fit 1 blocks"),
        (StepRow("n", 0, 4, True, new_block_ids=(1, 2), init=INIT), "samples after 4 of 5"),
        (StepRow("n", 0, 6, True, new_block_ids=(1, 2), init=INIT), "known are 5"),
        (StepRow("n", 4, 1, True, use_last_sampled=True, new_block_ids=(1, 2), init=INIT), "before anything"),
        (StepRow("n", 0, 5, True, use_last_sampled=True, new_block_ids=(1, 2), init=INIT), "with 5 tokens"),
        (StepRow("n", 0, 1, True, new_block_ids=(1,), init=RequestInit(GREEDY, (512,), 1)), "token id 512"),
        (StepRow("n", 0, 1, True, new_block_ids=(1,), init=RequestInit(GREEDY, (-1,), 1)), "token id -1"),
        (StepRow("n", 0, 1, True, new_block_ids=(1,), init=RequestInit(GREEDY, (5,), 2)), "a prompt of 2"),
        (StepRow("n", 120, 9, True, new_block_ids=(1,), init=RequestInit(GREEDY, (5,) * 129, 1)), "context of 128"),
        (StepRow("n", 0, 65, True, new_block_ids=(1,), init=RequestInit(GREEDY, (5,) * 65, 1)), "limit of 64"),
    ],
)
def test_wrong_plans_are_refused_before_anything_runs(row: StepRow, words: str) -> None:
    setup = Setup("llama")
    setup.run(start("a", prompt(5), (10, 11)))
    ran = len(setup.ops.batches)
    with pytest.raises(InvalidPlanError, match=words):
        setup.executor.run(StepPlan(2, 3, (row,)))
    failed = setup.execute(row)
    assert isinstance(failed, StepFailed) and words in failed.message and failed.suspects == ()
    assert len(setup.ops.batches) == ran


def test_two_rows_of_one_request_are_refused() -> None:
    setup = Setup("llama")
    row = start("a", prompt(5), (10, 11))
    failed = setup.execute(row, row)
    assert isinstance(failed, StepFailed) and "two rows" in failed.message


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    setup = Setup("llama")
    a, b = prompt(5, 1), prompt(5, 2)
    setup.run(start("a", a, (10, 11)))
    setup.ops.error = TimeoutError("no plan for layer 1 from ExpertCache within 0.2 s")
    failed = setup.execute(decode("a", 5), start("new", prompt(3), (0,)))
    assert failed == StepFailed(2, 3, f"TimeoutError: {setup.ops.error}", ("ExpertCache",))
    setup.ops.error = None
    # The next step was planned before the failure was known.
    result = setup.run(decode("a", 6), start("b", b, (20, 21)), decode("new", 3))
    assert token_of(result, "b") == setup.tiny.oracle_greedy(list(b), 1)[0]
    for row in (result.rows[0], result.rows[2]):
        assert row.token_id is None and row.failure is not None and "step 2 failed" in row.failure
    # A fresh start clears the mark.
    again = setup.run(start("a", a, (10, 11)), retired=("a",))
    assert token_of(again, "a") == setup.tiny.oracle_greedy(list(a), 1)[0]


def test_non_finite_logits_fail_one_request() -> None:
    setup = Setup("llama")
    a, b = prompt(5, 1), prompt(5, 2)
    setup.ops.poison_row = 0
    result = setup.run(start("a", a, (10, 11)), start("b", b, (20, 21)))
    assert result.rows[0].failure is not None and result.rows[0].failure.startswith("numeric")
    assert result.rows[0].token_id is None
    assert result.rows[1].token_id == setup.tiny.oracle_greedy(list(b), 1)[0]
    setup.ops.poison_row = None
    result = setup.run(decode("a", 5), decode("b", 5))
    assert result.rows[0].failure is not None and result.rows[1].failure is None
    assert token_of(result, "b") == setup.tiny.oracle_greedy(list(b), 2)[1]
