"""The CpuExecutor actor: runs its share of every expert layer from the store; holds the store for others."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import ClassVar

from freetoken._native import CpuServer, ExpertStore, Mailbox, SharedSegment, WorkerPool
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore, close_fds, receive_store
from freetoken.errors import FreeTokenError
from freetoken.experts.arrivals import Arrivals
from freetoken.experts.device_client import is_device_client, server_spin_us
from freetoken.experts.reports import StepReporter
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, ActorState, ActorStatus, MailboxShared, StepNotice, StoreShared, Wiring
from freetoken.service import Service
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

WIRE_TIMEOUT_S = 60.0
_COUNTED = ("experts", "routes", "layers", "bytes", "busy_ns")


class CpuExecutorService(Service):
    """Store and worker pool live as long as the actor; mailbox and dispatcher thread are of one epoch.

    With a dense model it computes nothing and holds the store all the same.
    """

    name: ClassVar[ActorName] = ActorName.CPU_EXECUTOR

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint) -> None:
        super().__init__(spec, endpoint)
        self.store: HeldStore | None = None
        self._expert_store: ExpertStore | None = None  # of `store`; made at the first wiring after it came
        self._pool: WorkerPool | None = None
        self._arrivals: Arrivals[Mailbox | None] = Arrivals("its shared memory")
        self._mailbox: Mailbox | None = None
        self._server: CpuServer | None = None
        self._totals = dict.fromkeys(_COUNTED, 0)  # of the servers of earlier epochs
        self._steps_total = 0
        self._reporter = StepReporter(endpoint, self.name, self.metrics)
        endpoint.on(StoreShared, self._on_store_shared)
        endpoint.on(MailboxShared, self._on_mailbox_shared)
        endpoint.on(StepNotice, self._on_step_notice)
        endpoint.on_peer_lost(self._arrivals.peer_lost)

    async def load(self) -> None:
        """Start the worker threads. Raises ``FreeTokenError`` for an instruction set this CPU lacks."""
        self.state = ActorState.LOADING
        if not self.spec.model.is_moe:
            return
        plan = self.spec.plan
        try:
            self._pool = WorkerPool(plan.cpu_threads, plan.cpu_core_ids, plan.spin_us, self.spec.config.executor.isa)
        except ValueError as error:
            raise FreeTokenError(f"CpuExecutor cannot start its workers: {error}") from error

    async def wire(self, wiring: Wiring) -> None:
        """Wait for the store (unless one is held already) and this epoch's mailbox, then start serving.

        Raises ``PeerLostError`` when the sender of one of them dies or it does not come within a minute,
        ``CheckpointError`` when store and checkpoint do not belong together.
        """
        await self._end_epoch()
        if not self.spec.model.is_moe:
            await super().wire(wiring)
            return
        if self._pool is None:
            raise FreeTokenError("CpuExecutor was wired before it was loaded")
        expected = [ActorName.EXPERT_CACHE]
        if self.store is None:
            expected.append(ActorName.WEIGHT_STREAMER)
        self._arrivals.expect(*expected)
        await super().wire(wiring)
        self._mailbox = (await self._arrivals.wait(WIRE_TIMEOUT_S))[ActorName.EXPERT_CACHE]
        assert self._mailbox is not None and self.store is not None
        if self._expert_store is None:
            index = await asyncio.to_thread(FtwIndex.load, self.spec.checkpoint)
            self._expert_store = self.store.build_expert_store(index)
        self._server = CpuServer(
            self._mailbox, self._expert_store, self._pool, server_spin_us(self.spec), is_device_client(self.spec)
        )
        self._server.start()
        logger.info(
            "event=cpu_wired epoch=%d threads=%d isa=%s store_bytes=%d",
            self.epoch,
            self._pool.num_threads,
            self._pool.isa,
            self.store.size_bytes,
        )

    async def share_store(self, to: ActorName) -> None:
        """Send the store's descriptors to ``to``. Raises ``FreeTokenError`` when none is held."""
        if self.store is None:
            raise FreeTokenError("CpuExecutor holds no store")
        self.store.share(self.endpoint, to, self.epoch)

    async def pause(self, reason: str) -> None:
        """Abort the mailbox; returns once the layer being computed is done."""
        await super().pause(reason)
        await self._end_epoch()

    async def close(self) -> None:
        await self._end_epoch()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._expert_store = None
        store, self.store = self.store, None
        if store is not None:
            store.close()
        await super().close()

    async def _end_epoch(self) -> None:
        self._arrivals.clear()
        self._reporter.stop()
        mailbox, self._mailbox = self._mailbox, None
        server, self._server = self._server, None
        if mailbox is not None:
            mailbox.abort()
        if server is not None:
            await asyncio.to_thread(server.stop)
            counters = server.counters()
            for name in _COUNTED:
                self._totals[name] += counters[name]

    def _on_store_shared(self, message: StoreShared, fds: tuple[int, ...]) -> None:
        store = receive_store(self.store, message, fds)
        if store is not self.store:
            # A server that still runs on the old one keeps it until the next wiring.
            if self.store is not None:
                self.store.close()
            self.store = store
            self._expert_store = None
            logger.info("event=store_held epoch=%d bytes=%d", message.epoch, store.size_bytes)
        self._arrivals.deliver(ActorName.WEIGHT_STREAMER, None)

    def _on_mailbox_shared(self, message: MailboxShared, fds: tuple[int, ...]) -> None:
        try:
            mailbox = Mailbox.attach(SharedSegment.attach(fds[0], message.size_bytes, "freetoken-mailbox"))
        finally:
            close_fds(fds)
        self._arrivals.deliver(ActorName.EXPERT_CACHE, mailbox)

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
        """Experts, routes and bytes computed since start; time spent on them; what is held."""
        current = self._server.counters() if self._server is not None else {}
        totals = {name: self._totals[name] + current.get(name, 0) for name in _COUNTED}
        busy_s = totals["busy_ns"] / 1e9
        return {
            "experts_total": float(totals["experts"]),
            "routes_total": float(totals["routes"]),
            "layers_total": float(totals["layers"]),
            "read_bytes_total": float(totals["bytes"]),
            "busy_seconds_total": busy_s,
            "steps_total": float(self._steps_total),
            "read_gbps": totals["bytes"] / totals["busy_ns"] if totals["busy_ns"] else 0.0,
            "threads": float(self._pool.num_threads if self._pool is not None else 0),
            "store_bytes": float(self.store.size_bytes if self.store is not None else 0),
        }

    def status(self) -> ActorStatus:
        """With the instruction set in use as detail."""
        status = super().status()
        return status if self._pool is None else dataclasses.replace(status, detail=f"isa={self._pool.isa}")
