"""How memory is divided: the rules, whatever the numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.costs import CostModel, SideCost
from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit, choose_granule
from freetoken.elastic.rebalance import ElasticFigures, ElasticPolicy, plan_auto, plan_rebalance, price_of_miss_ms
from freetoken.errors import CapacityError

shapes = st.builds(
    lambda granule, number, stride, block, slots: ArenaShape(
        granule, number, stride, block, 16, max_slots=slots, min_slots=1, min_blocks=1
    ),
    st.sampled_from([4096, 65536, 1 << 20]),
    st.integers(8, 400),
    st.integers(1, 12).map(lambda n: n * 4096),
    st.integers(100, 60_000),
    st.integers(4, 4000),
).filter(lambda shape: 1 <= shape.min_kv_granules < shape.max_kv_granules)
rates = st.floats(0, 1e6)
figures = st.builds(
    lambda less, now, more, uses, waiting, starved, again, hits, peak: ElasticFigures(
        *sorted((less, now, more)), uses, 0.3, waiting, starved, again, hits, 1.5, peak
    ),
    st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), rates, st.integers(0, 50), st.integers(0, 5000), rates, rates,
    st.integers(0, 5000),
)  # fmt: skip


def check(shape: ArenaShape, split: ArenaSplit) -> None:
    assert split.total <= shape.num_granules
    used = shape.slots_in(split.slot_granules) * shape.slot_stride_bytes
    used += shape.blocks_in(split.kv_granules) * shape.block_bytes
    assert used <= shape.budget_bytes
    assert split.kv_granules >= shape.min_kv_granules
    assert shape.slots_in(split.slot_granules) >= shape.min_slots


@settings(max_examples=150, deadline=None)
@given(shapes, st.data())
def test_pools_never_exceed_the_budget_and_more_kv_never_yields_more_slots(
    shape: ArenaShape, data: st.DataObject
) -> None:
    current = shape.split(data.draw(st.integers(shape.min_kv_granules, shape.max_kv_granules)))
    check(shape, current)
    held = data.draw(st.integers(0, shape.blocks_in(current.kv_granules)))
    before: ArenaSplit | None = None
    for tokens in sorted(data.draw(st.lists(st.integers(1, 20_000_000), max_size=6))):
        try:
            split = plan_rebalance(shape, current, held_blocks=held, kv_tokens=tokens)
        except CapacityError as error:
            assert "would work" in str(error)
            continue
        check(shape, split)
        assert shape.blocks_in(split.kv_granules) * 16 >= tokens
        assert shape.blocks_in(split.kv_granules) >= held
        if before is not None:
            assert shape.slots_in(split.slot_granules) <= shape.slots_in(before.slot_granules)
        before = split
    for size in data.draw(st.lists(st.integers(0, 400 << 20), max_size=6)):
        try:
            split = plan_rebalance(shape, current, held_blocks=held, expert_bytes=size)
        except CapacityError as error:
            assert "would work" in str(error)
            continue
        check(shape, split)
        assert split.slot_granules * shape.granule_bytes <= size
        assert shape.blocks_in(split.kv_granules) >= held


@settings(max_examples=150, deadline=None)
@given(shapes, figures, st.data())
def test_automatic_decisions_keep_the_rules(shape: ArenaShape, found: ElasticFigures, data: st.DataObject) -> None:
    current = shape.split(data.draw(st.integers(shape.min_kv_granules, shape.max_kv_granules)))
    decision = plan_auto(shape, current, found)
    check(shape, decision.split)
    if decision.split.kv_granules > current.kv_granules:
        assert decision.trigger == "kv_pressure" and found.starved_blocks > 0
        assert decision.kv_ms_per_s > decision.slot_ms_per_s
    if decision.split.kv_granules < current.kv_granules:
        assert decision.trigger == "idle_kv" and found.starved_blocks == 0
        assert shape.blocks_in(decision.split.kv_granules) > found.peak_held_blocks
    assert (decision.split == current) == decision.reason.startswith("nothing")
    assert (decision.split != current) == (decision.verdict in ("kv_grows", "slots_grow"))


def test_the_value_named_in_an_error_works() -> None:
    shape = ArenaShape(1 << 20, 100, 300_000, 20_000, 16, max_slots=10_000, min_slots=8, min_blocks=2)
    current = shape.split(50)
    for wish in ({"kv_tokens": 10**9}, {"expert_bytes": 5}, {"expert_bytes": 1 << 40}, {"kv_tokens": 16}):
        with pytest.raises(CapacityError) as caught:
            plan_rebalance(shape, current, held_blocks=700, **wish)
        name, _, value = str(caught.value).rpartition("; ")[2].partition(" ")[0].partition("=")
        check(shape, plan_rebalance(shape, current, held_blocks=700, **{name: int(value)}))


def test_kv_grows_under_pressure_and_comes_back_when_idle() -> None:
    shape = ArenaShape(1 << 20, 100, 300_000, 20_000, 16, max_slots=10_000, min_slots=8, min_blocks=2)
    current = shape.split(20)
    busy = ElasticFigures(0.5, 0.6, 0.65, 1000, 0.2, waiting_requests=3, starved_blocks=600, peak_held_blocks=1000)
    grown = plan_auto(shape, current, busy)
    assert grown.split.kv_granules == 20 + shape.granules_for_blocks(600)
    assert "3 requests held back" in grown.reason
    calm = dataclasses.replace(busy, waiting_requests=0, starved_blocks=0, peak_held_blocks=1500)
    assert plan_auto(shape, grown.split, calm).split == grown.split  # still within the reserve
    idle = dataclasses.replace(calm, peak_held_blocks=100)
    split = grown.split
    for _ in range(20):
        split = plan_auto(shape, split, idle).split
    assert shape.blocks_in(split.kv_granules) >= 129 and split.kv_granules < 5
    assert plan_auto(shape, split, idle).split == split


def test_idle_kv_that_the_longest_request_would_need_is_kept() -> None:
    shape = ArenaShape(1 << 20, 100, 300_000, 20_000, 16, 10_000, min_slots=8, min_blocks=2, context_blocks=1000)
    split = shape.split(40)
    for _ in range(20):
        split = plan_auto(shape, split, ElasticFigures(0.5, 0.6, 0.65, 1000, 0.2, peak_held_blocks=10)).split
    assert split.kv_granules == shape.granules_for_blocks(1000) < 40
    asked = plan_rebalance(shape, split, held_blocks=0, kv_tokens=500 * 16)  # an operator may want that
    assert shape.blocks_in(asked.kv_granules) < 1000
    assert plan_auto(shape, asked, ElasticFigures(0.5, 0.6, 0.65, 1000, 0.2)).split == asked


def test_slots_that_are_worth_more_are_kept() -> None:
    shape = ArenaShape(1 << 20, 100, 300_000, 20_000, 16, max_slots=10_000, min_slots=8, min_blocks=2)
    current = shape.split(20)
    found = ElasticFigures(0.2, 0.6, 0.9, 1e6, 0.2, waiting_requests=1, starved_blocks=600)
    assert plan_auto(shape, current, found).split == current
    assert plan_auto(shape, current, found, ElasticPolicy(advantage=1e-9)).split != current


@pytest.mark.parametrize("total", [1, 10_000, 1 << 20, 300 << 20, 8 << 30, 140 << 30])
@pytest.mark.parametrize("alignment", [4096, 2 << 20])
def test_granules_fit_the_budget(total: int, alignment: int) -> None:
    granule = choose_granule(total, alignment)
    assert granule % alignment == 0 and granule <= 32 << 20
    assert granule in (alignment, 32 << 20) or total // granule >= 64
    assert choose_granule(total, alignment, 5 << 20) % alignment == 0


def test_demand_that_flickers_around_the_capacity_causes_at_most_two_changes() -> None:
    shape = ArenaShape(1 << 20, 100, 300_000, 20_000, 16, max_slots=10_000, min_slots=8, min_blocks=2)
    split = shape.split(20)
    capacity = shape.blocks_in(20)
    changes, recent = 0, [0] * 4
    for step in range(1000):
        demand = capacity * (11 if step % 2 else 9) // 10
        held = min(demand, shape.blocks_in(split.kv_granules))
        recent = [*recent[1:], held]
        short = demand - held
        found = ElasticFigures(
            0.5, 0.6, 0.65, 1000, 0.2, waiting_requests=1.0 if short else 0.0, starved_blocks=short,
            peak_held_blocks=max(recent),
        )  # fmt: skip
        decided = plan_auto(shape, split, found).split
        changes += decided != split
        split = decided
    assert 1 <= changes <= 2


def test_the_price_of_a_miss_is_what_both_parties_together_take_for_it() -> None:
    fetch, cpu = SideCost(10e3, 1 / 50), SideCost(12e3, 1 / 100)
    costs = CostModel(fetch, fetch, cpu, cpu, 1 / 2000)
    record = 3e6

    def price(hit_ratio: float, fraction: float | None, costs: CostModel = costs) -> float:
        return price_of_miss_ms(costs, record, 8, hit_ratio, fraction)

    for hit_ratio in (0.0, 0.3, 0.6):
        assert price(hit_ratio, None) == pytest.approx(record / (50 + 100) / 1e6, rel=0.02)
        assert price(hit_ratio, 1.0) == pytest.approx(record / 50 / 1e6)
        assert price(hit_ratio, 0.0) == pytest.approx(record / 100 / 1e6)
        assert price(hit_ratio, 0.5) == pytest.approx(record / 2 / 50 / 1e6)
    # The CPU device computes hits as well: a miss costs what it takes longer than a hit.
    slow = CostModel(fetch, fetch, cpu, cpu, 1 / 200, True)
    assert price(0.5, 1.0, slow) == pytest.approx(record * (1 / 50 - 1 / 200) / 1e6)
    assert price_of_miss_ms(costs, record, 1, 0.5, None) > 0.0
