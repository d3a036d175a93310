"""A whole engine in this process is recorded while it serves; replayed, the file gives the hits that were served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.cli.main import main
from freetoken.engine.local import LocalRuntime
from freetoken.engine.phases import Phase
from freetoken.engine.prepare import prepare_launch
from freetoken.experts.replay import replay_policy
from freetoken.experts.route_trace import read_trace
from freetoken.testing.tiny_models import write_tiny_checkpoint
from freetoken.testing.waiting import until

PATH = "/v1/cache/trace"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    source = write_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "qwen3_moe")
    target = tmp_path_factory.mktemp("ftw") / "qwen3_moe"
    convert(source, target, ConvertOptions())
    return target


class Engine:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def complete(self, prompt: list[int], max_tokens: int) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()

    async def post(self, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + PATH, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()


@asynccontextmanager
async def running(checkpoint: Path, traces: Path) -> AsyncIterator[Engine]:
    settings: dict[str, Any] = {
        "device": "cpu", "vram": "4.6MiB", "max_context_tokens": 512,
        "served_model_name": "tiny", "runtime": "local",
        "server": {"port": 0}, "kv": {"num_tokens": 1536}, "elastic": {"auto": False},
        "scheduler": {"max_num_batched_tokens": 96, "prefill_chunk_tokens": 32},
        "executor": {"cpu_threads": 1, "device_threads": 1, "pin": False},
        "experts": {"split": "fetch", "trace_dir": str(traces)},
    }  # fmt: skip
    runtime = LocalRuntime(prepare_launch(str(checkpoint), overrides=settings, environment={}))
    await runtime.start()
    try:
        await until(lambda: runtime.controller.supervisor.phase in (Phase.READY, Phase.FAILED), 60.0)
        overview = await runtime.overview()
        assert overview.phase is Phase.READY, overview.failure
        async with aiohttp.ClientSession() as session:
            yield Engine(session, overview.url)
    finally:
        await runtime.stop()


PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(length)] for i, length in enumerate((1, 15, 33, 90))]


async def test_a_recording_replays_to_the_served_hits(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(checkpoint, tmp_path / "traces") as engine:
        out = tmp_path / "out.routes"
        command = ["trace", "record", "--url", engine.url, "--seconds", "600", "--out", str(out), "--json"]
        recording = asyncio.ensure_future(asyncio.to_thread(main, command))
        while not (await engine.get(PATH))["recording"]:
            pass
        code, refused = await engine.post({"action": "start"})
        assert (code, refused["error"]["code"]) == (409, "trace_under_way")
        await asyncio.gather(*(engine.complete(prompt, 40) for prompt in PROMPTS))
        code, stopped = await engine.post({"action": "stop"})  # somebody else's; the command sees that it is over
        assert code == 200 and stopped["unrecorded"] == 0
        served = (await engine.get("/v1/cache/status"))["experts"]
        await engine.complete(PROMPTS[0], 8)  # not in the trace
        assert await recording == 0
        summary = json.loads(capsys.readouterr().out)
        trace = read_trace(out)
        assert summary["path"] == str(out) and summary["ended"] == "stopped"
        assert trace.num_publishes == summary["publishes"] == served["publishes_total"]
        assert trace.num_tokens == summary["tokens"] > 4 * 39
        counts = replay_policy(trace, int(served["slots"]), "crf").sum(axis=0)
        assert counts.tolist() == [served[f"{name}_total"] for name in ("hits", "admitted", "evicted")]
        assert served["hits_total"] > 0 and served["evicted_total"] > 0
        assert not list((tmp_path / "traces").iterdir())  # it was moved


async def test_a_command_that_stops_in_time_leaves_the_file_with_the_engine(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(checkpoint, tmp_path / "traces") as engine:
        command = ["trace", "record", "--url", engine.url, "--max-bytes", "64KiB"]
        assert await asyncio.to_thread(main, [*command, "--seconds", "0.05"]) == 0
        (path,) = (tmp_path / "traces").iterdir()
        assert f"{path}: tiny: " in capsys.readouterr().out
        assert not read_trace(path).truncated
        recording = asyncio.ensure_future(asyncio.to_thread(main, command))  # until it is full
        while not (await engine.get(PATH))["recording"]:
            pass
        while (await engine.get(PATH))["recording"]:
            await engine.complete(PROMPTS[3], 40)
        assert await recording == 0
        assert "the limit of 65536 bytes was reached" in capsys.readouterr().out
        for arguments, words in (
            (["--out", str(path)], "exists already"),
            (["--out", str(tmp_path / "none" / "x")], "no directory"),
            (["--seconds", "0"], "--seconds 0"),
            (["--max-bytes", "lots"], "--max-bytes"),
            (["--max-bytes", "1KiB"], "65536"),
        ):
            assert await asyncio.to_thread(main, [*command, *arguments]) in (1, 2)
            assert words in capsys.readouterr().err
