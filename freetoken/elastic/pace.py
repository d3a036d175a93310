"""When an automatic decision may become a change. Pure: clocks are the caller's."""

from __future__ import annotations

from freetoken.elastic.arena_shape import ArenaSplit

PATIENCE_SHARE = 1 / 20
"""Of the cooldown: so long the same direction must have been asked for where a change is dear."""


class ChangePace:
    """Where memory moves, KV may grow at any time and shrinks after ``cooldown_s``. Where the arena is allocated anew,
    a change in either direction waits for ``reallocate_cooldown_s`` since the last one, and until the wish has lasted
    for a share of that: a burst of requests is over before a change for it would have paid."""

    def __init__(self, cooldown_s: float, reallocate_cooldown_s: float) -> None:
        self.cooldown_s = cooldown_s
        self.reallocate_cooldown_s = reallocate_cooldown_s
        self.changed_s = -1e9
        self._direction = 0
        self._since_s = 0.0

    def changed(self, now_s: float) -> None:
        """A change was tried, whoever wished it."""
        self.changed_s = now_s
        self._direction = 0

    def held_back(self, current: ArenaSplit, wanted: ArenaSplit, now_s: float, *, reallocates: bool) -> str:
        """Why not to change now; "" when it is time to, or nothing is wanted. Call it with every decision, also with
        those that want nothing."""
        grown = wanted.kv_granules - current.kv_granules
        direction = (grown > 0) - (grown < 0)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        if direction == 0:
            return ""
        lasted_s, rested_s = now_s - self._since_s, now_s - self.changed_s
        patience_s = PATIENCE_SHARE * self.reallocate_cooldown_s
        if reallocates and rested_s < self.reallocate_cooldown_s:
            return f"changed {rested_s:.1f} s ago, elastic.reallocate_cooldown_s={self.reallocate_cooldown_s:g}"
        if reallocates and lasted_s < patience_s:
            return f"wanted for {lasted_s:.1f} s, {patience_s:g} s are needed for a change that allocates anew"
        if not reallocates and direction < 0 and rested_s < self.cooldown_s:
            return f"changed {rested_s:.1f} s ago, elastic.cooldown_s={self.cooldown_s:g}"
        return ""
