"""Transitions of one service: one at a time, the newest wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from freetoken.engine.lifecycle import ServiceRunner
from freetoken.errors import FreeTokenError
from freetoken.messages import ActorName, ActorState, Wiring
from freetoken.service import Service
from freetoken.testing.fake_services import fake_spec
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub


class Recorder(Service):
    """Writes down what begins and ends; wiring waits for ``release``."""

    name: ClassVar[ActorName] = ActorName.EXPERT_CACHE
    log: list[str]
    release: asyncio.Event
    shared: list[ActorName]

    async def _step(self, what: str) -> None:
        self.log.append(f"{what} begins")
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.log.append(f"{what} cancelled")
            raise
        self.log.append(f"{what} ends")

    async def wire(self, wiring: Wiring) -> None:
        await super().wire(wiring)
        await self._step(f"wire {wiring.epoch}")

    async def pause(self, reason: str) -> None:
        await self._step("pause")
        await super().pause(reason)

    async def share_store(self, to: ActorName) -> None:
        self.shared.append(to)


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[ServiceRunner]:
    endpoint = InProcessHub().endpoint(ActorName.EXPERT_CACHE)
    service = Recorder(fake_spec(tmp_path), endpoint)
    service.log, service.release, service.shared = [], asyncio.Event(), []
    service.release.set()
    runner = ServiceRunner(service, endpoint)
    yield runner
    await runner.close()


def recorder(runner: ServiceRunner) -> Recorder:
    assert isinstance(runner.service, Recorder)
    return runner.service


async def test_life(runner: ServiceRunner) -> None:
    await runner.load()
    await runner.wire(Wiring(1, {}), {ActorName.SCHEDULER: 3})
    assert (await runner.status()).state is ActorState.WIRED
    await runner.resume()
    assert (await runner.status()).state is ActorState.SERVING
    await runner.pause("x")
    assert (await runner.status()).state is ActorState.PAUSED
    assert await runner.restarts() == {ActorName.SCHEDULER: 3}
    assert recorder(runner).log == ["wire 1 begins", "wire 1 ends", "pause begins", "pause ends"]


async def test_a_newer_wiring_replaces_one_under_way(runner: ServiceRunner) -> None:
    service = recorder(runner)
    service.release.clear()
    first = asyncio.ensure_future(runner.wire(Wiring(1, {}), {}))
    await until(lambda: service.log == ["wire 1 begins"])
    second = asyncio.ensure_future(runner.wire(Wiring(2, {}), {}))
    third = asyncio.ensure_future(runner.wire(Wiring(3, {}), {}))
    with pytest.raises(FreeTokenError, match="superseded"):
        await first
    with pytest.raises(FreeTokenError, match="superseded"):
        await second
    service.release.set()
    await third
    assert service.log == ["wire 1 begins", "wire 1 cancelled", "wire 3 begins", "wire 3 ends"]
    assert (await runner.status()).epoch == 3


async def test_pause_ends_a_wiring_and_does_not_touch_what_never_served(runner: ServiceRunner) -> None:
    service = recorder(runner)
    service.release.clear()
    wiring = asyncio.ensure_future(runner.wire(Wiring(1, {}), {}))
    await until(lambda: service.log == ["wire 1 begins"])
    await runner.pause("x")
    with pytest.raises(FreeTokenError, match="superseded"):
        await wiring
    assert service.log == ["wire 1 begins", "wire 1 cancelled"]


async def test_a_pause_is_not_cut_short(runner: ServiceRunner) -> None:
    service = recorder(runner)
    await runner.wire(Wiring(1, {}), {})
    await runner.resume()
    service.log.clear()
    service.release.clear()
    pausing = asyncio.ensure_future(runner.pause("x"))
    await until(lambda: service.log == ["pause begins"])
    wiring = asyncio.ensure_future(runner.wire(Wiring(2, {}), {}))
    await asyncio.sleep(0)
    service.release.set()
    await pausing
    await wiring
    assert service.log == ["pause begins", "pause ends", "wire 2 begins", "wire 2 ends"]


async def test_a_caller_that_gives_up_ends_its_transition(runner: ServiceRunner) -> None:
    service = recorder(runner)
    service.release.clear()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(runner.wire(Wiring(1, {}), {}), 0.01)
    assert service.log == ["wire 1 begins", "wire 1 cancelled"]


async def test_sharing_waits_for_the_epoch(runner: ServiceRunner) -> None:
    service = recorder(runner)
    sharing = asyncio.ensure_future(runner.share_store(ActorName.WEIGHT_STREAMER, 2))
    await runner.wire(Wiring(1, {}), {})
    assert not sharing.done()
    service.release.clear()
    wiring = asyncio.ensure_future(runner.wire(Wiring(2, {}), {}))
    await sharing  # also while the wiring goes on
    assert service.shared == [ActorName.WEIGHT_STREAMER]
    service.release.set()
    await wiring


async def test_rewire_is_for_the_same_epoch_only(runner: ServiceRunner) -> None:
    await runner.wire(Wiring(1, {}), {})
    await runner.rewire(Wiring(1, {}), {})
    with pytest.raises(FreeTokenError, match="epoch 1, not 2"):
        await runner.rewire(Wiring(2, {}), {})
    assert recorder(runner).log == ["wire 1 begins", "wire 1 ends"]


async def test_close_ends_everything(runner: ServiceRunner) -> None:
    service = recorder(runner)
    service.release.clear()
    wiring = asyncio.ensure_future(runner.wire(Wiring(1, {}), {}))
    waiting = asyncio.ensure_future(runner.wait_closed())
    await until(lambda: service.log == ["wire 1 begins"])
    await runner.close()
    await waiting
    with pytest.raises(FreeTokenError):
        await wiring
    with pytest.raises(FreeTokenError, match="closed"):
        await runner.wire(Wiring(2, {}), {})
    assert (await runner.status()).state is ActorState.STOPPED
