"""When an automatic decision may become a change."""

from freetoken.elastic.arena_shape import ArenaSplit
from freetoken.elastic.pace import ChangePace

NOW, MORE_KV, LESS_KV = ArenaSplit(10, 10), ArenaSplit(8, 12), ArenaSplit(12, 8)


def test_where_memory_moves_kv_grows_at_once_and_shrinks_after_the_cooldown() -> None:
    pace = ChangePace(15.0, 600.0)
    pace.changed(100.0)
    assert not pace.held_back(NOW, MORE_KV, 100.5, reallocates=False)
    assert pace.held_back(NOW, LESS_KV, 114.0, reallocates=False) == "changed 14.0 s ago, elastic.cooldown_s=15"
    assert not pace.held_back(NOW, LESS_KV, 115.0, reallocates=False)
    assert not pace.held_back(NOW, NOW, 200.0, reallocates=False)


def test_a_dear_change_waits_for_a_wish_that_lasts() -> None:
    pace = ChangePace(15.0, 600.0)
    assert pace.held_back(NOW, MORE_KV, 0.0, reallocates=True)
    assert pace.held_back(NOW, MORE_KV, 29.0, reallocates=True)
    assert not pace.held_back(NOW, NOW, 29.5, reallocates=True)  # the burst is over
    assert pace.held_back(NOW, MORE_KV, 31.0, reallocates=True)
    assert pace.held_back(NOW, LESS_KV, 60.0, reallocates=True)
    assert pace.held_back(NOW, LESS_KV, 89.0, reallocates=True)
    assert not pace.held_back(NOW, LESS_KV, 90.0, reallocates=True)


def test_a_dear_change_waits_for_its_cooldown_in_both_directions() -> None:
    pace = ChangePace(15.0, 600.0)
    pace.changed(1000.0)
    for wanted in (MORE_KV, LESS_KV):
        assert pace.held_back(NOW, wanted, 1500.0, reallocates=True)
        assert pace.held_back(NOW, wanted, 1599.0, reallocates=True)
        assert not pace.held_back(NOW, wanted, 1600.0, reallocates=True)
