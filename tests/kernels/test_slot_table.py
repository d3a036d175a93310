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
    table.empty(num_slots)
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


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(["crf", "lru"]),
    num_slots=st.integers(0, L * E),
    script=st.lists(
        publishes.map(lambda found: found[:4]) | st.integers(0, L * E) | st.sampled_from(["finish", "cancel"]),
        max_size=16,
    ),
)
def test_a_change_of_capacity_keeps_the_best_records_while_publishes_go_on(policy, num_slots, script):
    table = _native.SlotTable(L, E, num_slots, policy, 4.0)
    contents = {}  # slot -> record, as the device has it
    uses = {}
    clock = 0
    vacating = None  # (capacity, moves)

    def residents():
        return {slot: (layer, expert) for slot, layer, expert in table.resident()}

    for event in script:
        if isinstance(event, int) and vacating is None and event >= table.num_slots:
            table.grow(event)
            assert table.num_slots == event
        elif isinstance(event, int) and vacating is None:
            before = residents()
            vacated = table.vacate(event)
            vacating = (event, vacated.moves)
            after = residents()
            assert table.num_slots > event and after.items() <= before.items()
            assert {source for source, _ in vacated.moves} == {slot for slot in after if slot >= event}
            targets = {target for _, target in vacated.moves}
            assert len(targets) == len(vacated.moves) and not targets & after.keys()
            assert all(0 <= target < event for target in targets)
            gone = set(before.values()) - set(after.values())
            assert len(after) <= event and (not gone or len(after) >= min(event, len(before)) - E)
            if policy == "lru" and gone and after:
                assert max(uses[record] for record in gone) <= min(uses[record] for record in after.values())
        elif isinstance(event, int):
            with pytest.raises(RuntimeError, match="being vacated"):
                table.vacate(min(event, table.num_slots))
            with pytest.raises(RuntimeError, match="being vacated"):
                table.grow(table.num_slots + 1)
        elif event == "finish":
            capacity, moves = vacating or (table.num_slots, [])
            before = set(residents().values())
            contents |= {target: contents[source] for source, target in moves}
            table.finish_vacate()
            assert table.num_slots == capacity and set(residents().values()) == before
            contents = {slot: record for slot, record in contents.items() if slot < capacity}
            vacating = None
        elif event == "cancel":
            before = residents()
            table.cancel_vacate()
            assert residents() == before
            vacating = None
        else:
            for layer, experts, admit, num_tokens in event:
                answers = table.access(layer, experts, [1] * len(experts), admit[: len(experts)], num_tokens)
                for expert, (slot, destination) in zip(experts, answers, strict=True):
                    assert slot < 0 or contents[slot] == (layer, expert)
                    if destination >= 0:
                        contents[destination] = (layer, expert)
                        assert vacating is None or destination < vacating[0]
                        assert vacating is None or destination not in {target for _, target in vacating[1]}
                clock += 1
                uses |= {(layer, expert): clock for expert, may in zip(experts, admit, strict=False) if may}
                if vacating is not None:
                    assert {source for source, _ in vacating[1]} == {s for s in residents() if s >= vacating[0]}
        table.check_integrity()
        for slot, record in residents().items():
            assert contents[slot] == record


def test_emptying_the_table_ends_a_change_of_capacity():
    table = _native.SlotTable(1, E, 4, "crf")
    for expert in range(4):
        table.access(0, [expert], [1], [True], 1)
    table.vacate(2)
    table.empty(4)
    table.check_integrity()
    assert table.num_slots == 4 and table.vacate(1).num_evicted == 0
    table.finish_vacate()
    assert table.num_slots == 1
    with pytest.raises(ValueError, match=r"num_slots 2 is not in 0\.\.1"):
        table.vacate(2)
    with pytest.raises(ValueError, match="num_slots 0 is not in 1"):
        table.grow(0)


def test_the_score_curve_rises_to_one():
    table = _native.SlotTable(1, E, 4, "crf", 32.0)
    assert table.score_curve([0, 3]) == [0.0, 0.0]
    for _ in range(5):
        table.access(0, [0, 1], [1, 1], [True, True], 1)
    table.access(0, [2], [1], [True], 1)
    curve = table.score_curve([0, 1, 2, 3, 9])
    assert curve[0] == 0.0 and curve[-1] == pytest.approx(1.0) and sorted(curve) == curve
    assert curve[1] == pytest.approx(curve[2] - curve[1]) and curve[3] == pytest.approx(1.0)
