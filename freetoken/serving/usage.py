"""What a response cost, for every dialect's usage object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompts are counted once, however many choices share them. Times are the engine's (0 where it reported none)."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens_per_s: float = 0.0
