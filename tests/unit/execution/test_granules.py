"""Granules move between pools: nothing is lost whatever fails, and the budget holds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit
from freetoken.errors import CapacityError, FreeTokenError
from freetoken.execution.arena import Arena
from freetoken.execution.arena_pools import KV, SLOTS
from freetoken.execution.granules import GranuleDriver, Granules, HostGranules
from freetoken.execution.kv_geometry import KVGeometry

PAGE = 4096


class CountingDriver:
    """A driver of numbers that checks its use. ``fail_at``: the calls that fail, counted from 1."""

    alignment_bytes = 8

    def __init__(self, fail_at: frozenset[int] = frozenset()) -> None:
        self.fail_at = fail_at
        self.calls = 0
        self.granules: set[int] = set()
        self.mapped: dict[tuple[str, int], int] = {}
        self.allowed: set[tuple[str, int]] = set()
        self.ranges: set[str] = set()

    def _call(self) -> None:
        self.calls += 1
        if self.calls in self.fail_at:
            raise CapacityError("out of luck")

    def reserve(self, name: str, size_bytes: int) -> str:
        self._call()
        self.ranges.add(name)
        return name

    def create(self, size_bytes: int) -> int:
        self._call()
        self.granules.add(len(self.granules))
        return len(self.granules) - 1

    def map(self, where: str, offset: int, size_bytes: int, granule: int) -> None:
        self._call()
        assert (where, offset) not in self.mapped and granule in self.granules
        self.mapped[where, offset] = granule

    def allow(self, where: str, offset: int, size_bytes: int) -> None:
        self._call()
        for at in range(offset, offset + size_bytes, 8):
            assert (where, at) in self.mapped
            self.allowed.add((where, at))

    def unmap(self, where: str, offset: int, size_bytes: int) -> None:
        self._call()
        del self.mapped[where, offset]
        self.allowed.discard((where, offset))

    def destroy(self, granule: int, size_bytes: int) -> None:
        assert granule not in self.mapped.values()
        self.granules.discard(granule)

    def free(self, where: str, size_bytes: int) -> None:
        assert not any(name == where for name, _ in self.mapped)
        self.ranges.discard(where)


def usable(driver: CountingDriver, granules: Granules) -> dict[str, list[int]]:
    """What each pool would find in its granules."""
    found = {}
    for name, pool in granules.pools.items():
        at = [(pool.where, number * 8) for number in range(len(pool.granules))]
        assert all(place in driver.allowed for place in at)
        found[name] = [driver.mapped[place] for place in at]
        assert found[name] == pool.granules
    return found


sizes = st.tuples(st.integers(0, 10), st.integers(0, 10)).filter(lambda pair: sum(pair) <= 10)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.sampled_from(["commit", "abort"])), max_size=12), st.frozensets(st.integers(24, 120))
)
def test_any_failures_leave_the_division_as_it_was(changes: Any, fail_at: frozenset[int]) -> None:
    driver = CountingDriver(fail_at)
    granules = Granules(driver, 8, 10, {"slots": (6, 10), "kv": (3, 10)})
    for (slots, kv), end in changes:
        before = usable(driver, granules)
        try:
            granules.prepare({"slots": slots, "kv": kv})
        except FreeTokenError:
            assert usable(driver, granules) == before
            continue
        assert usable(driver, granules) == before  # while it is prepared, the old division serves
        if end == "commit":
            granules.commit()
            after = usable(driver, granules)
            assert (granules.size("slots"), granules.size("kv")) == (slots, kv)
            for name in after:  # what stays, stays in its place
                kept = min(len(before[name]), len(after[name]))
                assert after[name][:kept] == before[name][:kept]
            granules.release()
        else:
            granules.abort()
            assert usable(driver, granules) == before
        granules.check_integrity()
        assert len(driver.granules) == 10
    driver.fail_at = frozenset()
    granules.close()
    assert not driver.mapped and not driver.granules and not driver.ranges


def test_every_call_of_the_first_allocation_may_fail() -> None:
    for number in itertools.count(1):
        driver = CountingDriver(frozenset({number}))
        try:
            Granules(driver, 8, 5, {"slots": (2, 5), "kv": (2, 5)})
        except CapacityError as error:
            assert "--vram" in str(error)
            assert not driver.mapped and not driver.granules and not driver.ranges
        else:
            assert number > 2 + 5 + 4 + 2
            return


def test_what_cannot_be_unmapped_is_tried_again_before_the_next_change() -> None:
    driver = CountingDriver()
    granules = Granules(driver, 8, 4, {"slots": (2, 4), "kv": (2, 4)})
    granules.prepare({"slots": 1, "kv": 3})
    granules.commit()
    driver.fail_at = frozenset(range(driver.calls + 1, driver.calls + 3))
    granules.release()
    with pytest.raises(FreeTokenError, match="still mapped"):
        granules.prepare({"slots": 2, "kv": 2})
    assert (granules.size("slots"), granules.size("kv")) == (1, 3)
    granules.prepare({"slots": 2, "kv": 2})
    granules.commit()
    granules.close()
    assert not driver.mapped


def test_sizes_beyond_the_budget_are_refused() -> None:
    granules = Granules(CountingDriver(), 8, 4, {"slots": (2, 3), "kv": (2, 4)})
    for wanted in ({"slots": 3}, {"slots": 4, "kv": 0}, {"kv": -1}):
        with pytest.raises(ValueError, match="granules"):
            granules.prepare(wanted)
    granules.prepare({})
    with pytest.raises(ValueError, match="under way"):
        granules.prepare({})


class FailingDriver:
    """A driver that fails at its ``fail_at``-th call from now on."""

    alignment_bytes = PAGE

    def __init__(self, inner: GranuleDriver) -> None:
        self.inner = inner
        self.fail_at = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        def counted(*arguments: Any) -> Any:
            self.fail_at -= 1
            if self.fail_at == 0:
                raise FreeTokenError(f"no {name} today")
            return call(*arguments)

        return counted


SHAPE = ArenaShape(PAGE, 12, 5000, 3000, 16, max_slots=9, min_slots=1, min_blocks=1)


def build(driver: FailingDriver | None = None) -> Arena:
    kv = KVGeometry(num_blocks=5, num_layers=1, block_size=1, num_kv_heads=1, head_dim=375, dtype="f32")
    assert kv.block_bytes == SHAPE.block_bytes
    split = SHAPE.split(4)
    return Arena(kv, 99, SHAPE.slot_stride_bytes, (SHAPE, split), driver or FailingDriver(HostGranules(12 * PAGE)))


def record(arena: Arena, pool: str, index: int) -> Any:
    segment, stride = (
        (arena.slot_segment, SHAPE.slot_stride_bytes) if pool == "slots" else (arena.kv_segment, SHAPE.block_bytes)
    )
    return np.frombuffer(memoryview(segment), np.uint8)[index * stride : (index + 1) * stride]


def test_records_stay_at_their_addresses_and_move_where_they_are_told() -> None:
    arena = build()
    assert (arena.num_slots, arena.num_blocks) == (6, 5)
    for slot in range(6):
        record(arena, "slots", slot)[:] = slot + 1
    for block in range(5):
        record(arena, "kv", block)[:] = 100 + block
    assert arena.pools is not None
    assert arena.pools.prepare(7, SHAPE.split(8)) == (3, 10)
    assert record(arena, "slots", 5).tolist() == [6] * 5000
    arena.move(SLOTS, [(5, 0), (4, 2)])
    assert arena.num_slots == 6 and record(arena, "slots", 5).tolist() == [6] * 5000  # the old places are still read
    arena.commit()
    arena.pools.release()
    assert (arena.num_slots, arena.num_blocks, arena.pools.resize_id) == (3, 10, 7)
    assert [int(record(arena, "slots", slot)[-1]) for slot in range(3)] == [6, 2, 5]
    assert [int(record(arena, "kv", block)[0]) for block in range(5)] == [100, 101, 102, 103, 104]
    for block in range(10):
        record(arena, "kv", block)[:] = 50 + block
    arena.pools.prepare(8, SHAPE.split(2))
    arena.move(KV, [(9, 0), (8, 1)])
    arena.commit()
    arena.pools.release()
    assert (arena.num_slots, arena.num_blocks) == (8, 2)
    assert [int(record(arena, "kv", block)[0]) for block in range(2)] == [59, 58]
    assert [int(record(arena, "slots", slot)[-1]) for slot in range(3)] == [6, 2, 5]
    arena.close()


@pytest.mark.parametrize("kv_granules", [1, 11])
def test_the_kth_allocation_fails_for_every_k(kv_granules: int) -> None:
    driver = FailingDriver(HostGranules(12 * PAGE))
    arena = build(driver)
    assert arena.pools is not None
    for slot in range(arena.num_slots):
        record(arena, "slots", slot)[:] = slot + 1
    for block in range(arena.num_blocks):
        record(arena, "kv", block)[:] = 100 + block
    for number in itertools.count(1):
        driver.fail_at = number
        try:
            arena.pools.prepare(number, SHAPE.split(kv_granules))
        except FreeTokenError:
            driver.fail_at = 0
            assert (arena.num_slots, arena.num_blocks, arena.pools.resize_id) == (6, 5, 0)
            for slot in range(6):
                assert (record(arena, "slots", slot) == slot + 1).all()
            for block in range(5):
                assert (record(arena, "kv", block) == 100 + block).all()
            arena.pools.granules.check_integrity()
        else:
            break
    assert number > 3
    arena.close()


def test_moves_out_of_nowhere_are_refused_before_anything_is_copied() -> None:
    arena = build()
    assert arena.pools is not None
    arena.pools.prepare(1, ArenaSplit(4, 8))
    for pool, moves in (
        (SLOTS, [(2, 0)]),
        (SLOTS, [(6, 0)]),
        (SLOTS, [(5, 3)]),
        (SLOTS, [(5, 0), (4, 0)]),
        (KV, [(4, 1)]),
    ):
        with pytest.raises(ValueError, match="move"):
            arena.move(pool, moves)
    arena.move(SLOTS, [(3, 0)])
    arena.close()
