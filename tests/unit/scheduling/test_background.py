"""Long prefill beside decoding: background steps, what they keep off, and how long they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from freetoken.messages import FinishReason, StepResult
from freetoken.scheduling import SchedulerLimits
from freetoken.scheduling.chunk_costs import ChunkCosts, plan_chunk_tokens
from freetoken.testing.scheduler_rig import SchedulerRig
from tests.unit.scheduling.test_scheduler import LIMITS, check_answer, greedy, prompt


def make(**changes: object) -> SchedulerRig:
    limits: SchedulerLimits = replace(LIMITS, ride_along_tokens=4, **changes)  # type: ignore[arg-type]
    return SchedulerRig(limits)


def beside_a_stream(**changes: object) -> SchedulerRig:
    """A stream decodes, and a prompt of 100 tokens has come: its first chunk is a background step that has begun."""
    rig = make(**changes)
    rig.submit("stream", prompt(8), greedy(60))
    for _ in range(3):
        rig.cycle()
    rig.submit("long", prompt(100, salt=2), greedy(3))
    rig.settle_replies()
    while not rig._begun:
        rig.run_step()
        rig.settle_replies()
    return rig


def test_a_long_prompt_beside_a_stream_runs_in_the_background() -> None:
    rig = beside_a_stream()
    plan = rig.background
    assert plan is not None and [row.request_id for row in plan.rows] == ["long"]
    assert plan.rows[0].num_tokens == 16  # nothing is known of its costs yet
    assert all(row.request_id == "stream" for other in rig.plans for row in other.rows)
    for _ in range(10):  # the stream goes on for as long as it takes
        assert rig.run_step()
        rig.settle_replies()
        assert len(rig.plans) == 2
    assert rig.end_background()
    rig.settle_replies()
    rig.run_step()
    rig.settle_replies()
    assert rig.background is not None and rig.background.rows[0].num_tokens == 32  # twice as long
    rig.drain()
    for name, tokens, count in (("stream", prompt(8), 60), ("long", prompt(100, salt=2), 3)):
        check_answer(rig, name, tokens, greedy(count))
    steps = rig.token_steps["stream"]
    assert max(b - a for a, b in pairwise(steps)) <= 2  # the end of a background step comes between
    assert rig.scheduler.background_steps_total >= 4
    rig.check_baseline()


def test_without_streams_prefill_is_an_ordinary_step() -> None:
    rig = make()
    rig.submit("long", prompt(100), greedy(3))
    rig.drain()
    assert rig.scheduler.background_steps_total == 0
    check_answer(rig, "long", prompt(100), greedy(3))


def test_short_prompts_ride_along_with_and_without_a_background_step() -> None:
    rig = make()
    rig.submit("stream", prompt(8), greedy(60))
    for _ in range(3):
        rig.cycle()
    rig.submit("short", prompt(4, salt=3), greedy(2))
    rig.drain()
    assert rig.scheduler.background_steps_total == 0
    rig = beside_a_stream()
    rig.submit("short", prompt(4, salt=3), greedy(2))
    rig.submit("longer", prompt(9, salt=4), greedy(2))
    while "short" not in rig.endings:
        rig.settle_replies()
        assert rig.run_step()
    assert rig._begun and "longer" not in rig.tokens
    rig.end_background()
    rig.settle_replies()
    rig.run_step()
    rig.settle_replies()
    assert rig.background is not None
    assert {row.request_id: row.num_tokens for row in rig.background.rows} == {"long": 23, "longer": 9}
    rig.drain()
    check_answer(rig, "longer", prompt(9, salt=4), greedy(2))
    rig.check_baseline()


def test_a_cached_conversation_rides_along_with_what_is_new() -> None:
    rig = beside_a_stream()
    rig.submit("again", prompt(8) + tuple(rig.tokens["stream"][:3]), greedy(2))
    while "again" not in rig.endings:
        rig.settle_replies()
        assert rig.run_step()
    assert rig._begun and rig.endings["again"].num_cached_tokens == 8
    rig.drain()


def test_an_aborted_request_keeps_its_blocks_until_the_background_step_ends() -> None:
    rig = beside_a_stream()
    rig.abort("long")
    assert rig.endings["long"].finish_reason is FinishReason.ABORT
    for _ in range(4):
        rig.settle_replies()
        rig.run_step()
    assert "long" in rig.scheduler.book.lingering and rig.device.num_requests == 2
    rig.end_background()
    for _ in range(3):
        rig.settle_replies()
        rig.run_step()
    assert not rig.scheduler.book.lingering and rig.device.num_requests == 1
    rig.drain()
    check_answer(rig, "stream", prompt(8), greedy(60))
    rig.check_baseline()


def test_blocks_of_a_background_step_are_taken_only_after_it() -> None:
    # 13 blocks of 4: the prompt's first chunk and the stream fill them.
    rig = make(num_kv_blocks=13, max_context_tokens=52)
    rig.submit("stream", prompt(8), greedy(40))
    for _ in range(3):
        rig.cycle()
    rig.submit("long", prompt(36, salt=2), greedy(3))
    rig.settle_replies()
    while not rig._begun:
        rig.run_step()
        rig.settle_replies()
    for _ in range(40):
        rig.settle_replies()
        rig.run_step()
    stalled = len(rig.tokens["stream"])
    assert not rig.plans and rig._begun and stalled < 40 and rig.scheduler.book.preemptions_total == 0
    rig.drain()
    assert rig.scheduler.book.preemptions_total >= 1
    check_answer(rig, "stream", prompt(8), greedy(40))
    check_answer(rig, "long", prompt(36, salt=2), greedy(3))
    rig.check_baseline()


@pytest.mark.parametrize("failing", ["background", "ordinary"])
def test_a_failed_step_fails_its_own_requests_only(failing: str) -> None:
    rig = beside_a_stream()
    if failing == "background":
        rig.end_background("out of luck")
    else:
        rig.fail_step()
    rig.drain()
    lost, kept = ("long", "stream") if failing == "background" else ("stream", "long")
    assert rig.endings[lost].failure is not None and rig.endings[lost].failure.retryable
    check_answer(rig, kept, *((prompt(8), greedy(60)) if kept == "stream" else (prompt(100, salt=2), greedy(3))))
    rig.check_baseline()


def test_a_background_step_that_is_never_answered_stalls() -> None:
    rig = beside_a_stream()
    patience = rig.limits.background_timeout_s
    assert patience == pytest.approx(10 / 0.6)
    for _ in range(int(patience) + 2):
        rig.settle_replies()
        rig.run_step()
    assert rig.scheduler.check_stalled(rig.now) == "GpuExecutor"
    rig.pump()
    assert "was not answered" in rig.endings["long"].failure.message and "stream" not in rig.endings  # type: ignore[union-attr]
    rig.drain()
    check_answer(rig, "stream", prompt(8), greedy(60))
    rig.check_baseline()


def test_a_new_epoch_forgets_the_background_step() -> None:
    from freetoken.messages import RequestFailure

    rig = beside_a_stream()
    rig.scheduler.drop_all(RequestFailure("engine_restarted", "again, please", retryable=True), 9.0)
    assert rig.scheduler.num_outstanding_steps == 0
    rig.plans.clear()
    rig.replies.clear()
    rig.background, rig._begun = None, False
    rig.device.reset()
    rig.allocator.release_all()
    rig.submit("stream2", prompt(8), greedy(20))
    rig.submit("long2", prompt(100, salt=2), greedy(3))
    rig.drain()
    check_answer(rig, "long2", prompt(100, salt=2), greedy(3))
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- costs


def test_costs_are_a_line_through_the_chunks() -> None:
    costs = ChunkCosts()
    assert costs.line() is None
    for tokens in (512, 520, 515):
        costs.add(tokens, 0.23 + 15e-6 * tokens)
    assert costs.line() is None and costs.longest_tokens == 520
    for tokens in (4096, 1000, 2048):
        costs.add(tokens, 0.23 + 15e-6 * tokens)
    line = costs.line()
    assert line is not None
    assert line == (pytest.approx(0.23), pytest.approx(15e-6))
    for _ in range(60):  # the machine has changed
        for tokens in (100, 900):
            costs.add(tokens, 0.1 + 1e-4 * tokens)
    assert costs.line() == (pytest.approx(0.1, rel=1e-3), pytest.approx(1e-4, rel=1e-3))


@pytest.mark.parametrize("samples", [[(100, 0.5), (1000, 0.2)], [(100, 0.0), (1000, 0.9)], [(16, 0.0), (2000, 0.0)]])
def test_costs_are_never_negative(samples: list[tuple[int, float]]) -> None:
    costs = ChunkCosts()
    for tokens, seconds in samples:
        costs.add(tokens, seconds)
    line = costs.line()
    assert line is not None and min(line) >= 0.0
    assert 256 <= plan_chunk_tokens(line, 0, 256, 4096) <= 4096


def test_chunks_are_as_long_as_their_fixed_price_asks_for() -> None:
    assert plan_chunk_tokens(None, 0, 256, 4096) == 256
    assert plan_chunk_tokens(None, 300, 256, 4096) == 600
    assert plan_chunk_tokens(None, 3000, 256, 4096) == 4096
    fixed, per_token = 0.02, 1e-4
    chunk = plan_chunk_tokens((fixed, per_token), 0, 16, 4096)
    assert chunk / (fixed + per_token * chunk) >= 0.7 / per_token > (chunk - 1) / (fixed + per_token * (chunk - 1))
    assert plan_chunk_tokens((0.23, 15e-6), 0, 256, 4096) == 4096  # 36,000 would be wanted
    assert plan_chunk_tokens((0.0, 1e-3), 0, 256, 4096) == 256
    assert plan_chunk_tokens((0.5, 0.0), 0, 256, 4096) == 4096
    assert plan_chunk_tokens((0.5, 1e-3), 0, 512, 512) == 512


def test_the_scheduler_learns_from_background_steps_and_from_prefill_alone() -> None:
    rig = make(max_num_batched_tokens=64)
    rig.device.run = _timed(rig.device.run, fixed_ns=10_000_000, per_token_ns=1_000_000)  # type: ignore[method-assign]
    rig.submit("alone", prompt(90), greedy(1))
    rig.drain()
    rig.submit("stream", prompt(8), greedy(100))
    for _ in range(3):
        rig.cycle()
    rig.submit("long", prompt(150, salt=2), greedy(1))
    rig.drain()
    line = rig.scheduler.clock.chunk_costs.line()
    assert line == (pytest.approx(0.01), pytest.approx(0.001))
    assert rig.scheduler.metrics()["chunk_fixed_ms"] == pytest.approx(10.0)
    assert rig.scheduler._chunk_tokens() == 24


def _timed(run: object, fixed_ns: int, per_token_ns: int) -> object:
    def timed(plan: object) -> StepResult:
        result = run(plan)  # type: ignore[operator]
        busy = fixed_ns + per_token_ns * sum(row.num_tokens for row in plan.rows)  # type: ignore[attr-defined]
        if plan.background:  # type: ignore[attr-defined]
            return replace(result, started_ns=0, finished_ns=10**12, busy_ns=busy)
        return replace(result, started_ns=0, finished_ns=busy)

    return timed


def test_fewer_blocks_wait_for_the_background_step_while_streams_go_on() -> None:
    rig = beside_a_stream()
    rig.resize(90)
    for _ in range(10):
        assert rig.run_step()
        rig.settle_replies()
        assert rig.is_resizing and rig.background is not None
    rig.submit("longer", prompt(150, salt=3), greedy(3))
    assert rig.end_background()  # the owner of the blocks is asked, so no other begins
    assert rig.is_resizing and rig.background is None
    assert rig.run_step() and rig.background is None
    assert rig.finish_resize()
    rig.drain()
    assert rig.scheduler.background_steps_total > 1
    for name, tokens, count in (
        ("stream", prompt(8), 60), ("long", prompt(100, salt=2), 3), ("longer", prompt(150, salt=3), 3),
    ):  # fmt: skip
        check_answer(rig, name, tokens, greedy(count))
    rig.check_baseline()
