"""From a step's rows to batches of fixed shapes: which tokens run together, and with how much padding. Pure; no torch.

A batch of single tokens is one decode batch. Anything else is cut, in order, into pieces of at most ``PIECE_TOKENS``
tokens; each is padded to the next bucket, because kernels are compiled for token counts. A row may span pieces: its
earlier tokens' keys are stored before its later ones attend to them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BUCKETS = (8, 16, 32, 64, 128)
PIECE_TOKENS = PIECE_BUCKETS[-1]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``[start, start + count)`` of row ``row`` (counted within the row), at ``first`` within the piece."""

    row: int
    start: int
    count: int
    first: int


@dataclass(frozen=True, slots=True)
class Piece:
    """``bucket`` tokens, of which the first ``num_real`` are real; at ``offset`` in the step's padded tokens."""

    parts: tuple[Part, ...]
    num_real: int
    bucket: int
    offset: int


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``count``; ``ValueError`` when none does."""
    at = bisect.bisect_left(buckets, count)
    if at == len(buckets):
        raise ValueError(f"{count} exceeds the largest bucket of {buckets[-1]}")
    return buckets[at]


def cut_pieces(lengths: Sequence[int], buckets: Sequence[int] = PIECE_BUCKETS) -> list[Piece]:
    """Pieces of rows with ``lengths`` tokens (each at least 1), in order."""
    limit = buckets[-1]
    pieces: list[Piece] = []
    parts: list[Part] = []
    filled = offset = 0

    def close() -> None:
        nonlocal filled, offset, parts
        bucket = bucket_for(filled, buckets)
        pieces.append(Piece(tuple(parts), filled, bucket, offset))
        offset += bucket
        parts, filled = [], 0

    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            count = min(length - start, limit - filled)
            parts.append(Part(row, start, count, filled))
            start += count
            filled += count
            if filled == limit:
                close()
    if filled:
        close()
    return pieces


def query_blocks(piece: Piece, tokens_per_block: int) -> list[tuple[int, int, int]]:
    """(row, first token within the piece, count) of blocks of one row each; the last ones of a row come first, because
    they see the most keys and should not trail alone."""
    return [
        (part.row, part.first + first, min(tokens_per_block, part.count - first))
        for part in piece.parts
        for first in range((part.count - 1) // tokens_per_block * tokens_per_block, -1, -tokens_per_block)
    ]
