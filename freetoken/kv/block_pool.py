"""The free list and the holder counts of all KV blocks."""

from __future__ import annotations

from collections.abc import Mapping

_FREE = -1


class BlockPool:
    """Every block is *free*, *held* (one holder or more) or *idle* (no holder, yet not free: the prefix tree keeps it).

    The pool never decides anything: who evicts what is the allocator's business. Blocks returned last are handed out
    first, because their memory is the likeliest to be warm. All operations are O(blocks named); not thread-safe.
    """

    __slots__ = ("_free", "_holders", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [_FREE] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def holders(self, block_id: int) -> int:
        """How many holders the block has; 0 when it is free or idle."""
        return max(self._holders[block_id], 0)

    def is_free(self, block_id: int) -> bool:
        """Whether the block is on the free list."""
        return self._holders[block_id] == _FREE

    def take(self, count: int) -> list[int]:
        """``count`` free blocks with one holder each. Raises ``ValueError`` and takes nothing when there are fewer."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block_id in taken:
            self._holders[block_id] = 1
        return taken

    def hold(self, block_id: int) -> int:
        """One more holder of a held or idle block; returns the new count."""
        count = self._holders[block_id]
        if count == _FREE:
            raise ValueError(f"block {block_id} is free and cannot be shared")
        self._holders[block_id] = count + 1
        return count + 1

    def drop(self, block_id: int) -> int:
        """One holder less; returns how many remain. At 0 the block is idle until ``give_back`` or ``hold``."""
        count = self._holders[block_id]
        if count < 1:
            raise ValueError(f"block {block_id} has no holder to drop")
        self._holders[block_id] = count - 1
        return count - 1

    def give_back(self, block_id: int) -> None:
        """An idle block becomes free."""
        if self._holders[block_id] != 0:
            state = "free already" if self.is_free(block_id) else f"held {self._holders[block_id]} times"
            raise ValueError(f"block {block_id} cannot be freed: it is {state}")
        self._holders[block_id] = _FREE
        self._free.append(block_id)

    def free_blocks(self) -> tuple[int, ...]:
        """The free list, for integrity checks; O(blocks)."""
        return tuple(self._free)

    def resize(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        """So many blocks from now on. ``moved``: blocks in use -> the free ones that take their place; afterwards every
        block beyond ``num_blocks`` must be free. Raises ``ValueError``, having changed nothing, where it is not."""
        holders = self._holders + [_FREE] * max(num_blocks - self.num_blocks, 0)
        for source, target in moved.items():
            if holders[source] == _FREE or holders[target] != _FREE:
                raise ValueError(f"block {source} cannot move to {target}")
            holders[target], holders[source] = holders[source], _FREE
        left = [block_id for block_id in range(num_blocks, len(holders)) if holders[block_id] != _FREE]
        if left:
            raise ValueError(f"block {left[0]} is in use beyond the new size of {num_blocks}")
        self.num_blocks = num_blocks
        self._holders = holders[:num_blocks]
        # The order in which they are handed out stays: those returned last first, and new ones after all others.
        known = [b for b in self._free if b < num_blocks and self._holders[b] == _FREE]
        new = {b for b in range(num_blocks) if self._holders[b] == _FREE}.difference(known)
        self._free = sorted(new, reverse=True) + known
