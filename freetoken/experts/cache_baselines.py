"""What slots could do at best: caches that know the future, for comparison. Independent of the native policy code.

All take ``uses``, the distinct records of each publish (``RouteTrace.uses``), and return int64 [N, 3]: hits, fills and
evictions of each publish. All records of a publish are looked up before any of them is filled.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Uses = Sequence[NDArray[np.int64]]
Counts = NDArray[np.int64]

_NEVER = 1 << 62


def belady(uses: Uses, num_slots: int) -> Counts:
    """The most hits that any policy can have: what is needed latest goes, and a record that would be needed later than
    all residents is not filled at all."""
    next_use = _next_uses(uses)
    due: dict[int, int] = {}  # resident -> its next use
    latest: list[tuple[int, int]] = []  # a heap of (-next use, record); entries may be out of date
    counts = np.zeros((len(uses), 3), np.int64)
    for i, records in enumerate(uses):
        missed = []
        for record, then in zip(records.tolist(), next_use[i], strict=True):
            if record in due:
                counts[i, 0] += 1
                due[record] = then
                heapq.heappush(latest, (-then, record))
            else:
                missed.append((then, record))
        for then, record in sorted(missed):
            if then == _NEVER or num_slots == 0:
                continue
            if len(due) >= num_slots:
                while due.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if -latest[0][0] <= then:
                    continue
                del due[heapq.heappop(latest)[1]]
                counts[i, 2] += 1
            due[record] = then
            heapq.heappush(latest, (-then, record))
            counts[i, 1] += 1
    return counts


def _next_uses(uses: Uses) -> list[list[int]]:
    upcoming: dict[int, int] = {}
    result: list[list[int]] = []
    for i in range(len(uses) - 1, -1, -1):
        records = uses[i].tolist()
        result.append([upcoming.get(record, _NEVER) for record in records])
        upcoming.update(dict.fromkeys(records, i))
    result.reverse()
    return result


def best_static(uses: Uses, num_slots: int) -> Counts:
    """The records that are used most over the whole trace, there from the beginning and never replaced."""
    records, frequency = np.unique(np.concatenate([*uses, np.empty(0, np.int64)]), return_counts=True)
    chosen = set(records[np.argsort(-frequency, kind="stable")[:num_slots]].tolist())
    counts = np.zeros((len(uses), 3), np.int64)
    for i, named in enumerate(uses):
        counts[i, 0] = sum(record in chosen for record in named.tolist())
    return counts


def plain_lru(uses: Uses, num_slots: int) -> Counts:
    """Least recently used, filling every miss; a record named in a publish is not evicted by it."""
    order: OrderedDict[int, None] = OrderedDict()
    counts = np.zeros((len(uses), 3), np.int64)
    for i, named in enumerate(uses):
        records = named.tolist()
        missed = [record for record in records if record not in order]
        counts[i, 0] = len(records) - len(missed)
        for record in records:
            if record in order:
                order.move_to_end(record)
        room = num_slots - (len(records) - len(missed))
        for record in missed[: max(room, 0)]:
            if len(order) >= num_slots:
                order.popitem(last=False)
                counts[i, 2] += 1
            order[record] = None
            counts[i, 1] += 1
    return counts
