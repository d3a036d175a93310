"""Small helpers around tasks and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

_MAX_REASON = 300


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
