"""GpuExecutor's part in moving memory between the arena's pools; what is true of the arena is decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from freetoken.elastic.arena_shape import ArenaSplit
from freetoken.errors import FreeTokenError, PeerLostError
from freetoken.execution.arena_pools import KV, SLOTS, ArenaPools, Moves
from freetoken.execution.batch_state import BatchState
from freetoken.messages import (
    ActorName,
    ActorsSuspected,
    ArenaResized,
    PlacesLeft,
    PoolVacated,
    RecordsMoved,
    ResizeArena,
    ShrinkKV,
    VacatePool,
)
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ResizableArena(Protocol):
    """``Arena`` and ``CudaArena``. All but ``pools`` on the step thread, between two steps."""

    @property
    def pools(self) -> ArenaPools | None: ...

    def move(self, pool: str, moves: Moves) -> None: ...

    def commit(self) -> None: ...

    def mark(self) -> Callable[[], None]: ...


class ResizableExecutor(Protocol):
    """What follows a change: block tables and limits of one epoch's executor. On the step thread, between two steps."""

    @property
    def requests(self) -> BatchState: ...

    def resized(self, num_slots: int, num_blocks: int, block_moves: Moves) -> None: ...


class _EpochEnded(Exception):
    """Nobody goes on with the change."""


class _Change:
    """One change of one epoch, and the answers that it waits for."""

    def __init__(self, resize_id: int, epoch: int, executor: ResizableExecutor) -> None:
        self.resize_id = resize_id
        self.epoch = epoch
        self.executor = executor
        self.slots_vacated = self._answer()
        self.places_left = self._answer()
        self.kv_vacated = self._answer()

    def _answer(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def lose(self) -> None:
        """No answer will come."""
        for answer in (self.slots_vacated, self.places_left, self.kv_vacated):
            answer.cancel()


class ArenaResizer:
    """One change at a time, while steps run (see ``messages/elastic.py``). An epoch's end undoes one that was not made.

    What changes between two steps is done by jobs of the step thread, which wait for nothing on the device; what has
    to wait for it, waits elsewhere.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        arena: ResizableArena,
        current: Callable[[], tuple[int, ResizableExecutor | None]],
        post: Callable[[Callable[[], Any]], Future[Any]],
        timeout_s: float,
    ) -> None:
        """``current``: the epoch and its executor. ``post``: run on the step thread, in turn. ``timeout_s``: after so
        long without an answer ExpertCache is suspected."""
        self._endpoint = endpoint
        self._arena = arena
        self._current = current
        self._post = post
        self._timeout_s = timeout_s
        self._change: _Change | None = None
        self._memory = asyncio.Lock()  # over the pools, from preparing to releasing
        self.resizes_total = 0
        self.failed_resizes_total = 0
        self.moved_bytes_total = 0
        self.last_ms = 0.0
        self.slowest_job_ms = 0.0
        endpoint.on(ResizeArena, self._on_resize)
        endpoint.on(PoolVacated, self._on_vacated)
        endpoint.on(PlacesLeft, self._on_places_left)

    # ------------------------------------------------------------------------------------------ events

    async def _on_resize(self, message: ResizeArena, fds: tuple[int, ...]) -> None:
        epoch, executor = self._current()
        pools = self._arena.pools
        if message.epoch != epoch or executor is None:
            return
        if pools is None:
            self._tell_controller(message.resize_id, "the arena is not elastic (see elastic.enabled)")
            return
        if self._change is not None:
            self._tell_controller(message.resize_id, "another change is under way")
            return
        change = self._change = _Change(message.resize_id, epoch, executor)
        async with self._memory:
            try:
                await self._make(change, pools, ArenaSplit(message.slot_granules, message.kv_granules))
            except _EpochEnded:
                await asyncio.to_thread(pools.abort)
            except asyncio.CancelledError:
                await asyncio.to_thread(pools.abort)
                if self._change is change:  # this task was cancelled, not the wait for an answer
                    raise
            finally:
                if self._change is change:
                    self._change = None

    def _on_vacated(self, message: PoolVacated, fds: tuple[int, ...]) -> None:
        change, pools = self._change, self._arena.pools
        if change is None or pools is None or message.resize_id != change.resize_id:
            return
        if message.sender == ActorName.EXPERT_CACHE:
            _give(change.slots_vacated, message)
            return
        job: Future[Callable[[], None]] | None = None
        if not message.refusal:  # now, because plans that come later name the new places
            blocks = _moves_of(message)
            job = self._post_timed(lambda: self._commit(change.executor, pools, blocks))
        _give(change.kv_vacated, (message, job))

    def _on_places_left(self, message: PlacesLeft, fds: tuple[int, ...]) -> None:
        if self._change is not None and message.resize_id == self._change.resize_id:
            _give(self._change.places_left, None)

    async def end_epoch(self) -> None:
        """Undo a change that was not made. No step runs and none will."""
        change, self._change = self._change, None
        if change is not None:
            change.lose()
        async with self._memory:
            if self._arena.pools is not None:
                await asyncio.to_thread(self._arena.pools.abort)

    # ------------------------------------------------------------------------------------------ a change

    async def _make(self, change: _Change, pools: ArenaPools, split: ArenaSplit) -> None:
        started_s = time.monotonic()
        before = (pools.num_slots, pools.num_blocks)
        slots: Moves = ()
        blocks: Moves = ()
        try:
            num_slots, num_blocks = await asyncio.to_thread(pools.prepare, change.resize_id, split)
            if self._change is not change:
                raise _EpochEnded
            if num_slots < before[0]:
                slots = await self._vacate_slots(change, num_slots)
        except _EpochEnded:
            raise
        except Exception as error:
            why = str(error)
            if not isinstance(error, (FreeTokenError, ValueError)):  # nothing that was to be expected
                logger.exception("event=resize_failed resize=%d", change.resize_id)
                why = f"{type(error).__name__}: {error}"
            await asyncio.to_thread(pools.abort)
            self._fail(change, why)
            return
        try:
            if num_blocks < before[1]:
                self._send(ActorName.SCHEDULER, ShrinkKV(change.epoch, change.resize_id, num_blocks))
                vacated, job = await change.kv_vacated
                if vacated.refusal:
                    await asyncio.to_thread(pools.abort)
                    self._fail(change, vacated.refusal)
                    return
                blocks = _moves_of(vacated)
                wait = await self._result(job)
            else:
                wait = await self._result(self._post_timed(lambda: self._commit(change.executor, pools, ())))
            # The pool that grew gets memory that steps under way may still use for the other.
            await asyncio.to_thread(wait)
        except _EpochEnded:
            raise
        except Exception as error:
            logger.exception("event=resize_broken resize=%d", change.resize_id)
            self._suspect(ActorName.GPU_EXECUTOR, f"its arena could not follow a change: {error}")
            raise _EpochEnded from error
        if self._change is not change:
            raise _EpochEnded
        self._change = None
        self.resizes_total += 1
        moved = len(slots) * pools.shape.slot_stride_bytes + len(blocks) * pools.shape.block_bytes
        self.moved_bytes_total += moved
        self.last_ms = (time.monotonic() - started_s) * 1e3
        self._answer(change.resize_id, moved_bytes=moved)
        logger.info(
            "event=arena_resized resize=%d slots=%d->%d kv_blocks=%d->%d moved_bytes=%d ms=%.2f slowest_job_ms=%.2f",
            change.resize_id, before[0], pools.num_slots, before[1], pools.num_blocks, moved, self.last_ms,
            self.slowest_job_ms,
        )  # fmt: skip
        await asyncio.to_thread(pools.release)

    async def _vacate_slots(self, change: _Change, num_slots: int) -> Moves:
        """Has records copied out of the slots that go; returns what moved once no plan names these any more."""
        self._send(ActorName.EXPERT_CACHE, VacatePool(change.epoch, change.resize_id, num_slots))
        moves = _moves_of(await self._answer_of_cache(change.slots_vacated))
        made = False
        try:
            # Filled slots are only read, so steps may go on reading the old places while they are copied.
            wait = await self._result(self._post_timed(lambda: self._copy_slots(moves)))
            await asyncio.to_thread(wait)
            made = True
        finally:
            self._send(ActorName.EXPERT_CACHE, RecordsMoved(change.epoch, change.resize_id, made))
        await self._answer_of_cache(change.places_left)
        return moves

    def _copy_slots(self, moves: Moves) -> Callable[[], None]:
        self._arena.move(SLOTS, moves)
        return self._arena.mark()

    def _commit(self, executor: ResizableExecutor, pools: ArenaPools, blocks: Moves) -> Callable[[], None]:
        try:
            self._arena.move(KV, blocks)
            self._arena.commit()
            executor.resized(pools.num_slots, pools.num_blocks, blocks)
            return self._arena.mark()
        except Exception as error:  # the owners' tables may name places that this executor does not know
            executor.requests.invalidate(f"a change of the arena failed: {error}")
            raise

    def _post_timed(self, job: Callable[[], T]) -> Future[T]:
        def timed() -> T:
            started_s = time.monotonic()
            result = job()
            self.slowest_job_ms = max(self.slowest_job_ms, (time.monotonic() - started_s) * 1e3)
            return result

        return self._post(timed)

    @staticmethod
    async def _result(job: Future[T]) -> T:
        """Raises ``_EpochEnded`` when the step thread's queue was dropped."""
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            raise _EpochEnded from None

    async def _answer_of_cache(self, answer: asyncio.Future[T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._timeout_s)
        except asyncio.TimeoutError:
            self._suspect(ActorName.EXPERT_CACHE, f"no answer to a change within {self._timeout_s:g} s")
            return await answer

    # ------------------------------------------------------------------------------------------ messages

    def _fail(self, change: _Change, why: str) -> None:
        if self._change is not change:
            raise _EpochEnded
        self._change = None
        self.failed_resizes_total += 1
        logger.warning("event=resize_undone resize=%d why=%r", change.resize_id, why)
        self._answer(change.resize_id, why)

    def _answer(self, resize_id: int, failure: str = "", moved_bytes: int = 0) -> None:
        message = self._outcome(resize_id, failure, moved_bytes)
        for peer in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.CONTROLLER):
            self._send(peer, message)

    def _tell_controller(self, resize_id: int, failure: str) -> None:
        self._send(ActorName.CONTROLLER, self._outcome(resize_id, failure))

    def _outcome(self, resize_id: int, failure: str, moved_bytes: int = 0) -> ArenaResized:
        pools, (epoch, _) = self._arena.pools, self._current()
        num_slots, num_blocks = (pools.num_slots, pools.num_blocks) if pools is not None else (0, 0)
        return ArenaResized(epoch, resize_id, num_slots, num_blocks, failure, moved_bytes)

    def _suspect(self, name: ActorName, detail: str) -> None:
        self._send(ActorName.CONTROLLER, ActorsSuspected(self._current()[0], (name.value,), detail))

    def _send(self, to: ActorName, message: Any) -> None:
        try:
            self._endpoint.send(to, message)
        except PeerLostError as error:  # ends the epoch, or is the Controller's own affair
            logger.info("event=undeliverable message=%s error=%r", type(message).__name__, str(error))

    def metrics(self) -> dict[str, float]:
        """By the naming rule of ``ActorStatus.metrics``."""
        pools = self._arena.pools
        return {
            "elastic": float(pools is not None),
            "resizes_total": float(self.resizes_total),
            "failed_resizes_total": float(self.failed_resizes_total),
            "resize_moved_bytes_total": float(self.moved_bytes_total),
            "resize_ms": self.last_ms,
            "resize_slowest_pause_ms": self.slowest_job_ms,
            **(pools.figures() if pools is not None else {}),
        }


def _moves_of(message: PoolVacated) -> Moves:
    return list(zip(message.moved_from, message.moved_to, strict=True))


def _give(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)
