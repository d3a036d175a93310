"""What the Scheduler has to tell the KVAllocator, and what it knows of it."""

from __future__ import annotations

from typing import NamedTuple

from freetoken.messages import BlockCommit, KVStats
from freetoken.scheduling.limits import SchedulerLimits
from freetoken.scheduling.request import Request


class LedgerEntries(NamedTuple):
    """The bookkeeping part of one ``ReserveBlocks``."""

    commits: tuple[BlockCommit, ...]
    discards: tuple[str, ...]
    releases: tuple[str, ...]


class KVLedger:
    """Collects commits, discards and releases between two reservations.

    A commit is sent once it completes a block, since only full blocks are cached: a decoding request costs one every
    ``block_size`` steps.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._advanced: dict[str, Request] = {}
        self._commits: list[BlockCommit] = []
        self._discards: list[str] = []
        self._releases: list[str] = []
        self.stats = KVStats(limits.num_kv_blocks, limits.num_kv_blocks, 0, limits.block_size)

    def set_limits(self, limits: SchedulerLimits) -> None:
        """The size of KV has changed; ``stats`` follow where nothing is known of them yet."""
        self._limits = limits
        stats = self.stats
        if stats.free_blocks == stats.total_blocks != limits.num_kv_blocks:
            self.stats = KVStats(limits.num_kv_blocks, limits.num_kv_blocks, 0, limits.block_size)

    @property
    def num_available_blocks(self) -> int:
        """Blocks the allocator could hand out after its last reply; releases collected since are not counted."""
        return self.stats.free_blocks + self.stats.cached_blocks

    @property
    def is_due(self) -> bool:
        """Whether there is something to tell even without a need. Commits of running requests go along with the next
        message: they matter to first needs only, and a message with one of those carries them."""
        return bool(self._releases or self._discards)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell at all."""
        return not (self._advanced or self._commits or self._discards or self._releases)

    def computed(self, request: Request, num_tokens: int) -> None:
        """The KV of the request's first ``num_tokens`` tokens is valid: the step that wrote it succeeded."""
        request.num_computed_tokens = num_tokens
        if self._limits.prefix_cache and num_tokens // self._limits.block_size > request.num_committed_blocks:
            self._advanced[request.id] = request

    def release(self, request: Request) -> None:
        """Commit what is due, then drop the request's hold."""
        if not request.holds_blocks:
            return
        if self._advanced.pop(request.id, None) is not None:
            self._commits.append(self._commit(request))
        self._releases.append(request.id)
        request.forget_blocks()

    def discard(self, request: Request) -> None:
        """What the request cached must not be reused."""
        self._advanced.pop(request.id, None)
        if self._limits.prefix_cache:
            self._discards.append(request.id)

    def take(self) -> LedgerEntries:
        """Everything collected, which is thereby regarded as sent."""
        self._commits += map(self._commit, self._advanced.values())
        entries = LedgerEntries(tuple(self._commits), tuple(self._discards), tuple(self._releases))
        self._advanced.clear()
        self._commits.clear()
        self._discards.clear()
        self._releases.clear()
        return entries

    def _commit(self, request: Request) -> BlockCommit:
        new_tokens = tuple(request.generated[request.num_sent_tokens - len(request.prompt) :])
        request.num_sent_tokens += len(new_tokens)
        request.num_committed_blocks = request.num_computed_tokens // self._limits.block_size
        return BlockCommit(request.id, request.num_computed_tokens, new_tokens)
