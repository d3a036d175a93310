"""A slot table whose arena was replaced."""

from __future__ import annotations

from freetoken._native import CacheServer, SlotTable


def empty_slots(table: CacheServer | SlotTable, num_slots: int) -> None:
    """``num_slots`` slots, all free. What is known of the records' use stays. Between steps."""
    for size in (0, num_slots):
        table.resize(table.plan_resize(size))
