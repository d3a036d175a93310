"""Stop strings in a stream of text, wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence


def _failure_links(pattern: str) -> list[int]:
    """For each i, the length of the longest proper prefix of ``pattern`` that ends ``pattern[:i + 1]``."""
    links = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = links[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        links[i] = matched
    return links


class StopMatcher:
    """Withholds text that could be the start of a stop string; finds the stop that is complete first.

    The result does not depend on how the text is cut into pieces: when several stops end at the same character, the
    one that began first wins. One matcher serves one choice; after a match it must not be fed again.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._links = tuple(_failure_links(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._include_stop = include_stop

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can go out now, the stop string that was found). On a match the text ends before the stop, or
        after it with ``include_stop``."""
        if not self._stops:
            return text, None
        matched = self._matched
        for position, character in enumerate(text):
            found: str | None = None
            for i, stop in enumerate(self._stops):
                length = matched[i]
                while length and stop[length] != character:
                    length = self._links[i][length - 1]
                if stop[length] == character:
                    length += 1
                matched[i] = length
                if length == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    matched[i] = 0
            if found is not None:
                seen = self._held + text[: position + 1]
                self._held = ""
                return (seen if self._include_stop else seen[: len(seen) - len(found)]), found
        whole = self._held + text
        hold = max(matched)
        self._held = whole[len(whole) - hold :]
        return whole[: len(whole) - hold], None

    def flush(self) -> str:
        """The withheld text, once it is certain that no more follows."""
        held, self._held = self._held, ""
        return held
