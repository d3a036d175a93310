"""What was decided about the arena's memory: counted, told when it changes, the newest kept."""

from __future__ import annotations

import logging
import time
from collections import deque

from freetoken.elastic.arena_shape import ArenaShape, ArenaSplit
from freetoken.elastic.rebalance import VERDICTS, ElasticDecision
from freetoken.messages import RebalanceRecord

logger = logging.getLogger(__name__)

HISTORY = 16
REPEAT_S = 60.0
"""What was not done is told again no sooner, however often the decision changes to and fro."""

TRIGGERS = ("kv_pressure", "idle_kv", "request")
OUTCOMES = ("done", "unchanged", "held_back", "failed")
_HELD = "held back: "


class DecisionLog:
    """``records``: changes, operators' wishes, and what was not done although requests starve or a change was due;
    newest last. ``idle_reason``: why the last look changed nothing."""

    def __init__(self) -> None:
        self.records: deque[RebalanceRecord] = deque(maxlen=HISTORY)
        self.idle_reason = ""
        self._counts = dict.fromkeys((*VERDICTS, *TRIGGERS, "failed", "held_back"), 0)
        self._mind = ("", False)
        self._told_s: dict[tuple[str, bool], float] = {}

    def decided(
        self,
        shape: ArenaShape,
        current: ArenaSplit,
        decision: ElasticDecision,
        outcome: str,
        moved_bytes: int = 0,
        duration_ms: float = 0.0,
    ) -> RebalanceRecord:
        """A decision that was carried out, or (``outcome`` says why) could not be; or a wish that changes nothing."""
        record = _record(shape, current, decision, outcome, moved_bytes, duration_ms)
        self._counts[decision.verdict] += 1
        if outcome != "unchanged":
            self._counts[decision.trigger if outcome == "done" else "failed"] += 1
        self._mind = ("", False)
        self._tell("rebalance", decision.verdict, record)
        self.records.append(record)
        return record

    def passed(self, shape: ArenaShape, current: ArenaSplit, decision: ElasticDecision, held_back: str) -> None:
        """A look that changed nothing: so it was decided, or (``held_back``) it is not the time."""
        self._counts[decision.verdict] += 1
        self._counts["held_back"] += bool(held_back)
        outcome = f"{_HELD}{held_back}" if held_back else "unchanged"
        self.idle_reason = f"{outcome}; {decision.reason}" if held_back else decision.reason
        mind, now_s = (decision.verdict, bool(held_back)), time.monotonic()
        if mind == self._mind:
            return
        self._mind = mind
        if now_s - self._told_s.get(mind, -REPEAT_S) < REPEAT_S:
            return
        self._told_s[mind] = now_s
        record = _record(shape, current, decision, outcome)
        self._tell("decision", decision.verdict, record)
        if held_back or decision.trigger == "kv_pressure":
            self.records.append(record)

    def metrics(self) -> dict[str, float]:
        """Decisions by verdict, changes by what called for them, and the newest record."""
        counts = self._counts
        return {
            "rebalance_decisions_total": float(sum(counts[verdict] for verdict in VERDICTS)),
            **{f"rebalance_decisions_{verdict}_total": float(counts[verdict]) for verdict in VERDICTS},
            "rebalance_decisions_held_back_total": float(counts["held_back"]),
            **{f"rebalances_{name}_total": float(counts[name]) for name in (*TRIGGERS, "failed")},
            **(_figures(self.records[-1]) if self.records else {}),
        }

    @staticmethod
    def _tell(event: str, verdict: str, record: RebalanceRecord) -> None:
        logger.info(
            "event=%s trigger=%s verdict=%s outcome=%r slots=%d->%d kv_tokens=%d->%d slot_ms_per_s=%.3g "
            "kv_ms_per_s=%.3g moved_bytes=%d ms=%.1f reason=%r",
            event, record.trigger, verdict, record.outcome, record.slots_before, record.slots_after,
            record.kv_tokens_before, record.kv_tokens_after, record.slot_ms_per_s, record.kv_ms_per_s,
            record.moved_bytes, record.duration_ms, record.reason,
        )  # fmt: skip


def _record(
    shape: ArenaShape,
    current: ArenaSplit,
    decision: ElasticDecision,
    outcome: str,
    moved_bytes: int = 0,
    duration_ms: float = 0.0,
) -> RebalanceRecord:
    after = decision.split if outcome == "done" else current
    return RebalanceRecord(
        time_s=time.time(),
        trigger=decision.trigger,
        reason=decision.reason,
        outcome=outcome,
        slots_before=shape.slots_in(current.slot_granules),
        slots_after=shape.slots_in(after.slot_granules),
        kv_tokens_before=shape.blocks_in(current.kv_granules) * shape.block_size,
        kv_tokens_after=shape.blocks_in(after.kv_granules) * shape.block_size,
        slot_ms_per_s=decision.slot_ms_per_s,
        kv_ms_per_s=decision.kv_ms_per_s,
        moved_bytes=moved_bytes,
        duration_ms=duration_ms,
    )


def _figures(record: RebalanceRecord) -> dict[str, float]:
    """One of the triggers is 1, and one of the outcomes."""
    outcome = "held_back" if record.outcome.startswith(_HELD) else record.outcome
    outcome = outcome if outcome in OUTCOMES else "failed"
    figures = {
        "timestamp_seconds": record.time_s,
        **{f"trigger_{name}": float(name == record.trigger) for name in TRIGGERS},
        **{f"outcome_{name}": float(name == outcome) for name in OUTCOMES},
        "slots_before": record.slots_before,
        "slots_after": record.slots_after,
        "kv_tokens_before": record.kv_tokens_before,
        "kv_tokens_after": record.kv_tokens_after,
        "slot_ms_per_s": record.slot_ms_per_s,
        "kv_ms_per_s": record.kv_ms_per_s,
        "moved_bytes": record.moved_bytes,
        "duration_ms": record.duration_ms,
    }
    return {f"last_decision_{name}": float(value) for name, value in figures.items()}
