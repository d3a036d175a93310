"""The one-process runtime, with fake services."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.engine.build import SERVICES
from freetoken.engine.local import LocalRuntime
from freetoken.engine.phases import Phase
from freetoken.errors import CheckpointError
from freetoken.messages import ACTOR_NAMES, ActorState, HealthState
from freetoken.testing.fake_services import FAKE_SERVICES, fake_spec
from freetoken.testing.waiting import open_fds, until


@pytest.mark.parametrize("encode", [False, True])
async def test_life(tmp_path: Path, encode: bool) -> None:
    before = open_fds()
    runtime = LocalRuntime(fake_spec(tmp_path), FAKE_SERVICES, encode)
    await runtime.start()
    await until(lambda: runtime.controller.supervisor.phase is Phase.READY)
    await until(lambda: len(runtime.controller.reports) == 2)
    overview = await runtime.overview()
    assert overview.health.state is HealthState.READY
    assert [status.name for status in overview.actors] == list(ACTOR_NAMES)
    assert all(status.state is ActorState.SERVING for status in overview.actors)
    assert overview.url
    await runtime.stop()
    assert (await runtime.overview()).phase is Phase.STOPPED
    assert open_fds() <= before


async def test_failure_is_final(tmp_path: Path) -> None:
    (tmp_path / "corrupt").touch()
    runtime = LocalRuntime(fake_spec(tmp_path), FAKE_SERVICES)
    await runtime.start()
    await until(lambda: runtime.controller.supervisor.phase is Phase.FAILED)
    assert isinstance((await runtime.overview()).failure, CheckpointError)
    await runtime.stop()


async def test_stop_before_start(tmp_path: Path) -> None:
    await LocalRuntime(fake_spec(tmp_path), FAKE_SERVICES).stop()


def test_every_actor_has_a_service() -> None:
    assert set(SERVICES) == set(ACTOR_NAMES)
