"""One behaviour of the allocator per test; random sequences are in test_allocator_properties.py."""

import pytest

from freetoken.kv import IntegrityError, KVAllocator
from freetoken.messages import BlockCommit, BlockNeed, ReserveBlocks

BLOCK = 4


def reserve(allocator, *needs, commits=(), releases=(), discards=()):
    reply = allocator.apply(
        ReserveBlocks(7, 3, tuple(commits), tuple(releases), tuple(needs), discards=tuple(discards))
    )
    assert (reply.step_id, reply.epoch) == (7, 3)
    allocator.check_integrity()
    stats = reply.stats
    assert stats.free_blocks + stats.cached_blocks <= stats.total_blocks
    return reply


def first(request_id, tokens, num_new=1000):
    return BlockNeed(request_id, 0, num_new, tuple(tokens))


def run_and_release(allocator, request_id, tokens):
    """Compute the whole of ``tokens`` and let go of it."""
    grant = reserve(allocator, first(request_id, tokens)).grants[0]
    reserve(allocator, commits=[BlockCommit(request_id, len(tokens))], releases=[request_id])
    return grant


def held(reply):
    return reply.stats.total_blocks - reply.stats.free_blocks - reply.stats.cached_blocks


def test_first_need_makes_room_for_the_chunk_only_and_later_needs_append():
    allocator = KVAllocator(8, BLOCK)
    reply = reserve(allocator, first("a", range(20), num_new=6))
    assert reply.grants[0].new_block_ids == (0, 1) and reply.grants[0].num_cached_tokens == 0
    assert held(reply) == 2
    reply = reserve(allocator, BlockNeed("a", 6, 2))
    assert reply.grants[0].new_block_ids == ()
    reply = reserve(allocator, BlockNeed("a", 8, 9))
    assert reply.grants[0].new_block_ids == (2, 3, 4)
    assert allocator.block_table("a") == (0, 1, 2, 3, 4)


def test_first_need_never_reaches_beyond_the_tokens():
    allocator = KVAllocator(8, BLOCK)
    assert len(reserve(allocator, first("a", range(5), num_new=500)).grants[0].new_block_ids) == 2


@pytest.mark.parametrize("length", range(1, 4 * BLOCK + 2))
def test_resent_prompt_shares_all_full_blocks_but_always_leaves_a_token(length):
    allocator = KVAllocator(16, BLOCK)
    original = run_and_release(allocator, "a", range(length))
    reply = reserve(allocator, first("b", range(length)))
    cached = (length - 1) // BLOCK * BLOCK
    assert reply.grants[0].num_cached_tokens == cached < length
    assert reply.grants[0].new_block_ids[: cached // BLOCK] == original.new_block_ids[: cached // BLOCK]
    assert len(reply.grants[0].new_block_ids) == -(-length // BLOCK)


def test_only_committed_blocks_are_matched_and_each_chunk_counts():
    allocator = KVAllocator(16, BLOCK)
    reserve(allocator, first("a", range(12), num_new=8))
    assert reserve(allocator, first("b", range(12), num_new=1)).grants[0].num_cached_tokens == 0
    reserve(allocator, commits=[BlockCommit("a", 7)], releases=["b"])
    assert reserve(allocator, first("c", range(12), num_new=1)).grants[0].num_cached_tokens == 4
    reserve(allocator, commits=[BlockCommit("a", 8)], releases=["c"])
    assert reserve(allocator, first("d", range(12), num_new=1)).grants[0].num_cached_tokens == 8


def test_generated_tokens_extend_the_path():
    allocator = KVAllocator(16, BLOCK)
    reserve(allocator, first("a", [1, 2, 3]))
    reserve(allocator, BlockNeed("a", 3, 2), commits=[BlockCommit("a", 3, (4,))])
    reserve(allocator, commits=[BlockCommit("a", 4, (5, 6))], releases=["a"])
    assert reserve(allocator, first("b", [1, 2, 3, 4, 5])).grants[0].num_cached_tokens == 4
    assert reserve(allocator, first("c", [1, 2, 3, 9, 5])).grants[0].num_cached_tokens == 0


def test_uncommitted_blocks_become_free_and_committed_ones_cached():
    allocator = KVAllocator(8, BLOCK)
    reserve(allocator, first("a", range(20)))
    reply = reserve(allocator, commits=[BlockCommit("a", 9)], releases=["a", "unknown"])
    assert (reply.stats.free_blocks, reply.stats.cached_blocks) == (6, 2)


def test_exhausted_need_changes_nothing_and_later_smaller_ones_are_served():
    allocator = KVAllocator(4, BLOCK)
    run_and_release(allocator, "old", range(100, 109))
    before = allocator.stats()
    reply = reserve(allocator, first("big", range(20)))
    assert reply.exhausted == ("big",) and reply.grants == ()
    assert reply.stats == before
    reply = reserve(allocator, first("big", range(20)), first("small", range(5)))
    assert reply.exhausted == ("big",) and [grant.request_id for grant in reply.grants] == ["small"]


def test_matched_blocks_do_not_count_as_evictable():
    allocator = KVAllocator(4, BLOCK)
    run_and_release(allocator, "a", range(12))  # 3 cached, 1 free
    reply = reserve(allocator, first("b", range(17)))  # 3 shared and 2 new: one too many
    assert reply.exhausted == ("b",)
    reply = reserve(allocator, first("b", range(16)))
    assert reply.grants[0].num_cached_tokens == 12


def test_least_recently_used_leaf_goes_first_and_parents_last():
    allocator = KVAllocator(6, BLOCK)
    shared = list(range(4))
    run_and_release(allocator, "a", [*shared, 10, 11, 12, 13])
    run_and_release(allocator, "b", [*shared, 20, 21, 22, 23])
    run_and_release(allocator, "a2", [*shared, 10, 11, 12, 13, 14])  # touches a's branch; b's is now the oldest
    reserve(allocator, first("x", range(50, 62)), releases=[])  # 3 free blocks: takes them
    reply = reserve(allocator, BlockNeed("x", 12, 4))  # evicts b's leaf
    assert reply.stats.evicted_blocks_total == 1
    assert reserve(allocator, first("probe", [*shared, 20, 21, 22, 23, 24], num_new=0)).grants[0].num_cached_tokens == 4
    reserve(allocator, releases=["probe"])
    probe = reserve(allocator, first("probe", [*shared, 10, 11, 12, 13, 14], num_new=0))
    assert probe.grants[0].num_cached_tokens == 8


def test_second_writer_of_a_block_keeps_its_copy_and_its_continuation_is_cached():
    allocator = KVAllocator(8, BLOCK)
    reserve(allocator, first("a", range(8)), first("b", [*range(4), 50, 51, 52, 53]))
    reply = reserve(allocator, commits=[BlockCommit("a", 8), BlockCommit("b", 8)])
    tables = allocator.block_table("a"), allocator.block_table("b")
    assert set(tables[0]).isdisjoint(tables[1]) and held(reply) == 4
    reply = reserve(allocator, releases=["a"])
    assert (reply.stats.cached_blocks, held(reply)) == (1, 3)  # b holds a's first block too: it lies above b's second
    reply = reserve(allocator, releases=["b"])
    assert (reply.stats.cached_blocks, held(reply)) == (3, 0)
    grant = reserve(allocator, first("c", [*range(4), 50, 51, 52, 53, 54])).grants[0]
    assert grant.new_block_ids[:2] == (tables[0][0], tables[1][1])


def test_idle_copy_makes_way_for_that_of_a_request_in_use():
    allocator = KVAllocator(8, BLOCK)
    reserve(allocator, first("a", range(4)), first("b", range(5)))
    reply = reserve(allocator, commits=[BlockCommit("a", 4)], releases=["a"])
    assert (reply.stats.cached_blocks, held(reply)) == (1, 2)
    reply = reserve(allocator, commits=[BlockCommit("b", 4)])
    assert (reply.stats.cached_blocks, held(reply)) == (0, 2)
    assert (
        reserve(allocator, first("c", range(5), num_new=0)).grants[0].new_block_ids[0] == allocator.block_table("b")[0]
    )


def test_request_alone_can_have_every_block_even_where_it_kept_a_copy():
    allocator = KVAllocator(4, BLOCK)
    reserve(allocator, first("a", range(4)), first("b", range(5)))
    reply = reserve(allocator, commits=[BlockCommit("a", 4), BlockCommit("b", 4)], releases=["a"])
    assert held(reply) == 3  # b has two blocks and keeps a's alive
    reply = reserve(allocator, BlockNeed("b", 5, 11))
    assert not reply.exhausted and len(allocator.block_table("b")) == 4
    reply = reserve(allocator, commits=[BlockCommit("b", 15, tuple(range(5, 16)))], releases=["b"])
    assert (reply.stats.free_blocks, reply.stats.cached_blocks) == (1, 3)


def test_discard_removes_the_path_and_what_lies_below_even_while_held():
    allocator = KVAllocator(16, BLOCK)
    run_and_release(allocator, "old", [*range(8), 30, 31, 32, 33])
    reserve(allocator, first("bad", range(12)), first("other", [*range(8), 40, 41, 42, 43, 44]))
    reply = reserve(allocator, commits=[BlockCommit("bad", 12), BlockCommit("other", 12)], discards=["bad"])
    assert reply.stats.cached_blocks == 0
    assert reserve(allocator, first("probe", range(12), num_new=1)).grants[0].num_cached_tokens == 0
    reserve(allocator, releases=["probe"])
    # The other request goes on with its blocks; nothing it commits from now on may be matched.
    reserve(allocator, BlockNeed("other", 13, 4), commits=[BlockCommit("other", 16, (1, 2, 3))])
    reply = reserve(allocator, releases=["bad", "other"])
    assert (reply.stats.free_blocks, reply.stats.cached_blocks) == (16, 0)


def test_discard_before_the_first_commit_prevents_it():
    allocator = KVAllocator(8, BLOCK)
    reserve(allocator, first("bad", range(8)))
    reserve(allocator, discards=["bad"])
    reply = reserve(allocator, commits=[BlockCommit("bad", 8)], releases=["bad"])
    assert reply.stats.free_blocks == 8


def test_discard_reaches_a_request_released_shortly_before():
    allocator = KVAllocator(8, BLOCK)
    run_and_release(allocator, "bad", range(8))
    reply = reserve(allocator, discards=["bad", "unknown"])
    assert reply.stats.free_blocks == 8
    run_and_release(allocator, "fresh", range(8))
    reply = reserve(allocator, discards=["bad"])  # its blocks are gone already: those of others stay
    assert reply.stats.cached_blocks == 2


def test_without_prefix_cache_nothing_stays():
    allocator = KVAllocator(8, BLOCK, prefix_cache=False)
    run_and_release(allocator, "a", range(12))
    reply = reserve(allocator, first("b", range(12)))
    assert reply.grants[0].num_cached_tokens == 0 and reply.stats.cached_blocks == 0
    assert reserve(allocator, releases=["b"]).stats.free_blocks == 8


def test_misuse_is_answered_and_harms_nobody(caplog):
    allocator = KVAllocator(8, BLOCK)
    assert reserve(allocator, BlockNeed("nobody", 4, 4)).exhausted == ("nobody",)
    reserve(allocator, first("a", range(8)))
    reserve(allocator, commits=[BlockCommit("a", 400), BlockCommit("nobody", 4)])
    assert "commit_too_long" in caplog.text
    reply = reserve(allocator, first("a", range(100, 108)))
    assert "admitted_twice" in caplog.text
    assert (held(reply), reply.stats.cached_blocks) == (2, 2)


def test_release_all_keeps_the_tree():
    allocator = KVAllocator(8, BLOCK)
    reserve(allocator, first("a", range(8)), first("b", range(50, 55)))
    reserve(allocator, commits=[BlockCommit("a", 8)])
    allocator.release_all()
    allocator.check_integrity()
    assert allocator.num_requests == 0
    assert (allocator.stats().cached_blocks, allocator.stats().free_blocks) == (2, 6)


def test_integrity_check_notices_a_leak():
    allocator = KVAllocator(8, BLOCK)
    reserve(allocator, first("a", range(8)))
    allocator._pool.hold(0)
    with pytest.raises(IntegrityError, match="block 0 counts 2 holders, 1 hold it"):
        allocator.check_integrity()


def test_counts_hits_and_queries():
    allocator = KVAllocator(16, BLOCK)
    run_and_release(allocator, "a", range(10))
    stats = reserve(allocator, first("b", range(10))).stats
    assert (stats.hit_tokens_total, stats.query_tokens_total) == (8, 20)
