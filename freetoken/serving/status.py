"""What the engine tells about itself: health, actors, caches. The figures come from the actors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

from freetoken.costs import assumed_costs
from freetoken.errors import FreeTokenError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorState,
    ActorStatus,
    ElasticView,
    HealthState,
    HealthView,
    RebalanceRecord,
    RebalanceWish,
    TraceRecording,
    TraceWish,
)
from freetoken.quant.record import DTYPE_BYTES
from freetoken.serving.control import Control

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTROL_TIMEOUT_S = 2.0
TRACE_TIMEOUT_S = 60.0  # the last records have to reach the disk
FRESH_S = 0.2
"""Answers of the Controller are shared by all requests within this time."""


class _Cached(Generic[T]):
    """One question to the Controller: asked once at a time, its answer kept for ``FRESH_S``."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._answer: T | None = None
        self._answered_s = -FRESH_S
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """What was answered is no longer so."""
        self._answer = None

    async def get(self) -> T:
        """The answer; raises what the question raised, or ``TimeoutError``."""
        async with self._lock:
            if self._answer is None or time.monotonic() - self._answered_s >= FRESH_S:
                self._answer = None
                try:
                    self._answer = await asyncio.wait_for(self._ask(), CONTROL_TIMEOUT_S)
                except asyncio.TimeoutError:
                    raise TimeoutError(f"no answer within {CONTROL_TIMEOUT_S} s") from None
                self._answered_s = time.monotonic()
            return self._answer


class EngineView:
    """The engine as the front sees it. ``own_status`` and ``own_health`` are this actor's; they need no Controller.
    ``busy_since_s`` tells since when (monotonic) this front has had requests under way, or None."""

    def __init__(
        self,
        spec: LaunchSpec,
        control: Control | None,
        own_status: Callable[[], ActorStatus],
        own_health: Callable[[], HealthView],
        busy_since_s: Callable[[], float | None],
    ) -> None:
        self._spec = spec
        self._own_status = own_status
        self._own_health = own_health
        self._busy_since_s = busy_since_s
        self._steps = -1.0
        self._step_seen_s = 0.0
        self._control = control
        self._actors = None if control is None else _Cached(control.actors)
        self._health = None if control is None else _Cached(control.health)

    async def actors(self) -> list[ActorStatus]:
        """Every actor's newest status; only this one's when the Controller does not answer."""
        own = self._own_status()
        if self._actors is None:
            return [own]
        try:
            others = await self._actors.get()
        except Exception as error:
            logger.warning("event=control_unreachable question=actors error=%r", str(error))
            return [own]
        # Of itself an actor knows everything but how often it died.
        return [replace(own, restarts=actor.restarts) if actor.name is own.name else actor for actor in others] or [own]

    async def health(self) -> HealthView:
        """The worse of this actor's state and the Controller's judgement."""
        own = self._own_health()
        if self._health is None or own.state is HealthState.STOPPING:
            return own
        try:
            view = await self._health.get()
        except Exception as error:
            logger.warning("event=control_unreachable question=health error=%r", str(error))
            if own.state is not HealthState.READY:
                return own
            return HealthView(HealthState.DEGRADED, f"the Controller does not answer: {error or type(error).__name__}")
        return own if view.state is HealthState.READY and own.state is not HealthState.READY else view

    async def health_report(self) -> dict[str, Any]:
        """The body of /health."""
        view, actors = await self.health(), await self.actors()
        scheduler = _metrics_of(actors, ActorName.SCHEDULER)
        stalled_s = self._stalled_s(scheduler)
        state, detail = view.state, view.detail
        limit_s = self._spec.config.scheduler.step_timeout_s
        if state is HealthState.READY and stalled_s > limit_s:
            state = HealthState.DEGRADED
            detail = (
                f"no step for {stalled_s:.0f} s with {scheduler.get('running', 0.0):.0f} requests running and "
                f"{scheduler.get('waiting', 0.0):.0f} waiting (scheduler.step_timeout_s is {limit_s:.0f})"
            )
        report: dict[str, Any] = {
            "status": state.value,
            "detail": detail,
            "model": self._spec.served_model_name,
            "requests": {"running": scheduler.get("running"), "waiting": scheduler.get("waiting")},
            "stalled_s": round(stalled_s, 1),
            "actors": {
                actor.name.value: {"state": actor.state.value, "epoch": actor.epoch, "restarts": actor.restarts}
                for actor in actors
            },
        }
        if state is HealthState.LOADING:
            share = view.done_bytes / view.total_bytes if view.total_bytes else None
            report["progress"] = {
                "done_bytes": view.done_bytes,
                "total_bytes": view.total_bytes,
                "fraction": share,
                "what": view.what,
            }
        return report

    def _stalled_s(self, scheduler: dict[str, float]) -> float:
        """For how long there has been work and, as far as was seen, no step."""
        now = time.monotonic()
        steps = scheduler.get("steps_total")
        busy_since_s = self._busy_since_s()
        if steps is None or steps != self._steps:
            self._steps = -1.0 if steps is None else steps
            self._step_seen_s = now
        return 0.0 if busy_since_s is None else now - max(busy_since_s, self._step_seen_s)

    async def cache_status(self) -> dict[str, Any]:
        """The body of /v1/cache/status: ``plan`` is that of the launch, the rest the actors' figures by the names they
        have in /metrics, each once."""
        actors = await self.actors()
        plan = self._spec.plan
        cache = _metrics_of(actors, ActorName.EXPERT_CACHE)
        split = {key: value for key, value in cache.items() if key.startswith("split_")}
        kv = _metrics_of(actors, ActorName.KV_ALLOCATOR)
        kv.pop("block_size_tokens", None)  # the plan's, which nothing changes
        return {
            "object": "cache.status",
            "plan": {
                "num_slots": plan.num_slots,
                "slot_stride_bytes": plan.slot_stride_bytes,
                "num_kv_blocks": plan.num_kv_blocks,
                "kv_block_size": plan.kv_block_size,
                "kv_block_bytes": plan.kv_block_size * self._spec.model.kv_bytes_per_token(DTYPE_BYTES[plan.kv_dtype]),
                "kv_dtype": plan.kv_dtype,
                "kv_capacity_tokens": plan.kv_capacity_tokens,
                "max_context_tokens": plan.max_context_tokens,
                "dense_bytes": plan.dense_bytes,
                "workspace_bytes": plan.workspace_bytes,
            },
            "experts": {
                "slots": float(plan.num_slots),
                **{key: value for key, value in cache.items() if key not in split},
            },
            "split": {
                "setting": self._spec.config.experts.split,
                "now": _detail_of(actors, ActorName.EXPERT_CACHE),
                "costs": (plan.costs or assumed_costs(self._spec.config.device)).to_json(),
                **{key.removeprefix("split_"): value for key, value in split.items()},
            },
            "kv": {
                "capacity_tokens": int(kv.get("blocks", plan.num_kv_blocks)) * plan.kv_block_size,
                **kv,
            },
            "elastic": elastic_json(await self._elastic()),
            "store": {"store_bytes": plan.store_bytes, **_metrics_of(actors, ActorName.WEIGHT_STREAMER)},
        }

    async def _elastic(self) -> ElasticView:
        nothing = ElasticView(False, False, False, 0, 0, idle_reason="the Controller does not say")
        if self._control is None:
            return nothing
        try:
            return await asyncio.wait_for(self._control.elastic(), CONTROL_TIMEOUT_S)
        except Exception as error:
            logger.warning("event=control_unreachable question=elastic error=%r", str(error))
            return nothing

    async def rebalance(self, wish: RebalanceWish) -> RebalanceRecord:
        """Divide the arena anew; raises what ``Control.rebalance`` does, and ``FreeTokenError`` without a
        Controller."""
        if self._control is None:
            raise FreeTokenError("there is none")
        try:
            return await self._control.rebalance(wish)
        finally:
            if self._actors is not None:
                self._actors.forget()

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """What ``Control.trace`` does; raises that, and ``FreeTokenError`` when nobody answers."""
        if self._control is None:
            raise FreeTokenError("there is none")
        try:
            return await asyncio.wait_for(self._control.trace(wish), TRACE_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FreeTokenError(f"no answer within {TRACE_TIMEOUT_S:g} s") from None


def _metrics_of(actors: list[ActorStatus], name: ActorName) -> dict[str, float]:
    for actor in actors:
        if actor.name is name and actor.state is not ActorState.DEAD:
            return dict(actor.metrics)
    return {}


def _detail_of(actors: list[ActorStatus], name: ActorName) -> str:
    return next((actor.detail for actor in actors if actor.name is name), "")


def actor_json(actor: ActorStatus) -> dict[str, Any]:
    """One entry of /v1/actors."""
    return {
        "name": actor.name.value,
        "state": actor.state.value,
        "pid": actor.pid,
        "epoch": actor.epoch,
        "uptime_s": round(actor.uptime_s, 3),
        "restarts": actor.restarts,
        "detail": actor.detail,
        "metrics": actor.metrics,
    }


def decision_json(record: RebalanceRecord) -> dict[str, Any]:
    """One decision."""
    return {
        "time": record.time_s,
        "trigger": record.trigger,
        "reason": record.reason,
        "outcome": record.outcome,
        "slots": {"before": record.slots_before, "after": record.slots_after},
        "kv_tokens": {"before": record.kv_tokens_before, "after": record.kv_tokens_after},
        "slot_ms_per_s": record.slot_ms_per_s,
        "kv_ms_per_s": record.kv_ms_per_s,
        "moved_bytes": record.moved_bytes,
        "duration_ms": round(record.duration_ms, 3),
    }


def elastic_json(view: ElasticView) -> dict[str, Any]:
    """The part ``elastic`` of /v1/cache/status."""
    return {**asdict(view), "decisions": [decision_json(record) for record in view.decisions]}
