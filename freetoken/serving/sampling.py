"""From request fields to ``SamplingParams``, within the limits of model and server."""

from __future__ import annotations

from dataclasses import dataclass, replace

from freetoken.launch_spec import LaunchSpec
from freetoken.messages import SamplingParams
from freetoken.serving.errors import ApiError, bad_value, context_overflow
from freetoken.serving.openai_schema import GenerationFields
from freetoken.serving.tokenizer import GenerationDefaults


@dataclass(frozen=True, slots=True)
class Limits:
    """``context_tokens`` bounds prompt plus output of one request, ``requests`` those between front and Scheduler."""

    context_tokens: int
    vocab_size: int
    requests: int
    max_tokens_default: int | None
    clamp_max_tokens: bool

    @classmethod
    def of(cls, spec: LaunchSpec) -> Limits:
        """The limits that follow from settings and plan."""
        plan, config = spec.plan, spec.config
        return cls(
            context_tokens=min(plan.max_context_tokens, plan.kv_capacity_tokens),
            vocab_size=spec.model.vocab_size,
            requests=config.scheduler.max_num_running + config.scheduler.max_num_waiting,
            max_tokens_default=config.server.max_tokens_default,
            clamp_max_tokens=config.server.clamp_max_tokens,
        )


def output_budget(limits: Limits, prompt_tokens: int, requested: int | None, param: str) -> int:
    """How many tokens may be generated after a prompt. Raises 400 ``context_length_exceeded``."""
    room = limits.context_tokens - prompt_tokens
    if room < 1:
        raise context_overflow(limits.context_tokens, prompt_tokens, None, param)
    if requested is None:
        return min(room, limits.max_tokens_default or room)
    if requested > room and not limits.clamp_max_tokens:
        raise context_overflow(limits.context_tokens, prompt_tokens, requested, param)
    return min(room, requested)


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raises 400 for an id outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_value(f"{param} contains token id {token_id}; ids must be from 0 to {vocab_size - 1}", param)


def resolve_sampling(
    fields: GenerationFields, defaults: GenerationDefaults, spec: LaunchSpec, top_logprobs: int
) -> SamplingParams:
    """Sampling of every choice of a request, without seed and ``max_tokens``, which ``for_choice`` sets.

    What the request leaves open comes from the checkpoint's generation defaults, then from ``SamplingParams``. Raises
    ``ApiError`` for token ids outside the vocabulary.
    """
    vocab_size = spec.model.vocab_size
    base = SamplingParams()
    stop_token_ids = fields.stop_token_ids or []
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    bias = sorted((int(key), value) for key, value in (fields.logit_bias or {}).items())
    check_token_ids([token_id for token_id, _ in bias], vocab_size, "logit_bias")
    if not fields.ignore_eos:
        # The Scheduler knows the end-of-sequence tokens of config.json; generation_config.json may name more.
        known = (*spec.model.eos_token_ids, *stop_token_ids)
        stop_token_ids = stop_token_ids + [i for i in defaults.eos_token_ids if i not in known and 0 <= i < vocab_size]

    def choose(value: float | None, default: float | None, fallback: float) -> float:
        return value if value is not None else default if default is not None else fallback

    top_k = fields.top_k if fields.top_k is not None else defaults.top_k
    return SamplingParams(
        temperature=choose(fields.temperature, defaults.temperature, base.temperature),
        top_p=choose(fields.top_p, defaults.top_p, base.top_p),
        top_k=base.top_k if top_k is None else max(top_k, 0),
        min_p=choose(fields.min_p, defaults.min_p, base.min_p),
        repetition_penalty=choose(fields.repetition_penalty, defaults.repetition_penalty, base.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple(bias),
        top_logprobs=top_logprobs,
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        ignore_eos=bool(fields.ignore_eos),
    )


def for_choice(sampling: SamplingParams, max_tokens: int, seed: int | None, index: int) -> SamplingParams:
    """``sampling`` of one choice: choices of the same prompt differ in their seed."""
    if sampling.min_tokens > max_tokens:
        raise bad_value(
            f"min_tokens is {sampling.min_tokens}, above the {max_tokens} tokens that may be generated", "min_tokens"
        )
    own_seed = None if seed is None else (seed + index) & (2**63 - 1)
    return replace(sampling, max_tokens=max_tokens, seed=own_seed)


def check_choices(count: int, limits: Limits, param: str) -> None:
    """Raises 400 when a request wants more sequences than this server could ever hold at once."""
    if count > limits.requests:
        raise ApiError(
            400,
            f"{count} sequences were requested; at most {limits.requests} fit into this server's queue "
            "(scheduler.max_num_running + scheduler.max_num_waiting)",
            "invalid_value",
            param,
        )
