"""A whole engine in this process on a tiny model: streams go on through any number of rebalances, bit for bit."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.cli.main import main
from freetoken.elastic.arena_shape import plan_arena
from freetoken.engine.local import LocalRuntime
from freetoken.engine.phases import Phase
from freetoken.engine.prepare import prepare_launch
from freetoken.engine.rebalancer import Rebalancer
from freetoken.errors import CapacityError, FreeTokenError
from freetoken.experts.slot_worth import SlotWorth
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import (
    ActorName,
    ActorStatus,
    ArenaResized,
    KVResized,
    PlacesLeft,
    PoolVacated,
    RebalanceWish,
    RecordsMoved,
    ShrinkKV,
    StepPlan,
    VacatePool,
)
from freetoken.testing.tiny_models import write_tiny_checkpoint
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

BUDGET = "4.6MiB"


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = write_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "qwen3_moe")
    target = tmp_path_factory.mktemp("ftw") / "qwen3_moe"
    convert(source, target, ConvertOptions())
    return target


class Engine:
    """The runtime, its services, and an HTTP client of it."""

    def __init__(self, runtime: LocalRuntime, session: aiohttp.ClientSession, url: str) -> None:
        self.runtime = runtime
        self.session = session
        self.url = url

    def service(self, name: ActorName) -> Any:
        handle = self.runtime.controller.supervisor._others[name].handle
        assert handle is not None
        return handle.service  # type: ignore[attr-defined]

    async def complete(self, prompt: list[int], max_tokens: int) -> tuple[str, Any]:
        """The text and every token's log-probability, which differ where one bit of a logit does."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 1,
        }  # fmt: skip
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            choice = answer["choices"][0]
            assert len(choice["logprobs"]["token_logprobs"]) == max_tokens
            return choice["text"], choice["logprobs"]

    async def post(self, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + "/v1/cache/rebalance", json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()

    async def check_between_changes(self) -> None:
        """``check``, once the change that may be under way is made."""
        device = self.service(ActorName.GPU_EXECUTOR)
        await until(lambda: device._resizer._change is None)
        cache = self.service(ActorName.EXPERT_CACHE)
        await until(lambda: cache.slots.num_slots == device._arena.num_slots)
        self.check()

    def check(self) -> None:
        """Tables, capacities and memory agree, and stay within the budget."""
        cache, kv, device = (
            self.service(name) for name in (ActorName.EXPERT_CACHE, ActorName.KV_ALLOCATOR, ActorName.GPU_EXECUTOR)
        )
        arena = device._arena
        kv.allocator.check_integrity()
        arena.pools.granules.check_integrity()
        assert cache.slots.num_slots == arena.num_slots
        assert kv.allocator.stats().total_blocks == arena.num_blocks
        shape = arena.pools.shape
        used = arena.num_slots * shape.slot_stride_bytes + arena.num_blocks * shape.block_bytes
        assert used <= arena.pools.split.total * shape.granule_bytes <= shape.budget_bytes
        counters = cache._server.counters()
        assert counters["resident"] + counters["in_flight"] <= arena.num_slots


def launch(checkpoint: Path, **overrides: Any) -> LaunchSpec:
    settings: dict[str, Any] = {
        "device": "cpu", "vram": BUDGET, "deterministic": True, "max_context_tokens": 512,
        "served_model_name": "tiny", "runtime": "local",
        "server": {"port": 0}, "kv": {"num_tokens": 1536}, "elastic": {"auto": False},
        "scheduler": {"max_num_batched_tokens": 96, "prefill_chunk_tokens": 32},
        "executor": {"cpu_threads": 1, "device_threads": 1, "pin": False},
    }  # fmt: skip
    return prepare_launch(str(checkpoint), overrides={**settings, **overrides}, environment={})


@asynccontextmanager
async def running(spec: LaunchSpec) -> AsyncIterator[Engine]:
    runtime = LocalRuntime(spec)
    await runtime.start()
    try:
        await until(lambda: runtime.controller.supervisor.phase in (Phase.READY, Phase.FAILED), 60.0)
        overview = await runtime.overview()
        assert overview.phase is Phase.READY, overview.failure
        async with aiohttp.ClientSession() as session:
            yield Engine(runtime, session, overview.url)
    finally:
        await runtime.stop()


PROMPTS = [
    [(7 * i + 3 * j) % 500 + 5 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33, 60, 90, 5))
]


async def test_8_streams_and_a_long_one_go_on_through_100_rebalances(checkpoint: Path) -> None:
    spec = launch(checkpoint)
    async with running(spec) as engine:
        rng = random.Random(11)
        streams = [functools.partial(engine.complete, prompt, 60) for prompt in PROMPTS]
        streams.append(functools.partial(engine.complete, PROMPTS[3], 400))
        expected = await asyncio.gather(*(stream() for stream in streams))
        before = await engine.get("/v1/cache/status")
        assert 0 < before["experts"]["slots"] < 40  # of 48 records
        steps = engine.service(ActorName.SCHEDULER).metrics()["steps_total"]
        rebalancer = engine.runtime.controller.rebalancer
        shape = rebalancer.shape
        assert shape is not None
        most = shape.blocks_in(shape.max_kv_granules) * shape.block_size
        done = failed = 0
        tasks: list[asyncio.Task[Any]] = []
        while done < 100:
            if all(task.done() for task in tasks):
                assert [task.result() for task in tasks] == expected[: len(tasks)]
                tasks = [asyncio.ensure_future(stream()) for stream in streams]
            await asyncio.sleep(0)
            try:
                record = await rebalancer.rebalance(RebalanceWish(kv_tokens=rng.randrange(16, most)))
            except CapacityError:
                failed += 1  # more is in use
            else:
                assert record.outcome in ("done", "unchanged") or "too few" in record.outcome
                done += record.outcome == "done"
                if record.outcome != "unchanged":
                    engine.check()
        assert await asyncio.gather(*tasks) == expected
        after = await engine.get("/v1/cache/status")
        assert after["experts"]["hits_total"] > before["experts"]["hits_total"]
        assert len(after["elastic"]["decisions"]) == 16
        scheduler = engine.service(ActorName.SCHEDULER).metrics()
        assert scheduler["steps_total"] - steps > 200  # all the while
        assert scheduler["resizes_total"] >= 100 and scheduler["failed_steps_total"] == 0
        engine.check()


async def test_an_operator_asks_over_http(checkpoint: Path) -> None:
    async with running(launch(checkpoint)) as engine:
        prompt = PROMPTS[5]
        expected = await engine.complete(prompt, 8)
        status = await engine.get("/v1/cache/status")
        assert status["elastic"]["elastic"] and status["kv"]["capacity_tokens"] == 1536
        slots = status["experts"]["slots"]
        code, answer = await engine.post({"kv_tokens": 1700})
        assert code == 200 and answer["outcome"] == "done", answer
        assert answer["kv_tokens"]["before"] >= 1536 and answer["kv_tokens"]["after"] >= 1700
        status = await engine.get("/v1/cache/status")
        assert status["experts"]["slots"] == answer["slots"]["after"] < slots
        assert status["kv"]["capacity_tokens"] == answer["kv_tokens"]["after"]
        assert status["kv"]["cached_blocks"] > 0  # the prefix is still there
        assert await engine.complete(prompt, 8) == expected
        code, answer = await engine.post({"kv_tokens": 1700})
        assert code == 200 and answer["outcome"] == "unchanged"
        code, answer = await engine.post({"expert_bytes": "1.5MiB"})
        assert code == 200 and answer["outcome"] == "done"
        code, answer = await engine.post({"auto": True})
        assert code == 200 and answer["trigger"] == "request"
        for body, words in (
            ({}, "exactly one"),
            ({"kv_tokens": 5, "auto": True}, "exactly one"),
            ({"kv_tokens": "many"}, "kv_tokens"),
            ({"expert_bytes": "lots"}, "not a quantity"),
            ({"kv_tokens": 10**9}, "would work"),
            ({"tokens": 5}, "tokens"),
        ):
            code, answer = await engine.post(body)
            assert code == 400 and words in answer["error"]["message"], answer
        engine.check()
        metrics = engine.runtime.controller.metrics()
        assert metrics["rebalances_request_total"] >= 2


async def test_changes_of_a_new_controller_are_later_ones_whatever_the_clock_says(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners of tables tell by the order of ids which changes were made."""
    async with running(launch(checkpoint)) as engine:
        controller, pools = engine.runtime.controller, engine.service(ActorName.GPU_EXECUTOR)._arena.pools
        assert (await controller.rebalance(RebalanceWish(kv_tokens=GROWN))).outcome == "done"
        first = pools.resize_id
        controller.rebalancer._resize_id = 0  # as a new one begins
        monkeypatch.setattr(time, "time_ns", lambda: 1)
        assert (await controller.rebalance(RebalanceWish(kv_tokens=SHRUNK))).outcome == "done"
        assert pools.resize_id > first
        engine.check()


@pytest.mark.parametrize(("mode", "told"), [("auto", "virtual"), ("reallocate", "reallocate")])
def test_an_engine_that_is_loading_tells_what_is_configured(checkpoint: Path, mode: str, told: str) -> None:
    async def ask(max_age_s: float) -> list[ActorStatus]:
        return []

    spec = launch(checkpoint, elastic={"auto": False, "mode": mode})
    endpoint = InProcessHub().endpoint(ActorName.CONTROLLER)
    view = Rebalancer(spec, endpoint, lambda: 1, ask, lambda: False, lambda name: None).view()
    assert view.elastic and view.mode == told and not view.decisions


async def test_one_of_two_at_once_gets_409(checkpoint: Path) -> None:
    async with running(launch(checkpoint)) as engine:
        answers = await asyncio.gather(*(engine.post({"kv_tokens": count}) for count in (1650, 1700)))
        assert sorted(code for code, _ in answers) == [200, 409]
        refused = next(answer for code, answer in answers if code == 409)
        assert refused["error"]["code"] == "rebalance_under_way"
        engine.check()


@pytest.mark.parametrize("kv_tokens", [1700, 1000], ids=["kv grows", "slots grow"])
async def test_when_memory_cannot_be_mapped_the_old_division_serves(checkpoint: Path, kv_tokens: int) -> None:
    async with running(launch(checkpoint)) as engine:
        expected = await asyncio.gather(*(engine.complete(prompt, 30) for prompt in PROMPTS))
        granules = engine.service(ActorName.GPU_EXECUTOR)._arena.pools.granules
        driver, calls = granules._driver, 0

        class Failing:
            alignment_bytes = 4096
            fail_at = 0

            def __getattr__(self, name: str) -> Any:
                nonlocal calls
                calls += 1
                if calls == self.fail_at:
                    raise FreeTokenError("out of physical memory")
                return getattr(driver, name)

        failing = granules._driver = Failing()
        streams = [asyncio.ensure_future(engine.complete(prompt, 30)) for prompt in PROMPTS]
        outcomes = []
        for fail_at in range(1, 200):
            calls, failing.fail_at = 0, fail_at
            before = (await engine.get("/v1/cache/status"))["experts"]["slots"]
            code, answer = await engine.post({"kv_tokens": kv_tokens})
            outcomes.append(code)
            if code == 200:
                break
            assert "out of physical memory" in answer["error"]["message"]
            assert (await engine.get("/v1/cache/status"))["experts"]["slots"] == before
            engine.check()
        assert outcomes[-1] == 200 and outcomes.count(409) == len(outcomes) - 1 > 3
        assert await asyncio.gather(*streams) == expected
        assert await asyncio.gather(*(engine.complete(prompt, 30) for prompt in PROMPTS)) == expected
        engine.check()
        granules._driver = driver


SHRUNK, GROWN = 1000, 1700  # KV tokens
CHAIN = [
    (GROWN, VacatePool, ActorName.EXPERT_CACHE),
    (GROWN, PoolVacated, ActorName.GPU_EXECUTOR),
    (GROWN, RecordsMoved, ActorName.EXPERT_CACHE),
    (GROWN, PlacesLeft, ActorName.GPU_EXECUTOR),
    (GROWN, ArenaResized, ActorName.KV_ALLOCATOR),
    (GROWN, ArenaResized, ActorName.CONTROLLER),
    (GROWN, KVResized, ActorName.SCHEDULER),
    (SHRUNK, ShrinkKV, ActorName.SCHEDULER),
    (SHRUNK, VacatePool, ActorName.KV_ALLOCATOR),
    (SHRUNK, PoolVacated, ActorName.SCHEDULER),
    (SHRUNK, PoolVacated, ActorName.GPU_EXECUTOR),
    (SHRUNK, ArenaResized, ActorName.EXPERT_CACHE),
]


@pytest.mark.parametrize(
    ("kv_tokens", "lost", "receiver"), CHAIN, ids=lambda item: getattr(item, "__name__", str(item))
)
async def test_an_epoch_that_ends_in_the_middle_leaves_one_truth(
    checkpoint: Path, kv_tokens: int, lost: type, receiver: ActorName
) -> None:
    """Whichever message is the last one (its receiver, say, died with it), the next epoch agrees on the division and
    keeps what it can."""
    async with running(launch(checkpoint)) as engine:
        prompt = PROMPTS[6]
        expected = await engine.complete(prompt, 20)
        controller = engine.runtime.controller
        before = engine.service(ActorName.GPU_EXECUTOR)._arena.num_blocks
        endpoint = controller.endpoint if receiver is ActorName.CONTROLLER else engine.service(receiver).endpoint
        handler, seen = endpoint._handlers[lost], []
        endpoint.on(lost, lambda message, fds: seen.append(message))
        stream = asyncio.ensure_future(engine.complete(PROMPTS[4], 200))
        change = asyncio.ensure_future(controller.rebalance(RebalanceWish(kv_tokens=kv_tokens)))
        await until(lambda: len(seen) > 0)
        was_made = lost in (ArenaResized, KVResized)
        if was_made:
            await until(lambda: not engine.service(ActorName.GPU_EXECUTOR).endpoint._tasks)
        await controller.supervisor._attempt()  # everyone is paused and wired anew
        endpoint.on(lost, handler)
        await asyncio.wait([stream])
        record = await change
        arena = engine.service(ActorName.GPU_EXECUTOR)._arena
        if was_made:
            assert (arena.num_blocks > before) == (kv_tokens == GROWN) and arena.num_blocks != before
        else:
            assert arena.num_blocks == before
            assert "new epoch" in record.outcome
        engine.check()
        answer = await engine.complete(prompt, 20)
        assert answer == expected
        # Prefixes are lost only where their blocks had new names and were not copied.
        were_renamed = kv_tokens == SHRUNK and lost is PoolVacated
        assert (engine.service(ActorName.KV_ALLOCATOR).allocator.stats().hit_tokens_total == 0) == were_renamed
        assert (await controller.rebalance(RebalanceWish(kv_tokens=1300))).outcome == "done"
        engine.check()
        assert await engine.complete(prompt, 20) == expected


async def test_an_executor_that_cannot_follow_runs_no_step(checkpoint: Path) -> None:
    """KVAllocator has renamed its blocks, and then they cannot be copied. (In one process an actor is not replaced.)"""
    async with running(launch(checkpoint)) as engine:
        controller, service = engine.runtime.controller, engine.service(ActorName.GPU_EXECUTOR)
        executor, steps = service._executor, service._thread.stats

        def fail(*arguments: Any) -> None:
            raise RuntimeError("the copy failed")

        service._arena.move = fail
        stream = asyncio.ensure_future(engine.complete(PROMPTS[4], 400))
        await until(lambda: steps.steps > 0)
        record = await controller.rebalance(RebalanceWish(kv_tokens=SHRUNK))
        assert "new epoch" in record.outcome
        with pytest.raises(AssertionError, match="the copy failed"):
            await stream
        await until(lambda: controller.supervisor.phase is Phase.GAVE_UP)
        with pytest.raises(RuntimeError, match=r"GpuExecutor cannot go on: .*the copy failed"):
            executor.requests.apply(StepPlan(99, 1, ()))


async def test_slots_that_cannot_be_copied_stay_where_they_are(checkpoint: Path) -> None:
    async with running(launch(checkpoint)) as engine:
        expected = await asyncio.gather(*(engine.complete(prompt, 30) for prompt in PROMPTS))
        arena = engine.service(ActorName.GPU_EXECUTOR)._arena
        move, before = arena.move, arena.num_slots

        def fail(*arguments: Any) -> None:
            raise RuntimeError("the copy failed")

        arena.move = fail
        controller = engine.runtime.controller
        record = await controller.rebalance(RebalanceWish(kv_tokens=GROWN))
        assert "the copy failed" in record.outcome
        await until(lambda: engine.service(ActorName.EXPERT_CACHE)._vacating_id == 0)
        assert arena.num_slots == before
        engine.check()
        arena.move = move
        assert (await controller.rebalance(RebalanceWish(kv_tokens=GROWN))).outcome == "done"
        assert await asyncio.gather(*(engine.complete(prompt, 30) for prompt in PROMPTS)) == expected
        engine.check()


async def test_kv_grows_by_itself_when_requests_wait_for_blocks(checkpoint: Path) -> None:
    spec = launch(
        checkpoint, kv={"num_tokens": 256}, elastic={"interval_s": 0.05, "cooldown_s": 0.0}, max_context_tokens=200
    )
    async with running(spec) as engine:
        before = (await engine.get("/v1/cache/status"))["kv"]["capacity_tokens"]
        answers = await asyncio.gather(*(engine.complete(prompt, 100) for prompt in PROMPTS * 2))
        assert answers[: len(PROMPTS)] == answers[len(PROMPTS) :]
        status = await engine.get("/v1/cache/status")
        grown = [d for d in status["elastic"]["decisions"] if d["trigger"] == "kv_pressure" and d["outcome"] == "done"]
        assert grown and "requests held back" in grown[-1]["reason"]
        assert grown[-1]["kv_tokens"]["after"] > before
        assert engine.runtime.controller.metrics()["rebalances_kv_pressure_total"] >= 1
        await engine.check_between_changes()


async def test_kv_that_an_operator_made_small_grows_for_a_longer_prompt(checkpoint: Path) -> None:
    """And at once a 400 where it could not."""
    prompt = [(5 * i) % 500 + 5 for i in range(400)]
    for auto in (True, False):
        async with running(launch(checkpoint, elastic={"auto": auto, "interval_s": 60.0})) as engine:
            expected = await engine.complete(prompt, 8)
            code, answer = await engine.post({"kv_tokens": 200})
            assert code == 200 and answer["kv_tokens"]["after"] < 400, answer
            if not auto:
                with pytest.raises(AssertionError, match="the prompt has 400 tokens; the KV cache holds"):
                    await engine.complete(prompt, 8)
                continue
            assert await engine.complete(prompt, 8) == expected
            decision = (await engine.get("/v1/cache/status"))["elastic"]["decisions"][0]
            assert decision["trigger"] == "kv_pressure" and decision["kv_tokens"]["after"] >= 400
            await engine.check_between_changes()


async def test_idle_kv_goes_to_slots_by_itself(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU device a hit costs as much as a miss: both are read from the same memory.
    monkeypatch.setattr(Rebalancer, "_miss_ms", lambda rebalancer, experts: 1.0)
    spec = launch(
        checkpoint,
        elastic={"interval_s": 0.05, "cooldown_s": 0.0},
        kv={"num_tokens": 1536, "prefix_cache": False},
    )
    async with running(spec) as engine:
        for _ in range(30):
            await asyncio.gather(*(engine.complete(prompt, 20) for prompt in PROMPTS))
            decisions = engine.runtime.controller.rebalancer.view().decisions
            if any(record.trigger == "idle_kv" and record.outcome == "done" for record in decisions):
                break
        else:
            raise AssertionError(engine.runtime.controller.rebalancer.view())
        assert decisions[0].slots_after > decisions[0].slots_before
        await engine.check_between_changes()


async def test_the_first_wish_for_auto_goes_by_figures(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rebalancer, "_miss_ms", lambda rebalancer, experts: 1.0)
    async with running(launch(checkpoint, kv={"num_tokens": 1536, "prefix_cache": False})) as engine:
        await asyncio.gather(*(engine.complete(prompt, 20) for prompt in PROMPTS))
        code, answer = await engine.post({"auto": True})
        assert code == 200 and answer["outcome"] == "done", answer
        assert answer["slots"]["after"] > answer["slots"]["before"] and answer["slot_ms_per_s"] > 0.01
        await engine.check_between_changes()
        await engine.runtime.controller.supervisor._attempt()  # a new epoch
        await asyncio.gather(*(engine.complete(prompt, 20) for prompt in PROMPTS))
        code, answer = await engine.post({"auto": True})
        assert code == 200 and answer["slot_ms_per_s"] > 0.01, answer
        async with engine.session.get(engine.url + "/metrics") as response:
            page = await response.text()
        assert "freetoken_controller_last_decision_trigger_request 1.0" in page
        assert "freetoken_controller_rebalance_decisions_slots_grow_total" in page


async def test_requests_that_starve_for_slots_that_are_worth_more_are_told_of(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rebalancer, "_miss_ms", lambda rebalancer, experts: 1e6)
    monkeypatch.setattr(SlotWorth, "figures", lambda worth, table, slots: {"hit_estimate": 0.5})
    spec = launch(
        checkpoint, kv={"num_tokens": 256}, elastic={"interval_s": 0.05, "cooldown_s": 0.0}, max_context_tokens=200
    )
    async with running(spec) as engine:
        await asyncio.gather(*(engine.complete(prompt, 100) for prompt in PROMPTS * 2))
        decisions = (await engine.get("/v1/cache/status"))["elastic"]["decisions"]
        kept = [d for d in decisions if d["outcome"] == "unchanged" and "slots are worth more" in d["reason"]]
        assert len(kept) == 1 and kept[0]["trigger"] == "kv_pressure", decisions
        assert engine.runtime.controller.metrics()["rebalance_decisions_slots_worth_more_total"] >= 1


async def test_the_command_line_asks_the_same(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def cache(*arguments: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, ["cache", "--url", engine.url, *arguments])
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())

    async with running(launch(checkpoint)) as engine:
        status, text = await cache("rebalance", "--kv-tokens", "1700")
        assert status == 0 and "KV tokens 15" in text and "an operator asked for kv_tokens=1700" in text
        status, text = await cache()
        assert status == 0 and "expert slots" in text and "on request" in text and "request: done" in text
        status, text = await cache("rebalance", "--expert-bytes", "1TiB")
        assert status == 1 and "would work" in text
        assert (await cache("rebalance"))[0] == 2
        assert (await cache("--auto"))[0] == 2
    status, text = await cache()
    assert status == 1 and "no server answers" in text


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"vram": None}, "there is no VRAM budget (--vram)"),
        ({"elastic": {"enabled": False}}, "elastic.enabled is false"),
        ({"elastic": {"granule_bytes": 1 << 20}}, "a larger --vram or a smaller kv.num_tokens is needed"),
    ],
)
async def test_why_there_is_nothing_to_move(
    checkpoint: Path, settings: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(launch(checkpoint, **settings)) as engine:
        code, answer = await engine.post({"auto": True})
        assert code == 400 and why in answer["error"]["message"]
        elastic = (await engine.get("/v1/cache/status"))["elastic"]
        assert not elastic["elastic"] and why in elastic["idle_reason"]
        assert await asyncio.to_thread(main, ["cache", "--url", engine.url]) == 0
        assert f"memory cannot move between them: {elastic['idle_reason']}" in capsys.readouterr().out
        await engine.complete(PROMPTS[0], 4)


@pytest.mark.parametrize("vram", ["4.6MiB", "5MiB", "5.2MiB", "64MiB"])
@pytest.mark.parametrize("granule", [None, 8192, 65536])
def test_the_arena_stays_within_the_budget_and_all_experts_fit_where_they_did(
    checkpoint: Path, vram: str, granule: int | None
) -> None:
    spec = launch(checkpoint, vram=vram, elastic={"granule_bytes": granule})
    planned = plan_arena(spec)
    assert planned is not None and spec.config.vram is not None
    (shape, split), plan = planned, spec.plan
    assert shape.budget_bytes <= spec.config.vram - plan.dense_bytes - plan.workspace_bytes
    assert split.total <= shape.num_granules and shape.blocks_in(split.kv_granules) >= plan.num_kv_blocks
    lost = plan.num_slots - shape.slots_in(split.slot_granules)
    assert lost * shape.slot_stride_bytes < 2 * shape.granule_bytes + shape.slot_stride_bytes
    if vram == "64MiB":
        assert plan.num_slots == 48 and lost == 0
