"""The ExpertCache actor: owns slot table and mailbox; a native thread answers every expert layer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from freetoken._native import CacheServer, Mailbox, SharedSegment, SlotTable
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.config.schema import ExpertsConfig
from freetoken.costs import assumed_costs
from freetoken.errors import CapacityError, ConfigError, PeerLostError, TraceBusyError
from freetoken.experts.arrivals import Arrivals
from freetoken.experts.device_client import fetchable_records, is_device_client, plan_mailbox, server_spin_us
from freetoken.experts.reports import StepReporter
from freetoken.experts.route_trace import TraceInfo
from freetoken.experts.route_watch import RouteWatch
from freetoken.experts.slot_worth import SlotWorth
from freetoken.experts.split import describe_change, native_costs, split_metrics, split_mode
from freetoken.experts.trace_files import DEFAULT_MAX_BYTES, plan_trace_file
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorStatus,
    ArenaReady,
    ArenaReplaced,
    ArenaResized,
    MailboxShared,
    PlacesLeft,
    PoolEmptied,
    PoolVacated,
    RecordsMoved,
    StepNotice,
    TraceRecording,
    TraceWish,
    VacatePool,
    Wiring,
)
from freetoken.service import Service
from freetoken.transport import Endpoint
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)

WIRE_TIMEOUT_S = 60.0
_COUNTED = (
    "hits",
    "fetches",
    "cpu",
    "admitted",
    "evicted",
    "fetched_bytes",
    "cpu_bytes",
    "publishes",
    "hints",
    "copied_ahead",
    "used_ahead",
    "plan_ns",
)


class ExpertCacheService(Service):
    """The slot table lives as long as the arena; mailbox and server thread are of one epoch.

    With a dense model there is neither, and wiring waits for nothing.
    """

    name: ClassVar[ActorName] = ActorName.EXPERT_CACHE

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.slots: SlotTable | None = None
        self.split = spec.config.experts.split
        self.costs = spec.plan.costs or assumed_costs(spec.config.device)
        self._split_changes = 0  # of this epoch, that were logged
        self._arena_id: str | None = None
        self._arrivals: Arrivals[ArenaReady] = Arrivals("the arena")
        self._mailbox: Mailbox | None = None
        self._server: CacheServer | None = None
        self._totals = dict.fromkeys(_COUNTED, 0)  # of the servers of earlier epochs
        self._steps_total = 0
        self._vacating_id = 0  # a change between VacatePool and RecordsMoved
        self._worth = SlotWorth(spec)
        self._routes: RouteWatch | None = None
        self._reporter = StepReporter(endpoint, self.name, self.metrics)
        endpoint.on(ArenaReady, self._on_arena_ready)
        endpoint.on(StepNotice, self._on_step_notice)
        endpoint.on(VacatePool, self._on_vacate)
        endpoint.on(RecordsMoved, self._on_records_moved)
        endpoint.on(ArenaResized, self._on_resized)
        endpoint.on(ArenaReplaced, self._on_replaced)
        endpoint.on_peer_lost(self._arrivals.peer_lost)

    async def load(self) -> None:
        """Begin the recording that the settings ask for, if they do."""
        path = self.spec.config.experts.trace_path
        if path is not None:
            try:
                await self.record_routes(path)
            except (ConfigError, TraceBusyError) as error:
                logger.warning("event=not_recording detail=%r", str(error))

    async def wire(self, wiring: Wiring) -> None:
        """Make this epoch's mailbox, send it out, wait for GpuExecutor's arena, start serving.

        Raises ``PeerLostError`` when GpuExecutor or CpuExecutor is gone, or the arena does not come in time;
        ``CapacityError`` when there is no memory for the mailbox.
        """
        self._end_epoch()
        if not self.spec.model.is_moe:
            await super().wire(wiring)
            return
        segment = await asyncio.to_thread(self._new_segment)
        self._arrivals.expect(ActorName.GPU_EXECUTOR)
        await super().wire(wiring)
        self._mailbox = Mailbox.create(segment, self.epoch, *plan_mailbox(self.spec))
        for peer in (ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR):
            self.endpoint.send(peer, MailboxShared(self.epoch, segment.size_bytes), [segment.fd])
        mailbox = self._mailbox
        arena = (await self._arrivals.wait(self._arena_timeout_s))[ActorName.GPU_EXECUTOR]
        fetchable = await self._fetchable(arena)
        slots = self._slots_for(arena)
        model = self.spec.model
        self._server = CacheServer(
            mailbox,
            slots,
            1.0,
            self.spec.plan.in_place,
            server_spin_us(self.spec),
            [self.spec.layouts[i].stride_bytes for i in self.spec.layer_layout],
            is_device_client(self.spec),
            fetchable,
            [self.spec.layouts[i].num_tiles for i in self.spec.layer_layout]
            if self.spec.config.experts.split_records
            else [],
        )
        self._apply_split(self._server)
        self._server.set_lookahead(self.spec.config.experts.lookahead)
        self._server.start()
        self._watch_routes().attach(self._server)
        logger.info(
            "event=cache_wired epoch=%d layers=%d experts=%d slots=%d resident=%d",
            self.epoch,
            len(model.moe_layers),
            model.num_experts,
            slots.num_slots,
            self._server.counters()["resident"],
        )

    @property
    def _arena_timeout_s(self) -> float:
        """A GPU says what it can fetch only after it has registered the whole store, at gigabytes per second."""
        if is_device_client(self.spec):
            return max(WIRE_TIMEOUT_S, self.spec.config.health.load_timeout_s)
        return WIRE_TIMEOUT_S

    def _new_segment(self) -> SharedSegment:
        """All pages are there before the first publish: a page fault would cost as much as a layer."""
        size_bytes = Mailbox.required_bytes(*plan_mailbox(self.spec))
        try:
            segment = SharedSegment.create("freetoken-mailbox", size_bytes)
            segment.populate()
        except (MemoryError, OSError) as error:
            raise CapacityError(
                f"{format_bytes(size_bytes)} for the mailbox are not available ({error}); lower "
                f"scheduler.max_num_batched_tokens={self.spec.plan.max_batch_tokens}"
            ) from error
        return segment

    async def _fetchable(self, arena: ArenaReady) -> NDArray[np.bool_] | None:
        """Which records the device can read in the store; None: all."""
        if arena.fetchable is None:
            return None
        index = await asyncio.to_thread(FtwIndex.load, self.spec.checkpoint)
        mask = fetchable_records(index, arena.fetchable)
        if mask.all():
            return None
        stride_bytes = np.array([index.layout_of(layer).stride_bytes for layer in range(len(mask))], np.int64)
        logger.warning(
            "event=not_fetchable bytes=%d of=%d records=%d of=%d detail=%r",
            int((~mask).sum(axis=1) @ stride_bytes),
            index.expert_bytes,
            mask.size - int(mask.sum()),
            mask.size,
            "the device cannot read these experts in host memory; CpuExecutor runs them, unless a slot holds them or "
            "long prefill streams them",
        )
        return mask

    def _slots_for(self, arena: ArenaReady) -> SlotTable:
        """The table that is true to the arena: emptied when the arena's contents were lost."""
        experts, model = self.spec.config.experts, self.spec.model
        self._vacating_id = 0
        if self.slots is None:
            self.slots = SlotTable(
                len(model.moe_layers),
                model.num_experts,
                arena.num_slots,
                experts.policy,
                experts.half_life_tokens,
                experts.long_half_life_tokens,
                experts.admission_margin,
                experts.admission_floor,
            )
        self.slots.cancel_vacate()  # the epoch ended before this table had agreed, so the arena did not shrink
        if arena.arena_id != self._arena_id or self.slots.num_slots > arena.num_slots:
            self.slots.empty(arena.num_slots)
            logger.info("event=slots_emptied epoch=%d slots=%d", self.epoch, arena.num_slots)
        else:
            self.slots.grow(arena.num_slots)
        self._arena_id = arena.arena_id
        return self.slots

    async def set_split(self, split: str | float) -> None:
        """Split every layer's misses this way from now on, also in later epochs (for whoever holds the service; no
        message asks for it): by live rates ('auto'), or a share for the device to fetch ('fetch', 'cpu', 'q=0.3', or
        the number).

        Raises ``ConfigError`` for anything else, and for a share outside 0..1.
        """
        text = split if isinstance(split, str) else f"q={split:g}"
        try:
            self.split = ExpertsConfig(split=text).split
        except ValueError:
            raise ConfigError(f"experts.split {text} is not from 0 to 1, nor 'auto', 'fetch' or 'cpu'") from None
        if self._server is not None:
            self._apply_split(self._server)
        logger.info("event=split_set epoch=%d split=%s", self.epoch, self.split)

    @property
    def fetch_fraction(self) -> float | None:
        """Share of the misses that a fixed split fetches; None: the split is by live rates."""
        return ExpertsConfig(split=self.split).fetch_fraction

    def _apply_split(self, server: CacheServer) -> None:
        fraction = self.fetch_fraction
        self._split_changes = 0
        if fraction is None:
            server.set_auto_split(native_costs(self.costs))
        else:
            server.set_fetch_fraction(fraction)
            server.watch_rates(native_costs(self.costs))

    def _split_figures(self, server: CacheServer | None) -> dict[str, float]:
        """Live rates and the split; logs the newest change."""
        status = server.split_status() if server is not None else None
        if status is None:
            return {}
        if status["changes"] > self._split_changes:
            self._split_changes = status["changes"]
            change = status["last_change"]
            logger.info(
                "event=split_changed epoch=%d changes=%d layer=%d mode=%s gain=%.3f reason=%r",
                self.epoch,
                status["changes"],
                change["at_layer"],
                split_mode(1.0, change["fetched_after"]),
                change["gain"],
                describe_change(self.costs, change),
            )
        return split_metrics(self.costs, status)

    async def pause(self, reason: str) -> None:
        """Abort the mailbox and stop the server; slots of unfinished fills become free."""
        await super().pause(reason)
        self._end_epoch()

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        """What the Controller passes on (a lifecycle call): record into a file of ``experts.trace_dir`` from now on,
        over epochs; end that; tell of the last recording, if there was one. Raises ``ConfigError`` and
        ``TraceBusyError``."""
        if wish.action == "start":
            self._check_routes()
            routes = self._watch_routes()
            routes.check_idle()  # rather than a complaint about the new file
            place = (self.spec.config, self.spec.served_model_name, wish.name, wish.max_bytes)
            path, max_bytes = await asyncio.to_thread(plan_trace_file, *place)
            await routes.start_recording(path, max_bytes)
        elif wish.action == "stop":
            await self.stop_recording()
        return await self._routes.recording() if self._routes is not None else None

    async def record_routes(self, path: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Record a route trace from now on, while serving. Raises ``ConfigError`` for a dense model and a path that
        cannot be written or exists, and ``TraceBusyError`` while another is being recorded."""
        self._check_routes()
        await self._watch_routes().start_recording(path, max_bytes)

    async def stop_recording(self) -> None:
        """The trace is complete."""
        if self._routes is not None:
            await self._routes.stop_recording()

    def _check_routes(self) -> None:
        if not self.spec.model.is_moe:
            raise ConfigError(f"routes cannot be recorded: {self.spec.served_model_name} has no experts")

    def _watch_routes(self) -> RouteWatch:
        if self._routes is None:
            model = self.spec.model
            info = TraceInfo(
                self.spec.served_model_name,
                len(model.moe_layers),
                model.num_experts,
                plan_mailbox(self.spec)[1],
                tuple(self.spec.layouts[i].stride_bytes for i in self.spec.layer_layout),
                "recorded",
            )
            self._routes = RouteWatch(info, lambda: self.slots.num_slots if self.slots is not None else 0)
        return self._routes

    async def close(self) -> None:
        self._end_epoch()
        if self._routes is not None:
            await self._routes.stop_recording()
        await super().close()

    def _end_epoch(self) -> None:
        self._arrivals.clear()
        self._reporter.stop()
        mailbox, self._mailbox = self._mailbox, None
        server, self._server = self._server, None
        if mailbox is not None:
            mailbox.abort()
        if server is not None:
            server.stop()  # its thread answers within microseconds or sleeps
            if self._routes is not None:
                self._routes.detach()
            counters = server.counters()
            for name in _COUNTED:
                self._totals[name] += counters[name]

    def _on_arena_ready(self, message: ArenaReady, fds: tuple[int, ...]) -> None:
        self._arrivals.deliver(ActorName.GPU_EXECUTOR, message)

    def _on_vacate(self, message: VacatePool, fds: tuple[int, ...]) -> None:
        table = self._server or self.slots
        if table is None:
            return
        vacated = table.vacate(message.capacity)
        self._vacating_id = message.resize_id
        moves = vacated.moves
        logger.info(
            "event=slots_vacated resize=%d slots=%d moved=%d evicted=%d",
            message.resize_id, message.capacity, len(moves), vacated.num_evicted,
        )  # fmt: skip
        reply = PoolVacated(
            self.epoch,
            message.resize_id,
            self.name.value,
            tuple(source for source, _ in moves),
            tuple(target for _, target in moves),
        )
        self._send(ActorName.GPU_EXECUTOR, reply)

    def _on_records_moved(self, message: RecordsMoved, fds: tuple[int, ...]) -> None:
        table = self._server or self.slots
        if table is None or self._vacating_id != message.resize_id:
            return
        self._vacating_id = 0
        if message.made:
            table.finish_vacate()
            self._send(ActorName.GPU_EXECUTOR, PlacesLeft(self.epoch, message.resize_id))
        else:
            table.cancel_vacate()

    def _on_resized(self, message: ArenaResized, fds: tuple[int, ...]) -> None:
        table = self._server or self.slots
        if table is not None and self.slots is not None and message.num_slots > self.slots.num_slots:
            table.grow(message.num_slots)
            logger.info("event=slots_grown resize=%d slots=%d", message.resize_id, message.num_slots)

    def _on_replaced(self, message: ArenaReplaced, fds: tuple[int, ...]) -> None:
        table = self._server or self.slots
        if table is None:
            return
        table.empty(message.num_slots)
        self._arena_id = message.arena_id
        logger.info("event=slots_emptied epoch=%d slots=%d", self.epoch, message.num_slots)
        self._send(ActorName.SCHEDULER, PoolEmptied(self.epoch, message.resize_id, self.name.value))

    def _send(self, to: ActorName, message: PoolVacated | PlacesLeft | PoolEmptied) -> None:
        try:
            self.endpoint.send(to, message)
        except PeerLostError as error:  # the epoch is over
            logger.info("event=undeliverable message=%s error=%r", type(message).__name__, str(error))

    def _on_step_notice(self, message: StepNotice, fds: tuple[int, ...]) -> None:
        self._steps_total += 1
        server = self._server
        if server is None:
            return
        if message.num_tokens > 0:
            server.notice()
        else:  # only retires requests
            server.rest()
        self._reporter.notice(message)

    def metrics(self) -> dict[str, float]:
        """Distinct (layer, expert) uses by where they ran, cumulative over epochs; slots by state;
        ``plan_us``: mean time of planning one publish."""
        server = self._server
        current = server.counters() if server is not None else {}
        totals = {name: self._totals[name] + current.get(name, 0) for name in _COUNTED}
        uses = totals["hits"] + totals["fetches"] + totals["cpu"]
        if server is None and self.slots is not None:
            resident, in_flight = self.slots.num_resident, 0
        else:
            resident, in_flight = current.get("resident", 0), current.get("in_flight", 0)
        plan_ns = totals.pop("plan_ns")
        return {
            **{f"{name}_total": float(count) for name, count in totals.items()},
            "plan_seconds_total": plan_ns / 1e9,
            "plan_us": plan_ns / 1e3 / totals["publishes"] if totals["publishes"] else 0.0,
            "split_auto": float(self.split == "auto"),
            "fetch_fraction": self._fetched_share(totals),
            **self._split_figures(server),
            "steps_total": float(self._steps_total),
            "slots": float(self.slots.num_slots if self.slots is not None else self.spec.plan.num_slots),
            "resident_slots": float(resident),
            "in_flight_slots": float(in_flight),
            "hit_ratio": totals["hits"] / uses if uses else 0.0,
            **(self._routes.figures() if self._routes is not None else {}),
            **self._worth.figures(server or self.slots, self.slots.num_slots if self.slots is not None else 0),
        }

    def _fetched_share(self, totals: dict[str, int]) -> float:
        """The fixed share, or with a split by live rates that of all misses so far."""
        fraction = self.fetch_fraction
        if fraction is not None:
            return fraction
        misses = totals["fetches"] + totals["cpu"]
        return totals["fetches"] / misses if misses else 0.0

    def status(self) -> ActorStatus:
        """With the way of splitting, and the last change's reason, as detail."""
        status = super().status()
        server = self._server
        split = server.split_status() if server is not None else None
        if server is None:
            return status
        if split is None:
            return dataclasses.replace(status, detail=f"split={self.split}")
        detail = f"split={self.split} mode={split_mode(split['mean_misses'], split['mean_fetches'])}"
        if split["changes"]:
            detail += f" last change: {describe_change(self.costs, split['last_change'])}"
        return dataclasses.replace(status, detail=detail)
