"""Caches that know the future, on cases worked out by hand and against every possible decision."""

import functools
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.experts.cache_baselines import belady, best_static, plain_lru


def publishes(*named):
    return [np.array(sorted(records), np.int64) for records in named]


def one_by_one(text):
    return publishes(*[[ord(letter)] for letter in text])


def test_belady_keeps_what_comes_back_first():
    # a b fill; c comes once more but later than a and b, so it is not filled until b was used for the last time.
    counts = belady(one_by_one("abcabca"), 2)
    assert counts.tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_belady_never_fills_what_is_not_needed_again():
    assert belady(one_by_one("abcd"), 4).tolist() == [[0, 0, 0]] * 4
    assert belady(one_by_one("aa"), 0).tolist() == [[0, 0, 0]] * 2


def test_belady_evicts_what_is_needed_latest():
    counts = belady(one_by_one("abcbca"), 2)  # c is needed before a: a goes
    assert counts[:, 0].tolist() == [0, 0, 0, 1, 1, 0] and counts[2].tolist() == [0, 1, 1]


def test_records_of_a_publish_are_looked_up_together():
    assert belady(publishes([1, 2], [1, 2]), 2)[:, 0].tolist() == [0, 2]
    assert plain_lru(publishes([1, 2], [1, 2]), 2)[:, 0].tolist() == [0, 2]


def test_static_takes_the_most_used():
    counts = best_static(one_by_one("abacad"), 1)
    assert counts[:, 0].tolist() == [1, 0, 1, 0, 1, 0] and not counts[:, 1:].any()
    assert not best_static(one_by_one("ab"), 0).any() and best_static([], 3).shape == (0, 3)


def test_lru_evicts_the_least_recently_used():
    counts = plain_lru(one_by_one("abacb"), 2)  # c evicts b
    assert counts.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_lru_does_not_evict_what_the_publish_names():
    counts = plain_lru(publishes([1], [2], [1, 3, 4]), 2)
    assert counts[2].tolist() == [1, 1, 1]
    assert plain_lru(publishes([1], [2], [1, 3, 4], [1], [3]), 2)[:, 0].tolist() == [0, 0, 1, 1, 1]


def most_hits(uses, num_slots):
    """By trying every set of residents after every publish."""

    @functools.cache
    def best(i, residents):
        if i == len(uses):
            return 0
        named = frozenset(uses[i].tolist())
        pool = sorted(residents | named)
        later = max(
            best(i + 1, frozenset(kept))
            for size in range(min(num_slots, len(pool)) + 1)
            for kept in itertools.combinations(pool, size)
        )
        return len(residents & named) + later

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), max_size=7), st.integers(0, 3))
def test_no_policy_has_more_hits_than_belady(named, num_slots):
    uses = publishes(*named)
    assert belady(uses, num_slots)[:, 0].sum() == most_hits(uses, num_slots)
    for other in (plain_lru, best_static):
        if other is plain_lru:
            assert other(uses, num_slots)[:, 0].sum() <= belady(uses, num_slots)[:, 0].sum()
