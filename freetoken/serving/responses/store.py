"""Responses that a later request may continue by ``previous_response_id``: in memory, bounded, least recently used out
first."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

logger = logging.getLogger(__name__)

Item = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Segment:
    """Items that came together: the input of one request, or its output. Continuations share the segments of what they
    continue; ``holders`` counts the stored responses that have it."""

    items: tuple[Item, ...]
    size_bytes: int
    holders: int = 0

    @classmethod
    def of(cls, items: Sequence[Item]) -> Segment:
        """A segment of ``items``, which must not change any more."""
        return cls(tuple(items), len(orjson.dumps(list(items))))


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``segments`` is the whole conversation, oldest first, the last one being the response's own output; ``body`` the
    response object. ``own_input`` is the input of its request alone."""

    body: Mapping[str, Any]
    segments: tuple[Segment, ...]
    own_input: Segment
    overhead_bytes: int = field(default=0)

    @property
    def items(self) -> list[Item]:
        """Every item of the conversation."""
        return [item for segment in self.segments for item in segment.items]


class ResponseStore:
    """At most ``max_entries`` responses and ``max_bytes`` of JSON; what several responses share counts once.

    A response that is dropped does not take away anything from its continuations. Belongs to the event loop.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._outputs: dict[str, Item] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which counts as used by this; None when it is not (any more) there."""
        found = self._entries.get(response_id)
        if found is not None:
            self._entries.move_to_end(response_id)
        return found

    def item(self, item_id: str) -> Item | None:
        """An output item of a conversation that is still there."""
        return self._outputs.get(item_id)

    def put(self, body: Mapping[str, Any], history: Sequence[Segment], own_input: Sequence[Item]) -> None:
        """Keep a response that ended: ``history`` is the conversation it continues, ``own_input`` its request's items.
        ``body`` and the items must not change any more."""
        entry_input = Segment.of(own_input)
        output = Segment.of(body["output"])
        overhead = len(orjson.dumps(dict(body))) - output.size_bytes
        entry = StoredResponse(body, (*history, entry_input, output), entry_input, max(0, overhead))
        self._entries[str(body["id"])] = entry
        self.size_bytes += entry.overhead_bytes
        for segment in entry.segments:
            self._hold(segment)
        while len(self._entries) > self._max_entries or self.size_bytes > self._max_bytes:
            oldest = next(iter(self._entries))
            logger.debug("event=response_evicted response=%s entries=%d bytes=%d", oldest, len(self), self.size_bytes)
            self.delete(oldest)

    def delete(self, response_id: str) -> bool:
        """Forget a response; False when it was not there."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.size_bytes -= entry.overhead_bytes
        for segment in entry.segments:
            self._release(segment)
        return True

    def _hold(self, segment: Segment) -> None:
        if segment.holders == 0:
            self.size_bytes += segment.size_bytes
            for item in segment.items:
                self._outputs[str(item.get("id"))] = item
        segment.holders += 1

    def _release(self, segment: Segment) -> None:
        segment.holders -= 1
        if segment.holders == 0:
            self.size_bytes -= segment.size_bytes
            for item in segment.items:
                if self._outputs.get(str(item.get("id"))) is item:
                    del self._outputs[str(item.get("id"))]

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` when the counts do not agree with what is there."""
        held: dict[int, int] = {}
        segments: dict[int, Segment] = {}
        for entry in self._entries.values():
            for segment in entry.segments:
                held[id(segment)] = held.get(id(segment), 0) + 1
                segments[id(segment)] = segment
        assert all(segments[key].holders == count for key, count in held.items())
        own = sum(entry.overhead_bytes for entry in self._entries.values())
        assert self.size_bytes == own + sum(segment.size_bytes for segment in segments.values())
        assert len(self._entries) <= self._max_entries and self.size_bytes <= self._max_bytes
