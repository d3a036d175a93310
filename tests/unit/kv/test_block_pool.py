import pytest

from freetoken.kv.block_pool import BlockPool


def test_blocks_move_between_free_held_and_idle():
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.num_free == 1
    assert pool.hold(1) == 2
    assert pool.drop(1) == 1
    assert pool.drop(1) == 0
    assert not pool.is_free(1) and pool.holders(1) == 0
    assert pool.hold(1) == 1  # an idle block can be shared again
    pool.drop(1)
    pool.give_back(1)
    assert pool.is_free(1) and pool.num_free == 2


def test_taking_more_than_is_free_takes_nothing():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        pool.take(3)
    assert pool.num_free == 2 and pool.take(0) == []


def test_misuse_is_named():
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(ValueError, match="block 1 is free"):
        pool.hold(1)
    with pytest.raises(ValueError, match="block 1 has no holder"):
        pool.drop(1)
    with pytest.raises(ValueError, match="held 1 times"):
        pool.give_back(0)
    with pytest.raises(ValueError, match="free already"):
        pool.give_back(1)
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
