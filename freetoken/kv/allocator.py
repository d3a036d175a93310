"""The KV block allocator: one synchronous transition from ``ReserveBlocks`` to ``BlocksReserved``."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict
from typing import NamedTuple

from freetoken.kv.block_pool import BlockPool
from freetoken.kv.prefix_tree import PrefixNode, PrefixTree, encode_tokens
from freetoken.messages import BlockCommit, BlockGrant, BlockNeed, BlocksReserved, KVStats, ReserveBlocks

logger = logging.getLogger(__name__)

_REMEMBERED_RELEASES = 256
KEPT_SHARE = 0.75
"""So much may be kept for conversations that came back; the rest is left to new ones, which must come back once before
they are kept as well."""


class IntegrityError(Exception):
    """The allocator's tables contradict each other: a bug, found by ``check_integrity``."""


class BlockResize(NamedTuple):
    """``moved``: blocks in use -> free ones below the new limit. ``num_evicted``: cached blocks that go."""

    num_blocks: int
    moved: dict[int, int]
    num_evicted: int


class _Holding:
    """What one request holds.

    ``table`` are the blocks in its block table. ``path[i]`` is the tree's node of its i-th block, for committed ones;
    its block differs from ``table[i]`` when another request committed the same tokens first and still holds that block:
    the request then keeps its own copy and holds the tree's beside it, so that the path above its later blocks cannot
    be evicted.
    ``sealed`` requests commit no more. ``returning`` ones go on with what is mostly cached.
    """

    __slots__ = ("path", "returning", "sealed", "table", "tokens")

    def __init__(self, table: list[int], path: list[PrefixNode], tokens: bytearray, returning: bool) -> None:
        self.returning = returning
        self.table = table
        self.path = path
        self.tokens = tokens
        self.sealed = False


class KVAllocator:
    """Paged blocks with a prefix tree over them. Deterministic, no I/O, one thread.

    ``prefix_cache=False`` keeps no tree: nothing is ever cached and commits have no effect. Prefixes of conversations
    that come back (``BlockNeed.comes_back``; if that is None, at least half of their prompt was cached) are evicted
    after all others, while they are at most the share ``kept_share`` of all blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: bool = True, kept_share: float = KEPT_SHARE
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._pool = BlockPool(num_blocks)
        self._kept_share = kept_share
        self._tree = PrefixTree(block_size, int(num_blocks * kept_share))
        self._holdings: dict[str, _Holding] = {}
        # Topmost node of requests released lately: a fault may be noticed one step after the release.
        self._released: OrderedDict[str, PrefixNode] = OrderedDict()
        self._evicted_blocks_total = 0
        self._hit_tokens_total = 0
        self._query_tokens_total = 0

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._holdings)

    def stats(self) -> KVStats:
        """Figures as of now; O(1)."""
        return KVStats(
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            cached_blocks=len(self._tree.unused),
            block_size=self.block_size,
            evicted_blocks_total=self._evicted_blocks_total,
            hit_tokens_total=self._hit_tokens_total,
            query_tokens_total=self._query_tokens_total,
        )

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request in order; empty for unknown ids."""
        holding = self._holdings.get(request_id)
        return tuple(holding.table) if holding else ()

    def apply(self, message: ReserveBlocks) -> BlocksReserved:
        """Apply one message in the order its docstring promises and answer it. Time is linear in the tokens of first
        needs, in the blocks released, and in the tokens committed."""
        for commit in message.commits:
            self._commit(commit)
        for request_id in message.discards:
            self._discard(request_id)
        for request_id in message.releases:
            self._release(request_id)
        grants: list[BlockGrant] = []
        exhausted: list[str] = []
        for need in message.needs:
            grant = self._grow(need) if need.token_ids is None else self._admit(need, need.token_ids)
            if grant is None:
                exhausted.append(need.request_id)
            else:
                grants.append(grant)
        return BlocksReserved(message.step_id, message.epoch, tuple(grants), tuple(exhausted), self.stats())

    def release_all(self) -> None:
        """Drop every request's hold; what was committed stays cached."""
        for request_id in list(self._holdings):
            self._release(request_id)

    # ------------------------------------------------------------------------------------------ transitions

    def _admit(self, need: BlockNeed, token_ids: tuple[int, ...]) -> BlockGrant | None:
        if need.request_id in self._holdings:
            logger.error("event=admitted_twice request=%s action=release_first", need.request_id)
            self._release(need.request_id)
        path: list[PrefixNode] = []
        tokens = b""
        if self.prefix_cache:
            tokens = encode_tokens(token_ids)
            path = self._tree.match(tokens, (len(token_ids) - 1) // self.block_size)
        num_cached = len(path) * self.block_size
        room = min(num_cached + max(need.num_new_tokens, 0), len(token_ids))
        num_new_blocks = self._blocks_for(room) - len(path)
        evictable = len(self._tree.unused)
        for node in reversed(path):  # those without a holder are the tail of the path
            if self._pool.holders(node.block_id):
                break
            evictable -= 1
        if num_new_blocks > self._pool.num_free + evictable:
            return None
        returning = need.comes_back
        if returning is None:
            returning = 2 * num_cached >= len(token_ids)
        for node in path:
            self._hold(node)
            node.returning = node.returning or returning
        table = [node.block_id for node in path]
        table += self._take(num_new_blocks)
        self._holdings[need.request_id] = _Holding(table, path, bytearray(tokens), returning)
        self._released.pop(need.request_id, None)
        self._query_tokens_total += len(token_ids)
        self._hit_tokens_total += num_cached
        return BlockGrant(need.request_id, tuple(table), num_cached)

    def _grow(self, need: BlockNeed) -> BlockGrant | None:
        holding = self._holdings.get(need.request_id)
        if holding is None:
            logger.error("event=need_of_unknown_request request=%s", need.request_id)
            return None
        missing = self._blocks_for(need.num_computed_tokens + need.num_new_tokens) - len(holding.table)
        if missing <= 0:
            return BlockGrant(need.request_id, ())
        if missing > self._pool.num_free + len(self._tree.unused):
            self._drop_spare_copies(holding)
            if missing > self._pool.num_free + len(self._tree.unused):
                return None
        taken = self._take(missing)
        holding.table += taken
        return BlockGrant(need.request_id, tuple(taken))

    def _commit(self, commit: BlockCommit) -> None:
        holding = self._holdings.get(commit.request_id)
        if holding is None or holding.sealed or not self.prefix_cache:
            return
        holding.tokens += encode_tokens(commit.new_token_ids)
        path, table, tokens = holding.path, holding.table, holding.tokens
        step = self._tree.block_bytes
        num_full = commit.num_computed_tokens // self.block_size
        if num_full > min(len(tokens) // step, len(table)):
            logger.error(
                "event=commit_too_long request=%s num_computed_tokens=%d known_tokens=%d blocks=%d",
                commit.request_id, commit.num_computed_tokens, len(tokens) * self.block_size // step, len(table),
            )  # fmt: skip
            num_full = min(len(tokens) // step, len(table))
        for index in range(len(path), num_full):
            parent = path[-1] if path else self._tree.root
            if not parent.live:
                holding.sealed = True  # its prefix was discarded: nothing built upon it may be reused
                return
            key = bytes(tokens[index * step : (index + 1) * step])
            node = parent.children.get(key)
            if node is None:
                node = self._tree.insert(parent, key, table[index])
            elif self._pool.holders(node.block_id) == 0:
                self._tree.mark_used(node)
                self._replace_block(node, table[index])
            else:
                self._pool.hold(node.block_id)
            node.returning = node.returning or holding.returning
            path.append(node)

    def _release(self, request_id: str) -> None:
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return
        path, table = holding.path, holding.table
        for index in range(len(table) - 1, -1, -1):  # deepest first: the tree relies on it
            block_id = table[index]
            node = path[index] if index < len(path) else None
            if node is not None:
                self._drop(node)
            if (node is None or node.block_id != block_id) and self._pool.drop(block_id) == 0:
                self._pool.give_back(block_id)
        if path:
            self._released[request_id] = path[0]
            if len(self._released) > _REMEMBERED_RELEASES:
                self._released.popitem(last=False)

    def _discard(self, request_id: str) -> None:
        # The whole path, not only what the request wrote: a fault shows only when a token is sampled, so the
        # bad block may have been written by a request that ended before, and would fail every later user of it.
        holding = self._holdings.get(request_id)
        top = self._released.get(request_id) if holding is None else holding.path[0] if holding.path else None
        if top is not None:
            for node in self._tree.detach(top):
                self._pool.give_back(node.block_id)
        if holding is not None:
            holding.sealed = True

    # ------------------------------------------------------------------------------------------ capacity

    def plan_resize(self, num_blocks: int) -> BlockResize | str:
        """What it takes to have ``num_blocks`` blocks; or why that is not possible. Changes nothing.

        Cached blocks go, least recently used first, as far as blocks in use do not fit; the others move down.
        """
        pool, tree = self._pool, self._tree
        used = pool.num_blocks - pool.num_free
        num_evicted = max(used - num_blocks, 0)
        if num_evicted > len(tree.unused) or num_blocks < 1:
            held = used - len(tree.unused)
            return f"{num_blocks} blocks are too few: {held} are in use by requests"
        evicted = set(itertools.islice(tree.unused, num_evicted))
        free = set(pool.free_blocks()) | evicted
        targets = iter(sorted(block_id for block_id in free if block_id < num_blocks))
        moved = {source: next(targets) for source in range(num_blocks, pool.num_blocks) if source not in free}
        return BlockResize(num_blocks, moved, num_evicted)

    def resize(self, plan: BlockResize) -> None:
        """Make ``plan`` true: the KV of the blocks that move has been copied. Nothing may have changed since
        ``plan_resize``."""
        for _ in range(plan.num_evicted):
            self._pool.give_back(self._tree.evict().block_id)
            self._evicted_blocks_total += 1
        self._pool.resize(plan.num_blocks, plan.moved)
        self._tree.max_kept = int(plan.num_blocks * self._kept_share)
        moved = plan.moved
        if moved:
            orphans = {id(node): node for holding in self._holdings.values() for node in holding.path if not node.live}
            self._tree.move_blocks(moved)
            for node in orphans.values():  # discarded, and still held
                node.block_id = moved.get(node.block_id, node.block_id)
            for holding in self._holdings.values():
                holding.table = [moved.get(block_id, block_id) for block_id in holding.table]

    # ------------------------------------------------------------------------------------------ helpers

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, count: int) -> list[int]:
        for _ in range(count - self._pool.num_free):
            self._pool.give_back(self._tree.evict().block_id)
            self._evicted_blocks_total += 1
        return self._pool.take(count)

    def _replace_block(self, node: PrefixNode, block_id: int) -> None:
        """The tree's copy of a block, which nobody holds, makes way for a request's own."""
        self._pool.give_back(node.block_id)
        node.block_id = block_id

    def _drop_spare_copies(self, holding: _Holding) -> None:
        """Give up the copies that only this request keeps alive beside its own, so that a request alone can have all
        blocks for its table."""
        for index, node in enumerate(holding.path):
            spare = node.block_id
            if spare != holding.table[index] and self._pool.holders(spare) == 1:
                self._pool.drop(spare)
                self._replace_block(node, holding.table[index])

    def _hold(self, node: PrefixNode) -> None:
        if self._pool.hold(node.block_id) == 1:
            self._tree.mark_used(node)

    def _drop(self, node: PrefixNode) -> None:
        if self._pool.drop(node.block_id) == 0:
            if node.live:
                self._tree.mark_unused(node)
            else:
                self._pool.give_back(node.block_id)

    # ------------------------------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Recount everything from the requests' tables and the tree; raises ``IntegrityError`` naming the first
        contradiction. O(blocks + tokens held); for tests and idle moments."""
        pool, tree = self._pool, self._tree
        holders: Counter[int] = Counter()
        for request_id, holding in self._holdings.items():
            _require(len(set(holding.table)) == len(holding.table), f"{request_id} has a block twice")
            holders.update(holding.table)
            for index, node in enumerate(holding.path):
                if node.block_id != holding.table[index]:
                    holders[node.block_id] += 1
                if node.live:
                    above = holding.path[index - 1] if index else tree.root
                    _require(node.parent is above, f"{request_id}: node {index} is not below node {index - 1}")
        for block_id in range(pool.num_blocks):
            _require(
                pool.holders(block_id) == holders[block_id],
                f"block {block_id} counts {pool.holders(block_id)} holders, {holders[block_id]} hold it",
            )
        free = set(pool.free_blocks())
        _require(len(free) == pool.num_free, "the free list names a block twice")
        _require(all(pool.is_free(block_id) for block_id in free), "the free list names a block that is not free")
        nodes = {node.block_id: node for node in tree.walk()}
        _require(len(nodes) == tree.num_nodes, f"the tree counts {tree.num_nodes} nodes and has {len(nodes)} blocks")
        idle = {block_id for block_id in nodes if holders[block_id] == 0}
        _require(idle == set(tree.unused), "the eviction order does not name exactly the unused nodes")
        _require(not free & nodes.keys(), "a block is both free and in the tree")
        position = {block_id: order for order, block_id in enumerate(tree.unused)}
        for block_id, node in nodes.items():
            parent = node.parent
            _require(node.live and parent is not None, f"the tree holds the dead node of block {block_id}")
            assert parent is not None
            if node.returning and parent is not tree.root:
                _require(parent.returning, f"block {block_id} came back and the one above it did not")
            _require(parent.children.get(node.key) is node, f"the node of block {block_id} is not its parent's child")
            if parent is not tree.root and parent.block_id in position:
                _require(block_id in position, f"block {block_id} is used below the unused block {parent.block_id}")
                _require(position[block_id] < position[parent.block_id], f"block {block_id} outlives its parent")
        total = len(free) + len(idle) + len(+holders)
        _require(total == pool.num_blocks, f"free + cached + held is {total}, not {pool.num_blocks}")


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise IntegrityError(complaint)
