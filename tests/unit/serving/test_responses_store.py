"""The store of responses: bounds, sharing, and continuations that outlive what they continue."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from freetoken.serving.responses.store import ResponseStore


def body(identifier: str, text: str = "x") -> dict[str, Any]:
    return {"id": identifier, "output": [{"id": f"msg_{identifier}", "text": text}], "model": "tiny"}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def test_a_chain_reads_from_its_start() -> None:
    store = ResponseStore(10, 10_000)
    store.put(body("a"), (), [user("one")])
    first = store.get("a")
    assert first is not None
    store.put(body("b"), first.segments, [user("two")])
    second = store.get("b")
    assert second is not None
    assert second.items == [user("one"), body("a")["output"][0], user("two"), body("b")["output"][0]]
    assert list(second.own_input.items) == [user("two")]
    assert store.item("msg_a") == body("a")["output"][0]
    store.check_integrity()


def test_a_continuation_outlives_what_it_continues() -> None:
    store = ResponseStore(10, 10_000)
    store.put(body("a"), (), [user("one")])
    first = store.get("a")
    assert first is not None
    store.put(body("b"), first.segments, [user("two")])
    assert store.delete("a") and not store.delete("a")
    assert store.get("a") is None
    second = store.get("b")
    assert second is not None and second.items[0] == user("one")
    store.check_integrity()
    store.delete("b")
    assert (len(store), store.size_bytes, store.item("msg_a")) == (0, 0, None)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 10_000)
    store.put(body("a"), (), [])
    store.put(body("b"), (), [])
    assert store.get("a") is not None
    store.put(body("c"), (), [])
    assert store.get("b") is None and store.get("a") is not None and store.get("c") is not None


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 1000)
    for name in "abcdefgh":
        store.put(body(name, "y" * 300), (), [])
        store.check_integrity()
    assert 0 < len(store) <= 3
    store.put(body("large", "y" * 5000), (), [])
    assert (len(store), store.size_bytes) == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "continue", "get", "delete"]), st.integers(0, 9), st.integers(0, 200)))
)
def test_counts_agree_after_anything(steps: list[tuple[str, int, int]]) -> None:
    store = ResponseStore(6, 3000)
    for number, (step, which, size) in enumerate(steps):
        name = f"r{which}"
        if step == "put":
            store.delete(name)
            store.put(body(name, "y" * size), (), [user(str(number))])
        elif step == "continue":
            found = store.get(name)
            if found is not None:
                store.put(body(f"r{number + 10}", "y" * size), found.segments, [user(str(number))])
        elif step == "get":
            found = store.get(name)
            assert found is None or found.items
        else:
            store.delete(name)
        store.check_integrity()
