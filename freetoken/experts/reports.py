"""Paced ``StepReport`` messages: figures of a data-plane actor while steps run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from freetoken.errors import PeerLostError
from freetoken.messages import ActorName, StepNotice, StepReport
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25


class StepReporter:
    """Sends a report ``interval_s`` after a step was noticed, and again as long as the figures keep changing. Between
    steps no timer runs. Used on the event loop only."""

    def __init__(
        self,
        endpoint: Endpoint,
        sender: ActorName,
        metrics: Callable[[], dict[str, float]],
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._endpoint = endpoint
        self._sender = sender
        self._metrics = metrics
        self._interval_s = interval_s
        self._step_id = 0
        self._epoch = 0
        self._reported: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def notice(self, notice: StepNotice) -> None:
        """A step was planned."""
        self._step_id, self._epoch = notice.step_id, notice.epoch
        if self._timer is None:
            self._start()

    def stop(self) -> None:
        """Forget a report that is due; a later notice starts over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._report)

    def _report(self) -> None:
        self._timer = None
        metrics = self._metrics()
        if metrics == self._reported:
            return
        self._reported = metrics
        try:
            self._endpoint.send(
                ActorName.CONTROLLER, StepReport(str(self._sender), self._epoch, self._step_id, metrics)
            )
        except PeerLostError:
            return  # a new Controller is wired within the epoch or starts another; either comes with new notices
        self._start()
