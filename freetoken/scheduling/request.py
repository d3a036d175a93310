"""One request as the Scheduler sees it."""

from __future__ import annotations

import enum

from freetoken.messages import FinishReason, RequestInit, RequestStats, SamplingParams, StepRow


class RequestState(enum.Enum):
    """``WAITING -> RUNNING -> FINISHED``, with ``RUNNING -> PREEMPTED -> RUNNING`` when blocks run out."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """Tokens, progress and figures of one request.

    Three positions describe progress within the sequence of ``num_known_tokens`` tokens (prompt and generated):
    ``num_computed_tokens`` have valid KV (their step succeeded), ``num_scheduled_tokens`` are planned (in flight beyond
    the computed ones), and ``init_tokens`` were known when the device last learned the request: below it rows are
    prefill and their ids come from ``RequestInit``, above it each row takes the token sampled last.

    An *admission* is the time between getting blocks and losing them by preemption; a row in flight belongs to the
    admission it was planned in. ``num_in_flight`` counts unanswered rows of any admission.
    """

    __slots__ = (
        "admission", "arrival", "arrived_s", "blocked_at_blocks", "comes_back", "first_token_s", "generated",
        "holds_blocks", "id", "in_background", "init_tokens", "last_step_id", "last_token_s", "max_total_tokens",
        "min_total_tokens", "new_block_ids", "num_blocks", "num_bypassed", "num_cached_tokens",
        "num_committed_blocks", "num_computed_tokens", "num_in_flight", "num_pending_samples", "num_preemptions",
        "num_repeats", "num_scheduled_tokens", "num_sent_tokens", "on_device", "priority", "prompt", "sampling",
        "started_s", "state", "stop_token_ids", "wanted_tokens",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        priority: int,
        arrival: int,
        max_context_tokens: int,
        eos_token_ids: tuple[int, ...],
        now: float,
        comes_back: bool | None = None,
    ) -> None:
        self.comes_back = comes_back
        self.id = request_id
        self.prompt = prompt
        self.generated: list[int] = []
        self.num_repeats = 0  # how many times in a row the last token has been generated
        self.sampling = sampling
        self.priority = priority
        self.arrival = arrival
        self.max_total_tokens = min(max_context_tokens, len(prompt) + sampling.max_tokens)
        self.min_total_tokens = len(prompt) + sampling.min_tokens
        self.stop_token_ids = frozenset(sampling.stop_token_ids) | frozenset(
            () if sampling.ignore_eos else eos_token_ids
        )
        self.state = RequestState.WAITING

        self.admission = 0
        self.init_tokens = 0
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_samples = 0
        self.num_in_flight = 0
        self.last_step_id = -1
        self.on_device = False
        self.in_background = False  # a row of it is in the background step: until that ends, nothing else may be
        self.wanted_tokens = 0  # the step being planned wants room up to here

        self.holds_blocks = False
        self.num_blocks = 0
        self.new_block_ids: list[int] = []
        self.num_committed_blocks = 0
        self.num_sent_tokens = 0  # known to the allocator
        self.blocked_at_blocks = -1  # blocks available when the allocator last refused it
        self.num_bypassed = 0

        self.num_cached_tokens = 0  # of the first admission
        self.num_preemptions = 0
        self.arrived_s = now
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = now

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served sooner and preempted later."""
        return (self.priority, self.arrival)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_planned_tokens(self) -> int:
        """Length of the sequence once all rows in flight are done."""
        return len(self.prompt) + len(self.generated) + self.num_pending_samples

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before the first (next) one can be sampled, all of them when not running."""
        if self.state is RequestState.RUNNING:
            return max(self.init_tokens - self.num_scheduled_tokens, 0)
        return self.num_known_tokens

    def known_tokens(self) -> tuple[int, ...]:
        """All tokens; O(1) before the first generated one, else O(tokens)."""
        return self.prompt + tuple(self.generated) if self.generated else self.prompt

    def begin_admission(self, num_cached_tokens: int, now: float) -> None:
        """The allocator granted the first need: running, from the end of the cached prefix."""
        self.state = RequestState.RUNNING
        self.admission += 1
        self.init_tokens = self.num_sent_tokens = self.num_known_tokens
        self.num_computed_tokens = self.num_scheduled_tokens = num_cached_tokens
        self.num_bypassed = 0
        self.blocked_at_blocks = -1
        if self.started_s is None:
            self.started_s = now
            self.num_cached_tokens = num_cached_tokens

    def forget_blocks(self) -> None:
        """The allocator was told to release everything."""
        self.holds_blocks = False
        self.num_blocks = self.num_committed_blocks = 0
        self.new_block_ids.clear()
        self.wanted_tokens = 0

    def plan_row(self, step_id: int, num_tokens: int) -> StepRow:
        """The next ``num_tokens`` tokens become a row of ``step_id``; room for them is there."""
        start = self.num_scheduled_tokens
        decode = start >= self.init_tokens
        sample = decode or start + num_tokens == self.init_tokens
        init = None
        if not self.on_device:
            init = RequestInit(self.sampling, self.known_tokens(), len(self.prompt), tuple(sorted(self.stop_token_ids)))
            self.on_device = True
        row = StepRow(self.id, start, num_tokens, sample, decode, tuple(self.new_block_ids), init)
        self.new_block_ids.clear()
        self.num_scheduled_tokens = start + num_tokens
        self.num_in_flight += 1
        self.num_pending_samples += sample
        self.last_step_id = step_id
        return row

    @property
    def must_go_on(self) -> bool:
        """Whether the client forbids the model to end here, so that what it writes says nothing about its health."""
        return self.sampling.ignore_eos or self.num_known_tokens < self.min_total_tokens

    def append_token(self, token_id: int, now: float) -> FinishReason | None:
        """A sampled token; returns why the request ends with it, if it does."""
        may_stop = self.num_known_tokens >= self.min_total_tokens
        self.num_repeats = self.num_repeats + 1 if self.generated and self.generated[-1] == token_id else 1
        self.generated.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now
        if may_stop and token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_known_tokens >= self.max_total_tokens else None

    def stats(self, now: float) -> RequestStats:
        """Figures for the last delta."""
        started = now if self.started_s is None else self.started_s
        first = now if self.first_token_s is None else self.first_token_s
        return RequestStats(
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.generated),
            queue_s=started - self.arrived_s,
            prefill_s=first - started,
            decode_s=self.last_token_s - first if self.first_token_s is not None else 0.0,
            num_preemptions=self.num_preemptions,
        )
