"""One choice of a response: from token ids to text, log probabilities and the reason of its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from freetoken.messages import FinishReason, LogprobEntry, RequestStats, TokenDelta
from freetoken.serving.stop import StopMatcher
from freetoken.serving.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens of a request become text. ``keep_special_ids`` are shown in any case: a parser needs them."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    keep_special_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``offset`` counts characters of the choice's text before the token."""

    entry: LogprobEntry
    offset: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended: ``reason`` is ``stop`` or ``length``; ``stop_string`` or ``stop_token_id`` tell what stopped
    it (neither for the end-of-sequence token)."""

    reason: str
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class ChoiceDelta:
    """What became known of one choice since the last time. The last one of a choice has ``finish``."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def extend(self, later: ChoiceDelta) -> None:
        """Add what came after this."""
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish = later.finish


class ChoiceState:
    """Takes the deltas of one request of the Scheduler. Not thread-safe.

    ``eos_token_ids`` and ``stop_token_ids`` end a sequence: as the last token of a stopped request such a token is not
    part of the text. Stop strings only count in the text after the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        index: int,
        request_id: str,
        tokenizer: Tokenizer,
        options: TextOptions,
        min_tokens: int,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.finish: Finish | None = None
        self.stats: RequestStats | None = None
        self.settled = False
        self._detokenizer = tokenizer.open_detokenizer(options.skip_special_tokens, options.keep_special_ids)
        self._matcher = StopMatcher(options.stop, options.include_stop)
        self._min_tokens = min_tokens
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = stop_token_ids
        self._decoded = 0
        self._released = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def feed(self, delta: TokenDelta) -> ChoiceDelta | None:
        """The news in ``delta`` for the client, or None. Sets ``finish`` when the choice has ended, and ``settled``
        with the engine's last word on it; a stop string can end it before."""
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.stats is not None:
            self.stats = delta.stats
        if delta.finish_reason is not None:
            self.settled = True
        if self.finish is not None:
            return None
        out = ChoiceDelta(self.index)
        ids: Sequence[int] = delta.token_ids
        ended_by: int | None = None
        if delta.finish_reason is FinishReason.STOP and ids:
            last = ids[-1]
            if last in self._eos_token_ids or last in self._stop_token_ids:
                ids, ended_by = ids[:-1], last
        pieces: list[str] = []
        stop_string: str | None = None
        for i, token_id in enumerate(ids):
            self.num_tokens += 1
            self.token_ids.append(token_id)
            piece = self._detokenizer.push(token_id)
            if i < len(delta.logprobs):
                end = self._decoded + len(piece)
                self._waiting.append((end, TokenLogprob(delta.logprobs[i], self._decoded)))
            stop_string = self._release(piece, pieces)
            if stop_string is not None:
                break
        if stop_string is None and delta.finish_reason is not None:
            self.num_tokens += ended_by is not None
            stop_string = self._release(self._detokenizer.flush(), pieces)
            if stop_string is None:
                pieces.append(self._matcher.flush())
        out.text = "".join(pieces)
        self._released += len(out.text)
        if stop_string is not None:
            out.finish = Finish("stop", stop_string=stop_string)
        elif delta.finish_reason is FinishReason.STOP:
            is_eos = ended_by is None or ended_by in self._eos_token_ids
            out.finish = Finish("stop", stop_token_id=None if is_eos else ended_by)
        elif delta.finish_reason is FinishReason.LENGTH:
            out.finish = Finish("length")
        self.finish = out.finish
        self._take_logprobs(out, cut=stop_string is not None)
        return out if out.text or out.logprobs or out.finish else None

    def _release(self, piece: str, pieces: list[str]) -> str | None:
        self._decoded += len(piece)
        if self.num_tokens <= self._min_tokens:
            pieces.append(piece)
            return None
        text, stop_string = self._matcher.feed(piece)
        pieces.append(text)
        return stop_string

    def _take_logprobs(self, out: ChoiceDelta, cut: bool) -> None:
        """A token's entry goes out with the last of its text; after a cut, those of tokens beyond it never do."""
        waiting = self._waiting
        while waiting:
            end, logprob = waiting[0]
            if end > self._released and self.finish is None:
                break
            waiting.popleft()
            if not cut or logprob.offset < self._released:
                out.logprobs.append(logprob)
