"""Conversations that come back are evicted after requests that come once."""

from hypothesis import given
from hypothesis import strategies as st

from freetoken.kv import KVAllocator
from freetoken.messages import BlockCommit, BlockNeed, ReserveBlocks

BLOCK = 4


def run(allocator, name, tokens):
    """A request from its admission to its end; returns how many of its tokens were cached."""
    tokens = tuple(tokens)
    reply = allocator.apply(ReserveBlocks(1, 1, needs=(BlockNeed(name, 0, len(tokens), tokens),)))
    allocator.check_integrity()
    allocator.apply(ReserveBlocks(1, 1, commits=(BlockCommit(name, len(tokens)),), releases=(name,)))
    allocator.check_integrity()
    return reply.grants[0].num_cached_tokens if reply.grants else None


def side(i, length=8):
    """A prompt that nobody else has."""
    return range(1000 * (i + 1), 1000 * (i + 1) + length)


def test_requests_that_come_once_do_not_evict_a_conversation():
    allocator = KVAllocator(16, BLOCK)
    conversation = tuple(range(32))
    run(allocator, "turn 1", conversation[:24])
    assert run(allocator, "turn 2", conversation) == 24
    for i in range(20):
        run(allocator, f"side {i}", side(i))
    assert run(allocator, "turn 3", (*conversation, 7, 7)) == 32


def test_without_the_policy_they_do():
    allocator = KVAllocator(16, BLOCK, kept_share=0.0)
    conversation = tuple(range(32))
    run(allocator, "turn 1", conversation[:24])
    run(allocator, "turn 2", conversation)
    for i in range(20):
        run(allocator, f"side {i}", side(i))
    assert run(allocator, "turn 3", (*conversation, 7, 7)) == 0


def test_a_new_conversation_finds_room_beside_old_ones():
    allocator = KVAllocator(16, BLOCK)
    for i in range(8):  # conversations that came back, and are over
        run(allocator, f"old {i}", side(i))
        run(allocator, f"old {i} again", (*side(i), 1))
    new = tuple(range(16))
    run(allocator, "new", new)
    assert run(allocator, "new again", (*new, 1)) == 16


def test_a_shared_head_alone_is_no_return():
    allocator = KVAllocator(16, BLOCK)
    head = tuple(range(4))
    run(allocator, "first", (*head, *side(1, 12)))
    for i in range(2, 12):
        run(allocator, f"side {i}", (*head, *side(i, 12)))
    conversation = tuple(range(500, 520))
    run(allocator, "turn 1", conversation)
    run(allocator, "turn 2", (*conversation, *range(4)))
    for i in range(20, 30):
        run(allocator, f"side {i}", (*head, *side(i, 12)))
    assert run(allocator, "turn 3", (*conversation, *range(5))) == 24


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=40),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(6, 20),
)
def test_any_order_keeps_the_tables_sound(requests, share, num_blocks):
    allocator = KVAllocator(num_blocks, BLOCK, kept_share=share)
    for i, (session, length) in enumerate(requests):
        run(allocator, f"{i}", range(100 * session, 100 * session + length))
        plan = allocator.plan_resize(num_blocks - i % 3)
        if not isinstance(plan, str):
            allocator.resize(plan)
            allocator.check_integrity()


def admitted(allocator, name, tokens, comes_back):
    """As ``run``, with what the request says of itself."""
    tokens = tuple(tokens)
    need = BlockNeed(name, 0, len(tokens), tokens, comes_back)
    reply = allocator.apply(ReserveBlocks(1, 1, needs=(need,)))
    allocator.apply(ReserveBlocks(1, 1, commits=(BlockCommit(name, len(tokens)),), releases=(name,)))
    allocator.check_integrity()
    return reply.grants[0].num_cached_tokens


def test_a_conversation_may_be_expected_and_a_sub_agent_never_counts():
    allocator = KVAllocator(16, BLOCK)
    conversation = tuple(range(32))
    admitted(allocator, "turn 1", conversation, True)
    for i in range(8):
        helper = tuple(side(i, 24))
        assert admitted(allocator, f"helper {i}, turn 1", helper[:20], False) == 0
        assert admitted(allocator, f"helper {i}, turn 2", helper, False) == 20
    assert admitted(allocator, "turn 2", (*conversation, 7, 7), True) == 32
