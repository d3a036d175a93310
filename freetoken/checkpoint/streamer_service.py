"""The WeightStreamer actor: fills the store and hands it to those who compute with it."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore, close_fds
from freetoken.checkpoint.store_loader import LoadFigures, StoreLoader
from freetoken.elastic.machine import read_machine
from freetoken.errors import CapacityError, CheckpointError, FreeTokenError, PeerLostError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, ActorState, StepNotice, StoreShared, Wiring
from freetoken.service import Service
from freetoken.transport import Endpoint
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)

ADOPT_TIMEOUT_S = 60.0
RECEIVERS = (ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR, ActorName.CONTROLLER)


class WeightStreamerService(Service):
    """Holds the store for its whole life. With ``adopt`` it reads nothing and takes the store over from a holder."""

    name: ClassVar[ActorName] = ActorName.WEIGHT_STREAMER

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint, adopt: bool = False) -> None:
        super().__init__(spec, endpoint)
        self.adopt = adopt
        self.store: HeldStore | None = None
        self._arrival: asyncio.Future[None] | None = None  # of the store, while a wiring waits for it
        self._arrival_error: CheckpointError | None = None
        self._loader: StoreLoader | None = None
        self._figures: LoadFigures | None = None
        self._store_bytes = 0
        self._num_records = len(spec.layer_layout) * spec.model.num_experts
        self._steps_total = 0
        endpoint.on(StoreShared, self._on_store_shared)
        endpoint.on(StepNotice, self._on_step_notice)

    async def load(self) -> None:
        """Read the checkpoint into the store, on threads; nothing to do with ``adopt``.

        Raises ``CheckpointError`` naming file and record or tensor, and ``CapacityError`` before anything is allocated
        when the store does not fit the available memory.
        """
        self.state = ActorState.LOADING
        if self.adopt:
            return
        index = await asyncio.to_thread(FtwIndex.load, self.spec.checkpoint)
        if index.fingerprint != self.spec.fingerprint:
            raise CheckpointError(
                f"{index.path}: the checkpoint was replaced after this launch was planned (fingerprint "
                f"{index.fingerprint}, planned {self.spec.fingerprint}); launch again"
            )
        available = read_machine().available_bytes
        if index.store_bytes > available:
            raise CapacityError(
                f"{index.path}: the weights need {format_bytes(index.store_bytes)} of memory, "
                f"{format_bytes(available)} are available; free some, or convert with --dtype bf16"
            )
        settings = self.spec.config.loader
        self._store_bytes = index.store_bytes
        self._loader = loader = StoreLoader(
            index,
            threads=settings.threads,
            chunk_bytes=settings.chunk_bytes,
            direct=settings.direct,
            verify=settings.verify,
        )
        try:
            segments = await asyncio.to_thread(loader.run)
        except asyncio.CancelledError:
            loader.cancel()
            raise
        if self.state == ActorState.STOPPED:
            return  # closed while the last bytes came in; the segments go with this frame
        self.store = HeldStore(self.spec.checkpoint, index.fingerprint, segments)
        self._figures = figures = loader.figures
        assert figures is not None
        logger.info(
            "event=store_loaded bytes=%d seconds=%.2f gbps=%.2f direct=%d checked=%d files=%d",
            figures.num_bytes,
            figures.seconds,
            figures.gbps,
            figures.used_direct,
            figures.num_checked,
            len(segments),
        )

    def progress(self) -> tuple[int, int, str]:
        """Bytes read."""
        if self._loader is None:
            return (0, 0, "")
        return (self._loader.progress(), self._store_bytes, "weights")

    async def wire(self, wiring: Wiring) -> None:
        """Send the store to its users, first waiting for a holder to send it here where nothing was read.

        Raises ``FreeTokenError`` when no holder sends it in time, ``CheckpointError`` when it is another checkpoint's.
        """
        if self.store is None and not self.adopt:
            raise FreeTokenError("WeightStreamer was wired before its weights were loaded")
        self._arrival_error = None
        self._arrival = asyncio.get_running_loop().create_future()  # before connecting, which delivers held messages
        try:
            await super().wire(wiring)
            if self.store is None and self._arrival_error is None:
                await asyncio.wait([self._arrival], timeout=ADOPT_TIMEOUT_S)
        finally:
            self._arrival = None
        if self._arrival_error is not None:
            raise self._arrival_error
        if self.store is None:
            raise FreeTokenError(f"no holder sent the store within {ADOPT_TIMEOUT_S:g} s")
        for receiver in RECEIVERS:
            try:
                self.store.share(self.endpoint, receiver, self.epoch)
            except PeerLostError as error:  # its death is dealt with elsewhere; the others still need the store
                logger.warning("event=store_not_sent to=%s reason=%s", receiver, error)

    async def share_store(self, to: ActorName) -> None:
        """Send the store's descriptors to ``to``. Raises ``FreeTokenError`` when none is held."""
        if self.store is None:
            raise FreeTokenError("WeightStreamer holds no store")
        self.store.share(self.endpoint, to, self.epoch)

    async def close(self) -> None:
        """Stops a load that is under way and lets go of the store."""
        if self._loader is not None and self.store is None:
            self._loader.cancel()
        store, self.store = self.store, None
        if store is not None:
            store.close()
        await super().close()

    def metrics(self) -> dict[str, float]:
        """What is held, and how it was loaded (zeros after an adoption)."""
        figures = self._figures
        return {
            "store_bytes": float(self.store.size_bytes if self.store is not None else 0),
            "records": float(self._num_records),
            "adopted": float(self.adopt),
            "read_bytes_total": float(figures.num_bytes if figures else 0),
            "load_s": figures.seconds if figures else 0.0,
            "load_gbps": figures.gbps if figures else 0.0,
            "direct": float(figures.used_direct if figures else 0),
            "checked": float(figures.num_checked if figures else 0),
            "steps_total": float(self._steps_total),
        }

    def _on_store_shared(self, message: StoreShared, fds: tuple[int, ...]) -> None:
        if self.store is not None or not self.adopt:
            close_fds(fds)
            return
        try:
            if message.fingerprint != self.spec.fingerprint:
                close_fds(fds)
                raise CheckpointError(
                    f"the store that was handed over has fingerprint {message.fingerprint}, "
                    f"{self.spec.checkpoint} has {self.spec.fingerprint}"
                )
            self.store = HeldStore.adopt(message, fds)
            logger.info("event=store_adopted epoch=%d bytes=%d", message.epoch, self.store.size_bytes)
        except (FreeTokenError, OSError) as error:
            self._arrival_error = CheckpointError(f"the store cannot be taken over: {error}")
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _on_step_notice(self, message: StepNotice, fds: tuple[int, ...]) -> None:
        self._steps_total += 1
