"""Watches living actors: liveness pings, newest status, loading progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from freetoken.engine.lifecycle import ActorHandle
from freetoken.engine.members import Member, SupervisionPolicy
from freetoken.errors import PeerLostError
from freetoken.tasks import repeat, spawn

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 1.0
_PROGRESS_INTERVAL_S = 0.2
_SECOND_CHANCE_S = 1.0


class Watcher:
    """Reads and updates the supervisor's members; ``put_down`` and ``lost`` tell it what was found."""

    def __init__(
        self,
        own: Member,
        others: Sequence[Member],
        policy: SupervisionPolicy,
        put_down: Callable[[Member, ActorHandle, str], Awaitable[None]],
        lost: Callable[[ActorHandle, str], None],
        is_starting: Callable[[], bool],
    ) -> None:
        self._own = own
        self._others = others
        self._policy = policy
        self._put_down = put_down
        self._lost = lost
        self._is_starting = is_starting
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin, in the background."""
        if self._policy.ping_interval_s is not None:
            interval_s = self._policy.ping_interval_s
            self._spawn(repeat(self._ping_all, lambda: interval_s, "pings"), "pings")
        self._spawn(repeat(self._follow_progress, lambda: _PROGRESS_INTERVAL_S, "progress"), "progress")

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs now; cancel them to stop watching."""
        return list(self._tasks)

    async def ask_status(self, member: Member, max_age_s: float = 0.0) -> None:
        """Renew ``member.status``, unless it is younger than ``max_age_s``, if the actor answers soon."""
        handle = member.handle
        if handle is None or (member.status is not None and time.monotonic() - member.status_s < max_age_s):
            return
        asked_s = time.monotonic()
        try:
            status = await asyncio.wait_for(handle.status(), STATUS_TIMEOUT_S)
        except Exception:
            return
        if member.handle is handle:
            member.record_status(status, asked_s)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ping_all(self) -> None:
        for member in self._others:
            if member.handle is not None and not member.pinging:
                member.pinging = True
                self._spawn(self._ping(member, member.handle), f"ping of {member.name}")

    async def _ping(self, member: Member, handle: ActorHandle) -> None:
        limit_s = self._policy.ping_timeout_s if member.loaded else self._policy.loading_silence_s
        asked_s = time.monotonic()
        try:
            try:
                status = await asyncio.wait_for(handle.status(), limit_s)
            except asyncio.TimeoutError:
                # If this very process was stopped for a while, the answer is there but unread: ask once more.
                status = await asyncio.wait_for(handle.status(), min(_SECOND_CHANCE_S, limit_s))
            if member.handle is handle:
                member.record_status(status, asked_s)
        except asyncio.TimeoutError:
            await self._put_down(member, handle, f"silent for {limit_s:g} s")
        except PeerLostError as error:
            self._lost(handle, error.detail or "its process ended")
        except Exception as error:
            log.warning("event=ping_failed actor=%s error=%r", member.name, error)
        finally:
            member.pinging = False

    async def _follow_progress(self) -> None:
        if self._is_starting():
            await asyncio.gather(*(self._ask_progress(member) for member in self._others))

    async def _ask_progress(self, member: Member) -> None:
        handle = member.handle
        if handle is None:
            return
        try:
            progress = await asyncio.wait_for(handle.progress(), STATUS_TIMEOUT_S)
        except Exception:
            return
        if member.handle is handle:
            member.progress = progress
