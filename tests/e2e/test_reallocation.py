"""The arena is allocated anew beneath running requests, in real processes; one of them dies in the middle of it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.process import EngineProcess
from freetoken.messages import ActorName
from tests.e2e.conftest import TINY_SETTINGS, TINY_SLOTS, complete, get, post
from tests.e2e.test_recovery import wait_for, wait_until_serving

pytestmark = pytest.mark.e2e

PROMPTS = [[9, 8, 7, 6], [5] * 40, [3, 1, 4, 1, 5], list(range(20, 90))]


def actor(url: str, name: ActorName) -> Any:
    return next(a for a in get(url, "/v1/actors")["actors"] if a["name"] == str(name))


def metric(url: str, name: ActorName, key: str) -> float:
    return float(actor(url, name)["metrics"].get(key, 0.0))


def test_streams_go_on_and_a_death_in_the_middle_is_a_recovery(tiny_checkpoint: Path, cache_dir: Path) -> None:
    settings = (
        "--set",
        "elastic.mode=reallocate",
        "--set",
        f"loader.cache_dir={cache_dir}",
        "--set",
        "deterministic=true",
    )
    with (
        EngineProcess(str(tiny_checkpoint), *TINY_SETTINGS, *TINY_SLOTS, *settings) as engine,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        url = engine.url

        def text(prompt: list[int]) -> str:
            return str(complete(url, prompt, 300)["choices"][0]["text"])

        expected = list(pool.map(text, PROMPTS))
        answers = [pool.submit(text, prompt) for prompt in PROMPTS]
        for kv_tokens in (4150, 3900, 4150):
            generated = metric(url, ActorName.SCHEDULER, "generated_tokens_total")
            wait_for(lambda seen=generated: metric(url, ActorName.SCHEDULER, "generated_tokens_total") > seen)
            assert post(url, "/v1/cache/rebalance", {"kv_tokens": kv_tokens})["outcome"] == "done"
        assert [answer.result() for answer in answers] == expected
        assert metric(url, ActorName.SCHEDULER, "preemptions_total") > 0
        assert get(url, "/v1/cache/status")["elastic"]["mode"] == "reallocate"

        pid = actor(url, ActorName.EXPERT_CACHE)["pid"]
        os.kill(pid, signal.SIGSTOP)  # it will not empty its table
        change = pool.submit(post, url, "/v1/cache/rebalance", {"kv_tokens": 3900})
        wait_for(lambda: metric(url, ActorName.GPU_EXECUTOR, "resizes_total") == 4)
        os.kill(pid, signal.SIGKILL)
        wait_until_serving(url, {pid})
        assert change.result()["outcome"] == "done"
        assert list(pool.map(text, PROMPTS)) == expected
        status = get(url, "/v1/cache/status")
        device = actor(url, ActorName.GPU_EXECUTOR)["metrics"]
        assert 3900 <= status["kv"]["capacity_tokens"] < 4096
        assert device["slots"] == status["experts"]["slots"] and device["kv_blocks"] == status["kv"]["blocks"]
