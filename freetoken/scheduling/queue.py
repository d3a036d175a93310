"""Requests in order of importance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from freetoken.scheduling.request import Request


class RequestQueue:
    """Sorted by ``Request.rank``; a preempted request keeps its arrival and so returns to its old place."""

    __slots__ = ("_ranks", "_requests")

    def __init__(self) -> None:
        self._ranks: list[tuple[int, int]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._ranks, request.rank)
        return index < len(self._requests) and self._requests[index] is request

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        """Insert at its rank."""
        index = bisect_left(self._ranks, request.rank)
        self._ranks.insert(index, request.rank)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Take it out. Raises ``ValueError`` when it is not there."""
        index = bisect_left(self._ranks, request.rank)
        if index >= len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.id} is not in this queue")
        del self._ranks[index]
        del self._requests[index]

    def clear(self) -> None:
        """Forget all."""
        self._ranks.clear()
        self._requests.clear()
