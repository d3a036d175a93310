"""Tasks that nobody awaits tell what ends them, and rounds go on."""

import asyncio
import logging

import pytest

from freetoken.tasks import repeat, spawn


async def test_what_ends_a_spawned_task_is_logged_while_somebody_holds_it(caplog):
    async def fail():
        raise ValueError("out of luck")

    task = spawn(fail(), "the work")
    await asyncio.wait([task])
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info[0] is ValueError
    assert record.getMessage() == "event=task_failed task=the work error='out of luck'"


async def test_a_result_and_a_cancellation_are_no_news(caplog):
    async def answer():
        return 7

    assert await spawn(answer(), "an answer") == 7
    task = spawn(asyncio.Event().wait(), "a wait")
    task.cancel()
    await asyncio.wait([task])
    assert not caplog.records


async def test_rounds_outlive_failures_and_the_same_one_in_a_row_is_told_once(caplog):
    outcomes = ["a", "a", "a", "b", None, "b", None]
    rounds, done = iter(outcomes), asyncio.Event()

    async def work():
        try:
            outcome = next(rounds)
        except StopIteration:
            done.set()
            return
        if outcome is not None:
            raise ValueError(outcome)

    task = spawn(repeat(work, lambda: 0.0, "rounds"), "rounds")
    await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [str(record.exc_info[1]) for record in caplog.records] == ["a", "b", "b"]
    assert {record.getMessage() for record in caplog.records} == {"event=round_failed task=rounds"}
