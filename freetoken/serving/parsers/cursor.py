"""Reading a text that arrives in pieces.

What reads it (a *program*) is written as a generator, as if the whole text were there: where it needs more it yields.
No result may depend on where the text was cut, so everything here waits until the text alone decides. Text is consumed
as it arrives and each character is looked at a bounded number of times, so reading is linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

MAX_HEADER_CHARACTERS = 512
MAX_LAYOUT_CHARACTERS = 64


class MalformedError(Exception):
    """The text at the cursor is not what the format promises; it is to be taken as plain text."""


class CutError(Exception):
    """The text was cut off inside something that has no meaning until it is complete."""


class Markers:
    """A set of literal strings to look for. Where several begin at the same character, the longest wins."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = tuple(sorted({literal for literal in literals if literal}, key=len, reverse=True))
        self.prefixes = {a for a in self.literals for b in self.literals if a != b and b.startswith(a)}
        self._pattern = re.compile("|".join(map(re.escape, self.literals))) if self.literals else None
        self._longest = len(self.literals[0]) if self.literals else 0
        first = "".join(sorted({literal[0] for literal in self.literals}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """(position, literal) of the first one that is complete in ``text``."""
        match = self._pattern.search(text, start) if self._pattern else None
        return (match.start(), match.group()) if match else None

    def open_at(self, text: str, after: int = 0) -> int:
        """Where, not before ``after``, the end of ``text`` may be the beginning of a literal; its length if nowhere."""
        length = len(text)
        if self._first is None:
            return length
        start = max(after, length - self._longest + 1)
        for match in self._first.finditer(text, start):
            tail = text[match.start() :]
            if any(literal.startswith(tail) and literal != tail for literal in self.literals):
                return match.start()
        return length


@dataclass(frozen=True, slots=True)
class Delimiter:
    """A literal that ends a value, but only where one of ``followers`` comes next, possibly after white space (``""``
    stands for the end of the text; no followers at all: always). ``keep`` leaves the literal to the next reader."""

    literal: str
    followers: tuple[str, ...] = ()
    keep: bool = False


class Cursor:
    """The text so far that is not consumed, and where the program stands in it."""

    def __init__(self) -> None:
        self._text = ""
        self._taken: list[str] | None = None
        self.ended = False
        self.cut = False
        self.hit_end = False

    def push(self, text: str) -> None:
        """More text arrived."""
        self._text += text

    def end(self, cut: bool) -> None:
        """No more text will come; ``cut`` if it would have gone on."""
        self.ended = True
        self.cut = cut

    def more(self) -> Steps[bool]:
        """Wait for more text; False when there is none."""
        if self.ended:
            self.hit_end = True
            return False
        yield
        return True

    def mark(self) -> None:
        """Remember what is consumed from here on until ``release``, so that ``give_back`` can undo it."""
        self._taken = []
        self.hit_end = False

    def require_whole(self) -> None:
        """Raises ``CutError`` if what was read since ``mark`` depends on the end of a text that was cut off."""
        if self.cut and self.hit_end:
            raise CutError

    def release(self) -> None:
        """What was consumed is final."""
        self._taken = None

    def give_back(self) -> None:
        """Undo what was consumed since ``mark``."""
        if self._taken is not None:
            self._text = "".join(self._taken) + self._text
        self._taken = None

    def take(self, count: int) -> str:
        """Consume ``count`` characters that are there."""
        text, self._text = self._text[:count], self._text[count:]
        if self._taken is not None and text:
            self._taken.append(text)
        return text

    @property
    def waiting(self) -> str:
        """Text that is there and not consumed."""
        return self._text

    def scan(self, markers: Markers) -> tuple[str, str | None]:
        """Consume text up to and including the next marker, or all that cannot be the beginning of one. Never waits:
        without a marker the caller must wait for ``more`` itself."""
        found = markers.find(self._text)
        if found is None:
            return self.take(markers.open_at(self._text)), None
        position, literal = found
        if not self.ended:
            # A marker that begins earlier, or here and is longer, may not be complete yet.
            begun = markers.open_at(self._text)
            if begun < position or (begun == position and literal in markers.prefixes):
                return self.take(begun), None
        text = self.take(position)
        self.take(len(literal))
        return text, literal

    def skip_space(self) -> Steps[str]:
        """Consume white space; returns it."""
        parts = []
        while True:
            stripped = self._text.lstrip()
            parts.append(self.take(len(self._text) - len(stripped)))
            if stripped or not (yield from self.more()):
                return "".join(parts)

    def peek(self) -> Steps[str]:
        """The next character, not consumed; empty at the end."""
        while not self._text:
            if not (yield from self.more()):
                return ""
        return self._text[0]

    def accept(self, literals: Sequence[str]) -> Steps[str | None]:
        """Consume the longest of ``literals`` that the text goes on with."""
        ordered = sorted(filter(None, literals), key=len, reverse=True)
        while True:
            for literal in ordered:
                if self._text.startswith(literal):
                    return self.take(len(literal))
                if literal.startswith(self._text) and not self.ended:
                    break  # may still become this one
            else:
                if self.ended and any(literal.startswith(self._text) for literal in ordered):
                    self.hit_end = True
                return None
            yield from self.more()

    def header(self, end: re.Pattern[str]) -> Steps[str]:
        """Consume up to the end of the first match of ``end``; returns what came before the match. Raises
        ``MalformedError`` when there is none within a few hundred characters."""
        while True:
            match = end.search(self._text, 0, MAX_HEADER_CHARACTERS)
            if match is not None:
                text = self.take(match.start())
                self.take(match.end() - match.start())
                return text
            if len(self._text) >= MAX_HEADER_CHARACTERS or not (yield from self.more()):
                raise MalformedError

    def until(self, markers: Markers, delimiters: Mapping[str, Delimiter]) -> Steps[tuple[str, str | None]]:
        """Consume a value up to the first delimiter that counts: the value and the delimiter's literal, or None where
        the text ended first. ``delimiters`` are by literal; ``markers`` has all of them and may have more."""
        parts: list[str] = []
        start = 0
        while True:
            found = markers.find(self._text, start)
            if found is None:
                parts.append(self.take(markers.open_at(self._text, start)))
                start = 0
                if not (yield from self.more()):
                    parts.append(self.take(len(self._text)))
                    return "".join(parts), None
                continue
            position, literal = found
            begun = position if self.ended else markers.open_at(self._text, start)
            if begun < position:
                parts.append(self.take(begun))
                start = 0
                yield from self.more()
                continue
            delimiter = delimiters.get(literal)
            counts = delimiter is not None and self._follows(position + len(literal), delimiter)
            if counts is None:
                parts.append(self.take(position))
                start = 0
                yield from self.more()
            elif delimiter is not None and counts:
                parts.append(self.take(position))
                if not delimiter.keep:
                    self.take(len(literal))
                return "".join(parts), literal
            else:
                start = position + 1

    def _follows(self, position: int, delimiter: Delimiter) -> bool | None:
        """Whether the text at ``position`` goes on as the delimiter needs; None if that is not known yet."""
        if not delimiter.followers:
            return True
        end = position
        while end < len(self._text) and self._text[end].isspace():
            end += 1
        if end - position > MAX_LAYOUT_CHARACTERS:
            return False
        for literal in delimiter.followers:
            if literal and self._text.startswith(literal, end):
                return True
        rest = self._text[end:]
        if not self.ended:
            return None if any(literal.startswith(rest) for literal in delimiter.followers) or not rest else False
        if rest or "" not in delimiter.followers:
            return False
        self.hit_end = True
        return True
