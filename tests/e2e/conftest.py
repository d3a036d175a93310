"""Whole engines for the tests of this folder: one Ray engine for the session, on a tiny random model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.process import EngineProcess
from freetoken.testing.tiny_models import write_tiny_checkpoint

TINY_SETTINGS = (
    "--set", "server.port=0",
    "--set", "ray.dashboard=false",
    "--set", "kv.num_tokens=4096",
    "--set", "max_context_tokens=1024",
    "--set", "scheduler.max_num_batched_tokens=96",
    "--set", "scheduler.prefill_chunk_tokens=32",
    "--set", "elastic.auto=false",
    "--set", "health.ping_interval_s=0.5",
    "--set", "health.ping_timeout_s=5",
)  # fmt: skip
# 11 slots for 48 records: hits, fetches and CPU experts all occur.
TINY_SLOTS = ("--set", "vram=7.75MiB")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "qwen3_moe")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Path, cache_dir: Path) -> Iterator[EngineProcess]:
    """The session's Ray engine."""
    process = EngineProcess(str(tiny_checkpoint), *TINY_SETTINGS, *TINY_SLOTS, "--set", f"loader.cache_dir={cache_dir}")
    with process as running:
        yield running


def get(url: str, path: str) -> Any:
    """GET and parse JSON."""
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.loads(response.read())


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """POST JSON and parse the answer; ``urllib.error.HTTPError`` for an error status."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def complete(url: str, prompt: Any, max_tokens: int = 16, **fields: Any) -> Any:
    """A greedy completion; ``prompt`` may be token ids."""
    model = get(url, "/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return post(url, "/v1/completions", body | fields)
