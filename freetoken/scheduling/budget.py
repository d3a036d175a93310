"""How the tokens of one step are shared. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StepShares(NamedTuple):
    """Decode rows (one token each) and prefill tokens of one step, at most."""

    decode_rows: int
    prefill_tokens: int


class PrefillWork(NamedTuple):
    """One request's prefill: tokens to go (an upper bound when the cached prefix is not known yet), and how many of
    them may run in this step."""

    priority: int
    remaining_tokens: int
    limit_tokens: int


def plan_shares(num_decodes: int, any_prefill: bool, max_batched_tokens: int, prefill_chunk_tokens: int) -> StepShares:
    """Decodes come first, so that running streams keep their pace, and prefill beside them is capped by
    ``prefill_chunk_tokens``, so that a step stays short. A quarter of the step (at most the cap) is kept for prefill
    however many streams decode, so that it cannot starve; the streams then take turns."""
    if not any_prefill:
        return StepShares(min(num_decodes, max_batched_tokens), 0)
    if num_decodes == 0:
        return StepShares(0, max_batched_tokens)
    reserved = min(prefill_chunk_tokens, max(max_batched_tokens // 4, 1))
    decode_rows = min(num_decodes, max_batched_tokens - reserved)
    return StepShares(decode_rows, min(prefill_chunk_tokens, max_batched_tokens - decode_rows))


def plan_prefill_chunks(work: Sequence[PrefillWork], budget_tokens: int) -> list[int]:
    """Tokens for each of ``work`` (given most important first), together at most ``budget_tokens``.

    Half of the budget belongs to the first, which is the longest here: it always advances. The other half goes to the
    others by priority, shortest first, so a short prompt passes a long one without waiting. What one side leaves, the
    other takes. Equal prompts finish one after the other instead of all at the end.
    """
    chunks = [0] * len(work)
    able = [index for index, item in enumerate(work) if item.limit_tokens > 0]
    left = budget_tokens
    if not able or left <= 0:
        return chunks
    lead, others = able[0], able[1:]
    if others:
        others.sort(key=lambda index: (work[index].priority, work[index].remaining_tokens, index))
        chunks[lead] = min(work[lead].limit_tokens, (left + 1) // 2)
        left -= chunks[lead]
        for index in others:
            if left == 0:
                break
            chunks[index] = min(work[index].limit_tokens, left)
            left -= chunks[index]
    chunks[lead] += min(work[lead].limit_tokens - chunks[lead], left)
    return chunks


def plan_turns(last_step_ids: Sequence[int], max_rows: int) -> list[int]:
    """Indices of the ``max_rows`` that waited longest (all of them, in order, when they fit), ascending."""
    if len(last_step_ids) <= max_rows:
        return list(range(len(last_step_ids)))
    order = sorted(range(len(last_step_ids)), key=lambda index: (last_step_ids[index], index))
    return sorted(order[:max_rows])


def derive_seed(base: int, counter: int) -> int:
    """A seed in [0, 2^63) for the ``counter``-th request that brought none (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    value = (base * 0x9E3779B97F4A7C15 + (counter + 1) * 0xD1342543DE82EF95) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 1
