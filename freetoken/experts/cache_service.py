"""The ExpertCache actor: owns slot table and mailbox; a native thread answers every expert layer."""

from __future__ import annotations

import logging
from typing import ClassVar

from freetoken._native import CacheServer, Mailbox, SharedSegment, SlotTable
from freetoken.experts.arrivals import Arrivals
from freetoken.experts.reports import StepReporter
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, ArenaReady, MailboxShared, StepNotice, Wiring
from freetoken.service import Service
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

WIRE_TIMEOUT_S = 60.0
_COUNTED = ("hits", "fetches", "cpu", "admitted", "evicted", "fetched_bytes", "cpu_bytes", "publishes")


class ExpertCacheService(Service):
    """The slot table lives as long as the arena; mailbox and server thread are of one epoch.

    With a dense model there is neither, and wiring waits for nothing.
    """

    name: ClassVar[ActorName] = ActorName.EXPERT_CACHE

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.slots: SlotTable | None = None
        self._arena_id: str | None = None
        self._arrivals: Arrivals[ArenaReady] = Arrivals("the arena")
        self._mailbox: Mailbox | None = None
        self._server: CacheServer | None = None
        self._totals = dict.fromkeys(_COUNTED, 0)  # of the servers of earlier epochs
        self._steps_total = 0
        self._reporter = StepReporter(endpoint, self.name, self.metrics)
        endpoint.on(ArenaReady, self._on_arena_ready)
        endpoint.on(StepNotice, self._on_step_notice)
        endpoint.on_peer_lost(self._arrivals.peer_lost)

    async def wire(self, wiring: Wiring) -> None:
        """Make this epoch's mailbox, send it out, wait for GpuExecutor's arena, start serving.

        Raises ``PeerLostError`` when GpuExecutor or CpuExecutor is gone, or the arena does not come within a minute.
        """
        self._end_epoch()
        if not self.spec.model.is_moe:
            await super().wire(wiring)
            return
        self._arrivals.expect(ActorName.GPU_EXECUTOR)
        await super().wire(wiring)
        self._mailbox = self._share_new_mailbox()
        arena = (await self._arrivals.wait(WIRE_TIMEOUT_S))[ActorName.GPU_EXECUTOR]
        slots = self._slots_for(arena)
        plan, config, model = self.spec.plan, self.spec.config, self.spec.model
        stride_bytes = [self.spec.layouts[i].stride_bytes for i in self.spec.layer_layout]
        self._server = CacheServer(
            self._mailbox,
            slots,
            config.experts.fetch_fraction,
            slots.num_slots == 0,
            plan.spin_us,
            stride_bytes,
        )
        self._server.start()
        logger.info(
            "event=cache_wired epoch=%d layers=%d experts=%d slots=%d resident=%d",
            self.epoch,
            len(model.moe_layers),
            model.num_experts,
            slots.num_slots,
            self._server.counters()["resident"],
        )

    def _share_new_mailbox(self) -> Mailbox:
        model, max_tokens = self.spec.model, self.spec.plan.max_batch_tokens
        geometry = (
            max_tokens,
            model.num_experts_per_tok,
            model.hidden_size,
            len(model.moe_layers),
            model.num_experts,
        )
        segment = SharedSegment.create("freetoken-mailbox", Mailbox.required_bytes(*geometry))
        mailbox = Mailbox.create(segment, self.epoch, *geometry)
        for peer in (ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR):
            self.endpoint.send(peer, MailboxShared(self.epoch, segment.size_bytes), [segment.fd])
        return mailbox

    def _slots_for(self, arena: ArenaReady) -> SlotTable:
        """The table that is true to the arena: emptied when the arena's contents were lost."""
        experts, model = self.spec.config.experts, self.spec.model
        if self.slots is None or self.slots.num_slots != arena.num_slots:
            self.slots = SlotTable(
                len(model.moe_layers), model.num_experts, arena.num_slots, experts.policy, experts.half_life_tokens
            )
        elif arena.arena_id != self._arena_id:
            self.slots.invalidate_all()
            logger.info("event=slots_emptied epoch=%d slots=%d", self.epoch, arena.num_slots)
        self._arena_id = arena.arena_id
        return self.slots

    async def pause(self, reason: str) -> None:
        """Abort the mailbox and stop the server; slots of unfinished fills become free."""
        await super().pause(reason)
        self._end_epoch()

    async def close(self) -> None:
        self._end_epoch()
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
            counters = server.counters()
            for name in _COUNTED:
                self._totals[name] += counters[name]

    def _on_arena_ready(self, message: ArenaReady, fds: tuple[int, ...]) -> None:
        self._arrivals.deliver(ActorName.GPU_EXECUTOR, message)

    def _on_step_notice(self, message: StepNotice, fds: tuple[int, ...]) -> None:
        self._steps_total += 1
        if self._server is not None:
            self._reporter.notice(message)

    def metrics(self) -> dict[str, float]:
        """Distinct (layer, expert) uses by where they ran, cumulative over epochs; slots by state."""
        server = self._server
        current = server.counters() if server is not None else {}
        totals = {name: self._totals[name] + current.get(name, 0) for name in _COUNTED}
        uses = totals["hits"] + totals["fetches"] + totals["cpu"]
        if server is None and self.slots is not None:
            resident, in_flight = self.slots.num_resident, 0
        else:
            resident, in_flight = current.get("resident", 0), current.get("in_flight", 0)
        return {
            **{f"{name}_total": float(count) for name, count in totals.items()},
            "steps_total": float(self._steps_total),
            "slots": float(self.spec.plan.num_slots),
            "resident_slots": float(resident),
            "in_flight_slots": float(in_flight),
            "hit_ratio": totals["hits"] / uses if uses else 0.0,
        }
