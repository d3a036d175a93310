"""Waiting on state, and what a process has open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Run the event loop until ``condition()``; raises ``TimeoutError`` after ``limit_s``."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - any state, of any process
            await asyncio.sleep(0.001)

    try:
        await asyncio.wait_for(poll(), limit_s)
    except asyncio.TimeoutError:
        raise TimeoutError(f"the condition did not come true within {limit_s} s") from None


def open_fds() -> set[str]:
    """Everything this process has open, as ``number:target`` (abstract sockets and memfds included)."""
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.add(f"{entry.name}:{entry.readlink()}")
        except OSError:  # the descriptor of the listing itself
            pass
    return targets
