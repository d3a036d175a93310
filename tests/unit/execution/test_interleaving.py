"""Background steps: turns, the step threads that take them, and a real model with and without them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.errors import FreeTokenError
from freetoken.execution.pipelined_thread import PipelinedStepThread
from freetoken.execution.step_executor import StepExecutor
from freetoken.execution.step_thread import StepThread
from freetoken.execution.turns import Turn, TurnClock, plan_turn
from freetoken.messages import (
    FinishReason,
    RowResult,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepResult,
    StepRow,
)
from freetoken.scheduling import SchedulerLimits
from freetoken.testing.step_engine import StepEngine
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from tests.unit.execution.test_step_executor import BLOCK, NUM_BLOCKS, Setup, prompt

LIMIT_S = 20.0
GREEDY = SamplingParams(temperature=0.0, seed=0)


# ------------------------------------------------------------------------------------------------ turns


def test_turns_leave_decoding_its_share() -> None:
    # 25 % of Qwen3-30B-A3B resident on an H200: 4.8 ms a layer of a chunk, 14 ms a decode step.
    turn = plan_turn(4.8e-3, 14e-3, 0.4)
    assert turn == Turn(4, 1)
    for layer_ms in (0.01, 0.4, 1.0, 7.0, 50.0, 300.0):
        for step_ms in (3.0, 14.0, 90.0):
            for share in (0.3, 0.4, 0.9):
                layers, steps = plan_turn(layer_ms / 1e3, step_ms / 1e3, share)
                kept = steps * step_ms / (steps * step_ms + layers * layer_ms)
                assert kept >= share - 1e-6 or steps == 16
                assert layers == 1 or steps == 1
                if steps == 1:  # and prefill gets what is left, as far as layers can be counted
                    assert step_ms / (step_ms + (layers + 1) * layer_ms) < share + 1e-6


def test_turns_before_anything_was_measured() -> None:
    assert plan_turn(None, None, 0.4) == plan_turn(None, 0.01, 0.4) == Turn(1, 1)
    assert plan_turn(0.01, None, 0.4) == Turn(4, 1) and plan_turn(0.0, 0.01, 0.4) == Turn(4, 1)


def test_the_shorter_decode_time_counts() -> None:
    clock = TurnClock(0.5)
    clock.layers_done(4, 0.04)
    clock.step_done(0.06, beside=True)
    assert clock.turn() == Turn(6, 1)
    clock.step_done(0.03, beside=False)
    assert clock.turn() == Turn(3, 1)
    assert clock.metrics() == pytest.approx({"layer_ms": 10.0, "decode_alone_ms": 30.0, "decode_beside_ms": 60.0})


# ------------------------------------------------------------------------------------------------ threads


class Layers:
    """Background plans of so many layers as they have rows' tokens; logs what runs. ``gate`` holds up ordinary
    steps. Both kinds of executor."""

    depth = 2

    def __init__(self) -> None:
        self.log: list[str] = []
        self.left: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.breaks = False
        self.on_group: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> StepResult | StepFailed:
        assert self.gate.wait(LIMIT_S)
        self.log.append(f"step {plan.step_id}")
        return StepResult(plan.step_id, 1, tuple(RowResult(row.request_id, 1) for row in plan.rows), 0, 1)

    def must_finish_first(self, plan: StepPlan) -> bool:
        return False

    def enqueue(self, plan: StepPlan) -> Any:
        self.log.append(f"step {plan.step_id}")
        return plan

    def begin(self, plan: StepPlan) -> Any:
        self.log.append(f"begin {plan.step_id}")
        self.left[plan.step_id] = plan.rows[0].num_tokens
        return plan

    def advance(self, handle: Any, layers: int) -> bool:
        self.on_group()
        if self.breaks:
            raise RuntimeError("broken executor")
        left = self.left[handle.step_id] = max(self.left[handle.step_id] - layers, 0)
        self.log.append(f"group {handle.step_id}")
        return left == 0

    def finish(self, handle: Any) -> StepResult | StepFailed:
        assert self.gate.wait(LIMIT_S)
        return StepResult(handle.step_id, 1, tuple(RowResult(row.request_id, 1) for row in handle.rows), 0, 1)

    def cancel(self, handle: Any) -> None:
        self.cancelled.append(handle.step_id)

    def mark(self) -> Any:
        return None

    def await_mark(self, mark: Any) -> None:
        assert self.gate.wait(LIMIT_S)


class Outcomes:
    """Collects what the thread answers, and may send the next decode plan at once, as a scheduler does."""

    def __init__(self, kind: type[StepThread], executor: Layers) -> None:
        self.changed = threading.Condition()
        self.found: list[StepResult | StepFailed] = []
        self.next_plans: list[StepPlan] = []
        self.executor = executor
        self.thread = kind(self.deliver)
        self.thread.turns.turn = lambda: Turn(1, 1)  # type: ignore[method-assign]

    def deliver(self, plan: StepPlan, outcome: StepResult | StepFailed) -> None:
        with self.changed:
            self.found.append(outcome)
            if self.next_plans and not plan.background:
                self.thread.submit(self.executor, self.next_plans.pop(0))
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.found) >= count, LIMIT_S), self.executor.log
            return [outcome.step_id for outcome in self.found]


def decode(step: int) -> StepPlan:
    return StepPlan(step, 1, (StepRow("a", step, 1, True, True),))


def chunk(step: int, layers: int) -> StepPlan:
    return StepPlan(step, 1, (StepRow("b", 0, layers, False),), background=True)


@pytest.mark.parametrize("kind", [StepThread, PipelinedStepThread])
def test_groups_alternate_with_steps(kind: type[StepThread]) -> None:
    executor = Layers()
    outcomes = Outcomes(kind, executor)
    executor.gate.clear()
    outcomes.next_plans = [decode(step) for step in range(5, 30)]
    for plan in (decode(1), chunk(2, 6), decode(3), decode(4)):
        outcomes.thread.submit(executor, plan)
    executor.gate.set()
    outcomes.wait_for(29)
    log = executor.log
    assert log.index("begin 2") == 1 and log.count("group 2") == 6
    at = [number for number, entry in enumerate(log) if entry == "group 2"]
    assert all(1 <= b - a - 1 <= 3 for a, b in pairwise(at)), log  # never two groups in a row
    assert [step.step_id for step in outcomes.found if step.step_id != 2] == [1, *range(3, 30)]
    (result,) = [step for step in outcomes.found if step.step_id == 2]
    assert isinstance(result, StepResult) and result.busy_ns > 0
    outcomes.thread.drain(LIMIT_S)
    assert outcomes.thread.stats.steps == 29
    outcomes.thread.close(LIMIT_S)


@pytest.mark.parametrize("kind", [StepThread, PipelinedStepThread])
def test_a_background_step_alone_runs_through(kind: type[StepThread]) -> None:
    executor = Layers()
    outcomes = Outcomes(kind, executor)
    outcomes.thread.submit(executor, chunk(1, 5))
    assert outcomes.wait_for(1) == [1]
    assert executor.log == ["begin 1", *["group 1"] * 5]
    outcomes.thread.close(LIMIT_S)


@pytest.mark.parametrize("kind", [StepThread, PipelinedStepThread])
def test_draining_and_closing_forget_a_background_step(kind: type[StepThread]) -> None:
    for end in ("drain", "close"):
        executor = Layers()
        outcomes = Outcomes(kind, executor)
        begun = threading.Event()
        executor.on_group = begun.set
        outcomes.thread.submit(executor, chunk(1, 10**9))
        assert begun.wait(LIMIT_S)
        getattr(outcomes.thread, end)(LIMIT_S)
        assert executor.cancelled == [1] and not outcomes.found
        if end == "drain":
            outcomes.thread.submit(executor, chunk(2, 3))
            assert outcomes.wait_for(1) == [2]
        outcomes.thread.close(LIMIT_S)


@pytest.mark.parametrize("kind", [StepThread, PipelinedStepThread])
def test_an_executor_that_raises_loses_its_background_step_only(kind: type[StepThread]) -> None:
    executor = Layers()
    executor.breaks = True
    outcomes = Outcomes(kind, executor)
    outcomes.thread.submit(executor, chunk(1, 5))
    outcomes.thread.submit(executor, decode(2))
    assert sorted(outcomes.wait_for(2)) == [1, 2]
    assert [type(found) for found in sorted(outcomes.found, key=lambda o: o.step_id)] == [StepFailed, StepResult]
    outcomes.thread.close(LIMIT_S)


def test_a_second_background_plan_runs_whole() -> None:
    executor = Layers()
    outcomes = Outcomes(StepThread, executor)
    executor.gate.clear()
    for plan in (decode(1), chunk(2, 4), chunk(3, 4)):
        outcomes.thread.submit(executor, plan)
    executor.gate.set()
    outcomes.wait_for(3)
    assert "step 3" in executor.log
    outcomes.thread.close(LIMIT_S)


def test_a_step_that_hangs_is_reported_by_drain() -> None:
    executor = Layers()
    outcomes = Outcomes(PipelinedStepThread, executor)
    executor.gate.clear()
    outcomes.thread.submit(executor, chunk(1, 10**9))
    while len(executor.log) < 3:
        threading.Event().wait(0.001)
    with pytest.raises(FreeTokenError, match="did not end"):
        outcomes.thread.drain(0.01)
    executor.gate.set()
    outcomes.thread.drain(LIMIT_S)
    assert executor.cancelled == [1]
    outcomes.thread.close(LIMIT_S)


# ------------------------------------------------------------------------------------------------ a model

LIMITS = SchedulerLimits(
    max_num_running=4,
    max_num_waiting=16,
    max_num_batched_tokens=32,
    prefill_chunk_tokens=16,
    step_timeout_s=30.0,
    max_context_tokens=128,
    block_size=BLOCK,
    num_kv_blocks=NUM_BLOCKS,
    vocab_size=512,
    ride_along_tokens=4,
)


class Logging:
    """A ``StepExecutor`` that notes its turns, and breaks on demand."""

    def __init__(self, executor: StepExecutor) -> None:
        self.inner = executor
        self.log: list[str] = []
        self.fail_group: int | None = None

    def execute(self, plan: StepPlan) -> StepResult | StepFailed:
        self.log.append("step" if any(row.use_last_sampled for row in plan.rows) else "other")
        return self.inner.execute(plan)

    def begin(self, plan: StepPlan) -> Any:
        return self.inner.begin(plan)

    def advance(self, handle: Any, layers: int) -> bool:
        self.log.append("group")
        if self.fail_group is not None and self.log.count("group") == self.fail_group:
            handle.layers = iter(self._broken())
        return self.inner.advance(handle, layers)

    @staticmethod
    def _broken() -> Any:
        raise MemoryError("no room")
        yield

    def finish(self, handle: Any) -> StepResult | StepFailed:
        return self.inner.finish(handle)

    def cancel(self, handle: Any) -> None:
        self.inner.cancel(handle)


def engine_of(limits: SchedulerLimits = LIMITS) -> tuple[StepEngine, Logging]:
    executor = Logging(Setup("mixtral").executor)
    engine = StepEngine(
        replace(limits, vocab_size=load_tiny_checkpoint("mixtral").spec.vocab_size), executor, pipelined=False
    )
    engine.thread.turns.turn = lambda: Turn(1, 1)  # type: ignore[method-assign]
    return engine, executor


def answers(engine: StepEngine, prompts: dict[str, tuple[int, ...]], count: int) -> None:
    """The stream first, then, once it decodes, the others."""
    first, *others = prompts
    engine.submit(first, prompts[first], replace(GREEDY, max_tokens=count))
    engine.run_until(lambda: len(engine.tokens[first]) >= 2)
    for name in others:
        engine.submit(name, prompts[name], replace(GREEDY, max_tokens=4))
    engine.run_to_end()


def test_tokens_are_the_same_beside_a_background_step_and_gaps_are_a_group() -> None:
    tiny = load_tiny_checkpoint("mixtral")
    prompts = {"stream": prompt(6), "long": prompt(50, 1), "other": prompt(21, 2)}
    for limits in (LIMITS, replace(LIMITS, ride_along_tokens=None)):
        engine, executor = engine_of(limits)
        with engine:
            answers(engine, prompts, 30)
            for name, tokens in prompts.items():
                count = len(engine.tokens[name])
                assert engine.tokens[name] == tiny.oracle_greedy(list(tokens), count), name
                assert engine.endings[name].finish_reason is FinishReason.LENGTH
            engine.allocator.check_integrity()
        beside = limits.ride_along_tokens is not None
        assert (engine.scheduler.background_steps_total > 0) == ("group" in executor.log) == beside
        if beside:
            last = max(number for number, entry in enumerate(executor.log) if entry == "step")
            text = "".join({"step": "s", "group": "g", "other": "o"}[entry] for entry in executor.log[:last])
            assert "ggg" not in text, text  # while a stream runs, it waits for two groups at most
            assert engine.order != sorted(engine.order)  # a background step was answered after later ones


def test_a_chunk_that_fails_half_way_spares_the_stream() -> None:
    tiny = load_tiny_checkpoint("mixtral")
    engine, executor = engine_of()
    executor.fail_group = 2
    with engine:
        answers(engine, {"stream": prompt(6), "long": prompt(50, 1)}, 20)
        failure = engine.endings["long"].failure
        assert failure is not None and "no room" in failure.message and failure.retryable
        assert engine.tokens["stream"] == tiny.oracle_greedy(list(prompt(6)), 20)
        engine.submit("again", prompt(50, 1), replace(GREEDY, max_tokens=2))
        engine.run_to_end()
        assert engine.tokens["again"] == tiny.oracle_greedy(list(prompt(50, 1)), 2)


arrivals = st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(1, 12), st.integers(0, 2))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(arrivals, st.tuples(st.just("abort"), st.integers(0, 6))), min_size=2, max_size=8),
    st.sampled_from([20, NUM_BLOCKS]),
    st.sampled_from([Turn(1, 1), Turn(2, 1), Turn(1, 2)]),
)
def test_any_arrivals_aborts_and_preemptions_give_the_tokens_of_each_alone(
    events: list[tuple[Any, ...]], num_blocks: int, turn: Turn
) -> None:
    tiny = load_tiny_checkpoint("mixtral")
    engine, _ = engine_of(replace(LIMITS, num_kv_blocks=num_blocks))
    engine.thread.turns.turn = lambda: turn  # type: ignore[method-assign]
    sent: dict[str, tuple[int, ...]] = {}
    with engine:
        for event in events:
            if event[0] == "abort":
                engine.abort(f"r{event[1]}")
                continue
            length, seed, count, priority = event
            name = f"r{len(sent)}"
            sent[name] = prompt(length, seed)
            engine.submit(name, sent[name], replace(GREEDY, max_tokens=count), priority)
            seen = len(engine.order)
            engine.run_until(
                lambda seen=seen: len(engine.order) > seen + 1 or not engine.scheduler.num_outstanding_steps
            )  # type: ignore[misc]
        engine.run_to_end()
        engine.allocator.check_integrity()
    for name, tokens in sent.items():
        ending = engine.endings[name]
        if ending.finish_reason is not FinishReason.ERROR:
            assert (
                engine.tokens[name]
                == tiny.oracle_greedy(list(tokens), max(len(engine.tokens[name]), 1))[: len(engine.tokens[name])]
            )
        else:
            assert ending.failure is not None and ending.failure.kind == "context_length_exceeded"
