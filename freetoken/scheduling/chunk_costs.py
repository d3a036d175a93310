"""What a chunk of prefill costs, learnt from the chunks that ran, and how long chunks should therefore be."""

from __future__ import annotations

EFFICIENCY = 0.7
"""Chunks are long enough for so much of the throughput that endless ones would have."""
_KEEP = 0.9  # weight of all older samples when a new one comes
_APART = 0.1  # relative deviation of the lengths from which on they tell the slope


class ChunkCosts:
    """Seconds of a chunk of T tokens as ``fixed_s + per_token_s * T``: the fixed part is one pass over the weights,
    which is the same whatever the length. An exponentially weighted line through the samples."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_tokens = 0.0
        self._tokens_seconds = 0.0
        self.longest_tokens = 0

    def add(self, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` kept the device busy for ``seconds``."""
        self._weight = self._weight * _KEEP + 1.0
        self._tokens = self._tokens * _KEEP + tokens
        self._seconds = self._seconds * _KEEP + seconds
        self._tokens_tokens = self._tokens_tokens * _KEEP + tokens * tokens
        self._tokens_seconds = self._tokens_seconds * _KEEP + tokens * seconds
        self.longest_tokens = max(self.longest_tokens, tokens)

    def line(self) -> tuple[float, float] | None:
        """(``fixed_s``, ``per_token_s``), neither negative; None while the lengths so far were too much alike."""
        if self._weight == 0.0:
            return None
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_tokens / self._weight - mean_tokens**2
        if variance < (_APART * mean_tokens) ** 2:
            return None
        slope = (self._tokens_seconds / self._weight - mean_tokens * mean_seconds) / variance
        slope = min(max(slope, 0.0), mean_seconds / mean_tokens)
        return max(mean_seconds - slope * mean_tokens, 0.0), slope

    def metrics(self) -> dict[str, float | None]:
        """The line, if it is known."""
        line = self.line()
        return {
            "chunk_fixed_ms": None if line is None else line[0] * 1e3,
            "chunk_token_us": None if line is None else line[1] * 1e6,
        }


def plan_chunk_tokens(
    line: tuple[float, float] | None, longest_tokens: int, shortest: int, longest: int, efficiency: float = EFFICIENCY
) -> int:
    """Tokens of a chunk, ``shortest`` to ``longest``: the fewest for which T / (fixed + per_token * T) is at least
    ``efficiency`` of its limit, 1 / per_token. Longer ones only keep other prompts waiting.

    While no ``line`` is known, twice the longest so far: other lengths are what it takes to know one.
    """
    if line is None:
        wanted = float(2 * longest_tokens)
    else:
        fixed_s, per_token_s = line
        wanted = longest
        if per_token_s * longest > 0.0:
            wanted = efficiency / (1.0 - efficiency) * fixed_s / per_token_s
    return min(max(shortest, -int(-wanted // 1)), longest)
