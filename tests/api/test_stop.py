"""Stop strings across piece boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.serving.stop import StopMatcher


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop whose end comes first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.flush(), None


LETTERS = st.text("aab é😀", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("aab é😀", max_size=5), max_size=8), st.lists(LETTERS, max_size=3), st.booleans())
def test_any_cut_gives_the_same(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == reference("".join(pieces), stops, include)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=5), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_nothing_is_withheld_without_need(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["stop"], ["stop"], ("", "stop")),
        (["s", "t", "o", "p", "!"], ["stop"], ("", "stop")),
        (["x sto", "ry"], ["stop"], ("x story", None)),
        (["aab"], ["ab"], ("a", "ab")),
        (["xab", "c"], ["ab", "xabc"], ("x", "ab")),
        (["grö", "ße"], ["öß"], ("gr", "öß")),
        (["a\n", "\nb"], ["\n\n"], ("a", "\n\n")),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: tuple[str, str | None]) -> None:
    assert run(pieces, stops, include=False) == expected
