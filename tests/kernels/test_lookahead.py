"""Hints as ExpertCache's thread answers them, by raw memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from freetoken import _native
from freetoken.testing.raw_mailbox import RawMailbox, RawPlan

K, L, E, SLOTS = 2, 4, 8, 3
GEOMETRY = (6, K, 16, L, E, 4)
AHEAD = 3


class Rig:
    """A server, and a device that publishes one token at a time."""

    def __init__(self, fetchable: np.ndarray | None = None) -> None:
        segment = _native.SharedSegment.create("mailbox", _native.Mailbox.required_bytes(*GEOMETRY))
        self.mailbox = _native.Mailbox.create(segment, 9, *GEOMETRY)
        self.raw = RawMailbox(segment, self.mailbox.layout())
        self.server = _native.CacheServer(
            self.mailbox, _native.SlotTable(L, E, SLOTS), 1.0, False, 0, [100] * L, True, fetchable
        )
        self.server.set_lookahead(True)
        self.server.start()

    def hint(self, layer: int, ids: Sequence[int], step: int = 1) -> int:
        return self.raw.await_ahead(self.raw.hint(layer, ids, step_id=step))

    def publish(self, layer: int, ids: Sequence[int], step: int = 1, flags: int = 0) -> RawPlan:
        flags |= self.raw.layout["flag_device_client"]
        return self.raw.await_plan(self.raw.publish(layer, np.array([ids], np.int32), step_id=step, flags=flags))

    def counts(self) -> tuple[int, int, int]:
        counters = self.server.counters()
        return counters["hints"], counters["copied_ahead"], counters["used_ahead"]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.server.stop()


def kinds(plan: RawPlan) -> dict[int, int]:
    return {entry["expert"]: entry["kind"] for entry in plan.entries}


def test_the_best_guess_without_a_slot_is_copied_and_used(rig: Rig) -> None:
    rig.publish(1, [4, 5])
    rig.publish(2, [0, 1])  # now 4 and 5 of layer 1 are resident
    assert rig.hint(1, [4, 6], step=2) == 6
    rig.publish(0, [0, 1], step=2)
    plan = rig.publish(1, [6, 4], step=2)
    assert kinds(plan) == {4: rig.raw.layout["kind_hit"], 6: rig.raw.layout["kind_ahead"]}
    assert plan.header["num_hits"] == 1 and plan.header["num_fetches"] == 1
    assert plan.entries[1]["expert"] == 6 and plan.entries[1]["source_slot"] == -1
    assert rig.counts() == (1, 1, 1)
    assert rig.raw.layout["kind_ahead"] == AHEAD


def test_it_may_fill_a_slot_as_a_fetch_may(rig: Rig) -> None:
    assert rig.hint(1, [6, 7]) == 6
    plan = rig.publish(1, [6, 5])
    ahead = next(entry for entry in plan.entries if entry["expert"] == 6)
    assert ahead["kind"] == AHEAD and ahead["destination_slot"] >= 0 and plan.header["num_admitted"] == 2
    assert kinds(rig.publish(2, [0, 1])) == {0: 1, 1: 1}
    assert rig.raw.slot_of[1, 6] == ahead["destination_slot"]


def test_a_hint_for_the_next_layer_may_come_before_this_layers_publish(rig: Rig) -> None:
    assert rig.hint(1, [6, 7]) == 6
    assert rig.hint(2, [3, 4]) == 3
    assert kinds(rig.publish(1, [6, 7]))[6] == AHEAD
    assert kinds(rig.publish(2, [3, 4]))[3] == AHEAD
    assert rig.counts() == (2, 2, 2)


@pytest.mark.parametrize("case", ["late", "other step", "wrong", "device only", "no such layer", "no such expert"])
def test_a_hint_that_cannot_be_used_does_no_harm(rig: Rig, case: str) -> None:
    fetch = rig.raw.layout["kind_fetch"]
    if case == "late":
        rig.publish(1, [6, 7])
        assert rig.hint(1, [6, 7]) == -1
        assert kinds(rig.publish(1, [3, 4], step=2)) == {3: fetch, 4: fetch}
    elif case == "other step":
        assert rig.hint(1, [6, 7]) == 6
        assert kinds(rig.publish(1, [6, 7], step=2)) == {6: fetch, 7: fetch}
    elif case == "wrong":
        assert rig.hint(1, [6, 7]) == 6
        before = rig.server.counters()["fetched_bytes"]
        assert kinds(rig.publish(1, [3, 4])) == {3: fetch, 4: fetch}
        assert rig.server.counters()["fetched_bytes"] - before == 300
    elif case == "device only":
        assert rig.hint(1, [6, 7]) == 6
        plan = rig.publish(1, [6, 7], flags=rig.raw.layout["flag_device_only"])
        assert kinds(plan) == {6: fetch, 7: fetch}
    elif case == "no such layer":
        assert rig.hint(L, [6, 7]) == -1
    else:
        assert rig.hint(1, [E, -1]) == -1
    assert rig.raw.abort == 0 and rig.counts()[2] == 0
    # Nothing of it is left.
    assert kinds(rig.publish(3, [6, 7], step=9)) == {6: fetch, 7: fetch}


def test_nothing_is_copied_that_the_device_cannot_read() -> None:
    fetchable = np.ones((L, E), bool)
    fetchable[1, 6] = False
    rig = Rig(fetchable)
    try:
        assert rig.hint(1, [6, 7]) == 7
    finally:
        rig.server.stop()


def test_bad_guesses_end_the_copies_of_their_layer_and_good_ones_bring_them_back(rig: Rig) -> None:
    def step(number: int, layer: int, right: bool) -> int:
        """What the hint was answered with. Experts change, so that slots play no part."""
        guess = number % 4
        answer = rig.hint(layer, [guess, guess + 4], step=number)
        rig.publish(layer, [guess, guess + 4] if right else [(guess + 1) % 4, (guess + 1) % 4 + 4], step=number)
        return answer

    rig.server.empty(0)
    answers = [step(100 + i, 1, False) for i in range(40)]
    assert answers[0] >= 0 and answers[-1] == -1
    assert step(200, 2, True) >= 0, "layers are judged apart"
    answers = [step(300 + i, 1, True) for i in range(80)]
    assert answers[0] == -1 and answers[-1] >= 0
    assert 0.4 < rig.server.lookahead_status()["accuracy"] < 0.9


def test_a_server_goes_on_where_the_last_one_stopped(rig: Rig) -> None:
    assert rig.hint(1, [6, 7]) == 6
    rig.server.stop()
    slots = _native.SlotTable(L, E, SLOTS)
    server = _native.CacheServer(rig.mailbox, slots, 1.0, False, 0, [100] * L, True)
    server.start()
    try:
        assert rig.raw.await_ahead(rig.raw.hint(1, [6, 7])) == -1, "lookahead is off at first"
        assert server.counters()["hints"] == 1
    finally:
        server.stop()
