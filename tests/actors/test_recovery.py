"""kill -9 and SIGSTOP of real actor processes; one engine, left answering by every test."""

from __future__ import annotations

import os
import signal

import pytest

from freetoken.messages import ACTOR_NAMES, ActorName, ActorState

from .engines import Engine

pytestmark = pytest.mark.actors

OTHERS = [name for name in ACTOR_NAMES if name is not ActorName.CONTROLLER]


@pytest.mark.parametrize("victim", OTHERS, ids=str)
def test_kill_of_any_supervised_actor(engine: Engine, victim: ActorName) -> None:
    before = engine.until_answering()
    pids = {status.name: status.pid for status in before.actors}
    restarts = {status.name: status.restarts for status in before.actors}
    store = engine.store_inodes(before)
    os.kill(pids[victim], signal.SIGKILL)
    after = engine.until_answering(before.actors[0].epoch + 1)
    assert {s.name for s in after.actors if s.pid != pids[s.name]} == {victim}
    assert {s.name: s.restarts for s in after.actors} == {**restarts, victim: restarts[victim] + 1}
    assert (engine.reads, engine.store_inodes(after)) == (1, store)


def test_kill_of_the_controller(engine: Engine) -> None:
    before = engine.until_answering()
    pids = {status.name: status.pid for status in before.actors}
    epoch = before.actors[0].epoch
    answered = before.of(ActorName.API_FRONT).metrics["answered_total"]  # type: ignore[union-attr]
    os.kill(pids[ActorName.CONTROLLER], signal.SIGKILL)
    after = engine.until(lambda overview: overview.of(ActorName.CONTROLLER).pid != pids[ActorName.CONTROLLER])  # type: ignore[union-attr]
    after = engine.until_answering(epoch)  # the others went on, in the same epoch
    front = after.of(ActorName.API_FRONT)
    assert front is not None
    assert front.metrics["answered_total"] > answered
    assert {s.name for s in after.actors if s.pid != pids[s.name]} == {ActorName.CONTROLLER}
    assert after.of(ActorName.CONTROLLER).restarts == 1  # type: ignore[union-attr]
    engine.until(lambda overview: overview.of(ActorName.CONTROLLER).metrics["store_held"] == 1.0)  # type: ignore[union-attr]


def test_the_new_controller_supervises_and_hands_over_the_store(engine: Engine) -> None:
    before = engine.until_answering()
    store = engine.store_inodes(before)
    for status in before.actors:
        if status.name is not ActorName.CONTROLLER:
            os.kill(status.pid, signal.SIGKILL)
    after = engine.until_answering(before.actors[0].epoch + 1)
    assert (engine.reads, engine.store_inodes(after)) == (1, store)


def test_controller_and_weight_streamer_die_together(engine: Engine) -> None:
    before = engine.until_answering()
    store = engine.store_inodes(before)
    for name in (ActorName.CONTROLLER, ActorName.WEIGHT_STREAMER):
        os.kill(before.of(name).pid, signal.SIGKILL)  # type: ignore[union-attr]
    after = engine.until_answering(before.actors[0].epoch + 1)
    assert (engine.reads, engine.store_inodes(after)) == (1, store)


@pytest.mark.parametrize("name", [ActorName.EXPERT_CACHE, ActorName.CONTROLLER], ids=str)
def test_a_stopped_actor_is_replaced(engine: Engine, name: ActorName) -> None:
    before = engine.until_answering()
    victim = before.of(name)
    assert victim is not None
    os.kill(victim.pid, signal.SIGSTOP)
    after = engine.until(
        lambda overview: overview.of(name).pid not in (0, victim.pid)  # type: ignore[union-attr]
    )
    after = engine.until_answering()
    assert all(status.state is ActorState.SERVING for status in after.actors)
    assert engine.reads == 1
