"""Block reservation, between Scheduler and KVAllocator: one message and one reply per step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """Room wanted for one request in the coming step.

    First time (and again after a preemption): ``token_ids`` holds all tokens known so far (prompt, plus what was
    generated before a preemption). The allocator matches them against the prefix tree, always leaving at least one
    token to compute, and makes room for ``min(num_cached + num_new_tokens, len(token_ids))`` tokens.
    Later: ``token_ids is None`` and room is made for ``num_computed_tokens + num_new_tokens`` tokens.
    ``comes_back`` is that of the request; it matters the first time.
    """

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    token_ids: tuple[int, ...] | None = None
    comes_back: bool | None = None


@dataclass(frozen=True, slots=True)
class BlockCommit:
    """The KV of the first ``num_computed_tokens`` tokens is now valid. ``new_token_ids`` extends the allocator's copy
    of the sequence (generated tokens; prompts came with the first ``BlockNeed``). Full blocks enter the prefix tree."""

    request_id: str
    num_computed_tokens: int
    new_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Applied in the order commits, discards, releases, needs; needs are served in the order given, most important
    first.

    ``discards`` take everything a request holds, and whatever was cached below it, out of the prefix tree: it is never
    matched again, not even after the release. They do not release. ``releases`` drops the request's hold on its blocks:
    committed ones stay cached in the tree until evicted, the others become free. Unknown ids are ignored.
    """

    step_id: int
    epoch: int
    commits: tuple[BlockCommit, ...] = ()
    releases: tuple[str, ...] = ()
    needs: tuple[BlockNeed, ...] = ()
    discards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Blocks appended to the request's block table by this message, in order. For a first need this starts with the
    shared blocks of the matched prefix; ``num_cached_tokens`` (a multiple of the block size) says how long that is."""

    request_id: str
    new_block_ids: tuple[int, ...]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVStats:
    """``free`` blocks hold nothing; ``cached`` ones hold a reusable prefix nobody uses now (evictable); the rest is
    held by requests. free + cached + held == total."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    block_size: int
    evicted_blocks_total: int = 0
    hit_tokens_total: int = 0
    query_tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """A need is either granted whole or its id is in ``exhausted`` (and nothing was changed for it)."""

    step_id: int
    epoch: int
    grants: tuple[BlockGrant, ...]
    exhausted: tuple[str, ...]
    stats: KVStats
