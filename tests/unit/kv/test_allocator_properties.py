"""Random operation sequences against a model that recomputes everything from scratch."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from freetoken.kv import KVAllocator
from freetoken.messages import BlockCommit, BlockNeed, ReserveBlocks

BLOCK = 2
BLOCKS = 9
# Two symbols and short blocks: prefixes collide, branch and grow back all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
IDS = st.sampled_from("abcde")


@dataclass
class Held:
    tokens: list
    table: list
    path: list = field(default_factory=list)  # the tree's block of each committed block
    sealed: bool = False


class Model:
    """The tree as a dictionary from token prefixes to blocks; everything else is derived by searching."""

    def __init__(self):
        self.tree = {}
        self.last_use = {}
        self.clock = 0
        self.held = {}

    def in_use(self):
        return {block for held in self.held.values() for block in (*held.table, *held.path)}

    def cached(self):
        return {block for block in self.tree.values() if block not in self.in_use()}

    def free(self):
        return set(range(BLOCKS)) - self.in_use() - set(self.tree.values())

    def match(self, tokens):
        path = []
        while (end := (len(path) + 1) * BLOCK) < len(tokens) and tuple(tokens[:end]) in self.tree:
            path.append(self.tree[tuple(tokens[:end])])
        return path

    def evict_one(self):
        """The unused leaf released longest ago."""
        unused = self.cached()
        leaves = [
            prefix
            for prefix, block in self.tree.items()
            if block in unused and not any(k[: len(prefix)] == prefix and k != prefix for k in self.tree)
        ]
        del self.tree[min(leaves, key=lambda prefix: self.last_use[self.tree[prefix]])]

    def make_free(self, count):
        while len(self.free()) < count:
            self.evict_one()

    def commit(self, request_id, num_computed, new_tokens):
        held = self.held[request_id]
        held.tokens += new_tokens
        for index in range(len(held.path), num_computed // BLOCK):
            prefix = tuple(held.tokens[: (index + 1) * BLOCK])
            above = tuple(held.tokens[: index * BLOCK])
            if held.sealed or (index and self.tree.get(above) != held.path[index - 1]):
                held.sealed = True
                return
            if self.tree.get(prefix) in self.cached():
                self.tree[prefix] = held.table[index]  # the idle copy makes way
            held.path.append(self.tree.setdefault(prefix, held.table[index]))

    def drop_spare_copies(self, request_id):
        held = self.held[request_id]
        for index, block in enumerate(held.path):
            own = held.table[index]
            others = [other for name, other in self.held.items() if name != request_id]
            if block != own and not any(block in (*other.table, *other.path) for other in others):
                held.path[index] = own
                for prefix in [prefix for prefix, kept in self.tree.items() if kept == block]:
                    self.tree[prefix] = own

    def release(self, request_id):
        held = self.held.pop(request_id)
        for block in reversed(held.path):
            if block not in self.in_use():
                self.clock += 1
                self.last_use[block] = self.clock

    def discard(self, request_id):
        held = self.held[request_id]
        held.sealed = True
        top = tuple(held.tokens[:BLOCK])
        if held.path and self.tree.get(top) == held.path[0]:
            self.tree = {prefix: block for prefix, block in self.tree.items() if prefix[:BLOCK] != top}


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = KVAllocator(BLOCKS, BLOCK, kept_share=0.0)
        self.model = Model()
        self.step = 0

    def apply(self, **parts):
        self.step += 1
        return self.allocator.apply(ReserveBlocks(self.step, 1, **parts))

    def expect(self, reply, request_id, needed):
        """Compare the verdict with the model's; True when granted."""
        possible = needed <= len(self.model.free()) + len(self.model.cached())
        assert reply.exhausted == (() if possible else (request_id,))
        if possible:
            self.model.make_free(needed)
        return possible

    @rule(request_id=IDS, tokens=TOKENS, num_new=st.integers(0, 10))
    def admit(self, request_id, tokens, num_new):
        if request_id in self.model.held:
            return
        path = self.model.match(tokens)
        cached = len(path) * BLOCK
        room = min(cached + num_new, len(tokens))
        needed = -(-room // BLOCK) - len(path)
        reply = self.apply(needs=(BlockNeed(request_id, 0, num_new, tokens),))
        self.model.held[request_id] = Held(list(tokens), list(path), list(path))
        if not self.expect(reply, request_id, needed):
            del self.model.held[request_id]
            return
        (grant,) = reply.grants
        assert grant.num_cached_tokens == cached
        assert list(grant.new_block_ids[: len(path)]) == path
        self.take_over(request_id, grant.new_block_ids[len(path) :], needed)

    @rule(request_id=IDS, num_new=st.integers(1, 5))
    def grow(self, request_id, num_new):
        held = self.model.held.get(request_id)
        if held is None:
            return
        computed = len(held.table) * BLOCK - 1
        needed = max(-(-(computed + num_new) // BLOCK) - len(held.table), 0)
        if needed > len(self.model.free()) + len(self.model.cached()):
            self.model.drop_spare_copies(request_id)
        reply = self.apply(needs=(BlockNeed(request_id, computed, num_new),))
        if self.expect(reply, request_id, needed):
            self.take_over(request_id, reply.grants[0].new_block_ids, needed)

    def take_over(self, request_id, block_ids, needed):
        assert len(block_ids) == needed
        assert set(block_ids) <= self.model.free()
        self.model.held[request_id].table += block_ids

    @rule(request_id=IDS, new_tokens=st.lists(st.integers(0, 1), max_size=3), part=st.floats(0, 1))
    def commit(self, request_id, new_tokens, part):
        held = self.model.held.get(request_id)
        if held is None:
            return
        limit = min(len(held.tokens) + len(new_tokens), len(held.table) * BLOCK)
        computed = max(round(limit * part), len(held.path) * BLOCK)
        self.apply(commits=(BlockCommit(request_id, computed, tuple(new_tokens)),))
        self.model.commit(request_id, computed, new_tokens)

    @rule(request_id=IDS)
    def release(self, request_id):
        self.apply(releases=(request_id,))
        if request_id in self.model.held:
            self.model.release(request_id)

    @rule(request_id=IDS)
    def discard(self, request_id):
        if request_id in self.model.held:
            self.apply(discards=(request_id,))
            self.model.discard(request_id)

    @precondition(lambda self: self.model.held)
    @rule()
    def release_all(self):
        for request_id in list(self.model.held):
            self.model.release(request_id)
        self.allocator.release_all()
        assert self.allocator.num_requests == 0

    @invariant()
    def tables_agree(self):
        self.allocator.check_integrity()
        stats = self.allocator.stats()
        assert stats.free_blocks == len(self.model.free())
        assert stats.cached_blocks == len(self.model.cached())
        for request_id, held in self.model.held.items():
            assert list(self.allocator.block_table(request_id)) == held.table


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
