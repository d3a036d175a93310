"""One request on its way through its grammar: which tokens may come next, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from freetoken.grammar.compiler import GrammarCompiler, first_line
from freetoken.grammar.errors import ConstraintError
from freetoken.messages import Constraint

Mask = NDArray[np.uint32]


class _Part(Enum):
    OPENING = "it is not known yet whether a free part comes"
    FREE = "free"
    BOUND = "the grammar applies"
    ENDED = "an end token was sampled, or nothing may follow"


class Matcher:
    """Used by one thread at a time. ``advance`` with every generated token, then ``fill`` for the next one.

    The masks have one bit a token, token 32 * w + b in bit b of word w. They always allow something: when the text is
    complete, the end tokens; when it may be complete, those too.
    """

    def __init__(self, compiler: GrammarCompiler, constraint: Constraint, end_token_ids: Sequence[int]) -> None:
        """``end_token_ids``: any of them ends the output. Raises ``GrammarError``, and ``ConstraintError`` when there
        is none: the output could never end."""
        self._compiler = compiler
        self._vocabulary = compiler.vocabulary
        self._constraint = constraint
        self._ends = tuple(i for i in dict.fromkeys(end_token_ids) if 0 <= i < self._vocabulary.size)
        if not self._ends:
            raise ConstraintError("this model has no end-of-sequence token, so that no constrained output could end")
        self._num_words = num_words(self._vocabulary.size)
        self._grammar = compiler.compile(constraint)
        self._follows = True  # the grammar, while it is not known whether it applies
        self._seen = b""  # of the output, as much as may still become the text that is waited for
        if not constraint.free_until:
            self._part = _Part.BOUND
        elif constraint.free_opener:
            self._part = _Part.OPENING
        else:
            self._part = _Part.FREE

    @property
    def vocab_size(self) -> int:
        """Tokens that a mask speaks of."""
        return self._vocabulary.size

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        if self._part is _Part.ENDED:
            return True
        if self._part is _Part.FREE:
            return self._constraint.lazy
        return self._follows and self._grammar.is_accepting()

    def advance(self, token_ids: Iterable[int]) -> None:
        """Tokens were generated. Raises ``ConstraintError`` for one that the grammar does not allow."""
        for token_id in token_ids:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        if self._part is _Part.ENDED:
            return
        if token_id in self._ends and self.is_complete:
            self._part = _Part.ENDED
            return
        text = self._vocabulary.text_of(token_id)
        if self._part is _Part.OPENING:
            self._open(token_id, text)
        elif self._part is _Part.FREE:
            self._scan(text)
        else:
            self._consume(token_id)

    def _open(self, token_id: int, text: bytes) -> None:
        opener = self._constraint.free_opener.encode()
        self._seen += text
        if self._follows and not self._grammar.validate_tokens([token_id]):
            self._follows = False
        elif self._follows:
            self._consume(token_id)
        if self._seen.startswith(opener):
            seen, self._seen = self._seen[len(opener) :], b""
            self._part = _Part.FREE
            self._restart()
            self._scan(seen)
        elif self._part is _Part.OPENING and not opener.startswith(self._seen):
            if not self._follows:
                raise ConstraintError(f"{self._seen!r} neither opens a free part nor fits the grammar")
            self._part, self._seen = _Part.BOUND, b""

    def _scan(self, text: bytes) -> None:
        until = self._constraint.free_until.encode()
        seen = self._seen + text
        at = seen.find(until)
        if at < 0:
            self._seen = seen[max(0, len(seen) - len(until) + 1) :]
            return
        self._seen = b""
        self._part = _Part.BOUND
        rest = seen[at + len(until) :]
        if rest:
            for token_id in self._vocabulary.tokenize(rest):
                self._consume(token_id)

    def _restart(self) -> None:
        self._grammar = self._compiler.compile(self._constraint)
        self._follows = True

    def _consume(self, token_id: int) -> None:
        grammar = self._grammar
        if not grammar.consume_token(token_id):
            text = self._vocabulary.text_of(token_id)
            raise ConstraintError(
                f"token {token_id} ({text!r}) does not fit the grammar: {first_line(grammar.get_error())}"
            )
        if not grammar.is_stopped():
            return
        if grammar.is_error():
            raise ConstraintError(f"the grammar became too complex: {first_line(grammar.get_error())}")
        if self._constraint.lazy:
            self._part = _Part.FREE
            self._restart()
        else:
            self._part = _Part.ENDED

    def fill(self, mask: Mask, *, may_end: bool = True) -> None:
        """Write which tokens may come next, ``num_words(size)`` words. Without ``may_end`` (``min_tokens`` is not
        reached) end tokens are left out where anything else is possible. Raises ``ConstraintError`` when nothing is."""
        part = self._part
        if part is _Part.ENDED:
            mask[...] = 0
            set_bits(mask, self._ends)
            return
        if part is _Part.FREE:
            mask[...] = 0xFFFFFFFF
            if not (self._constraint.lazy and may_end):
                clear_bits(mask, self._ends)
            return
        complete = self.is_complete
        if self._follows:
            self._ask(mask)
        else:
            mask[...] = 0
        if part is _Part.OPENING:
            rest = self._constraint.free_opener[len(self._seen.decode("utf-8", "ignore")) :]
            set_bits(mask, self._vocabulary.tokenizer.tokenize_str(rest, parse_special=True)[:1])
        if complete and may_end:
            set_bits(mask, self._ends)
        elif complete:
            clear_bits(mask, self._ends)
            if not mask.any():
                set_bits(mask, self._ends)
        if not mask.any():
            raise ConstraintError("the grammar allows no token of this vocabulary here")

    def _ask(self, mask: Mask) -> None:
        grammar = self._grammar
        assert mask.flags.c_contiguous and mask.dtype == np.uint32 and len(mask) == self._num_words
        grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if grammar.is_error():
            raise ConstraintError(f"the grammar became too complex: {first_line(grammar.get_error())}")


def num_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


def set_bits(mask: Mask, token_ids: Iterable[int]) -> None:
    """Allow these tokens."""
    for token_id in token_ids:
        mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def clear_bits(mask: Mask, token_ids: Iterable[int]) -> None:
    """Forbid these tokens."""
    for token_id in token_ids:
        mask[token_id >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token_id & 31)))
