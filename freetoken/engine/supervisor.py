"""Brings the group of actors up, keeps it up, and takes it down. Knows nothing of Ray.

One loop converges: whatever is missing is created and loaded, survivors are paused, all are wired to the next epoch and
resumed. A death at any moment starts it over; what was created meanwhile is kept. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from freetoken.engine.host import ActorHost
from freetoken.engine.lifecycle import ActorHandle, Restarts
from freetoken.engine.members import Member, SupervisionPolicy
from freetoken.engine.phases import CLOSE_STAGES, HEALTH, RESUME_STAGES, STORE_HOLDERS, Phase
from freetoken.engine.store_keeper import StoreKeeper
from freetoken.engine.watcher import Watcher
from freetoken.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    FreeTokenError,
    PeerLostError,
    UnsupportedModelError,
)
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ACTOR_NAMES, ActorName, ActorState, ActorStatus, HealthState, HealthView, Wiring
from freetoken.tasks import brief, run_all, spawn

log = logging.getLogger(__name__)

USER_ERRORS = (CapacityError, CheckpointError, ConfigError, UnsupportedModelError)
"""Raised while starting, these are answers and not accidents: trying again would not help."""

_LOST_PEER_GRACE_S = 2.0
_MAX_VAIN_ATTEMPTS = 5
_ADOPTABLE = (ActorState.WIRED, ActorState.SERVING, ActorState.PAUSED)


class _AttemptFailedError(Exception):
    """This attempt to bring the group up is over; the cause was dealt with and the next may begin."""


class _HopelessError(Exception):
    """No further attempt makes sense."""


class Supervisor:
    """``own`` is the Controller itself: wired with the others, but never created or ended from here."""

    def __init__(
        self,
        host: ActorHost,
        own: ActorHandle,
        policy: SupervisionPolicy,
        spec_for: Callable[[ActorName], LaunchSpec],
        own_holds_store: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._policy = policy
        self._spec_for = spec_for
        self._clock = clock
        self._own = Member(own.name, handle=own, loaded=True)
        self._others = {name: Member(name) for name in ACTOR_NAMES if name != own.name}
        self._store = StoreKeeper(self._own, self._others, own_holds_store, policy.share_timeout_s)
        self._epoch = 0
        self._phase = Phase.STARTING
        self._detail = ""
        self._was_ready = False
        self._adopting = False
        self._failure: FreeTokenError | None = None
        self._changed = asyncio.Event()
        self._stop_lock = asyncio.Lock()
        self._main: asyncio.Task[None] | None = None
        self._put_down_reasons: dict[int, str] = {}
        self._watcher = Watcher(
            self._own, list(self._others.values()), policy, self._put_down, self._on_death, self._is_starting
        )
        host.on_death(self._on_death)

    @property
    def phase(self) -> Phase:
        """Where the group is in its life."""
        return self._phase

    @property
    def epoch(self) -> int:
        """The newest epoch that was begun."""
        return self._epoch

    @property
    def failure(self) -> FreeTokenError | None:
        """Why the first start failed."""
        return self._failure

    @property
    def total_restarts(self) -> int:
        """Of all actors, the Controller included."""
        return self._own.restarts + sum(member.restarts for member in self._others.values())

    def _is_starting(self) -> bool:
        return self._phase in (Phase.STARTING, Phase.RECOVERING)

    def last_status(self, name: ActorName) -> ActorStatus | None:
        """What that actor last said of itself, even if it has died since."""
        return self._others[name].last_status

    def handle(self, name: ActorName) -> ActorHandle | None:
        """That actor, unless it is dead or being created."""
        return self._others[name].handle

    def start(self, adopt: bool = False) -> None:
        """Begin, in the background. ``adopt``: take over the actors of an earlier Controller."""
        self._main = spawn(self._run(adopt), "supervision")
        self._watcher.start()

    def health(self) -> HealthView:
        """The whole, in one word and a sentence."""
        state = HEALTH[self._phase]
        if state is not HealthState.LOADING:
            return HealthView(state, self._detail)
        loading = [m for m in self._others.values() if not m.loaded]
        done, total, what = max((m.progress for m in loading), key=lambda progress: progress[1], default=(0, 0, ""))
        doing = ", ".join(
            f"{m.name} {m.progress[2]}".rstrip() for m in loading or self._others.values() if m.progress[2]
        )
        names = ", ".join(str(m.name) for m in loading)
        detail = self._detail or (f"loading: {doing or names}" if loading else f"wiring: {doing or 'all actors'}")
        return HealthView(state, detail, done, total, what)

    async def actors(self, max_age_s: float = 0.0) -> list[ActorStatus]:
        """Every actor's own account, not older than ``max_age_s``; of those that do not answer, the last one known."""
        members = [self._own, *self._others.values()]
        await asyncio.gather(*(self._watcher.ask_status(member, max_age_s) for member in members))
        return [
            dataclasses.replace(member.describe(self._epoch), restarts=member.restarts)
            for member in sorted(members, key=lambda member: ACTOR_NAMES.index(member.name))
        ]

    async def suspect(self, epoch: int, names: Sequence[str], detail: str) -> None:
        """Actors that failed their peers in ``epoch``, whatever they answer here: replace them. Ignored unless that
        epoch is being served; a recovery under way has its own limits."""
        for member in self._others.values():
            handle = member.handle
            if epoch == self._epoch and self._phase is Phase.READY and member.name in names and handle is not None:
                await self._put_down(member, handle, detail)

    async def stop(self) -> None:
        """Close all actors in order, each within its limit, and end their processes. Idempotent."""
        async with self._stop_lock:
            if self._phase is Phase.STOPPED:
                return
            failed = self._phase is Phase.FAILED
            self._enter(Phase.STOPPING, self._detail if failed else "")
            await self.abandon()
            for stage in CLOSE_STAGES:
                await asyncio.gather(*(self._close(self._others[name]) for name in stage))
            self._enter(Phase.STOPPED, self._detail)

    async def abandon(self) -> None:
        """Stop supervising; the actors are left as they are."""
        preparing = [m.preparing for m in self._others.values() if m.preparing is not None]
        tasks = [task for task in (self._main, *self._watcher.tasks(), *preparing) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _close(self, member: Member) -> None:
        handle = member.handle
        if handle is None:
            return
        try:
            await asyncio.wait_for(handle.close(), self._policy.close_timeout_s)
        except asyncio.TimeoutError:
            log.warning("event=close_timed_out actor=%s limit_s=%s", member.name, self._policy.close_timeout_s)
        except Exception as error:
            log.info("event=close_failed actor=%s error=%r", member.name, str(error))
        member.handle = member.status = None  # its death is no accident
        await self._host.kill(handle)

    # --- convergence -------------------------------------------------------------------------------------------------

    async def _run(self, adopt: bool) -> None:
        try:
            if adopt and await self._adopt():
                self._ready()
            else:
                await self._bring_up()
            while True:
                await self._changed.wait()
                await self._bring_up()
        except _HopelessError as error:
            phase = Phase.FAILED if not self._was_ready else Phase.GAVE_UP
            self._enter(phase, str(error))
            await self._pause_touched(str(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("event=supervision_failed")
            self._enter(Phase.GAVE_UP, f"supervision failed: {error}")

    async def _bring_up(self) -> None:
        """Returns once all are serving; raises ``_HopelessError``."""
        vain = 0
        while True:
            self._changed.clear()
            if self._was_ready:
                self._enter(Phase.RECOVERING, self._detail)
            self._check_hope()
            for member in self._others.values():
                self._prepare_if_missing(member)
            attempt = asyncio.ensure_future(self._attempt())
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({attempt, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                attempt.cancel()
                changed.cancel()
                await asyncio.wait({attempt, changed})
            if attempt.cancelled():
                continue
            error = attempt.exception()
            if isinstance(error, _AttemptFailedError):
                log.warning("event=attempt_failed epoch=%d why=%r", self._epoch, str(error))
                vain = 0 if self._changed.is_set() else vain + 1
                if vain > _MAX_VAIN_ATTEMPTS:
                    raise _HopelessError(f"the actors could not be wired: {error}")
                await asyncio.sleep(0.1 * vain)
            elif error is not None:
                raise error
            elif not self._changed.is_set():
                self._ready()
                return

    def _ready(self) -> None:
        self._was_ready = True
        self._enter(Phase.READY, "")

    def _enter(self, phase: Phase, detail: str) -> None:
        if phase is not self._phase:
            log.info("event=phase phase=%s epoch=%d detail=%r", phase.value, self._epoch, detail)
        self._phase, self._detail = phase, detail

    def _check_hope(self) -> None:
        if self._failure is not None:
            raise _HopelessError(str(self._failure))
        for member in self._others.values():
            if not member.loaded and not self._may_restart(member):
                raise _HopelessError(
                    f"{member.name} died {member.recent_deaths(self._clock())} times, the last time: {member.reason} "
                    f"(limit {self._limit()}; health.max_restarts={self._policy.max_restarts})"
                )

    def _limit(self) -> int:
        return (
            self._policy.max_restarts
            if self._was_ready
            else min(self._policy.start_attempts - 1, self._policy.max_restarts)
        )

    def _may_restart(self, member: Member) -> bool:
        return member.recent_deaths(self._clock()) <= self._limit()

    async def _attempt(self) -> None:
        await self._pause_touched(self._detail or "the engine is starting anew")
        preparing = [m.preparing for m in self._others.values() if m.preparing is not None]
        if preparing:
            await asyncio.wait(preparing)
        if not all(member.loaded for member in self._others.values()):
            raise _AttemptFailedError("an actor could not be loaded")
        self._epoch += 1
        await self._wire_all()
        for stage in RESUME_STAGES:
            await run_all(
                self._guarded(member, handle.resume, self._policy.resume_timeout_s, "resume", ActorState.SERVING)
                for member, handle in self._living()
                if member.name in stage
            )
        await asyncio.gather(*(self._watcher.ask_status(member) for member in self._others.values()))

    def _living(self) -> list[tuple[Member, ActorHandle]]:
        return [(m, m.handle) for m in (self._own, *self._others.values()) if m.handle is not None]

    async def _pause_touched(self, reason: str) -> None:
        async def pause(member: Member, handle: ActorHandle) -> None:
            limit_s = self._policy.pause_timeout_s
            await self._guarded(member, partial(handle.pause, reason), limit_s, "pause", ActorState.PAUSED)
            member.touched = False

        outcomes = await asyncio.gather(
            *(pause(member, handle) for member, handle in self._living() if member.touched), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, _AttemptFailedError):
                raise outcome

    async def _wire_all(self) -> None:
        members = self._living()
        wiring = Wiring(self._epoch, {member.name: handle.address for member, handle in members})
        limit_s = self._policy.wire_timeout_s if self._was_ready else self._policy.first_wire_timeout_s
        for member, _ in members:
            member.touched = True
        await run_all(
            [
                *(
                    self._guarded(
                        member, partial(handle.wire, wiring, self._restarts()), limit_s, "wire", ActorState.WIRED
                    )
                    for member, handle in members
                ),
                self._hand_over_store(),
            ]
        )
        for member, handle in members:
            if member.handle is handle:  # and not its successor already
                member.holds_store = member.name in STORE_HOLDERS
                member.awaits_store = member.must_read_store = False

    def _restarts(self) -> Restarts:
        return {member.name: member.restarts for member, _ in self._living()}

    async def _guarded(
        self,
        member: Member,
        call: Callable[[], Coroutine[Any, Any, None]],
        limit_s: float,
        what: str,
        leads_to: ActorState,
    ) -> None:
        """Await ``call()``, which brings the actor into the state ``leads_to``, for at most ``limit_s``. Whatever goes
        wrong is dealt with here, then ends the attempt."""
        handle = member.handle
        assert handle is not None
        try:
            await asyncio.wait_for(call(), limit_s)
            if member.handle is handle:
                member.record_transition(leads_to, time.monotonic())
            return
        except asyncio.TimeoutError:
            reason = f"{what} took longer than {limit_s:g} s"
        except PeerLostError as error:
            reason = f"{what}: {error}"
            if error.peer == member.name:
                self._on_death(handle, error.detail or "its process ended")
            else:  # the peer's death is noticed elsewhere, and ends this attempt; else it lives and does not answer
                await asyncio.sleep(_LOST_PEER_GRACE_S)
                suspect = next((m for m in self._others.values() if m.name == error.peer), member)
                if suspect.handle is not None:
                    member, handle = suspect, suspect.handle
        except Exception as error:
            reason = f"{what} failed: {brief(error)}"
            if self._note_failure(error):
                raise _AttemptFailedError(reason) from error
            log.warning("event=transition_failed actor=%s what=%s error=%r", member.name, what, str(error))
        await self._put_down(member, handle, reason)
        raise _AttemptFailedError(f"{member.name}: {reason}")

    def _note_failure(self, error: Exception) -> bool:
        if self._was_ready or not isinstance(error, USER_ERRORS):
            return False
        self._failure = error
        self._changed.set()
        return True

    # --- the store ---------------------------------------------------------------------------------------------------

    async def _hand_over_store(self) -> None:
        """Have a holder send the store to a WeightStreamer that waits for it; if none can, have it read again."""
        streamer = self._others[ActorName.WEIGHT_STREAMER]
        if not streamer.awaits_store or streamer.handle is None:
            return
        if await self._store.share(ActorName.WEIGHT_STREAMER, self._epoch):
            return
        streamer.must_read_store = True
        await self._put_down(streamer, streamer.handle, "no holder could hand over the store")
        raise _AttemptFailedError("no holder could hand over the store")

    # --- births and deaths -------------------------------------------------------------------------------------------

    def _prepare_if_missing(self, member: Member) -> None:
        if not member.loaded and member.preparing is None:
            member.preparing = spawn(self._prepare(member), f"preparation of {member.name}")

    async def _prepare(self, member: Member) -> None:
        """Create and load; never raises. Ends with ``member.loaded``, or with its death recorded."""
        adopt_store = (
            member.name == ActorName.WEIGHT_STREAMER and not member.must_read_store and bool(self._store.holders())
        )
        handle: ActorHandle | None = None
        try:
            await asyncio.sleep(member.restart_delay_s(self._clock()))
            handle = await asyncio.wait_for(
                self._host.create(member.name, self._spec_for(member.name), adopt_store), self._policy.create_timeout_s
            )
            member.handle, member.awaits_store = handle, adopt_store
            await asyncio.wait_for(handle.load(), self._policy.load_timeout_s)
            member.loaded = True
            member.preparing = None
            return
        except asyncio.TimeoutError:
            limit_s = self._policy.create_timeout_s if handle is None else self._policy.load_timeout_s
            reason = f"{'creation' if handle is None else 'load'} took longer than {limit_s:g} s"
        except PeerLostError as error:
            reason = error.detail or "its process ended"
        except Exception as error:
            if self._note_failure(error):
                return
            reason = f"{'creation' if handle is None else 'load'} failed: {brief(error)}"
            log.warning("event=prepare_failed actor=%s error=%r", member.name, reason)
        if handle is not None:
            await self._put_down(member, handle, reason)
        else:
            self._record_death(member, reason)

    def _on_death(self, handle: ActorHandle, reason: str) -> None:
        member = self._others.get(handle.name)
        if member is not None and member.handle is handle:
            self._record_death(member, self._put_down_reasons.get(id(handle), reason))

    def _record_death(self, member: Member, reason: str) -> None:
        if self._phase in (Phase.STOPPING, Phase.STOPPED):
            log.info("event=actor_ended actor=%s epoch=%d why=%r", member.name, self._epoch, reason)
            member.handle = member.status = None
            return
        log.warning("event=actor_died actor=%s epoch=%d why=%r", member.name, self._epoch, reason)
        preparing = member.preparing
        member.record_death(reason, self._clock())
        if preparing is not None and preparing is not asyncio.current_task():
            preparing.cancel()
        self._detail = f"{member.name} died: {reason}"
        self._changed.set()
        hopeful = self._phase in (Phase.STARTING, Phase.READY, Phase.RECOVERING) and self._may_restart(member)
        if hopeful and not self._adopting:
            self._prepare_if_missing(member)

    async def _put_down(self, member: Member, handle: ActorHandle, reason: str) -> None:
        """End a process that misbehaved, and count it as a death. The Controller itself is never ended."""
        if member is self._own or member.handle is not handle:
            return
        self._put_down_reasons[id(handle)] = reason
        try:
            await self._host.kill(handle)
            self._on_death(handle, reason)
        finally:
            self._put_down_reasons.pop(id(handle), None)

    # --- adoption ----------------------------------------------------------------------------------------------------

    async def _adopt(self) -> bool:
        """Take over living actors after the Controller's own death. True when they go on serving undisturbed; else
        what is usable is kept, and the group has to be brought up."""
        self._enter(Phase.RECOVERING, "the Controller was restarted")
        self._adopting = True  # until it is known who holds the store, nobody is created
        try:
            told = await asyncio.gather(*(self._adopt_one(handle) for handle in await self._host.adopt()))
            self._recall(told)
        finally:
            self._adopting = False
        statuses = [member.status for member in self._others.values()]
        if any(s is None or s.state is not ActorState.SERVING or s.epoch != self._epoch for s in statuses):
            return False
        try:
            await asyncio.wait_for(self._join_epoch(), self._policy.wire_timeout_s)
        except Exception as error:
            log.warning("event=join_failed epoch=%d error=%r", self._epoch, error)
            return False
        return not self._changed.is_set()

    async def _adopt_one(self, handle: ActorHandle) -> Restarts:
        """Returns what the earlier Controller told this actor about restarts."""
        member = self._others[handle.name]
        member.handle, member.loaded, member.touched = handle, True, True
        asked_s = time.monotonic()
        try:
            status = await asyncio.wait_for(handle.status(), self._policy.ping_timeout_s)
            known = await asyncio.wait_for(handle.restarts(), self._policy.ping_timeout_s)
        except Exception as error:
            await self._put_down(member, handle, f"no answer to the new Controller: {brief(error)}")
            return {}
        if status.state not in _ADOPTABLE:
            # Half-way through a load that this Controller knows nothing of.
            await self._put_down(member, handle, f"{status.state.value} when the Controller was restarted")
            return known
        member.record_status(status, asked_s)
        self._was_ready = True
        has_store = status.metrics.get("store_bytes", 1.0) > 0
        member.holds_store = member.name in STORE_HOLDERS and has_store
        member.awaits_store = member.name is ActorName.WEIGHT_STREAMER and not has_store
        self._epoch = max(self._epoch, status.epoch)
        return known

    def _recall(self, told: Sequence[Restarts]) -> None:
        """Restart counts of the earlier Controller, and the deaths that it did not see any more."""
        self._own.restarts += 1
        if not self._was_ready:
            self._enter(Phase.STARTING, "")
            return
        for member in (self._own, *self._others.values()):
            member.restarts += max((known.get(member.name, 0) for known in told), default=0)
            if member.handle is None and not member.deaths:
                self._record_death(member, "its process ended while there was no Controller")

    async def _join_epoch(self) -> None:
        """Become a peer within the running epoch: nobody is paused, no request is lost."""
        members = self._living()
        wiring = Wiring(self._epoch, {member.name: handle.address for member, handle in members})
        restarts = self._restarts()
        own = self._own.handle
        assert own is not None
        await own.wire(wiring, restarts)
        await run_all(handle.rewire(wiring, restarts) for member, handle in members if member is not self._own)
        await own.resume()
        await self._store.share(self._own.name, self._epoch)
