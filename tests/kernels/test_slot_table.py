"""The slot table's Python surface; its rules are checked against a model in csrc/tests/test_slot_table.cpp."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken import _native

L, E = 3, 6

publishes = st.lists(
    st.tuples(
        st.integers(0, L - 1),
        st.lists(st.integers(0, E - 1), unique=True, max_size=E),
        st.lists(st.booleans(), min_size=E, max_size=E),
        st.integers(1, 4),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(policy=st.sampled_from(["crf", "lru"]), num_slots=st.integers(0, L * E), publishes=publishes)
def test_invariants_over_any_sequence(policy, num_slots, publishes):
    table = _native.SlotTable(L, E, num_slots, policy, 4.0)
    in_flight = {}
    for layer, experts, admit, num_tokens in publishes:
        readable = {(at, expert): slot for slot, at, expert in table.resident()}
        filled = {**readable, **in_flight}
        answers = table.access(layer, experts, [num_tokens] * len(experts), admit[: len(experts)], num_tokens)
        table.check_integrity()
        named = {slot for slot, _ in answers if slot >= 0}
        destinations = [destination for _, destination in answers if destination >= 0]
        assert len(set(destinations)) == len(destinations) and not named & set(destinations)
        in_flight = {}
        for expert, may_admit, (slot, destination) in zip(experts, admit, answers, strict=False):
            assert slot == filled.get((layer, expert), -1)  # fills of the publish before are complete now
            assert destination == -1 or (slot == -1 and may_admit and destination < num_slots)
            if destination >= 0:
                in_flight[layer, expert] = destination
                assert table.lookup(layer, expert) == -1
        assert table.num_resident == len(table.resident()) <= num_slots - len(in_flight)
    table.invalidate_all()
    table.check_integrity()
    assert table.num_resident == 0 and table.resident() == []


def test_lru_evicts_the_least_recently_used():
    table = _native.SlotTable(1, E, 2, "lru")
    touch = lambda expert: table.access(0, [expert], [1], [True], 1)[0]  # noqa: E731
    assert touch(0) == (-1, 0) and touch(1) == (-1, 1)
    assert touch(0) == (0, -1)
    assert touch(2) == (-1, 1)
    assert touch(0) == (0, -1) and touch(2) == (1, -1)
    assert touch(1) == (-1, 0)


def test_more_experts_than_slots():
    table = _native.SlotTable(1, E, 2)
    answers = table.access(0, list(range(E)), [1] * E, [True] * E, 1)
    assert sorted(destination for _, destination in answers) == [-1] * (E - 2) + [0, 1]
    answers = table.access(0, list(range(E)), [1] * E, [True] * E, 1)
    assert sorted(slot for slot, _ in answers) == [-1] * (E - 2) + [0, 1]
    assert all(destination == -1 for _, destination in answers)  # both slots are named: nobody can go


@pytest.mark.parametrize(
    "arguments,match",
    [
        ((3, [0], [1], [True], 1), "layer 3"),
        ((0, [E], [1], [True], 1), "expert 6"),
        ((0, [-1], [1], [True], 1), "expert -1"),
        ((0, [1, 1], [1, 1], [True, True], 1), "named twice"),
        ((0, [0], [1, 1], [True], 1), "token_counts"),
        ((0, [0], [2], [True], 1), "token_counts"),
        ((0, [0], [1], [], 1), "admit"),
        ((0, [0], [0], [True], -1), "num_tokens -1"),
    ],
)
def test_bad_publishes_are_refused(arguments, match):
    table = _native.SlotTable(L, E, 4)
    with pytest.raises(ValueError, match=match):
        table.access(*arguments)
    table.check_integrity()


def test_bad_settings_are_refused():
    for arguments, match in (
        ((0, E, 4), "num_layers 0"),
        ((L, E, -1), "num_slots -1"),
        ((L, E, 4, "fifo"), "fifo"),
        ((L, E, 4, "crf", 0.0), "half_life"),
        ((L, E, 4, "crf", float("nan")), "half_life"),
        ((L, E, 4, "crf", 8.0, 4.0), "long_half_life"),
        ((L, E, 4, "crf", 8.0, 64.0, 0.9), "margin"),
        ((L, E, 4, "crf", 8.0, 64.0, 1.0, -1.0), "floor"),
    ):
        with pytest.raises(ValueError, match=match):
            _native.SlotTable(*arguments)


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(["crf", "lru"]),
    num_slots=st.integers(0, L * E),
    script=st.lists(publishes.map(lambda found: found[:8]) | st.integers(0, L * E), max_size=10),
)
def test_a_change_of_capacity_keeps_the_best_records(policy, num_slots, script):
    table = _native.SlotTable(L, E, num_slots, policy, 4.0)
    contents = {}  # slot -> record, as the device has it
    uses = {}
    clock = 0
    for event in script:
        if isinstance(event, int):
            before = {slot: (layer, expert) for slot, layer, expert in table.resident()}
            plan = table.plan_resize(event)
            table.check_integrity()
            assert {slot: (layer, expert) for slot, layer, expert in table.resident()} == before
            assert not {a for a, _ in plan.moves} & {b for _, b in plan.moves}
            assert all(b < event <= a for a, b in plan.moves)
            for source, target in plan.moves:
                assert target not in contents or target in plan.evicted or contents[target] not in before.values()
                contents[target] = contents[source]
            table.resize(plan)
            assert table.num_slots == event
            after = {slot: (layer, expert) for slot, layer, expert in table.resident()}
            gone = set(before.values()) - set(after.values())
            assert len(after) <= event and (not gone or len(after) >= min(event, len(before)) - E)
            if policy == "lru" and gone and after:
                assert max(uses[record] for record in gone) <= min(uses[record] for record in after.values())
            contents = {slot: record for slot, record in contents.items() if slot < event}
        else:
            for layer, experts, admit, num_tokens in event:
                answers = table.access(layer, experts, [1] * len(experts), admit[: len(experts)], num_tokens)
                for expert, (_, destination) in zip(experts, answers, strict=True):
                    if destination >= 0:
                        contents[destination] = (layer, expert)
                clock += 1
                uses |= {(layer, expert): clock for expert, may in zip(experts, admit, strict=False) if may}
        table.check_integrity()
        for slot, layer, expert in table.resident():
            assert contents[slot] == (layer, expert)


def test_a_plan_is_void_after_a_publish():
    table = _native.SlotTable(1, E, 4, "crf")
    table.access(0, [0], [1], [True], 1)
    plan = table.plan_resize(2)
    table.access(0, [1], [1], [True], 1)
    with pytest.raises(RuntimeError, match="publish"):
        table.resize(plan)


def test_the_score_curve_rises_to_one():
    table = _native.SlotTable(1, E, 4, "crf", 32.0)
    assert table.score_curve([0, 3]) == [0.0, 0.0]
    for _ in range(5):
        table.access(0, [0, 1], [1, 1], [True, True], 1)
    table.access(0, [2], [1], [True], 1)
    curve = table.score_curve([0, 1, 2, 3, 9])
    assert curve[0] == 0.0 and curve[-1] == pytest.approx(1.0) and sorted(curve) == curve
    assert curve[1] == pytest.approx(curve[2] - curve[1]) and curve[3] == pytest.approx(1.0)
