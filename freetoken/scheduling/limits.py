"""The numbers that bound scheduling, resolved once."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.elastic.arena_shape import plan_arena
from freetoken.launch_spec import LaunchSpec

RIDE_ALONG_TOKENS = 16
"""So much prefill may share a step with decoding requests: it reads few more weights than they do."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one engine; ``SchedulerConfig`` says what each means."""

    max_num_running: int
    max_num_waiting: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    step_timeout_s: float
    max_context_tokens: int
    block_size: int
    num_kv_blocks: int
    """Now."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    prefix_cache: bool = True
    ride_along_tokens: int | None = None
    """Prefill of more tokens runs beside decoding requests as a background step; None: it shares their steps."""
    decode_share: float = 0.4
    max_repeated_tokens: int | None = None
    growable_kv_blocks: int = 0
    """What KV may grow to by itself."""

    @classmethod
    def from_spec(cls, spec: LaunchSpec) -> SchedulerLimits:
        """The limits of a launch: the settings, cut to what the boot plan sized the workspace for."""
        config, plan = spec.config.scheduler, spec.plan
        arena = plan_arena(spec) if spec.config.elastic.auto else None
        batched = min(config.max_num_batched_tokens or plan.max_batch_tokens, plan.max_batch_tokens)
        return cls(
            max_num_running=config.max_num_running,
            max_num_waiting=config.max_num_waiting,
            max_num_batched_tokens=batched,
            prefill_chunk_tokens=min(config.prefill_chunk_tokens, batched),
            step_timeout_s=config.step_timeout_s,
            max_context_tokens=plan.max_context_tokens,
            block_size=plan.kv_block_size,
            num_kv_blocks=plan.num_kv_blocks,
            vocab_size=spec.model.vocab_size,
            eos_token_ids=spec.model.eos_token_ids,
            seed=spec.config.seed,
            prefix_cache=spec.config.kv.prefix_cache,
            ride_along_tokens=RIDE_ALONG_TOKENS,
            decode_share=config.decode_share,
            max_repeated_tokens=config.max_repeated_tokens,
            growable_kv_blocks=arena[0].blocks_in(arena[0].max_kv_granules) if arena is not None else 0,
        )

    @property
    def background_timeout_s(self) -> float:
        """``step_timeout_s`` for a step that has the device only part of the time."""
        return self.step_timeout_s / (1.0 - self.decode_share)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits when one request has it all."""
        return self.num_kv_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)
