"""Which token sequences have their KV in a block: a tree of full blocks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

_TOKEN_TYPE = "I"
TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


def encode_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as packed native integers, ``TOKEN_BYTES`` each: block keys are slices of this.

    Bytes compare exactly, hash once in C, and take an eighth of the memory of a tuple of ints. Raises ``OverflowError``
    for an id that is negative or does not fit.
    """
    return array(_TOKEN_TYPE, token_ids).tobytes()


class PrefixNode:
    """One full block under its parent. ``live`` is False once the node left the tree (evicted or discarded).
    ``returning``: a conversation that came back uses it; then its parent is returning too."""

    __slots__ = ("block_id", "children", "key", "live", "parent", "returning")

    def __init__(self, key: bytes, block_id: int, parent: PrefixNode | None) -> None:
        self.key = key
        self.block_id = block_id
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.live = True
        self.returning = False


class EvictionOrder:
    """Unused nodes by block, the next victim first: those that came once, then those of conversations that came
    back, both in the order in which they fell out of use."""

    __slots__ = ("_kept", "_once")

    def __init__(self) -> None:
        self._once: OrderedDict[int, PrefixNode] = OrderedDict()
        self._kept: OrderedDict[int, PrefixNode] = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._kept)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._once or block_id in self._kept

    def __iter__(self) -> Iterator[int]:
        yield from self._once
        yield from self._kept

    @property
    def num_kept(self) -> int:
        """How many are of conversations that came back."""
        return len(self._kept)

    def add(self, node: PrefixNode) -> None:
        """Behind all others of its sort."""
        (self._kept if node.returning else self._once)[node.block_id] = node

    def remove(self, node: PrefixNode) -> None:
        """Raises ``KeyError`` for a node that is not here."""
        if node.block_id in self._once:
            del self._once[node.block_id]
        else:
            del self._kept[node.block_id]

    def pop_first(self) -> PrefixNode:
        """The next victim. Raises ``KeyError`` when there is none."""
        return (self._once or self._kept).popitem(last=False)[1]

    def demote(self) -> None:
        """Let the first of the kept ones be one of the others, behind all of them."""
        block_id, node = self._kept.popitem(last=False)
        node.returning = False
        self._once[block_id] = node

    def rekey(self) -> None:
        """Blocks have moved: take the nodes' new ones."""
        self._once = OrderedDict((node.block_id, node) for node in self._once.values())
        self._kept = OrderedDict((node.block_id, node) for node in self._kept.values())


class PrefixTree:
    """Nodes keyed by their block's tokens under their parent, and the eviction order of the unused ones.

    A request that holds a node holds all its ancestors. Therefore a parent becomes unused no earlier than its
    children, and when it does it is appended to ``unused`` behind them: the front of ``unused`` is always a leaf, the
    least recently used one, and eviction is O(1) without a heap.

    Nodes of conversations that came back (``returning``) go last, so that requests which come once (titles, searches)
    do not evict a conversation that will go on. They are at most ``max_kept`` of the unused nodes: beyond that the
    least recently used of them become like the others. A node of the one sort is never above one of the other that
    goes later, so the front is a leaf all the same.
    """

    __slots__ = ("block_bytes", "max_kept", "num_nodes", "root", "unused")

    def __init__(self, block_size: int, max_kept: int = 0) -> None:
        self.max_kept = max_kept
        self.block_bytes = block_size * TOKEN_BYTES
        self.root = PrefixNode(b"", -1, None)
        self.unused = EvictionOrder()
        self.num_nodes = 0

    def match(self, tokens: bytes, max_blocks: int) -> list[PrefixNode]:
        """The longest cached path of at most ``max_blocks`` blocks of ``tokens`` (from ``encode_tokens``), top first.

        Changes nothing, not even the eviction order.
        """
        path: list[PrefixNode] = []
        children = self.root.children
        step = self.block_bytes
        for begin in range(0, max_blocks * step, step):
            node = children.get(tokens[begin : begin + step])
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def insert(self, parent: PrefixNode, key: bytes, block_id: int) -> PrefixNode:
        """A new node for a block in use. The caller made sure that ``parent`` has no child of that key."""
        node = PrefixNode(key, block_id, parent)
        parent.children[key] = node
        self.num_nodes += 1
        return node

    def mark_unused(self, node: PrefixNode) -> None:
        """Nobody holds ``node`` any more; call children before parents."""
        node.returning = node.returning and self.max_kept > 0
        self.unused.add(node)
        while self.unused.num_kept > self.max_kept:
            self.unused.demote()

    def mark_used(self, node: PrefixNode) -> None:
        """``node`` got its first holder."""
        self.unused.remove(node)

    def evict(self) -> PrefixNode:
        """Take the least recently used unused leaf out of the tree. Raises ``KeyError`` when nothing is unused."""
        node = self.unused.pop_first()
        assert node.parent is not None and not node.children, "the eviction order put a parent before its child"
        del node.parent.children[node.key]
        self._retire(node)
        return node

    def detach(self, node: PrefixNode) -> list[PrefixNode]:
        """Take ``node`` and everything below it out of the tree; returns those that nobody holds (their blocks are free
        to reuse). The others stay with their holders but are never matched again."""
        if not node.live or node.parent is None:
            return []
        del node.parent.children[node.key]
        orphans = []
        for gone in list(self.walk(node)):
            if gone.block_id in self.unused:
                self.unused.remove(gone)
                orphans.append(gone)
            gone.children = {}
            self._retire(gone)
        return orphans

    def move_blocks(self, moved: Mapping[int, int]) -> None:
        """Nodes follow their blocks to other places; the eviction order stays. O(nodes)."""
        for node in self.walk():
            node.block_id = moved.get(node.block_id, node.block_id)
        self.unused.rekey()

    def walk(self, top: PrefixNode | None = None) -> Iterator[PrefixNode]:
        """``top`` and all nodes below it, or all nodes; parents first. O(nodes)."""
        stack = [top] if top is not None else list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _retire(self, node: PrefixNode) -> None:
        node.live = False
        node.parent = None
        self.num_nodes -= 1
