"""Small helpers around asyncio tasks and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_MAX_REASON = 300
_T = TypeVar("_T")


def brief(error: BaseException) -> str:
    """One line, not too long; the whole is in the actor's log."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


async def run_all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def spawn(work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
    """A task that nobody awaits. What it raises is logged when it ends: asyncio itself tells only when such a task is
    collected, which one that somebody holds on to never is."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_tell_failure)
    return task


def _tell_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("event=task_failed task=%s error=%r", task.get_name(), brief(error), exc_info=error)


async def repeat(work: Callable[[], Awaitable[object]], interval_s: Callable[[], float], name: str) -> None:
    """Do ``work`` again and again, each time after ``interval_s()``, until cancelled. A failure is logged and does not
    end it; one that recurs at once is logged once, so that a short interval floods no log."""
    last = ""
    while True:
        await asyncio.sleep(interval_s())
        try:
            await work()
        except Exception as error:
            if repr(error) != last:
                log.exception("event=round_failed task=%s", name)
            last = repr(error)
        else:
            last = ""
