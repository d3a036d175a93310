"""Decides how the arena's memory is divided, and has it divided anew. One change at a time.

A change itself is a matter of GpuExecutor, Scheduler and the owners of tables (see ``messages/elastic.py``); the
Controller only wishes, and may die at any moment of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from freetoken.costs import assumed_costs
from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit, plan_arena, why_rigid
from freetoken.elastic.pace import ChangePace
from freetoken.elastic.rebalance import (
    ElasticDecision,
    ElasticFigures,
    ElasticPolicy,
    plan_auto,
    plan_rebalance,
    price_of_miss_ms,
)
from freetoken.engine.decision_log import DecisionLog
from freetoken.errors import CapacityError, PeerLostError, RebalanceBusyError
from freetoken.experts.split import live_costs
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorStatus,
    ArenaResized,
    BlocksShort,
    ElasticView,
    RebalanceRecord,
    RebalanceWish,
    ResizeArena,
)
from freetoken.tasks import repeat, spawn
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

PRESSURE_PAUSE_S = 1.0
"""Between two looks for lack of blocks."""
MEASURED_S = 1.0
"""What an operator wants decided is decided by the rates of at least so long."""

COSTS = {
    "": "",
    "virtual": "records that move are copied on the device; requests go on",
    "reallocate": "requests pause and are computed again; cached prefixes and resident experts are lost, and a GPU's "
    "graphs are captured again",
}
"""What a change takes, by mode."""

NO_VIRTUAL_MEMORY = "the device cannot map memory at a new place, and elastic.mode is virtual"

Metrics = Mapping[str, float]
_COMPARED = (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.GPU_EXECUTOR, ActorName.SCHEDULER)


class Rebalancer:
    """``ask`` gets every actor's status, not older than so many seconds; ``is_ready`` whether the engine serves;
    ``last_status`` is what is known of an actor without asking."""

    def __init__(
        self,
        spec: LaunchSpec,
        endpoint: Endpoint,
        epoch: Callable[[], int],
        ask: Callable[[float], Awaitable[Sequence[ActorStatus]]],
        is_ready: Callable[[], bool],
        last_status: Callable[[ActorName], ActorStatus | None],
    ) -> None:
        self._last_status = last_status
        self._spec = spec
        self._endpoint = endpoint
        self._epoch = epoch
        self._ask = ask
        self._is_ready = is_ready
        arena = plan_arena(spec)
        self.shape: ArenaShape | None = arena[0] if arena is not None else None
        self._policy = ElasticPolicy(advantage=spec.config.elastic.advantage)
        self._decisions = DecisionLog()
        self._busy = False
        self._looking = False
        self._answer: asyncio.Future[ArenaResized] | None = None
        self._resize_id = 0
        self._pace = ChangePace(spec.config.elastic.cooldown_s, spec.config.elastic.reallocate_cooldown_s)
        self._looked_s = -1e9
        self._short: tuple[float, BlocksShort] | None = None
        self._before: tuple[float, dict[ActorName, Metrics]] | None = None
        self._loop: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._rigid = why_rigid(spec.config, spec.model, spec.plan)
        endpoint.on(ArenaResized, self._on_resized)
        endpoint.on(BlocksShort, self._on_short)

    # ------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Begin deciding, if that is wanted."""
        if self.shape is not None and self._spec.config.elastic.auto and self._loop is None:
            interval_s = self._spec.config.elastic.interval_s
            self._loop = spawn(repeat(self._decide, lambda: interval_s, "rebalancing"), "rebalancing")

    async def close(self) -> None:
        """Stop deciding."""
        tasks = [*self._tasks, *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def epoch_begun(self) -> None:
        """Take the figures that the first decision compares its own with."""
        if self.shape is not None:
            self._spawn(self._take_reading(), "first figures")

    def epoch_ended(self) -> None:
        """What is under way will not be answered. Whether it was made shows in GpuExecutor's figures."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeerLostError("the group", "a new epoch began before the change was answered"))
        self._short = self._before = None

    # ------------------------------------------------------------------------------------------ wishes

    async def rebalance(self, wish: RebalanceWish) -> RebalanceRecord:
        """Do what an operator asks for. Raises ``RebalanceBusyError`` while a change is under way, and
        ``CapacityError`` for what is not possible, with the value that would be."""
        if self.shape is None:
            raise CapacityError(f"expert slots and KV share no memory that could be moved: {self._rigid}")
        if not self._is_ready():
            raise RebalanceBusyError("the engine is not ready")
        with self._only_one():
            metrics = await (self._measure() if wish.auto else self._read())
            current = self._current(metrics)
            if wish.auto:
                decision = plan_auto(self.shape, current, self._figures(metrics), self._policy)
                decision = dataclasses.replace(decision, trigger="request")
            else:
                split = plan_rebalance(
                    self.shape,
                    current,
                    held_blocks=int(metrics[ActorName.KV_ALLOCATOR].get("held_blocks", 0)),
                    kv_tokens=wish.kv_tokens,
                    expert_bytes=wish.expert_bytes,
                )
                asked = (
                    f"kv_tokens={wish.kv_tokens}" if wish.kv_tokens is not None else f"expert_bytes={wish.expert_bytes}"
                )
                decision = ElasticDecision(split, "request", "asked", f"an operator asked for {asked}")
            return await self._change(current, decision)

    def view(self) -> ElasticView:
        """Whether memory can move, whether it is moving, and the last decisions, newest first."""
        mode = self._mode_to_be() if self.shape is not None else ""
        return ElasticView(
            elastic=bool(mode),
            auto=self._loop is not None,
            busy=self._busy,
            granule_bytes=self.shape.granule_bytes if self.shape is not None else 0,
            granules=self.shape.num_granules if self.shape is not None else 0,
            decisions=tuple(reversed(self._decisions.records)),
            idle_reason=self._decisions.idle_reason if mode else self._rigid or NO_VIRTUAL_MEMORY,
            mode=mode,
            cost=COSTS[mode],
        )

    def _mode_to_be(self) -> str:
        """As GpuExecutor tells; as configured while it is being loaded."""
        device = self._last_status(ActorName.GPU_EXECUTOR)
        if device is not None and "elastic" in device.metrics:
            return _mode(device.metrics)
        return "reallocate" if self._spec.config.elastic.mode == "reallocate" else "virtual"

    def metrics(self) -> dict[str, float]:
        """See ``DecisionLog.metrics``; whether a change is under way."""
        return {**self._decisions.metrics(), "rebalance_busy": float(self._busy)}

    # ------------------------------------------------------------------------------------------ decisions

    def _on_short(self, message: BlocksShort, fds: tuple[int, ...]) -> None:
        self._short = (time.monotonic(), message)
        now_s = time.monotonic()
        pause_s = now_s - max(self._pace.changed_s, self._looked_s)
        if self._loop is not None and not self._busy and pause_s >= PRESSURE_PAUSE_S:
            self._looked_s = now_s
            self._spawn(self._decide(), "rebalancing under pressure")

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> None:
        task = spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decide(self) -> None:
        shape = self.shape
        if self._busy or self._looking or shape is None or not self._is_ready():
            return
        self._looking = True
        try:
            if self._before is None:  # of an epoch that began before this Controller
                await self._take_reading()
                return
            metrics = await self._read()
            current = self._current(metrics)
            decision = plan_auto(shape, current, self._figures(metrics), self._policy)
            reallocates = _mode(metrics[ActorName.GPU_EXECUTOR]) == "reallocate"
            held_back = self._pace.held_back(current, decision.split, time.monotonic(), reallocates=reallocates)
            if decision.split == current or held_back:
                self._decisions.passed(shape, current, decision, held_back)
            elif not self._busy:  # or an operator was quicker
                with self._only_one():
                    await self._change(current, decision)
        except (CapacityError, RebalanceBusyError, KeyError) as error:  # an actor without figures is being replaced
            logger.info("event=no_decision why=%r", str(error))
        finally:
            self._looking = False

    async def _read(self) -> dict[ActorName, Metrics]:
        return {status.name: status.metrics for status in await self._ask(0.0)}

    async def _take_reading(self) -> None:
        epoch, metrics = self._epoch(), await self._read()
        if self._before is None and self._epoch() == epoch and all(metrics.get(name) for name in _COMPARED):
            self._before = (time.monotonic(), metrics)

    async def _measure(self) -> dict[ActorName, Metrics]:
        """Figures that lie ``MEASURED_S`` or more after those before."""
        while self._before is None or time.monotonic() - self._before[0] < MEASURED_S:
            if not self._is_ready():
                raise RebalanceBusyError("the engine is not ready")
            if self._before is None:
                await self._take_reading()
            await asyncio.sleep(MEASURED_S / 10)
        return await self._read()

    def _figures(self, metrics: Mapping[ActorName, Metrics]) -> ElasticFigures:
        now_s = time.monotonic()
        if self._before is None:
            raise RebalanceBusyError("a new epoch began while figures were taken")
        (before_s, old), self._before = self._before, (now_s, dict(metrics))
        elapsed_s = max(now_s - before_s, 1e-3)

        def rate(name: ActorName, key: str) -> float:
            return max(0.0, metrics[name].get(key, 0.0) - old[name].get(key, 0.0)) / elapsed_s

        experts, kv = metrics[ActorName.EXPERT_CACHE], metrics[ActorName.KV_ALLOCATOR]
        short = self._short[1] if self._short is not None and now_s - self._short[0] < 2 * PRESSURE_PAUSE_S else None
        tokens_per_s = rate(ActorName.GPU_EXECUTOR, "tokens_total")
        busy_ms_per_s = 1e3 * rate(ActorName.GPU_EXECUTOR, "busy_seconds_total")
        return ElasticFigures(
            hit_less=experts.get("hit_estimate_less", 0.0),
            hit_now=experts.get("hit_estimate", 0.0),
            hit_more=experts.get("hit_estimate_more", 0.0),
            uses_per_s=sum(rate(ActorName.EXPERT_CACHE, f"{kind}_total") for kind in ("hits", "fetches", "cpu")),
            miss_ms=self._miss_ms(experts),
            waiting_requests=float(short.num_requests) if short is not None else 0.0,
            starved_blocks=short.num_blocks if short is not None else 0,
            recomputed_tokens_per_s=rate(ActorName.SCHEDULER, "recomputed_tokens_total"),
            cached_hit_tokens_per_s=rate(ActorName.KV_ALLOCATOR, "hit_tokens_total"),
            prefill_ms_per_token=busy_ms_per_s / tokens_per_s if tokens_per_s else 0.0,
            peak_held_blocks=int(max(kv.get("peak_held_blocks", 0.0), kv.get("held_blocks", 0.0))),
        )

    def _miss_ms(self, experts: Metrics) -> float:
        """What one miss costs by the cost model, at the rates of now where there are any."""
        model = self._spec.model
        costs = live_costs(self._spec.plan.costs or assumed_costs(self._spec.config.device), experts)
        fraction = None if experts.get("split_auto") else experts.get("fetch_fraction")
        hit_ratio = experts.get("hit_ratio", 0.0)
        return price_of_miss_ms(
            costs, self._spec.plan.slot_stride_bytes, model.num_experts_per_tok, hit_ratio, fraction
        )

    def _current(self, metrics: Mapping[ActorName, Metrics]) -> ArenaSplit:
        device = metrics[ActorName.GPU_EXECUTOR]
        if not device.get("elastic"):
            raise CapacityError(
                "GpuExecutor's arena is not elastic: the driver cannot map memory in pieces; with elastic.mode=auto it "
                "would be allocated anew"
            )
        return ArenaSplit(int(device["slot_granules"]), int(device["kv_granules"]))

    # ------------------------------------------------------------------------------------------ changes

    def _only_one(self) -> _Busy:
        if self._busy:
            raise RebalanceBusyError("a rebalance is under way; try again when it has ended")
        return _Busy(self)

    async def _change(self, current: ArenaSplit, decision: ElasticDecision) -> RebalanceRecord:
        shape = self.shape
        assert shape is not None
        split, begun_s = decision.split, time.monotonic()
        outcome, moved_bytes = "unchanged", 0
        if split != current:
            outcome, moved_bytes = await self._resize(split)
        if split != current:
            self._pace.changed(time.monotonic())
        duration_ms = (time.monotonic() - begun_s) * 1e3
        return self._decisions.decided(shape, current, decision, outcome, moved_bytes, duration_ms)

    async def _resize(self, split: ArenaSplit) -> tuple[str, int]:
        """ "done", or why not; bytes copied."""
        # Higher than any of a Controller before this one; the wall clock may have been set back since.
        self._resize_id = max(self._resize_id + 1, time.monotonic_ns())
        answer = self._answer = asyncio.get_running_loop().create_future()
        limit_s = 2 * self._spec.config.scheduler.step_timeout_s
        try:
            self._endpoint.send(
                ActorName.GPU_EXECUTOR,
                ResizeArena(self._epoch(), self._resize_id, split.slot_granules, split.kv_granules),
            )
            resized = await asyncio.wait_for(answer, limit_s)
        except PeerLostError as error:
            return str(error), 0
        except asyncio.TimeoutError:
            return f"no answer within {limit_s:g} s", 0
        finally:
            self._answer = None
        return resized.failure or "done", resized.moved_bytes

    def _on_resized(self, message: ArenaResized, fds: tuple[int, ...]) -> None:
        if self._answer is not None and not self._answer.done() and message.resize_id == self._resize_id:
            self._answer.set_result(message)


def _mode(device: Metrics) -> str:
    """How GpuExecutor's arena is divided anew."""
    if not device.get("elastic"):
        return ""
    return "reallocate" if device.get("reallocates") else "virtual"


class _Busy:
    """Context in which no other change begins."""

    def __init__(self, owner: Rebalancer) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner._busy = True

    def __exit__(self, *details: object) -> None:
        self._owner._busy = False
