"""How requests come and go: admission, preemption, the end, and what has to be told to whom then."""

from __future__ import annotations

import dataclasses
import logging

from freetoken.messages import FinishReason, KVStats, LogprobEntry, RequestFailure, SubmitRequest, TokenDelta
from freetoken.scheduling.budget import derive_seed
from freetoken.scheduling.ledger import KVLedger
from freetoken.scheduling.limits import SchedulerLimits
from freetoken.scheduling.queue import RequestQueue
from freetoken.scheduling.request import Request, RequestState

logger = logging.getLogger(__name__)

GROWTH_LIMIT_S = 10.0
"""So long a prompt waits for KV that could grow to hold it. The Controller looks every second, and may find that slots
are worth more."""


class RequestBook:
    """All requests by state. Every known request is in exactly one of ``waiting``, ``running`` and ``lingering``.

    ``lingering`` ones have ended (their last delta is out) but a planned row may still write to their blocks: they are
    released, and retired on the device, once that row is answered.

    ``oversized`` submissions are no requests yet: KV is too small for their prompts, and might grow.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.ledger = KVLedger(limits)
        self.live: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.lingering: dict[str, Request] = {}
        self.oversized: dict[str, tuple[SubmitRequest, float]] = {}  # and since when
        self.retired: list[str] = []
        self.deltas: list[TokenDelta] = []
        self._arrivals = 0
        self._seeds = 0
        self.preemptions_total = 0
        self.recomputed_tokens_total = 0
        self.rejected_total = 0
        self.finished_total = 0
        self.failed_total = 0
        self.aborted_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.generated_tokens_total = 0

    def set_limits(self, limits: SchedulerLimits) -> None:
        """The size of KV has changed."""
        self.limits = limits
        self.ledger.set_limits(limits)
        for message, since_s in list(self.oversized.values()):
            if len(message.prompt_token_ids) <= limits.kv_capacity_tokens:
                del self.oversized[message.request_id]
                self.submit(message, since_s)

    # ------------------------------------------------------------------------------------------ arrival

    def submit(self, message: SubmitRequest, now: float) -> None:
        """Queue the request, or answer it with a failure."""
        failure = self._objection(message)
        if failure is not None:
            self.reject(message.request_id, failure)
            return
        if len(message.prompt_token_ids) > self.limits.kv_capacity_tokens:
            self.oversized[message.request_id] = (message, now)
            return
        sampling = message.sampling
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=derive_seed(self.limits.seed, self._seeds))
            self._seeds += 1
        self._arrivals += 1
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            sampling,
            priority=message.priority,
            arrival=self._arrivals,
            max_context_tokens=self.limits.max_context_tokens,
            eos_token_ids=self.limits.eos_token_ids,
            now=now,
            comes_back=message.comes_back,
        )
        self.prompt_tokens_total += len(request.prompt)
        self.live[request.id] = request
        self.waiting.add(request)
        if sampling.max_tokens < 1:
            self.finish(request, FinishReason.LENGTH, now)

    def reject(self, request_id: str, failure: RequestFailure) -> None:
        """Answer a submission that never becomes a request."""
        self.rejected_total += 1
        self.deltas.append(TokenDelta(request_id, finish_reason=FinishReason.ERROR, failure=failure))

    def _objection(self, message: SubmitRequest) -> RequestFailure | None:
        limits, length = self.limits, len(message.prompt_token_ids)
        if message.request_id in self.live or message.request_id in self.oversized:
            return RequestFailure("internal", f"request id {message.request_id!r} is in use")
        if length == 0:
            return RequestFailure("internal", "the prompt has no tokens; at least 1 is needed")
        low, high = min(message.prompt_token_ids), max(message.prompt_token_ids)
        if low < 0 or high >= limits.vocab_size:
            bad = low if low < 0 else high
            return RequestFailure("internal", f"token id {bad} is outside the vocabulary [0, {limits.vocab_size})")
        if length >= limits.max_context_tokens:
            return RequestFailure(
                "context_length_exceeded",
                f"the prompt has {length} tokens; at most {limits.max_context_tokens - 1} leave room for an answer "
                f"within the context of {limits.max_context_tokens} tokens (max_context_tokens)",
            )
        if length > max(limits.kv_capacity_tokens, limits.growable_kv_blocks * limits.block_size):
            return self._over_capacity(f"the prompt has {length} tokens")
        num_waiting = len(self.waiting) + len(self.oversized)
        if len(self.running) + num_waiting >= limits.max_num_running + limits.max_num_waiting:
            return RequestFailure(
                "queue_full",
                f"{num_waiting} requests are waiting (limit {limits.max_num_waiting}, scheduler.max_num_waiting) "
                f"behind {len(self.running)} running; try again later",
                retryable=True,
            )
        return None

    def _over_capacity(self, what: str) -> RequestFailure:
        limits = self.limits
        return RequestFailure(
            "context_length_exceeded",
            f"{what}; the KV cache holds {limits.kv_capacity_tokens} tokens "
            f"({limits.num_kv_blocks} blocks of {limits.block_size}, kv.num_tokens)",
        )

    def end_oversized(self, now: float) -> None:
        """KV has not grown for them in time."""
        for message, since_s in list(self.oversized.values()):
            if now - since_s >= GROWTH_LIMIT_S:
                del self.oversized[message.request_id]
                failure = self._over_capacity(f"the prompt has {len(message.prompt_token_ids)} tokens")
                text = f"{failure.message} and did not grow within {GROWTH_LIMIT_S:g} s"
                self.reject(message.request_id, dataclasses.replace(failure, message=text))

    def fail_oversized(self, now: float) -> None:
        """KV has shrunk: end the requests that do not fit any more. They would preempt all others, and then starve."""
        for request in list(self.live.values()):
            if request.num_known_tokens > self.limits.kv_capacity_tokens:
                self.fail(request, self._over_capacity(f"the request has {request.num_known_tokens} tokens"), now)

    # ------------------------------------------------------------------------------------------ progress

    def admit(self, request: Request, num_cached_tokens: int, now: float) -> None:
        """Blocks were granted: from waiting or preempted to running."""
        if request.started_s is None:
            self.cached_tokens_total += num_cached_tokens
        self.waiting.remove(request)
        request.begin_admission(num_cached_tokens, now)
        self.running.add(request)

    def preempt(self, request: Request) -> None:
        """Take the request's blocks away at once and put it back in the queue.

        A row in flight may go on writing to them: it runs before any row that is planned from now on, so whoever
        gets the blocks next overwrites it, and its sampled token is still good.
        """
        self.preemptions_total += 1
        self.recomputed_tokens_total += request.num_computed_tokens
        request.num_preemptions += 1
        self.ledger.release(request)
        if request.on_device:
            request.on_device = False
            self.retired.append(request.id)
        self.running.remove(request)
        request.state = RequestState.PREEMPTED
        self.waiting.add(request)
        logger.debug("event=preempted request=%s known_tokens=%d", request.id, request.num_known_tokens)

    def kv_replaced(self, stats: KVStats) -> None:
        """KV is another one, empty, and the device knows no request; none is running. What there was to tell of the
        old one is forgotten."""
        self.ledger = KVLedger(self.limits)
        self.ledger.stats = stats
        self.retired = []
        for request in self.waiting:
            request.blocked_at_blocks = -1

    def append_token(self, request: Request, token_id: int, logprob: LogprobEntry | None, now: float) -> None:
        """A token was sampled: tell the front, and end the request when it is the last."""
        self.generated_tokens_total += 1
        reason = request.append_token(token_id, now)
        logprobs = (logprob,) if logprob is not None else ()
        failure = None
        if reason is None and self._is_stuck(request):
            self.ledger.discard(request)
            reason, failure = FinishReason.ERROR, self._repetition(request)
        elif reason is None and request.num_known_tokens > self.limits.kv_capacity_tokens:
            # It has all blocks there are and needs one more.
            reason = FinishReason.ERROR
            failure = self._over_capacity(f"the request has grown to {request.num_known_tokens} tokens")
        if reason is None:
            self.deltas.append(TokenDelta(request.id, (token_id,), logprobs, request.num_cached_tokens))
        else:
            self.finish(request, reason, now, failure=failure, token_ids=(token_id,), logprobs=logprobs)

    def _is_stuck(self, request: Request) -> bool:
        limit = self.limits.max_repeated_tokens
        return limit is not None and request.num_repeats >= limit and not request.must_go_on

    def _repetition(self, request: Request) -> RequestFailure:
        return RequestFailure(
            "repetition",
            f"the model wrote token {request.generated[-1]} {request.num_repeats} times in a row "
            "(scheduler.max_repeated_tokens); the request was ended and what it cached was dropped",
        )

    # ------------------------------------------------------------------------------------------ the end

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        failure: RequestFailure | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[LogprobEntry, ...] = (),
    ) -> None:
        """Send the last delta. Blocks and device state go now, or when the last row in flight is answered."""
        if failure is not None:
            self.failed_total += 1
            logger.info("event=request_failed request=%s kind=%s message=%r", request.id, failure.kind, failure.message)
        elif reason is FinishReason.ABORT:
            self.aborted_total += 1
        else:
            self.finished_total += 1
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        request.state = RequestState.FINISHED
        del self.live[request.id]
        self.deltas.append(
            TokenDelta(
                request.id, token_ids, logprobs, request.num_cached_tokens, reason, failure, request.stats(now)
            )
        )  # fmt: skip
        if request.num_in_flight:
            self.lingering[request.id] = request
        else:
            self._settle(request)

    def fail(self, request: Request, failure: RequestFailure, now: float) -> None:
        """End the request with an error."""
        self.finish(request, FinishReason.ERROR, now, failure=failure)

    def abort(self, request_id: str, now: float) -> bool:
        """End the request as its client wished; False when it is not known (any more)."""
        if self.oversized.pop(request_id, None) is not None:
            self.aborted_total += 1
            self.deltas.append(TokenDelta(request_id, finish_reason=FinishReason.ABORT))
            return True
        request = self.live.get(request_id)
        if request is None:
            return False
        self.finish(request, FinishReason.ABORT, now)
        return True

    def row_answered(self, request: Request, sampled: bool) -> None:
        """One row in flight less."""
        request.num_in_flight -= 1
        request.num_pending_samples -= sampled
        if request.num_in_flight == 0 and self.lingering.pop(request.id, None) is not None:
            self._settle(request)

    def _settle(self, request: Request) -> None:
        self.ledger.release(request)
        if request.on_device:
            request.on_device = False
            self.retired.append(request.id)

    def drop_all(self, failure: RequestFailure, now: float) -> list[TokenDelta]:
        """Forget everything; returns the last deltas of the requests that were in flight, plus those not yet taken."""
        for request_id in self.oversized:
            self.reject(request_id, failure)
        self.oversized.clear()
        deltas = self.deltas
        for request in self.live.values():
            deltas.append(
                TokenDelta(
                    request.id, (), (), request.num_cached_tokens, FinishReason.ERROR, failure, request.stats(now)
                )
            )  # fmt: skip
            request.state = RequestState.FINISHED
            self.failed_total += 1
        self.live.clear()
        self.waiting.clear()
        self.running.clear()
        self.lingering.clear()
        self.retired = []
        self.deltas = []
        self.ledger = KVLedger(self.limits)
        return deltas
