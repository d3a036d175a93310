"""Requests and their tokens, between ApiFront and Scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(str, enum.Enum):
    """Why a request ended. ``STOP`` is an end-of-sequence or stop token; stop *strings* are found by ApiFront."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ConstraintKind(str, enum.Enum):
    """How ``Constraint.text`` is to be read."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request's output must match. Already compiled once by the front, so a mistake in it is a fault here.

    ``text`` is a JSON schema, nothing (any JSON object), a regular expression or a Lark grammar (in the dialect of
    llguidance, which names special tokens and nests JSON schemas), by ``kind``. The whole output must match it, and can
    end only then, unless a part of the output is free:

    - ``free_until``: the output is free up to and with the first occurrence of this text (the end of reasoning, or the
      opening of a tool call), and must match after it. It cannot end before.
    - ``free_opener``: that part is there only if the output begins with this text; otherwise all of it must match.
    - ``lazy``: the output may end in the free part, and after each match it is free again up to the next
      ``free_until``.
    """

    kind: ConstraintKind
    text: str = ""
    free_until: str = ""
    free_opener: str = ""
    lazy: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Already validated by the front; the defaults are greedy-free OpenAI defaults.

    ``temperature == 0`` is greedy. ``top_k == 0`` means no limit. ``seed is None`` lets the engine choose one.
    ``top_logprobs`` is -1 when no logprobs are wanted, else the number of alternatives (0 = chosen token only).
    ``constraint`` forbids every token that its grammar does not allow; it wins over ``logit_bias`` and ``min_tokens``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """ApiFront -> Scheduler. ``prompt_token_ids`` has at least one token. Answered by deltas in ``TokenBatch``.

    ``comes_back``: whether a request is to be expected that goes on with this one; None: there is no telling.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    comes_back: bool | None = None


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """ApiFront -> Scheduler. Idempotent; a late abort of a finished or unknown id is a no-op.

    The Scheduler answers with a final delta (``FinishReason.ABORT``) when the request was still known.
    """

    request_id: str
    reason: str = "client"


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """Natural-log probability of one generated token and of its most likely alternatives (descending)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request could not go on. ``kind`` is one of ``queue_full``, ``context_length_exceeded``,
    ``engine_restarted``, ``numeric``, ``repetition``, ``constraint``, ``internal``; ``retryable`` tells the client to
    come back."""

    kind: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Filled on the last delta of a request. Times are seconds on the Scheduler's monotonic clock."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request. The last one of a request has ``finish_reason`` set; with ``STOP``, its last token is
    the one that ended the request.

    ``num_cached_tokens`` is valid from the first delta on. An empty ``token_ids`` with a finish reason is normal
    (abort, failure).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Scheduler -> ApiFront, once per step at most: all new tokens of that step."""

    step_id: int
    epoch: int
    deltas: tuple[TokenDelta, ...] = field(default_factory=tuple)
