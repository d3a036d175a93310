"""What GpuExecutor remembers of each request between steps, and the checks that keep a wrong plan from running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FreeTokenError
from freetoken.messages import RequestInit, SamplingParams, StepPlan, StepRow

if TYPE_CHECKING:
    from freetoken.execution.constraints import Grammars, RequestGrammar


class InvalidPlanError(FreeTokenError):
    """A step plan contradicts what this executor knows; nothing of it was run."""


class RequestState:
    """One request: its tokens, its block table, and how far its KV is computed. Mutated by the step thread only."""

    def __init__(self, request_id: str, init: RequestInit, num_computed: int) -> None:
        self.request_id = request_id
        self.sampling = init.sampling
        self.seed = init.sampling.seed or 0
        self.eos_token_ids = init.eos_token_ids
        self.num_prompt = init.num_prompt_tokens
        self.tokens: list[int] = list(init.token_ids)
        self.num_computed = num_computed
        self.failure: str | None = None
        self.failure_kind = "numeric"
        self.grammar: RequestGrammar | None = None
        self._blocks = np.empty(64, dtype=np.int32)
        self._num_blocks = 0
        self._prompt_ids: NDArray[np.int64] | None = None
        self._output_counts: Counter[int] | None = None

    @property
    def blocks(self) -> NDArray[np.int32]:
        """The block table, a view valid until the next append."""
        return self._blocks[: self._num_blocks]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        """Extend the block table."""
        needed = self._num_blocks + len(block_ids)
        if needed > len(self._blocks):
            self._blocks = np.resize(self._blocks, max(needed, 2 * len(self._blocks)))
        self._blocks[self._num_blocks : needed] = block_ids
        self._num_blocks = needed

    def move_blocks(self, now: NDArray[np.int32]) -> bool:
        """Block ``b`` is ``now[b]`` from here on; whether that changes the table."""
        before = self.blocks
        after = now[before]
        moved = bool((after != before).any())
        self._blocks[: self._num_blocks] = after
        return moved

    def append_token(self, token_id: int) -> None:
        """A token was sampled."""
        self.tokens.append(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self._output_counts is not None:
            self._output_counts[token_id] += 1

    def output_counts(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(distinct generated ids, how often each). Kept up from the first call on: only penalised requests pay."""
        if self._output_counts is None:
            self._output_counts = Counter(self.tokens[self.num_prompt :])
        size = len(self._output_counts)
        ids = np.fromiter(self._output_counts.keys(), dtype=np.int64, count=size)
        return ids, np.fromiter(self._output_counts.values(), dtype=np.float32, count=size)

    def seen_ids(self) -> NDArray[np.int64]:
        """Distinct ids of prompt and output."""
        if self._prompt_ids is None:
            self._prompt_ids = np.unique(np.asarray(self.tokens[: self.num_prompt], dtype=np.int64))
        return np.union1d(self._prompt_ids, self.output_counts()[0])


class BatchState:
    """All requests known to this executor. Plans are checked whole before any of their rows is applied."""

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        max_context_tokens: int,
        grammars: Grammars | None = None,
    ) -> None:
        """Without ``grammars`` constrained requests fail."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._num_blocks = self._most_blocks = num_blocks
        self._max_context_tokens = max_context_tokens
        self._requests: dict[str, RequestState] = {}
        self._untrue: str | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> RequestState:
        return self._requests[request_id]

    def retire(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    def resized(self, num_blocks: int, block_moves: Sequence[tuple[int, int]]) -> list[RequestState]:
        """The arena has so many blocks from now on, after these moved; the requests whose block tables changed."""
        # Requests that have ended and were not retired yet may name blocks that went with an earlier change.
        self._most_blocks = max(self._most_blocks, num_blocks)
        now = np.arange(self._most_blocks, dtype=np.int32)
        self._num_blocks = num_blocks
        for source, target in block_moves:
            now[source] = target
        return [state for state in self._requests.values() if state.move_blocks(now)] if block_moves else []

    def invalidate(self, why: str) -> None:
        """Block ids do not mean what the Scheduler takes them for any more: no plan can be run."""
        self._untrue = why

    def fail(self, request_ids: Iterable[str], message: str) -> None:
        """Requests whose state is no longer true: rows already planned for them are answered with ``message``.

        Unknown ones too: the step that failed may have been the one to bring them.
        """
        for request_id in request_ids:
            if request_id not in self._requests:
                self._requests[request_id] = RequestState(request_id, RequestInit(SamplingParams(), (0,), 1), 0)
            self._requests[request_id].failure = message

    def apply(self, plan: StepPlan) -> list[RequestState]:
        """Retire, admit and extend as ``plan`` says; the states of its rows, in order.

        Raises ``InvalidPlanError`` naming request and numbers. Then retirements have happened and nothing else.
        ``RuntimeError`` naming the actor that has to be replaced, after ``invalidate``.
        """
        if self._untrue is not None:
            raise RuntimeError(f"GpuExecutor cannot go on: {self._untrue}")
        self.retire(plan.retired)
        seen: set[str] = set()
        for row in plan.rows:
            if row.request_id in seen:
                raise InvalidPlanError(f"step {plan.step_id}: request {row.request_id!r} has two rows")
            seen.add(row.request_id)
            self._check(plan.step_id, row)
        states = []
        for row in plan.rows:
            if row.init is not None:
                self._requests[row.request_id] = self._admit(row.request_id, row.init, row.start)
            state = self._requests[row.request_id]
            state.append_blocks(row.new_block_ids)
            states.append(state)
        return states

    def _admit(self, request_id: str, init: RequestInit, num_computed: int) -> RequestState:
        state = RequestState(request_id, init, num_computed)
        if init.sampling.constraint is not None:
            if self._grammars is None:
                state.failure, state.failure_kind = "this engine has no grammars for constrained output", "constraint"
            else:
                state.grammar = self._grammars.open(state)
        return state

    def _check(self, step_id: int, row: StepRow) -> None:
        where = f"step {step_id}: request {row.request_id!r}"
        end = row.start + row.num_tokens
        if row.num_tokens < 1 or row.start < 0:
            raise InvalidPlanError(f"{where}: a row of {row.num_tokens} tokens from {row.start} is not possible")
        if end > self._max_context_tokens:
            raise InvalidPlanError(f"{where}: {end} tokens exceed the context of {self._max_context_tokens}")
        state = self._requests.get(row.request_id)
        if row.init is not None:
            known, num_blocks = len(row.init.token_ids), len(row.new_block_ids)
            if not 1 <= row.init.num_prompt_tokens <= known:
                raise InvalidPlanError(f"{where}: a prompt of {row.init.num_prompt_tokens} among {known} tokens")
            lowest, highest = min(row.init.token_ids), max(row.init.token_ids)
            if lowest < 0 or highest >= self._vocab_size:
                wrong = lowest if lowest < 0 else highest
                raise InvalidPlanError(f"{where}: token id {wrong} is outside the vocabulary of {self._vocab_size}")
        elif state is None:
            raise InvalidPlanError(f"{where} is unknown and its row brings no init")
        elif state.failure is not None:
            return
        else:
            known, num_blocks = len(state.tokens), len(state.blocks) + len(row.new_block_ids)
            if row.start != state.num_computed:
                raise InvalidPlanError(f"{where}: the row starts at {row.start}, computed are {state.num_computed}")
        if row.use_last_sampled and row.num_tokens != 1:
            raise InvalidPlanError(f"{where}: use_last_sampled with {row.num_tokens} tokens")
        if row.use_last_sampled and (row.init is not None or state is None or end <= state.num_prompt):
            raise InvalidPlanError(f"{where}: use_last_sampled before anything was sampled")
        if end > known:
            raise InvalidPlanError(f"{where}: the row ends at {end}, known are {known} tokens")
        if row.sample and end != known:
            raise InvalidPlanError(f"{where}: the row samples after {end} of {known} known tokens")
        if end > num_blocks * self._block_size:
            raise InvalidPlanError(f"{where}: {end} tokens do not fit {num_blocks} blocks of {self._block_size}")
        for block_id in row.new_block_ids:
            if not 0 <= block_id < self._num_blocks:
                raise InvalidPlanError(f"{where}: block {block_id} is outside 0..{self._num_blocks - 1}")
