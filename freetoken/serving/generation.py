"""The core of every API dialect: submit sequences to the Scheduler, and iterate over text with its end and its cost."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from freetoken.errors import PeerLostError
from freetoken.messages import (
    AbortRequest,
    ActorName,
    FinishReason,
    RequestFailure,
    SamplingParams,
    SubmitRequest,
    TokenDelta,
)
from freetoken.serving.choice import ChoiceDelta, ChoiceState, Finish, TextOptions
from freetoken.serving.conversation import Session
from freetoken.serving.errors import ApiError, from_failure, unavailable
from freetoken.serving.metrics import FrontMetrics
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.streams import Gate, RequestStreams
from freetoken.serving.tokenizer import TextModel
from freetoken.serving.usage import Usage
from freetoken.transport import Endpoint

logger = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 1.0
"""How long the usage of a response waits for the engine's answer to the abort that followed a stop string."""

COLLECT_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence to generate. ``prompt_index`` tells which sequences share a prompt."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_index: int = 0


class Generation:
    """One API request at the Scheduler; an async context manager.

    Entering submits it (503 when that is impossible, 429 when too many are under way). Leaving aborts what has not
    ended, exactly once for each sequence, whatever the reason (a cancelled handler is how a lost client shows).
    """

    def __init__(
        self,
        request_id: str,
        sequences: Sequence[SequencePlan],
        choices: list[ChoiceState],
        comes_back: bool | None,
        endpoint: Endpoint,
        streams: RequestStreams,
        gate: Gate,
        metrics: FrontMetrics,
        arrived_s: float,
        timeout_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self.request_id = request_id
        self._sequences = sequences
        self._choices = choices
        self._by_id = {choice.request_id: choice for choice in choices}
        self._comes_back = comes_back
        self._endpoint = endpoint
        self._streams = streams
        self._gate = gate
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_token_s = 0.0
        self._aborted: set[str] = set()

    async def __aenter__(self) -> Generation:
        self._gate.check()
        self._inbox = self._streams.open([choice.request_id for choice in self._choices])
        submitted = 0
        try:
            for sequence, choice in zip(self._sequences, self._choices, strict=True):
                self._endpoint.send(
                    ActorName.SCHEDULER,
                    SubmitRequest(
                        request_id=choice.request_id,
                        prompt_token_ids=sequence.prompt_token_ids,
                        sampling=sequence.sampling,
                        comes_back=self._comes_back,
                    ),
                )
                submitted += 1
        except BaseException as error:
            for choice in self._choices[submitted:]:
                self._streams.forget(choice.request_id)
            self._abort_rest("client")
            self._inbox.close()
            if isinstance(error, PeerLostError):
                raise unavailable(f"the engine cannot be reached: {error}") from error
            raise
        self._metrics.submitted(self.usage().prompt_tokens)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abort_rest("client")
        self._inbox.close()
        usage, outcome, elapsed_s = self.usage(), self._outcome(error), time.monotonic() - self._arrived_s
        self._metrics.ended(usage, elapsed_s, outcome)
        logger.info(
            "event=generation_ended request=%s generation=%s outcome=%s choices=%d prompt_tokens=%d cached_tokens=%d "
            "output_tokens=%d elapsed_s=%.3f",
            REQUEST_ID.get(),
            self.request_id,
            outcome,
            self.num_choices,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            elapsed_s,
        )

    def _outcome(self, error: BaseException | None) -> str:
        if error is None and self.done:
            return "ok"
        return "error" if isinstance(error, Exception) and not isinstance(error, ConnectionError) else "disconnected"

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return all(choice.finish is not None for choice in self._choices)

    @property
    def num_choices(self) -> int:
        """Choices are numbered from 0, those of the first prompt first."""
        return len(self._choices)

    def token_ids(self, index: int) -> tuple[int, ...]:
        """What a choice has generated by now, without the token that ended it."""
        return tuple(self._choices[index].token_ids)

    def end_choice(self, index: int) -> Finish:
        """End a choice here and now: what it may still generate is not wanted."""
        choice = self._choices[index]
        if choice.finish is None:
            choice.finish = Finish("stop")
        if not choice.settled:
            self._abort(choice, "stop")
        return choice.finish

    def on_unread(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when too much is waiting for ``next``. After entering."""
        self._inbox.on_overflow = callback

    async def next(self, silence_s: float) -> list[ChoiceDelta]:
        """News, at most one delta for each choice; empty after ``silence_s`` in which nothing came, or when what came
        is not to be shown yet. Raises ``ApiError`` when the engine could not go on."""
        if self._timeout_s is not None:
            left_s = self._arrived_s + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise ApiError(
                    504,
                    f"the request took longer than {self._timeout_s:g} s (server.request_timeout_s)",
                    "request_timeout",
                )
            silence_s = min(silence_s, left_s)
        news = await self._inbox.take(silence_s)
        if isinstance(news, RequestFailure):
            raise from_failure(news)
        return self._digest(news)

    def _digest(self, news: list[TokenDelta]) -> list[ChoiceDelta]:
        merged: dict[int, ChoiceDelta] = {}
        num_tokens = 0
        for delta in news:
            choice = self._by_id[delta.request_id]
            if delta.failure is not None:
                raise from_failure(delta.failure)
            if choice.finish is None:
                if delta.finish_reason is FinishReason.ERROR:
                    raise ApiError(500, "the engine failed this request without a reason", "internal_error")
                if delta.finish_reason is FinishReason.ABORT:
                    raise unavailable("the engine ended this request before it was complete", "aborted")
            before = choice.num_tokens
            out = choice.feed(delta)
            num_tokens += choice.num_tokens - before
            if choice.finish is not None and not choice.settled:
                self._abort(choice, "stop")
            if out is None:
                continue
            known = merged.setdefault(out.index, out)
            if known is not out:
                known.extend(out)
        if num_tokens:
            self._time_tokens(num_tokens)
        return list(merged.values())

    def _time_tokens(self, count: int) -> None:
        now = time.monotonic()
        if self._last_token_s == 0.0:
            self._metrics.first_token(now - self._arrived_s)
        else:
            self._metrics.more_tokens(now - self._last_token_s)
        self._metrics.tokens(count)
        self._last_token_s = now

    async def settle(self) -> None:
        """After ``done``: wait (briefly) for the engine's last word on choices that a stop string ended, so that usage
        has its figures. Never raises for the engine's failures."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not all(choice.settled for choice in self._choices):
            left = deadline - time.monotonic()
            news = await self._inbox.take(left) if left > 0 else []
            if isinstance(news, RequestFailure) or not news:
                return
            for delta in news:
                self._by_id[delta.request_id].feed(delta)

    def _abort(self, choice: ChoiceState, reason: str) -> None:
        if choice.request_id in self._aborted:
            return
        self._aborted.add(choice.request_id)
        try:
            self._endpoint.send(ActorName.SCHEDULER, AbortRequest(choice.request_id, reason))
        except PeerLostError:
            logger.info("event=abort_unsent request=%s reason=%s", choice.request_id, reason)

    def _abort_rest(self, reason: str) -> None:
        for choice in self._choices:
            if self._streams.forget(choice.request_id):
                self._abort(choice, reason)

    def usage(self) -> Usage:
        """What is known by now; complete after ``settle``."""
        seen: set[int] = set()
        prompt_tokens = cached_tokens = 0
        for sequence, choice in zip(self._sequences, self._choices, strict=True):
            if sequence.prompt_index not in seen:
                seen.add(sequence.prompt_index)
                prompt_tokens += len(sequence.prompt_token_ids)
                cached_tokens += choice.num_cached_tokens
        output_tokens = sum(choice.num_tokens for choice in self._choices)
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        decode_s = max((s.decode_s for s in stats), default=0.0)
        decoded = sum(max(0, s.num_output_tokens - 1) for s in stats)  # prefill makes the first token
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            queue_s=max((s.queue_s for s in stats), default=0.0),
            prefill_s=max((s.prefill_s for s in stats), default=0.0),
            decode_s=decode_s,
            decode_tokens_per_s=decoded / decode_s if decode_s > 0 else 0.0,
        )

    async def collect(self) -> list[ChoiceDelta]:
        """Run to the end: everything each choice said, in one delta a choice."""
        whole = [ChoiceDelta(index) for index in range(self.num_choices)]
        while not self.done:
            for delta in await self.next(COLLECT_WAIT_S):
                whole[delta.index].extend(delta)
        await self.settle()
        return whole


class Generator:
    """Makes ``Generation`` objects; one for each front."""

    def __init__(
        self,
        endpoint: Endpoint,
        streams: RequestStreams,
        gate: Gate,
        metrics: FrontMetrics,
        eos_token_ids: Sequence[int],
        timeout_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._endpoint = endpoint
        self._streams = streams
        self._gate = gate
        self._metrics = metrics
        self._eos_token_ids = tuple(eos_token_ids)
        self._prefix = secrets.token_hex(8)
        self._count = 0

    def start(
        self,
        sequences: Sequence[SequencePlan],
        text: TextModel,
        options: TextOptions,
        arrived_s: float,
        session: Session,
        has_tools: bool = False,
    ) -> Generation:
        """A generation of these sequences, to be entered with ``async with``. ``arrived_s`` is ``time.monotonic()`` at
        the request's arrival."""
        self._count += 1
        request_id = f"{self._prefix}{self._count:08x}"
        eos_token_ids = frozenset((*self._eos_token_ids, *text.defaults.eos_token_ids))
        choices = [
            ChoiceState(
                index,
                f"{request_id}-{index}",
                text.tokenizer,
                options,
                sequence.sampling.min_tokens,
                frozenset() if sequence.sampling.ignore_eos else eos_token_ids,
                frozenset(sequence.sampling.stop_token_ids),
            )
            for index, sequence in enumerate(sequences)
        ]
        return Generation(
            request_id,
            sequences,
            choices,
            session.comes_back(has_tools),
            self._endpoint,
            self._streams,
            self._gate,
            self._metrics,
            arrived_s,
            self._timeout_s,
        )
