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
    """One full block under its parent. ``live`` is False once the node left the tree (evicted or discarded)."""

    __slots__ = ("block_id", "children", "key", "live", "parent")

    def __init__(self, key: bytes, block_id: int, parent: PrefixNode | None) -> None:
        self.key = key
        self.block_id = block_id
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.live = True


class PrefixTree:
    """Nodes keyed by their block's tokens under their parent, and the eviction order of the unused ones.

    A request that holds a node holds all its ancestors. Therefore a parent becomes unused no earlier than its
    children, and when it does it is appended to ``unused`` behind them: the front of ``unused`` is always a leaf, the
    least recently used one, and eviction is O(1) without a heap.
    """

    __slots__ = ("block_bytes", "num_nodes", "root", "unused")

    def __init__(self, block_size: int) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.root = PrefixNode(b"", -1, None)
        self.unused: OrderedDict[int, PrefixNode] = OrderedDict()
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
        self.unused[node.block_id] = node

    def mark_used(self, node: PrefixNode) -> None:
        """``node`` got its first holder."""
        del self.unused[node.block_id]

    def evict(self) -> PrefixNode:
        """Take the least recently used unused leaf out of the tree. Raises ``KeyError`` when nothing is unused."""
        _, node = self.unused.popitem(last=False)
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
            if self.unused.pop(gone.block_id, None) is not None:
                orphans.append(gone)
            gone.children = {}
            self._retire(gone)
        return orphans

    def move_blocks(self, moved: Mapping[int, int]) -> None:
        """Nodes follow their blocks to other places; the eviction order stays. O(nodes)."""
        for node in self.walk():
            node.block_id = moved.get(node.block_id, node.block_id)
        self.unused = OrderedDict((node.block_id, node) for node in self.unused.values())

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
