"""kill -9 of each actor: in-flight requests end with an error, the service comes back, nothing is read again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.main import main
from freetoken.cli.process import EngineProcess
from freetoken.experts.route_trace import read_trace
from freetoken.messages import ACTOR_NAMES, ActorName
from tests.e2e.conftest import TINY_SETTINGS, TINY_SLOTS, complete, get, post

pytestmark = pytest.mark.e2e

RECOVERY_LIMIT_S = 60.0
"""Far above what it takes (bench/system/recovery.py measures that); a hang must not block the suite."""


def wait_until_serving(url: str, dead_pids: set[int]) -> list[dict[str, Any]]:
    """Every actor serving, none of them one of ``dead_pids``."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            actors = get(url, "/v1/actors")["actors"]
            alive = [a for a in actors if a["state"] == "serving" and a["pid"] not in dead_pids]
            if len(alive) == len(ACTOR_NAMES) and get(url, "/health")["status"] == "ready":
                return actors
        time.sleep(0.1)
    raise AssertionError(f"not serving again within {RECOVERY_LIMIT_S} s")


def store_metrics(actors: list[dict[str, Any]]) -> dict[str, float]:
    """WeightStreamer's own figures."""
    metrics: dict[str, float] = next(a["metrics"] for a in actors if a["name"] == str(ActorName.WEIGHT_STREAMER))
    return metrics


@pytest.mark.parametrize("victim", ACTOR_NAMES, ids=str)
def test_any_actor_may_be_killed(engine: EngineProcess, victim: ActorName) -> None:
    url = engine.url
    actors = wait_until_serving(url, set())
    before = complete(url, [9, 8, 7, 6], 12)["choices"][0]["text"]
    outcome: list[object] = []

    def long_request() -> None:
        try:
            outcome.append(complete(url, [5, 6, 7], 900))
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            outcome.append(error)

    thread = threading.Thread(target=long_request)
    thread.start()
    pid = next(a["pid"] for a in actors if a["name"] == str(victim))
    os.kill(pid, signal.SIGKILL)
    thread.join(RECOVERY_LIMIT_S)
    assert not thread.is_alive(), "the in-flight request hangs"
    assert outcome
    after = wait_until_serving(url, {pid})
    assert complete(url, [9, 8, 7, 6], 12)["choices"][0]["text"] == before
    assert store_metrics(after)["store_bytes"] == store_metrics(actors)["store_bytes"] > 0
    read = 0.0 if victim is ActorName.WEIGHT_STREAMER else store_metrics(actors)["read_bytes_total"]
    assert store_metrics(after)["read_bytes_total"] == read, "weights were read again"


def test_two_deaths_at_once(engine: EngineProcess) -> None:
    actors = wait_until_serving(engine.url, set())
    victims = {str(ActorName.WEIGHT_STREAMER), str(ActorName.CONTROLLER)}
    pids = {a["pid"] for a in actors if a["name"] in victims}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until_serving(engine.url, pids)
    complete(engine.url, [1, 2, 3], 4)


def test_an_actor_stuck_in_the_data_plane_is_replaced(tiny_checkpoint: Path, cache_dir: Path) -> None:
    """Long before it would be missed by pings, and the requests that it fails end with an error."""
    settings = ("--set", "executor.wait_timeout_s=1", "--set", "health.ping_timeout_s=600")
    arguments = (*TINY_SETTINGS, *TINY_SLOTS, *settings, "--set", f"loader.cache_dir={cache_dir}")
    with EngineProcess(str(tiny_checkpoint), *arguments) as engine:
        actors = wait_until_serving(engine.url, set())
        before = complete(engine.url, [9, 8, 7, 6], 12)["choices"][0]["text"]
        pid = next(a["pid"] for a in actors if a["name"] == str(ActorName.EXPERT_CACHE))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(engine.url, [9, 8, 7, 6], 12)
        assert b"ExpertCache" in refused.value.read()
        refused.value.close()
        wait_until_serving(engine.url, {pid})
        assert complete(engine.url, [9, 8, 7, 6], 12)["choices"][0]["text"] == before


@pytest.mark.parametrize("victim", [ActorName.KV_ALLOCATOR, ActorName.EXPERT_CACHE, ActorName.GPU_EXECUTOR], ids=str)
def test_a_changed_division_survives_all_but_its_memory(engine: EngineProcess, victim: ActorName) -> None:
    expected = complete(engine.url, [9, 8, 7, 6], 12)["choices"][0]["text"]
    asked = 4150 if get(engine.url, "/v1/cache/status")["kv"]["capacity_tokens"] < 4150 else 4000
    answer = post(engine.url, "/v1/cache/rebalance", {"kv_tokens": asked})
    assert answer["outcome"] == "done", answer
    changed = get(engine.url, "/v1/cache/status")["kv"]["capacity_tokens"]
    pid = next(a["pid"] for a in get(engine.url, "/v1/actors")["actors"] if a["name"] == victim)
    os.kill(pid, signal.SIGKILL)
    wait_until_serving(engine.url, {pid})
    assert complete(engine.url, [9, 8, 7, 6], 12)["choices"][0]["text"] == expected
    status = get(engine.url, "/v1/cache/status")
    if victim is not ActorName.GPU_EXECUTOR:
        assert status["kv"]["capacity_tokens"] == changed
    assert status["kv"]["capacity_tokens"] // 16 == status["kv"]["blocks"]
    device = next(a["metrics"] for a in get(engine.url, "/v1/actors")["actors"] if a["name"] == "GpuExecutor")
    assert device["slots"] == status["experts"]["slots"] and device["kv_blocks"] == status["kv"]["blocks"]


@pytest.mark.parametrize("victim", [ActorName.EXPERT_CACHE, ActorName.CONTROLLER, ActorName.SCHEDULER], ids=str)
def test_a_recording_outlives_all_but_its_maker(
    engine: EngineProcess, victim: ActorName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, out = engine.url, tmp_path / "out.routes"
    wait_until_serving(url, set())
    statuses: list[int] = []
    command = ["trace", "record", "--url", url, "--out", str(out), "--json"]
    thread = threading.Thread(target=lambda: statuses.append(main(command)))
    thread.start()
    wait_for(lambda: get(url, "/v1/cache/trace")["recording"])
    begun = get(url, "/v1/cache/trace")
    complete(url, [5, 6, 7], 20)
    wait_for(lambda: get(url, "/v1/cache/trace")["tokens"] >= 22)  # of the prompt and all answers but the last
    pid = next(a["pid"] for a in get(url, "/v1/actors")["actors"] if a["name"] == str(victim))
    os.kill(pid, signal.SIGKILL)
    wait_until_serving(url, {pid})
    complete(url, [5, 6, 7], 20)
    now = get(url, "/v1/cache/trace")
    if victim is ActorName.EXPERT_CACHE:
        assert not now["recording"] and "ExpertCache ended" in now["ended"]
    else:
        assert now["recording"] and now["path"] == begun["path"]
        assert post(url, "/v1/cache/trace", {"action": "stop"})["ended"] == "stopped"
    thread.join(RECOVERY_LIMIT_S)
    assert statuses == [0]
    summary, trace = json.loads(capsys.readouterr().out), read_trace(out)
    assert (trace.num_publishes, trace.num_tokens) == (summary["publishes"], summary["tokens"])
    assert trace.num_tokens >= (22 if victim is ActorName.EXPERT_CACHE else 40)


def wait_for(condition: Callable[[], bool]) -> None:
    """Within the limit."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
