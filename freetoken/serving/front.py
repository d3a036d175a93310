"""ApiFront: the actor that clients talk to."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from aiohttp import web

from freetoken.errors import ConfigError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorState,
    ActorStatus,
    HealthState,
    HealthView,
    RequestFailure,
    TokenBatch,
)
from freetoken.service import Service
from freetoken.serving.app import build_app
from freetoken.serving.constraints import Constraints
from freetoken.serving.context import FrontContext
from freetoken.serving.control import Control
from freetoken.serving.dialogue import Dialogue
from freetoken.serving.generation import Generator
from freetoken.serving.metrics import FrontMetrics
from freetoken.serving.responses.store import ResponseStore
from freetoken.serving.sampling import Limits
from freetoken.serving.status import EngineView
from freetoken.serving.streams import Gate, RequestStreams
from freetoken.serving.tokenizer import load_text_model
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2
DRAIN_S = 1.0
SHUTDOWN_S = 1.0
MAX_HEADER_BYTES = 32 * 1024


class ApiFrontService(Service):
    """The HTTP server with tokenizer and streams. Listens from ``load`` on; takes requests between ``resume`` and
    ``pause``. ``control`` answers for the other actors; without it the front only knows of itself."""

    name: ClassVar[ActorName] = ActorName.API_FRONT

    def __init__(self, spec: LaunchSpec, endpoint: Endpoint, control: Control | None = None) -> None:
        super().__init__(spec, endpoint)
        self._limits = Limits.of(spec)
        self._gate = Gate()
        self._streams = RequestStreams(self._limits.requests)
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._closed = False
        front_metrics = FrontMetrics()
        self._context = FrontContext(
            spec=spec,
            limits=self._limits,
            gate=self._gate,
            generator=Generator(
                endpoint,
                self._streams,
                self._gate,
                front_metrics,
                spec.model.eos_token_ids,
                spec.config.server.request_timeout_s,
            ),
            metrics=front_metrics,
            engine=EngineView(spec, control, self.status, self._own_health, lambda: self._streams.busy_since_s),
            pool=self._pool,
            constraints=Constraints(spec.checkpoint, spec.model.vocab_size, spec.model.eos_token_ids, self._pool),
            responses=ResponseStore(spec.config.server.response_store_entries, spec.config.server.response_store_bytes),
        )
        endpoint.on(TokenBatch, self._on_tokens)
        endpoint.on_peer_lost(self._on_peer_lost)

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 before ``load``."""
        return self._port

    @property
    def pending_tokens(self) -> int:
        """Tokens that arrived from the Scheduler and that no handler has taken yet."""
        return self._streams.pending_tokens

    @property
    def url(self) -> str:
        """Base URL without a trailing slash; empty before ``load``."""
        if not self._port:
            return ""
        host = self.spec.config.server.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def load(self) -> None:
        """Listen, then read the tokenizer. Raises ``ConfigError`` when the address cannot be bound, ``CheckpointError``
        for a checkpoint without a sound tokenizer."""
        self.state = ActorState.LOADING
        await self._listen()
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._pool, load_text_model, self.spec.checkpoint)
        if text.tokenizer.vocab_size > self._limits.vocab_size:
            logger.warning(
                "event=vocabulary_larger_than_model tokenizer=%d model=%d",
                text.tokenizer.vocab_size,
                self._limits.vocab_size,
            )
        dialogue = await loop.run_in_executor(self._pool, Dialogue.of, self.spec, text)
        self._context.dialogue = dialogue
        self._context.text = dialogue.ending(text)
        logger.info(
            "event=tokenizer_loaded tokens=%d chat_template=%s", text.tokenizer.vocab_size, text.template is not None
        )

    def progress(self) -> tuple[int, int, str]:
        """A name while the tokenizer is read; that has no size worth a bar."""
        return (0, 0, "" if self._context.text is not None else "tokenizer")

    async def _listen(self) -> None:
        server = self.spec.config.server
        runner = web.AppRunner(
            build_app(self._context),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            max_field_size=MAX_HEADER_BYTES,
        )
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, server.host, server.port).start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on server.host {server.host!r}, server.port {server.port}: {error.strerror or error}"
            ) from error
        address = runner.addresses[0]
        self._port = int(address[1])
        logger.info("event=listening url=%s", self.url)

    async def resume(self) -> None:
        await super().resume()
        self._gate.open()

    async def pause(self, reason: str) -> None:
        """In-flight requests end with the dialect's error; new ones get 503 until ``resume``."""
        await super().pause(reason)
        self._gate.close(f"the engine is recovering: {reason}", "engine_restarted")
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        if len(self._streams):
            logger.warning("event=requests_failed count=%d reason=%r", len(self._streams), reason)
        self._streams.fail_all(
            RequestFailure("engine_restarted", f"the engine stopped before the request was complete: {reason}", True)
        )

    def _on_tokens(self, batch: TokenBatch, fds: tuple[int, ...]) -> None:
        self._streams.deliver(batch)

    def _on_peer_lost(self, peer: ActorName) -> None:
        if peer is not ActorName.SCHEDULER or self.state is not ActorState.SERVING:
            return
        self._gate.close("the engine is recovering: its Scheduler is gone", "engine_restarted")
        self._fail_all("its Scheduler is gone")

    def _own_health(self) -> HealthView:
        if self._closed or self.state is ActorState.STOPPED:
            return HealthView(HealthState.STOPPING, "the engine is stopping")
        if self._gate.is_open:
            return HealthView(HealthState.READY)
        if self.state in (ActorState.CREATED, ActorState.LOADING, ActorState.WIRED) and self.epoch <= 1:
            return HealthView(
                HealthState.LOADING, self._gate.reason, what="tokenizer" if self._context.text is None else ""
            )
        return HealthView(HealthState.DEGRADED, self._gate.reason)

    def metrics(self) -> dict[str, float]:
        """Requests under way, and the endpoint's counters."""
        return {
            "requests": float(len(self._streams)),
            "pending_tokens": float(self.pending_tokens),
            "requests_limit": float(self._streams.max_requests),
            "port": float(self._port),
            "late_deltas_total": float(self._streams.unknown_deltas_total),
            **self.endpoint.counters(),
        }

    def status(self) -> ActorStatus:
        """``detail`` is where the server listens."""
        base = super().status()
        return ActorStatus(
            base.name, base.state, base.pid, base.epoch, base.uptime_s, base.restarts, self.url, base.metrics
        )

    async def close(self) -> None:
        """Stop listening, let short requests end, end the others, release everything."""
        if self._closed:
            return
        self._closed = True
        self._gate.close("the engine is stopping", "engine_stopping")
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            if self.state is ActorState.SERVING:
                await self._streams.wait_idle(DRAIN_S)
            self._fail_all("it is stopping")
            await self._runner.cleanup()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await super().close()
