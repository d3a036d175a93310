"""Plans and results of steps, between Scheduler, GpuExecutor and the expert actors."""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken.messages.requests import LogprobEntry, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestInit:
    """What GpuExecutor must know of a request before its first row (again after a preemption).

    ``sampling.seed`` is always set here. ``token_ids`` are all tokens known so far; the first ``num_prompt_tokens`` of
    them are the prompt (penalties distinguish the two). ``eos_token_ids`` are only used for ``min_tokens`` masking;
    the Scheduler decides when a request ends.
    """

    sampling: SamplingParams
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's share of a step: tokens ``[start, start + num_tokens)`` of its sequence.

    ``use_last_sampled`` (only with ``num_tokens == 1``): the input is the token that the previous step sampled for this
    request; the Scheduler planned this row before knowing it. Otherwise the input ids come from ``RequestInit``
    (``token_ids[start:start + num_tokens]``). ``sample``: draw a token from the logits of the row's last position.
    ``new_block_ids`` are appended to the request's block table before the row runs.
    """

    request_id: str
    start: int
    num_tokens: int
    sample: bool
    use_last_sampled: bool = False
    new_block_ids: tuple[int, ...] = ()
    init: RequestInit | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler -> GpuExecutor. ``retired`` requests lose their device-side state before the rows run. Empty ``rows``
    are allowed (only retires) and answered. Plans run in order; two may be outstanding.

    Beside them one ``background`` plan may be outstanding: a long piece of prefill, which starts in its turn and which
    the device may run in groups of layers between the plans that come after it. It may be answered after those. Its
    requests are in no other plan, neither as rows nor as retired ones, until it is.
    """

    step_id: int
    epoch: int
    rows: tuple[StepRow, ...] = ()
    retired: tuple[str, ...] = ()
    background: bool = False


@dataclass(frozen=True, slots=True)
class StepNotice:
    """Scheduler -> ExpertCache, CpuExecutor, WeightStreamer: a step of this size was just planned. ``last`` is true
    when nothing else will follow it whatever it samples (the servers may park after it). A step of 0 tokens only
    retires requests: the engine is idle."""

    step_id: int
    epoch: int
    num_tokens: int
    num_decode_rows: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class ExpertCounters:
    """Distinct (layer, expert) uses of one step or since start, by where they ran, and their bytes.

    ``hits`` read a slot (or, without a VRAM budget, the store in place), ``fetches`` were read from the store by the
    device, ``cpu`` ran on CpuExecutor. ``admitted`` fetches also filled a slot; ``evicted`` slots lost their expert.
    """

    hits: int = 0
    fetches: int = 0
    cpu: int = 0
    admitted: int = 0
    evicted: int = 0
    fetched_bytes: int = 0
    cpu_bytes: int = 0
    layer_steps: int = 0

    def __add__(self, other: ExpertCounters) -> ExpertCounters:
        return ExpertCounters(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class RowResult:
    """``token_id`` is None for rows that did not sample. ``failure`` says why the request cannot go on; its kind is
    ``numeric`` (the logits are not finite, so its KV may not be either) or ``constraint`` (nothing is wrong with its
    KV)."""

    request_id: str
    token_id: int | None = None
    logprob: LogprobEntry | None = None
    failure: str | None = None
    failure_kind: str = "numeric"


@dataclass(frozen=True, slots=True)
class StepResult:
    """GpuExecutor -> Scheduler. Times are ``time.monotonic_ns()`` (one clock per node). ``busy_ns``: of a background
    step, how long the device worked on it between its start and its end; else 0."""

    step_id: int
    epoch: int
    rows: tuple[RowResult, ...]
    started_ns: int
    finished_ns: int
    experts: ExpertCounters = field(default_factory=ExpertCounters)
    busy_ns: int = 0


@dataclass(frozen=True, slots=True)
class StepFailed:
    """GpuExecutor -> Scheduler. The step's KV and sampled tokens are void; its requests fail with ``message``.
    ``suspects`` names actors whose data-plane answer was late, or who left a layer half done."""

    step_id: int
    epoch: int
    message: str
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """ExpertCache, CpuExecutor, GpuExecutor -> Controller, at most every 250 ms while steps run: cumulative figures."""

    sender: str
    epoch: int
    step_id: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ActorsSuspected:
    """Scheduler -> Controller: these actors left a step or a reservation unanswered, ``detail`` says which. They may
    answer pings all the same. The Controller replaces them, which begins a new epoch."""

    epoch: int
    suspects: tuple[str, ...]
    detail: str
