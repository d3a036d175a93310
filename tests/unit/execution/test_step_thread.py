"""StepThread: order, draining, ending; with executors that block on demand."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from freetoken.errors import FreeTokenError
from freetoken.execution.step_thread import StepThread
from freetoken.messages import ExpertCounters, RowResult, StepFailed, StepPlan, StepResult, StepRow

LIMIT_S = 20.0


class Recorder:
    """Answers every plan; step 13 fails, step 99 breaks the rule that execute does not raise."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.steps: list[int] = []
        self.outcomes: list[StepResult | StepFailed] = []
        self.delivered = threading.Condition()

    def execute(self, plan: StepPlan) -> StepResult | StepFailed:
        self.started.set()
        assert self.gate.wait(LIMIT_S)
        self.steps.append(plan.step_id)
        if plan.step_id == 99:
            raise ValueError("broken executor")
        if plan.step_id == 13:
            return StepFailed(13, 1, "unlucky")
        rows = tuple(RowResult(row.request_id, 5 if row.sample else None) for row in plan.rows)
        return StepResult(plan.step_id, 1, rows, 0, 0, ExpertCounters(hits=2, cpu=1))

    def deliver(self, plan: StepPlan, outcome: StepResult | StepFailed) -> None:
        with self.delivered:
            self.outcomes.append(outcome)
            self.delivered.notify_all()

    def wait_for(self, count: int) -> None:
        with self.delivered:
            assert self.delivered.wait_for(lambda: len(self.outcomes) >= count, LIMIT_S)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def thread(recorder: Recorder):  # type: ignore[no-untyped-def]
    thread = StepThread(recorder.deliver)
    yield thread
    recorder.gate.set()
    thread.close(LIMIT_S)


def plan(step: int) -> StepPlan:
    return StepPlan(step, 1, (StepRow("a", 0, 3, False), StepRow("b", 5, 1, True)))


def test_plans_run_in_order_and_are_counted(thread: StepThread, recorder: Recorder) -> None:
    for step in (1, 13, 99, 2):
        thread.submit(recorder, plan(step))
    recorder.wait_for(3)
    assert recorder.steps == [1, 13, 99, 2]
    assert [outcome.step_id for outcome in recorder.outcomes] == [1, 13, 2]
    thread.drain(LIMIT_S)
    metrics = thread.stats.metrics()
    assert (metrics["steps_total"], metrics["failed_steps_total"]) == (3, 1)
    assert (metrics["tokens_total"], metrics["sampled_tokens_total"]) == (12, 2)
    assert (metrics["expert_hits_total"], metrics["expert_cpu_total"]) == (4, 2)


def test_draining_drops_what_waits_and_awaits_what_runs(thread: StepThread, recorder: Recorder) -> None:
    recorder.gate.clear()
    thread.submit(recorder, plan(1))
    assert recorder.started.wait(LIMIT_S)
    thread.submit(recorder, plan(2))
    with pytest.raises(FreeTokenError, match="did not end within"):
        thread.drain(0.01)
    assert thread.queued == 0
    threading.Timer(0.01, recorder.gate.set).start()
    thread.drain(LIMIT_S)
    assert recorder.steps == [1]
    thread.submit(recorder, plan(3))
    recorder.wait_for(2)
    assert recorder.steps == [1, 3]


def test_calls_run_on_the_thread_and_bring_results_back(thread: StepThread, recorder: Recorder) -> None:
    assert thread.call(lambda: threading.current_thread().name) == "ft-steps"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    recorder.gate.clear()
    thread.submit(recorder, plan(1))
    failures: list[BaseException] = []

    def call() -> None:
        try:
            thread.call(lambda: None)
        except BaseException as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while thread.queued == 0 or not recorder.started.is_set():
        caller.join(0.001)
    with pytest.raises(FreeTokenError):
        thread.drain(0.0)
    caller.join(LIMIT_S)
    assert len(failures) == 1 and isinstance(failures[0], CancelledError)


def test_a_job_that_nobody_wants_any_more_does_not_run(thread: StepThread, recorder: Recorder) -> None:
    recorder.gate.clear()
    thread.submit(recorder, plan(1))
    assert recorder.started.wait(LIMIT_S)
    ran: list[int] = []
    unwanted = thread.post(lambda: ran.append(1))
    running = thread.post(lambda: ran.append(2))
    assert unwanted.cancel()
    recorder.gate.set()
    running.result(LIMIT_S)
    assert ran == [2]
    thread.submit(recorder, plan(3))
    recorder.wait_for(2)


def test_closing_is_final_and_may_be_repeated(thread: StepThread, recorder: Recorder) -> None:
    thread.close(LIMIT_S)
    thread.close(LIMIT_S)
    thread.submit(recorder, plan(1))
    with pytest.raises(CancelledError):
        thread.call(lambda: None)
    assert recorder.steps == [] and thread.queued == 0
