"""``freetoken launch`` around a runtime that does as it is told."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from freetoken.cli import launch
from freetoken.cli.launch import Launch, overrides_of
from freetoken.cli.live import LiveView, PlainView, View
from freetoken.cli.main import COMMANDS, build_parser, main
from freetoken.engine.phases import HEALTH, Phase
from freetoken.engine.runtime import Overview
from freetoken.errors import CapacityError, CheckpointError, ConfigError, FreeTokenError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ACTOR_NAMES, ActorName, ActorState, ActorStatus, HealthView
from freetoken.testing.fake_services import fake_spec
from freetoken.testing.waiting import until

METRICS = {
    ActorName.SCHEDULER: {"running": 3, "waiting": 2, "generated_tokens_total": 50, "step_ms": 12.5},
    ActorName.EXPERT_CACHE: {"hits_total": 6, "fetches_total": 3, "cpu_total": 1, "slots": 8, "resident_slots": 5},
    ActorName.KV_ALLOCATOR: {
        "blocks": 64,
        "held_blocks": 4,
        "cached_blocks": 10,
        "free_blocks": 50,
        "block_size_tokens": 16,
    },
}


def overview_in(phase: Phase, detail: str = "", failure: FreeTokenError | None = None, done: int = 0) -> Overview:
    states = {Phase.READY: ActorState.SERVING, Phase.STARTING: ActorState.LOADING}
    actors = tuple(
        ActorStatus(
            name,
            states.get(phase, ActorState.DEAD),
            pid=100 + i,
            epoch=1,
            uptime_s=1.0,
            detail="http://127.0.0.1:8321" if name is ActorName.API_FRONT else "",
            metrics={key: float(value) for key, value in METRICS.get(name, {}).items()},
        )
        for i, name in enumerate(ACTOR_NAMES)
    )
    health = HealthView(HEALTH[phase], detail, done, 1 << 30 if phase is Phase.STARTING else 0, "weights")
    return Overview(phase, health, actors, failure)


class ScriptedRuntime:
    """Shows ``overviews`` one after the other, and the last one for ever."""

    def __init__(self, *overviews: Overview | FreeTokenError) -> None:
        self.overviews = list(overviews)
        self.log: list[str] = []
        self.hang = asyncio.Event()
        self.hang.set()

    async def start(self) -> None:
        self.log.append("start")

    def notes(self) -> list[str]:
        return ["a note [with brackets]"]

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        newest = self.overviews.pop(0) if len(self.overviews) > 1 else self.overviews[0]
        if isinstance(newest, FreeTokenError):
            raise newest
        return newest

    async def stop(self) -> None:
        self.log.append("stop")
        await self.hang.wait()
        self.log.append("stopped")

    def kill(self) -> None:
        self.log.append("kill")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LOADING_INTERVAL_S", 0.001)
    monkeypatch.setattr(launch, "_SERVING_INTERVAL_S", 0.001)


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    return fake_spec(tmp_path)


def make_view(spec: LaunchSpec, terminal: bool) -> View:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, legacy_windows=False)
    return (LiveView if terminal else PlainView)(console, spec)


def printed(view: View) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "live"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_life(spec: LaunchSpec, tmp_path: Path, terminal: bool, number: int) -> None:
    runtime = ScriptedRuntime(
        overview_in(Phase.STARTING, "loading: weights"),
        overview_in(Phase.STARTING, "loading: weights", done=1 << 29),
        FreeTokenError("the Controller is away"),
        overview_in(Phase.READY),
    )
    view = make_view(spec, terminal)
    ready = tmp_path / "ready.json"
    running = asyncio.ensure_future(Launch(runtime, view, ready_file=ready).run())
    await until(ready.exists)
    assert json.loads(ready.read_text()) == {"url": "http://127.0.0.1:8321", "pid": os.getpid()}
    os.kill(os.getpid(), number)
    assert await running == 0
    assert runtime.log == ["start", "stop", "stopped"]
    assert not ready.exists()
    text = printed(view)
    assert "a note [with brackets]" in text
    assert "fake is ready at http://127.0.0.1:8321/v1" in text
    assert "512.00 MiB of 1.00 GiB" in text
    assert "stopping" in text


async def test_signal_before_ready_stops_in_order(spec: LaunchSpec) -> None:
    runtime = ScriptedRuntime(overview_in(Phase.STARTING))
    running = asyncio.ensure_future(Launch(runtime, make_view(spec, False)).run())
    await until(lambda: runtime.log == ["start"])
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert runtime.log == ["start", "stop", "stopped"]


async def test_second_signal_ends_it_at_once(spec: LaunchSpec) -> None:
    runtime = ScriptedRuntime(overview_in(Phase.READY))
    runtime.hang.clear()
    running = asyncio.ensure_future(Launch(runtime, make_view(spec, False)).run())
    await until(lambda: runtime.log == ["start"])
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: runtime.log == ["start", "stop"])
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 130
    assert runtime.log == ["start", "stop", "kill"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(ConfigError("port 80 is\ntaken"), 2), (CheckpointError("data-0 is corrupt"), 1), (CapacityError("too big"), 2)],
)
async def test_failure(
    spec: LaunchSpec, failure: FreeTokenError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = ScriptedRuntime(overview_in(Phase.STARTING), overview_in(Phase.FAILED, failure=failure))
    assert await Launch(runtime, make_view(spec, True)).run() == status
    assert runtime.log == ["start", "stop", "stopped"]
    assert capsys.readouterr().err == f"error: {'; '.join(str(failure).splitlines())}\n"


async def test_detach_leaves_it_running(spec: LaunchSpec, tmp_path: Path) -> None:
    runtime = ScriptedRuntime(overview_in(Phase.STARTING), overview_in(Phase.READY))
    ready = tmp_path / "ready.json"
    assert await Launch(runtime, make_view(spec, False), detach=True, ready_file=ready).run() == 0
    assert runtime.log == ["start"]
    assert ready.exists()


async def test_stopped_from_elsewhere(spec: LaunchSpec) -> None:
    runtime = ScriptedRuntime(overview_in(Phase.READY), overview_in(Phase.STOPPED))
    assert await Launch(runtime, make_view(spec, False)).run() == 0


async def test_an_engine_that_never_answers_again(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_LOST_S", 0.01)
    runtime = ScriptedRuntime(overview_in(Phase.READY), FreeTokenError("the Controller is gone"))
    assert await Launch(runtime, make_view(spec, False)).run() == 1
    assert "the Controller is gone" in capsys.readouterr().err
    assert runtime.log[-1] == "stopped"


def test_live_picture(spec: LaunchSpec) -> None:
    moe = dataclasses.replace(spec, model=dataclasses.replace(spec.model, moe_layers=(0,)))
    view = make_view(moe, True)
    with view:
        view.update(overview_in(Phase.READY))
        view.update(overview_in(Phase.RECOVERING, "GpuExecutor died: signal 9"))
        view.log_stream().write("a log line [not markup]\n")
    text = printed(view)
    for expected in (
        "3 running · 2 waiting",
        "step 12.5 ms",
        "hits 60.0 % · fetched 30.0 % · CPU 10.0 % · slots 5/8",
        "4 held · 10 cached · 50 free of 64 blocks (1024 tokens)",
        "GpuExecutor died: signal 9",
        "WeightStreamer",
        "a log line [not markup]",
    ):
        assert expected in text


def test_plain_lines_are_few(spec: LaunchSpec) -> None:
    view = make_view(spec, False)
    for done in range(0, (1 << 30) + 1, 1 << 24):
        view.update(overview_in(Phase.STARTING, done=done))
    for _ in range(20):
        view.update(overview_in(Phase.READY))
    assert len(printed(view).splitlines()) == 11  # that it is ready is told by `ready`, with the address
    view.update(overview_in(Phase.RECOVERING))
    view.update(overview_in(Phase.READY))
    assert printed(view).splitlines()[12:] == ["ready"]


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser(only="launch").parse_args(["launch", "model", *arguments])


def test_flags_become_settings() -> None:
    args = parse(
        "--device", "cpu", "--vram", "8GiB", "--set", "server.port=1", "--set", "kv.block_size=8", "--port", "0"
    )
    assert overrides_of(args) == {"device": "cpu", "vram": 8 << 30, "server": {"port": 0}, "kv": {"block_size": 8}}
    assert overrides_of(parse()) == {}
    with pytest.raises(ConfigError, match=r"server\.port"):
        overrides_of(parse("--set", "server.port"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", "/nowhere", "--set", "server.prot=1"],
        ["launch", "/nowhere", "--set", "junk"],
        ["launch", "/nowhere", "--profile", "nothing"],
        ["launch", "/nowhere", "--set", "scheduler.max_num_running=0"],
    ],
)
def test_wrong_settings_end_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["launch", "m", "--vram", "much"], ["lunch"], []):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    capsys.readouterr()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("freetoken 0.")


def test_summaries_match_the_commands() -> None:
    actions = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert {choice.dest: choice.help for choice in actions[0]._choices_actions} == COMMANDS
