"""Start, recovery and stop of the group, with fake actors that crash, hang and fail on command."""

from __future__ import annotations

import pytest

from freetoken.engine import watcher
from freetoken.engine.phases import Phase
from freetoken.errors import CheckpointError, FreeTokenError, PeerLostError
from freetoken.messages import ACTOR_NAMES, ActorName, ActorsSuspected, ActorState, HealthState
from freetoken.testing.fake_group import FakeGroup
from freetoken.testing.waiting import until

OTHERS = [name for name in ACTOR_NAMES if name is not ActorName.CONTROLLER]
STREAMER, FRONT, GPU, CPU = (
    ActorName.WEIGHT_STREAMER,
    ActorName.API_FRONT,
    ActorName.GPU_EXECUTOR,
    ActorName.CPU_EXECUTOR,
)


async def test_start(group: FakeGroup) -> None:
    assert (await group.controller.health()).state is HealthState.LOADING
    group.start()
    await group.until_answering(epoch=1)
    assert (await group.controller.health()).state is HealthState.READY
    assert group.reads == 1
    assert len(group.store_inodes()) == 1
    await until(lambda: set(group.controller.reports) == {"ExpertCache", "CpuExecutor"})
    statuses = await group.controller.actors()
    assert [status.name for status in statuses] == list(ACTOR_NAMES)
    assert all(status.state is ActorState.SERVING and status.restarts == 0 for status in statuses)
    overview = await group.controller.overview()
    assert overview.url.startswith("http://127.0.0.1:")


async def test_an_actor_that_is_slow_to_tell_is_described_by_what_it_was_led_to(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a fresh engine under load, when no status has come within its limit since the actors serve."""

    monkeypatch.setattr(watcher, "STATUS_TIMEOUT_S", 0.02)

    async def described() -> dict[ActorName, tuple[ActorState, int]]:
        return {status.name: (status.state, status.epoch) for status in await group.controller.actors()}

    group.host.hanging |= {(CPU, "status"), (GPU, "status")}
    group.start()
    await group.until_answering(epoch=1)
    assert set((await described()).values()) == {(ActorState.SERVING, 1)}
    group.host.hanging.clear()
    await group.controller.actors()  # from now on they have told once, in the first epoch
    group.host.hanging |= {(CPU, "status"), (GPU, "status")}
    await group.host.crash(FRONT)
    await group.until_answering(epoch=2)
    assert set((await described()).values()) == {(ActorState.SERVING, 2)}


async def test_order_of_the_start(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    calls = [call for call in group.host.calls if call[1] in ("load", "wire", "resume")]
    stages = [[method for _, method in calls].index(method) for method in ("load", "wire", "resume")]
    assert stages == [0, 7, 14]
    assert calls[-2:] == [(ActorName.SCHEDULER, "resume"), (FRONT, "resume")]


@pytest.mark.parametrize("victim", OTHERS, ids=str)
async def test_death_of_any_actor(group: FakeGroup, victim: ActorName) -> None:
    group.start()
    await group.until_answering(epoch=1)
    store = group.store_inodes()
    survivors = {name: handle.pid for name, handle in group.host.living.items() if name != victim}
    await group.host.crash(victim)
    await group.until_answering(epoch=2)
    assert {name: handle.pid for name, handle in group.host.living.items() if name != victim} == survivors
    assert (group.reads, group.store_inodes()) == (1, store)
    restarts = {status.name: status.restarts for status in await group.controller.actors()}
    assert restarts == {name: int(name is victim) for name in ACTOR_NAMES}


async def test_front_comes_back_at_the_same_port(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    port = group.service(FRONT).metrics()["port"]
    await group.host.crash(FRONT)
    await group.until_answering(epoch=2)
    assert group.service(FRONT).spec.config.server.port == port


async def test_several_deaths_at_once(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    store = group.store_inodes()
    for name in (STREAMER, CPU, ActorName.SCHEDULER, GPU):
        await group.host.crash(name)
    await group.until_answering(epoch=2)
    assert (group.reads, group.store_inodes()) == (1, store)  # the Controller had it


async def test_death_of_all_seven(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    for name in OTHERS:
        await group.host.crash(name)
    await group.until_answering(epoch=2)
    assert group.reads == 1


@pytest.mark.parametrize("moment", ["load", "wire", "resume"])
@pytest.mark.parametrize("second", [STREAMER, ActorName.KV_ALLOCATOR, GPU], ids=str)
async def test_death_during_recovery(group: FakeGroup, moment: str, second: ActorName) -> None:
    group.start()
    await group.until_answering(epoch=1)
    group.host.before[(CPU, moment)] = lambda: group.host.crash_soon(second)
    await group.host.crash(CPU)
    await until(lambda: [name for name, _ in group.host.created].count(second) == 2)
    await group.until_answering_again()
    assert group.reads == 1
    assert len(group.store_inodes()) == 1


async def test_death_of_the_newborn_itself(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    group.host.before[(GPU, "wire")] = lambda: group.host.crash_soon(GPU)
    await group.host.crash(GPU)
    await until(lambda: group.controller.supervisor.epoch == 3)
    await group.until_answering(epoch=3)
    assert [status.restarts for status in await group.controller.actors() if status.name is GPU] == [2]


@pytest.mark.parametrize("method", ["load", "pause", "wire", "resume"])
async def test_an_actor_that_hangs_is_replaced(group: FakeGroup, method: str) -> None:
    group.limit(load_timeout_s=0.1, pause_timeout_s=0.1, wire_timeout_s=0.1, resume_timeout_s=0.1)
    group.start()
    await group.until_answering(epoch=1)
    hung = ActorName.EXPERT_CACHE
    group.host.hanging.add((hung, method))
    await group.host.crash(hung if method == "load" else CPU)
    await until(lambda: [name for name, _ in group.host.created].count(hung) >= 2 + (method == "load"))
    group.host.hanging.clear()
    await until(lambda: group.controller.supervisor.epoch >= 2)
    await group.until_answering_again()


async def test_a_silent_actor_is_replaced(group: FakeGroup) -> None:
    group.limit(ping_interval_s=0.01, ping_timeout_s=0.05)
    group.start()
    await group.until_answering(epoch=1)
    group.host.hanging.add((ActorName.KV_ALLOCATOR, "status"))
    pid = group.host.living[ActorName.KV_ALLOCATOR].pid
    await until(lambda: ActorName.KV_ALLOCATOR not in group.host.living)
    group.host.hanging.clear()
    await group.until_answering_again()
    assert group.host.living[ActorName.KV_ALLOCATOR].pid != pid


async def test_creation_that_hangs_is_tried_again(group: FakeGroup) -> None:
    group.limit(create_timeout_s=0.05)
    group.start()
    await group.until_answering(epoch=1)
    group.host.hanging.add((CPU, "create"))
    await group.host.crash(CPU)
    await until(lambda: group.host.created.count((CPU, False)) >= 3)
    group.host.hanging.clear()
    await group.until_answering(epoch=2)


async def test_store_is_read_again_only_when_no_holder_can_share(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    group.host.failing[(CPU, "share_store")] = CheckpointError("lost")
    group.host.failing[(GPU, "share_store")] = CheckpointError("lost")
    group.controller.drop_store()
    await group.host.crash(STREAMER)
    await until(lambda: group.reads == 2)
    await group.until_answering_again()
    assert [adopt for name, adopt in group.host.created if name is STREAMER] == [False, True, False]


async def test_another_holder_shares_when_the_first_cannot(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    group.controller.drop_store()
    group.host.failing[(CPU, "share_store")] = CheckpointError("lost")
    await group.host.crash(STREAMER)
    await group.until_answering(epoch=2)
    assert group.reads == 1
    assert (GPU, "share_store") in group.host.calls


async def test_too_many_deaths_end_in_degraded(group: FakeGroup) -> None:
    group.limit(max_restarts=2)
    group.start()
    for epoch in (1, 2, 3):
        await group.until_answering(epoch)
        await group.host.crash(CPU, f"death {epoch}")
    await group.until_phase(Phase.GAVE_UP)
    health = await group.controller.health()
    assert health.state is HealthState.DEGRADED
    assert "CpuExecutor died 3 times" in health.detail
    assert "death 3" in health.detail
    assert "health.max_restarts=2" in health.detail
    await until(lambda: group.service(FRONT).state is ActorState.PAUSED)
    statuses = {status.name: status for status in await group.controller.actors()}
    assert statuses[CPU].state is ActorState.DEAD


async def test_an_error_for_the_user_ends_the_start(group: FakeGroup) -> None:
    (group.directory / "corrupt").touch()
    group.start()
    await group.until_phase(Phase.FAILED)
    failure = (await group.controller.overview()).failure
    assert isinstance(failure, CheckpointError)
    assert str(failure) == "data-0: record 3 is corrupt"
    assert group.reads == 1


async def test_an_actor_that_dies_while_starting_is_given_few_chances(group: FakeGroup) -> None:
    group.host.failing[(GPU, "load")] = RuntimeError("no such device")
    group.start()
    await group.until_phase(Phase.FAILED)
    failure = (await group.controller.overview()).failure
    assert isinstance(failure, FreeTokenError)
    assert "GpuExecutor died 3 times" in str(failure)
    assert "no such device" in str(failure)
    assert [name for name, _ in group.host.created].count(GPU) == 3


async def test_a_lost_peer_does_not_count_against_the_one_who_noticed(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    group.host.failing[(ActorName.EXPERT_CACHE, "wire")] = PeerLostError(str(GPU))
    group.host.before[(CPU, "wire")] = lambda: (
        group.host.failing.clear(),
        group.host.crash_soon(GPU),
    )
    await group.host.crash(CPU)
    await until(lambda: group.controller.supervisor.epoch >= 3)
    await group.until_answering_again()
    restarts = {status.name: status.restarts for status in await group.controller.actors()}
    assert restarts[ActorName.EXPERT_CACHE] == 0


async def test_the_controller_comes_back_unnoticed(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    await group.host.crash(CPU)
    await group.until_answering(epoch=2)
    pids = {name: handle.pid for name, handle in group.host.living.items()}
    answered = group.service(FRONT).metrics()["answered_total"]
    await group.replace_controller()
    await group.until_phase(Phase.READY)
    assert {name: handle.pid for name, handle in group.host.living.items()} == pids
    assert group.controller.supervisor.epoch == 2
    await until(lambda: group.service(FRONT).metrics()["answered_total"] > answered + 3)
    assert group.service(FRONT).epoch == 2
    restarts = {status.name: status.restarts for status in await group.controller.actors()}
    assert restarts == {name: int(name in (ActorName.CONTROLLER, CPU)) for name in ACTOR_NAMES}
    # It hears reports, holds the store, and supervises.
    await until(lambda: bool(group.controller.reports))
    await until(lambda: group.controller.metrics()["store_held"] == 1.0)
    for name in OTHERS:
        await group.host.crash(name)
    await group.until_answering(epoch=3)
    assert group.reads == 1
    await group.replace_controller()
    await group.until_phase(Phase.READY)
    assert {s.name: s.restarts for s in await group.controller.actors()}[ActorName.CONTROLLER] == 2


@pytest.mark.parametrize("victim", OTHERS, ids=str)
async def test_controller_and_another_die_together(group: FakeGroup, victim: ActorName) -> None:
    group.start()
    await group.until_answering(epoch=1)
    store = group.store_inodes()
    await group.controller.supervisor.abandon()
    await group.host.crash(victim)
    await group.replace_controller()
    await group.until_answering(epoch=2)
    assert (group.reads, group.store_inodes()) == (1, store)
    restarts = {status.name: status.restarts for status in await group.controller.actors()}
    assert restarts == {name: int(name in (ActorName.CONTROLLER, victim)) for name in ACTOR_NAMES}


async def test_a_new_controller_replaces_a_silent_weight_streamer(group: FakeGroup) -> None:
    group.limit(ping_timeout_s=0.1)
    group.start()
    await group.until_answering(epoch=1)
    store = group.store_inodes()
    await group.controller.supervisor.abandon()
    group.host.hanging.add((STREAMER, "status"))
    await group.replace_controller()
    await until(lambda: group.host.created.count((STREAMER, True)) == 1)
    group.host.hanging.clear()
    await group.until_answering_again()
    assert (group.reads, group.store_inodes()) == (1, store)


async def test_controller_dies_while_the_group_loads(group: FakeGroup) -> None:
    group.host.hanging.add((GPU, "load"))
    group.start()
    await until(lambda: (GPU, "load") in group.host.calls)
    group.host.hanging.clear()
    await group.replace_controller()
    await group.until_answering(epoch=1)


@pytest.mark.parametrize("hung", [GPU, STREAMER, CPU], ids=str)
@pytest.mark.parametrize("victim", [None, STREAMER, GPU], ids=str)
async def test_controller_dies_during_a_wiring(group: FakeGroup, hung: ActorName, victim: ActorName | None) -> None:
    if victim is not None:
        group.start()
        await group.until_answering(epoch=1)
    group.host.hanging.add((hung, "wire"))
    wirings = group.host.calls.count((hung, "wire"))
    if victim is None:
        group.start()
    else:
        await group.host.crash(victim)
    await until(lambda: group.host.calls.count((hung, "wire")) > wirings)
    group.host.hanging.clear()
    await group.replace_controller()
    await group.until_answering_again()
    assert len(group.store_inodes()) == 1
    # Before the first wiring is complete, WeightStreamer alone is sure to have the store.
    assert group.reads == (2 if victim is None and hung is STREAMER else 1)


async def test_stop_is_orderly(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    await group.controller.stop()
    closed = [name for name, method in group.host.calls if method == "close"]
    assert closed[:2] == [FRONT, ActorName.SCHEDULER]
    assert set(closed[2:4]) == {CPU, GPU}
    assert len(closed) == 7
    assert not group.host.living
    assert group.controller.supervisor.phase is Phase.STOPPED
    await group.controller.stop()


@pytest.mark.parametrize("method", ["create", "load", "wire", "resume"])
async def test_stop_in_the_middle_of_the_start(group: FakeGroup, method: str) -> None:
    group.host.hanging.add((GPU, method))
    group.start()
    await until(
        lambda: (GPU, method) in group.host.calls or (method == "create" and (GPU, False) in group.host.created)
    )
    await group.controller.stop()
    assert not group.host.living


async def test_stop_does_not_wait_for_one_that_hangs(group: FakeGroup) -> None:
    group.limit(close_timeout_s=0.05)
    group.start()
    await group.until_answering(epoch=1)
    group.host.hanging.update((name, "close") for name in OTHERS)
    await group.controller.stop()
    assert not group.host.living


async def test_stop_before_start(group: FakeGroup) -> None:
    await group.controller.stop()


async def test_suspects_of_this_epoch_are_replaced(group: FakeGroup) -> None:
    group.start()
    await group.until_answering(epoch=1)
    scheduler = group.service(ActorName.SCHEDULER)
    message = ActorsSuspected(1, ("ExpertCache",), "step 7 failed: ExpertCache was late")
    scheduler.endpoint.send(ActorName.CONTROLLER, message)
    scheduler.endpoint.send(ActorName.CONTROLLER, message)  # of the second step in flight
    await group.until_answering(epoch=2)
    await group.controller.supervisor.suspect(1, ("GpuExecutor",), "late")  # of an epoch that is over
    await group.controller.supervisor.suspect(2, ("Controller", "nobody"), "late")
    statuses = {status.name: status.restarts for status in await group.controller.actors()}
    assert statuses == {name: int(name is ActorName.EXPERT_CACHE) for name in ACTOR_NAMES}
    assert group.controller.supervisor.epoch == 2
