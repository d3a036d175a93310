"""A whole engine in this process whose arena is allocated anew: streams go on through it, bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import random
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.main import main
from freetoken.engine.phases import Phase
from freetoken.errors import CapacityError
from freetoken.execution import arena as arena_module
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ArenaReplaced,
    ArenaResized,
    ArenaVacated,
    PoolEmptied,
    RebalanceWish,
    VacateArena,
)
from freetoken.testing.waiting import until
from tests.unit.elastic import test_rebalance_engine as moving
from tests.unit.elastic.test_rebalance_engine import PROMPTS, Engine, running


@pytest.fixture(autouse=True)
def no_other_arena() -> None:
    gc.collect()  # engines of other tests


checkpoint = moving.checkpoint
one_torch_thread = moving.one_torch_thread


def launch(checkpoint: Path, **overrides: Any) -> LaunchSpec:
    elastic = {"auto": False, "mode": "reallocate", **overrides.pop("elastic", {})}
    return moving.launch(checkpoint, elastic=elastic, **overrides)


def check(engine: Engine) -> None:
    """Tables, capacities and memory agree; there is one arena, within the budget."""
    cache, kv, device = (
        engine.service(name) for name in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.GPU_EXECUTOR)
    )
    arena = device._arena
    kv.allocator.check_integrity()
    assert arena.pools is None and arena.shape is not None
    assert cache.slots.num_slots == arena.num_slots == arena.slot_segment.size_bytes // arena.slot_stride_bytes
    assert kv.allocator.stats().total_blocks == arena.num_blocks == arena.kv_segment.size_bytes // arena.kv.block_bytes
    assert cache._arena_id == kv._arena_id == arena.arena_id
    assert arena.size_bytes <= arena.shape.budget_bytes
    counters = cache._server.counters()
    assert counters["resident"] + counters["in_flight"] <= arena.num_slots
    maps = Path("/proc/self/maps").read_text()
    assert maps.count("memfd:freetoken-kv") == maps.count("memfd:freetoken-slots") == 1  # the old ones are gone


async def test_9_streams_go_on_through_12_reallocations(checkpoint: Path) -> None:
    async with running(launch(checkpoint)) as engine:
        rng = random.Random(5)
        streams = [functools.partial(engine.complete, prompt, 60) for prompt in PROMPTS]
        streams.append(functools.partial(engine.complete, PROMPTS[3], 400))
        expected = await asyncio.gather(*(stream() for stream in streams))
        store = engine.service(ActorName.GPU_EXECUTOR).store
        rebalancer = engine.runtime.controller.rebalancer
        shape = rebalancer.shape
        assert shape is not None
        most = shape.blocks_in(shape.max_kv_granules) * shape.block_size
        scheduler = engine.service(ActorName.SCHEDULER).scheduler
        tasks = [asyncio.ensure_future(stream()) for stream in streams]
        arenas, done, preempted = set(), 0, 0

        async def more_tokens() -> None:
            seen = scheduler.book.generated_tokens_total
            await until(lambda: scheduler.book.generated_tokens_total > seen + 20 or not scheduler.book.live, 30.0)

        while done < 12:
            await more_tokens()
            if all(task.done() for task in tasks):
                assert [task.result() for task in tasks] == expected
                tasks = [asyncio.ensure_future(stream()) for stream in streams]
                continue
            running_now = len(scheduler.book.running)
            try:
                record = await rebalancer.rebalance(RebalanceWish(kv_tokens=rng.randrange(256, most)))
            except CapacityError:  # more is in use
                continue
            assert record.outcome in ("done", "unchanged")
            if record.outcome == "done":
                done += 1
                preempted += running_now
                arenas.add(engine.service(ActorName.GPU_EXECUTOR)._arena.arena_id)
                check(engine)
        assert await asyncio.gather(*tasks) == expected
        assert len(arenas) == 12 and preempted > 12
        assert engine.service(ActorName.GPU_EXECUTOR).store is store and engine.runtime.controller.epoch == 1
        figures = engine.service(ActorName.SCHEDULER).metrics()
        assert figures["resizes_total"] == 12 and figures["preemptions_total"] >= 12
        assert figures["failed_steps_total"] == figures["requests_failed_total"] == 0
        check(engine)


async def test_an_operator_asks_over_http(checkpoint: Path) -> None:
    spec = launch(checkpoint)
    async with running(spec) as engine:
        prompt = PROMPTS[5]
        expected = await engine.complete(prompt, 8)
        status = await engine.get("/v1/cache/status")
        assert status["elastic"]["elastic"] and status["elastic"]["mode"] == "reallocate"
        assert "computed again" in status["elastic"]["cost"]
        assert status["experts"]["slots"] == spec.plan.num_slots
        assert status["kv"]["capacity_tokens"] == spec.plan.num_kv_blocks * 16
        assert status["kv"]["cached_blocks"] > 0
        code, answer = await engine.post({"kv_tokens": 1700})
        assert code == 200 and answer["outcome"] == "done" and answer["moved_bytes"] == 0, answer
        status = await engine.get("/v1/cache/status")
        assert status["experts"]["slots"] == answer["slots"]["after"] < spec.plan.num_slots
        assert status["kv"]["capacity_tokens"] == answer["kv_tokens"]["after"] >= 1700
        assert status["kv"]["cached_blocks"] == 0 and status["experts"]["resident_slots"] == 0
        assert status["elastic"]["decisions"][0]["outcome"] == "done"
        assert await engine.complete(prompt, 8) == expected
        code, answer = await engine.post({"kv_tokens": 1700})
        assert code == 200 and answer["outcome"] == "unchanged"
        code, answer = await engine.post({"expert_bytes": "1.5MiB"})
        assert code == 200 and answer["outcome"] == "done"
        answers = await asyncio.gather(*(engine.post({"kv_tokens": count}) for count in (1650, 1700)))
        assert sorted(code for code, _ in answers) == [200, 409]
        device = engine.service(ActorName.GPU_EXECUTOR).metrics()
        assert device["resizes_total"] == 3 and device["resize_slowest_pause_ms"] >= device["resize_ms"] > 0
        assert engine.runtime.controller.metrics()["rebalances_request_total"] == 3
        check(engine)


async def test_the_command_line_tells_the_way(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(launch(checkpoint)) as engine:
        assert await asyncio.to_thread(main, ["cache", "--url", engine.url]) == 0
        assert "a change (reallocate): requests pause" in " ".join(capsys.readouterr().out.split())


async def test_when_memory_is_short_the_old_division_serves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(launch(checkpoint)) as engine:
        expected = await asyncio.gather(*(engine.complete(prompt, 30) for prompt in PROMPTS))
        allocate, calls, fail_at = arena_module._allocate, 0, 0

        def short(what: str, size_bytes: int, flag: str) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise CapacityError(f"no memory for {what} today")
            return allocate(what, size_bytes, flag)

        monkeypatch.setattr(arena_module, "_allocate", short)
        streams = [asyncio.ensure_future(engine.complete(prompt, 30)) for prompt in PROMPTS]
        before = await engine.get("/v1/cache/status")
        for number, what in ((1, "kv"), (2, "slots")):
            calls, fail_at = 0, number
            code, answer = await engine.post({"kv_tokens": 1700})
            assert code == 409 and f"no memory for {what} today" in answer["error"]["message"], answer
            assert "the old division was allocated again" in answer["error"]["message"]
            after = await engine.get("/v1/cache/status")
            assert after["experts"]["slots"] == before["experts"]["slots"]
            assert after["kv"]["capacity_tokens"] == before["kv"]["capacity_tokens"]
            assert "no memory" in after["elastic"]["decisions"][0]["outcome"]
            check(engine)
        assert await asyncio.gather(*streams) == expected
        assert engine.service(ActorName.GPU_EXECUTOR).metrics()["failed_resizes_total"] == 2
        fail_at = 0
        assert (await engine.post({"kv_tokens": 1700}))[0] == 200
        assert await asyncio.gather(*(engine.complete(prompt, 30) for prompt in PROMPTS)) == expected
        check(engine)


async def test_when_no_division_can_be_had_a_new_process_serves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(launch(checkpoint)) as engine:
        expected = await engine.complete(PROMPTS[4], 20)
        supervisor = engine.runtime.controller.supervisor
        supervisor._policy = dataclasses.replace(supervisor._policy, max_restarts=1)
        allocate, calls = arena_module._allocate, 0

        def short(what: str, size_bytes: int, flag: str) -> Any:
            nonlocal calls
            calls += 1
            if calls <= 2:
                raise CapacityError("somebody else has all memory")
            return allocate(what, size_bytes, flag)

        monkeypatch.setattr(arena_module, "_allocate", short)
        lost = engine.service(ActorName.GPU_EXECUTOR)
        code, answer = await engine.post({"kv_tokens": 1700})
        assert code == 409 and "new epoch" in answer["error"]["message"], answer
        await until(lambda: supervisor.phase is Phase.READY and engine.runtime.controller.epoch == 2, 30.0)
        assert engine.service(ActorName.GPU_EXECUTOR) is not lost
        assert "could not be allocated again" in supervisor._others[ActorName.GPU_EXECUTOR].reason
        assert await engine.complete(PROMPTS[4], 20) == expected
        check(engine)


CHAIN = {
    VacateArena: (ActorName.SCHEDULER,),
    ArenaVacated: (ActorName.GPU_EXECUTOR,),
    ArenaReplaced: (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR),
    ArenaResized: (ActorName.CONTROLLER,),
    PoolEmptied: (ActorName.SCHEDULER,),
}


@pytest.mark.parametrize(
    ("lost", "receiver"),
    [(message, name) for message, names in CHAIN.items() for name in names],
    ids=lambda item: item.__name__ if isinstance(item, type) else str(item),
)
async def test_an_epoch_that_ends_in_the_middle_leaves_one_truth(
    checkpoint: Path, lost: type, receiver: ActorName
) -> None:
    """Whichever message is the last one (its receiver, say, died with it), the next epoch agrees on the arena."""
    async with running(launch(checkpoint)) as engine:
        prompt = PROMPTS[6]
        expected = await engine.complete(prompt, 20)
        controller = engine.runtime.controller
        endpoint = controller.endpoint if receiver is ActorName.CONTROLLER else engine.service(receiver).endpoint
        handler, seen = endpoint._handlers[lost], []
        endpoint.on(lost, lambda message, fds: seen.append(message))
        stream = asyncio.ensure_future(engine.complete(PROMPTS[4], 200))
        change = asyncio.ensure_future(controller.rebalance(RebalanceWish(kv_tokens=1700)))
        await until(lambda: len(seen) > 0)
        for name in (ActorName.GPU_EXECUTOR, ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR):
            await until(lambda name=name: not engine.service(name).endpoint._tasks)
        await controller.supervisor._attempt()  # everyone is paused and wired anew
        endpoint.on(lost, handler)
        await asyncio.wait([stream])
        await change
        arena = engine.service(ActorName.GPU_EXECUTOR)._arena
        assert (arena.num_blocks * 16 >= 1700) == (lost not in (VacateArena, ArenaVacated))
        check(engine)
        assert await engine.complete(prompt, 20) == expected
        assert (await controller.rebalance(RebalanceWish(kv_tokens=1000))).outcome == "done"
        check(engine)
        assert await engine.complete(prompt, 20) == expected


async def test_an_epoch_may_end_while_memory_is_allocated(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(launch(checkpoint)) as engine:
        expected = await engine.complete(PROMPTS[6], 20)
        controller, device = engine.runtime.controller, engine.service(ActorName.GPU_EXECUTOR)
        loop, allocate = asyncio.get_running_loop(), arena_module._allocate
        attempts: list[asyncio.Task[None]] = []

        def end_epoch(what: str, size_bytes: int, flag: str) -> Any:
            if not attempts:
                begun = loop.create_future()

                def begin() -> None:
                    attempts.append(asyncio.ensure_future(controller.supervisor._attempt()))
                    begun.set_result(None)

                loop.call_soon_threadsafe(begin)
                asyncio.run_coroutine_threadsafe(until(lambda: device._mailbox is None), loop).result()
            return allocate(what, size_bytes, flag)

        monkeypatch.setattr(arena_module, "_allocate", end_epoch)
        record = await controller.rebalance(RebalanceWish(kv_tokens=1700))
        assert "new epoch" in record.outcome
        await attempts[0]
        assert device._arena.num_blocks * 16 >= 1700  # what had begun was brought to its end
        check(engine)
        assert await engine.complete(PROMPTS[6], 20) == expected
        assert (await controller.rebalance(RebalanceWish(kv_tokens=1000))).outcome == "done"
        check(engine)


async def test_kv_grows_by_itself_when_requests_wait_for_blocks(checkpoint: Path) -> None:
    elastic = {"auto": True, "interval_s": 0.05, "reallocate_cooldown_s": 0.0}
    spec = launch(checkpoint, kv={"num_tokens": 256}, elastic=elastic, max_context_tokens=200)
    async with running(spec) as engine:
        answers = await asyncio.gather(*(engine.complete(prompt, 100) for prompt in PROMPTS * 2))
        assert answers[: len(PROMPTS)] == answers[len(PROMPTS) :]
        status = await engine.get("/v1/cache/status")
        grown = [d for d in status["elastic"]["decisions"] if d["trigger"] == "kv_pressure" and d["outcome"] == "done"]
        assert grown and grown[-1]["kv_tokens"]["after"] > 256
        assert engine.runtime.controller.metrics()["rebalances_kv_pressure_total"] >= 1
        check(engine)
