"""SchedulerService with the real KVAllocatorService, a fake GpuExecutor and a front that records, on one event loop."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from freetoken.kv.service import KVAllocatorService
from freetoken.messages import (
    AbortRequest,
    ActorName,
    ActorsSuspected,
    FinishReason,
    SamplingParams,
    StepFailed,
    StepNotice,
    SubmitRequest,
    Wiring,
)
from freetoken.scheduling.service import SchedulerService
from freetoken.testing.fake_executor import (
    FakeGpuExecutorService,
    RecordingFront,
    expected_answer,
    fake_launch_spec,
)
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

PLAYED = (ActorName.CONTROLLER, ActorName.EXPERT_CACHE, ActorName.CPU_EXECUTOR, ActorName.WEIGHT_STREAMER)


class Group:
    """Four services; the other four actors only listen."""

    def __init__(self, encode, **settings):
        self.spec = fake_launch_spec(**settings)
        self.hub = InProcessHub(encode)
        self.scheduler = SchedulerService(self.spec, self.hub.endpoint(ActorName.SCHEDULER))
        self.kv = KVAllocatorService(self.spec, self.hub.endpoint(ActorName.KV_ALLOCATOR))
        self.gpu = FakeGpuExecutorService(self.spec, self.hub.endpoint(ActorName.GPU_EXECUTOR))
        self.front = RecordingFront(self.spec, self.hub.endpoint(ActorName.API_FRONT))
        self.services = (self.gpu, self.kv, self.scheduler, self.front)
        self.notices = {name: [] for name in PLAYED}
        self.reports = []
        self.played = {name: self.hub.endpoint(name) for name in PLAYED}
        for name, endpoint in self.played.items():
            endpoint.on(StepNotice, lambda message, fds, name=name: self.notices[name].append(message))
            endpoint.on(ActorsSuspected, lambda message, fds: self.reports.append(message))
        self.epoch = 0

    async def wire(self):
        self.epoch += 1
        endpoints = {**self.played, **{service.name: service.endpoint for service in self.services}}
        wiring = Wiring(self.epoch, {name: endpoint.address for name, endpoint in endpoints.items()})
        for endpoint in self.played.values():
            await endpoint.connect(wiring)
        await asyncio.gather(*(service.wire(wiring) for service in self.services))

    async def resume(self):
        for service in self.services:
            await service.resume()

    def submit(self, request_id, prompt, sampling):
        self.front.endpoint.send(ActorName.SCHEDULER, SubmitRequest(request_id, tuple(prompt), sampling))

    async def ended(self, *request_ids):
        await until(lambda: all(request_id in self.front.endings for request_id in request_ids))

    async def idle(self):
        """Everything is back where it was: no request, no held block, no device state."""

        def quiet():
            kv, book = self.kv.metrics(), self.scheduler.scheduler.book
            return (
                not (book.live or book.lingering or book.retired)
                and kv["held_blocks"] == 0
                and self.gpu.device.num_requests == 0
                and self.scheduler.scheduler.num_outstanding_steps == 0
            )

        await until(quiet)
        self.kv.allocator.check_integrity()
        assert self.gpu.errors == []

    def check_answer(self, request_id, prompt, sampling):
        tokens, reason = expected_answer(
            tuple(prompt),
            replace(sampling, seed=sampling.seed or 0),
            vocab_size=50,
            max_context_tokens=200,
            eos_token_ids=self.spec.model.eos_token_ids,
        )
        assert self.front.tokens[request_id] == tokens
        assert self.front.endings[request_id].finish_reason is reason


@asynccontextmanager
async def group(encode=False, **settings):
    members = Group(encode, **settings)
    await members.wire()
    await members.resume()
    try:
        yield members
    finally:
        for service in members.services:
            await service.close()
            await service.close()
        for endpoint in members.played.values():
            await endpoint.close()


def greedy(max_tokens=10, **kwargs):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **kwargs)


def prompt(length, salt=0):
    return tuple((salt * 7 + index * index) % 50 for index in range(length))


@pytest.mark.parametrize("encode", [False, True])
async def test_requests_end_to_end_and_everything_returns_to_the_baseline(encode):
    async with group(encode, eos_token_ids=(3,)) as members:
        samplings = {f"r{index}": (prompt(3 + index * 5, index % 3), greedy(5 + index)) for index in range(10)}
        for name, (tokens, sampling) in samplings.items():
            members.submit(name, tokens, sampling)
        await members.ended(*samplings)
        for name, (tokens, sampling) in samplings.items():
            members.check_answer(name, tokens, sampling)
        await members.idle()
        metrics = members.scheduler.metrics()
        assert metrics["requests_finished_total"] == 10 and metrics["running"] == metrics["waiting"] == 0
        assert metrics["generated_tokens_total"] == sum(map(len, members.front.tokens.values()))
        assert metrics["step_ms"] >= 0 and metrics["planning_ms"] >= 0 and metrics["reservation_ms"] >= 0
        assert metrics["step_gap_ms"] >= 0


async def test_one_batch_of_tokens_and_one_notice_to_each_server_per_step():
    async with group() as members:
        for index in range(8):
            members.submit(f"r{index}", prompt(6, index), greedy(12))
        await members.ended(*(f"r{index}" for index in range(8)))
        await members.idle()
        steps = [batch.step_id for batch in members.front.batches]
        assert len(steps) == members.scheduler.metrics()["steps_total"]
        heard = [members.notices[name] for name in PLAYED if name is not ActorName.CONTROLLER]
        await until(lambda: all(notices and notices[-1].num_tokens == 0 for notices in heard))
        assert heard[0] == heard[1] == heard[2] and heard[0][-1].last


async def test_two_plans_are_queued_while_a_step_runs():
    async with group() as members:
        members.gpu.held = True
        members.submit("a", prompt(6), greedy(20))
        await until(lambda: len(members.gpu.plans) == 2)
        for _ in range(10):
            members.gpu.run_one()
            await until(lambda: len(members.gpu.plans) == 2)
        assert members.gpu.max_queued == 2
        members.gpu.release()
        await members.ended("a")
        members.check_answer("a", prompt(6), greedy(20))
        await members.idle()


async def test_sixty_four_clients_that_come_and_go():
    async with group(
        num_kv_blocks=200, max_num_running=64, max_num_batched_tokens=128, prefill_chunk_tokens=64
    ) as members:
        rng = random.Random(7)
        samplings = {}
        for index in range(64):
            name = f"r{index}"
            samplings[name] = (prompt(rng.randrange(1, 80), rng.randrange(4)), greedy(rng.randrange(1, 40)))
            members.submit(name, *samplings[name])
            if rng.random() < 0.3:
                members.front.endpoint.send(ActorName.SCHEDULER, AbortRequest(f"r{rng.randrange(index + 1)}"))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await members.ended(*samplings)
        for name, (tokens, sampling) in samplings.items():
            ending = members.front.endings[name]
            if ending.finish_reason is not FinishReason.ABORT:
                assert ending.failure is None
                members.check_answer(name, tokens, sampling)
        assert members.scheduler.metrics()["requests_aborted_total"] > 3
        await members.idle()


async def test_failed_steps_fail_only_their_requests():
    async with group() as members:
        members.gpu.fault = lambda plan: "a worker died" if plan.step_id % 7 == 0 else None
        samplings = {f"r{index}": (prompt(4 + index, index), greedy(3)) for index in range(12)}
        for name, (tokens, sampling) in samplings.items():
            members.submit(name, tokens, sampling)
            await members.ended(name)
        await members.idle()
        failed = {name for name, ending in members.front.endings.items() if ending.failure is not None}
        assert failed and failed != set(samplings)
        for name, (tokens, sampling) in samplings.items():
            if name in failed:
                failure = members.front.endings[name].failure
                assert failure.retryable and "a worker died" in failure.message
            else:
                members.check_answer(name, tokens, sampling)


async def test_pause_ends_all_requests_and_a_new_epoch_serves_with_the_old_prefixes():
    async with group() as members:
        members.submit("warm", prompt(40), greedy(1))
        await members.ended("warm")
        await members.idle()
        members.gpu.held = True
        members.submit("a", prompt(6), greedy(20))
        members.submit("b", prompt(60, 1), greedy(20))
        await until(lambda: len(members.gpu.plans) == 2)
        for service in (members.scheduler, members.kv, members.gpu):
            await service.pause("CpuExecutor died")
        await members.ended("a", "b")
        members.submit("c", prompt(6), greedy(2))
        await members.ended("c")
        for name in "abc":
            failure = members.front.endings[name].failure
            assert (failure.kind, failure.retryable) == ("engine_restarted", True)
            assert "CpuExecutor died" in failure.message
        members.gpu.held = False
        await members.wire()
        await members.resume()
        members.submit("d", prompt(40), greedy(5))
        await members.ended("d")
        members.check_answer("d", prompt(40), greedy(5))
        assert members.front.endings["d"].num_cached_tokens == 36
        await members.idle()


async def test_requests_that_come_before_resume_wait():
    members = Group(encode=False)
    await members.wire()
    members.submit("a", prompt(6), greedy(4))
    await until(lambda: "a" in members.scheduler.scheduler.book.live)
    assert not members.gpu.plans
    await members.resume()
    await members.ended("a")
    members.check_answer("a", prompt(6), greedy(4))
    for service in members.services:
        await service.close()
    for endpoint in members.played.values():
        await endpoint.close()


async def test_requests_of_a_lost_front_are_aborted():
    async with group() as members:
        members.gpu.held = True
        for index in range(3):
            members.submit(f"r{index}", prompt(6, index), greedy(50))
        await until(lambda: len(members.scheduler.scheduler.book.running) == 3)
        await members.front.close()
        await until(lambda: not members.scheduler.scheduler.book.live)
        members.gpu.release()
        await members.idle()
        assert members.scheduler.metrics()["requests_aborted_total"] == 3


async def test_suspects_of_a_failed_step_are_reported():
    async with group() as members:
        members.gpu.held = True
        members.submit("a", prompt(6), greedy(20))
        await until(lambda: members.scheduler.scheduler.num_outstanding_steps)
        step_id = members.scheduler.scheduler.last_step_id
        failed = StepFailed(step_id, members.epoch, "ExpertCache was late", ("ExpertCache",))
        members.gpu.endpoint.send(ActorName.SCHEDULER, failed)
        await members.ended("a")
        await until(lambda: members.reports)
        assert members.reports == [
            ActorsSuspected(members.epoch, ("ExpertCache",), f"step {step_id} failed: ExpertCache was late")
        ]


async def test_stalled_step_is_reported_and_its_requests_fail():
    async with group(step_timeout_s=0.01) as members:
        members.gpu.held = True
        members.submit("a", prompt(6), greedy(20))
        await members.ended("a")
        assert "scheduler.step_timeout_s" in members.front.endings["a"].failure.message
        await until(lambda: members.reports)
        assert members.reports[0].suspects == ("GpuExecutor",)
        assert "scheduler.step_timeout_s" in members.reports[0].detail
        assert members.scheduler.metrics()["stalled_steps_total"] >= 1
        members.gpu.release()
        await members.idle()
        members.submit("b", prompt(6), greedy(4))
        await members.ended("b")
        await members.idle()


async def test_lost_executors_do_not_raise_and_wait_for_the_next_epoch():
    async with group() as members:
        await members.gpu.close()
        await members.kv.close()
        members.submit("a", prompt(6), greedy(20))
        await until(lambda: "a" in members.scheduler.scheduler.book.live)
        await members.scheduler.pause("GpuExecutor died")
        await members.ended("a")
        assert members.front.endings["a"].failure.kind == "engine_restarted"
