"""What is told, counted and kept of decisions about the arena's memory."""

from __future__ import annotations

import logging

import pytest

from freetoken.elastic.arena_shape import ArenaShape
from freetoken.elastic.rebalance import ElasticDecision
from freetoken.engine import decision_log
from freetoken.engine.decision_log import DecisionLog

SHAPE = ArenaShape(1 << 20, 100, 300_000, 20_000, 16, max_slots=10_000, min_slots=8, min_blocks=2)
NOW = SHAPE.split(20)
POOR = ElasticDecision(NOW, "kv_pressure", "slots_worth_more", "nothing: slots are worth more; 3 requests", 2.0, 1.0)
IDLE = ElasticDecision(NOW, "idle_kv", "no_idle_kv", "nothing: no KV is idle; 7 blocks", 0.5, 0.25)
LESS = ElasticDecision(SHAPE.split(15), "idle_kv", "slots_grow", "slots grow: 7 blocks", 3.0, 1.0)


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=decision_log.__name__)


def test_nothing_under_pressure_is_told_with_its_numbers_counted_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog()
    for _ in range(5):
        log.passed(SHAPE, NOW, POOR, "")
    (record,) = log.records
    assert record.outcome == "unchanged" and record.reason == log.idle_reason == POOR.reason
    (line,) = (entry.getMessage() for entry in caplog.records)
    assert "event=decision trigger=kv_pressure verdict=slots_worth_more outcome='unchanged'" in line
    assert "slot_ms_per_s=2 kv_ms_per_s=1" in line and "3 requests" in line
    metrics = log.metrics()
    assert metrics["rebalance_decisions_total"] == metrics["rebalance_decisions_slots_worth_more_total"] == 5
    assert metrics["last_decision_trigger_kv_pressure"] == metrics["last_decision_outcome_unchanged"] == 1
    assert metrics["last_decision_slot_ms_per_s"] == 2 and metrics["last_decision_kv_ms_per_s"] == 1
    assert metrics["last_decision_timestamp_seconds"] == record.time_s


def test_a_change_that_is_held_back_is_told_once_and_then_made(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog()
    for ago in range(3):
        log.passed(SHAPE, NOW, LESS, f"changed {ago} s ago")
    assert log.idle_reason == "held back: changed 2 s ago; slots grow: 7 blocks"
    assert log.metrics()["last_decision_outcome_held_back"] == 1
    log.decided(SHAPE, NOW, LESS, "done", 4096, 2.5)
    assert [record.outcome for record in log.records] == ["held back: changed 0 s ago", "done"]
    assert (
        len(caplog.records) == 2
        and "event=rebalance" in caplog.records[1].getMessage()
        and "moved_bytes=4096" in caplog.records[1].getMessage()
    )
    metrics = log.metrics()
    assert metrics["rebalance_decisions_slots_grow_total"] == 4 and metrics["rebalance_decisions_held_back_total"] == 3
    assert metrics["rebalances_idle_kv_total"] == metrics["last_decision_outcome_done"] == 1
    assert metrics["last_decision_outcome_held_back"] == 0
    assert metrics["last_decision_slots_before"] < metrics["last_decision_slots_after"]
    assert metrics["last_decision_kv_tokens_before"] > metrics["last_decision_kv_tokens_after"]
    assert metrics["last_decision_moved_bytes"] == 4096


def test_a_mind_that_changes_to_and_fro_floods_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(decision_log.time, "monotonic", lambda: now_s)
    log = DecisionLog()
    for _ in range(500):
        log.passed(SHAPE, NOW, POOR, "")
        log.passed(SHAPE, NOW, IDLE, "")
        now_s += 0.1
    assert len(caplog.records) == 2 and len(log.records) == 1  # idle KV that stays is no event
    now_s += decision_log.REPEAT_S
    log.passed(SHAPE, NOW, POOR, "")
    assert len(caplog.records) == 3
    assert log.metrics()["rebalance_decisions_total"] == 1001


def test_what_failed_is_counted_and_shown_as_such() -> None:
    log = DecisionLog()
    assert "last_decision_timestamp_seconds" not in log.metrics()
    record = log.decided(SHAPE, NOW, LESS, "out of physical memory")
    assert record.slots_after == record.slots_before
    metrics = log.metrics()
    assert metrics["rebalances_failed_total"] == metrics["last_decision_outcome_failed"] == 1
    assert metrics["rebalances_idle_kv_total"] == 0
