"""The arena may be allocated anew between any two steps: requests are computed again and get the same tokens."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.kv import KVAllocator
from freetoken.messages import ActorName, FinishReason, PoolEmptied, SamplingParams, VacateArena
from freetoken.testing.fake_executor import FakeDevice, expected_answer
from freetoken.testing.scheduler_rig import SchedulerRig
from tests.unit.scheduling.test_resize_properties import LIMITS as RESIZE_LIMITS
from tests.unit.scheduling.test_resize_properties import MIN_BLOCKS, requests

LIMITS = replace(RESIZE_LIMITS, ride_along_tokens=2)


def stand_still(rig, num_blocks):
    """GpuExecutor wants to allocate the arena anew; what Scheduler answers once nothing is under way."""
    rig.scheduler.changes.vacate(VacateArena(1, 7, num_blocks))
    rig.pump()
    while (vacated := rig.scheduler.take_vacated(rig.now)) is None:
        assert rig.deliver_reply() or rig.end_background() or rig.run_step(), "the moment without steps never comes"
    assert not rig.plans and not rig.replies and rig.background is None
    assert rig.scheduler.take_vacated(rig.now) is None or vacated.refusal  # told once
    return vacated


def replace_arena(rig, num_blocks):
    """Both tables are emptied, and the device knows nobody."""
    limits = rig.limits
    rig.allocator = KVAllocator(num_blocks, limits.block_size, limits.prefix_cache)
    steps = rig.device.num_steps
    rig.device = FakeDevice(num_blocks, limits.block_size, limits.vocab_size)
    rig.device.num_steps = steps
    rig.scheduler.emptied(PoolEmptied(1, 7, ActorName.EXPERT_CACHE.value))
    assert rig.scheduler.advance(rig.now) is None
    rig.scheduler.emptied(PoolEmptied(1, 7, ActorName.KV_ALLOCATOR.value, rig.allocator.stats()))
    rig.pump()


events = st.one_of(requests, st.sampled_from(["cycle", "cycle", "step", "reply", "abort"]), st.integers(MIN_BLOCKS, 40))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, max_size=60), st.booleans())
def test_tokens_do_not_depend_on_it(script, prefix_cache):
    rig = SchedulerRig(replace(LIMITS, prefix_cache=prefix_cache))
    sent = {}
    for event in script:
        if event == "cycle":
            rig.cycle()
        elif event == "step":
            rig.run_step()
        elif event == "reply":
            rig.deliver_reply()
        elif event == "abort":
            if sent:
                rig.abort(next(reversed(sent)))
        elif isinstance(event, int):
            assert stand_still(rig, event).refusal == ""
            assert not rig.scheduler.book.running and not rig.scheduler.book.lingering
            replace_arena(rig, event)
            assert rig.scheduler.limits.num_kv_blocks == event
        else:
            name = f"r{len(sent)}"
            sent[name] = event
            rig.submit(name, *event)
        rig.allocator.check_integrity()
    rig.drain(5000)
    rig.check_baseline()
    for name, (prompt, sampling) in sent.items():
        tokens, reason = expected_answer(
            prompt, sampling, vocab_size=LIMITS.vocab_size, max_context_tokens=LIMITS.max_context_tokens
        )
        if rig.endings[name].finish_reason is FinishReason.ABORT:
            assert rig.tokens.get(name, []) == tokens[: len(rig.tokens.get(name, []))]
            continue
        assert rig.endings[name].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), rig.endings[name].failure
        assert (rig.tokens[name], rig.endings[name].finish_reason) == (tokens, reason)


def test_requests_that_come_or_go_meanwhile_wait_or_end():
    rig = SchedulerRig(LIMITS)
    rig.submit("first", (1, 2, 3), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    rig.submit("second", (3, 2, 1), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        rig.cycle()
    stand_still(rig, 30)
    assert rig.tokens["first"]
    rig.submit("third", (2, 2), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    rig.abort("second")
    assert not rig.plans and not rig.replies and rig.endings["second"].finish_reason is FinishReason.ABORT
    replace_arena(rig, 30)
    rig.drain()
    rig.check_baseline()
    assert len(rig.tokens["first"]) == 12 and len(rig.tokens["third"]) == 3
    assert rig.endings["first"].stats.num_preemptions == 1 and rig.endings["third"].stats.num_preemptions == 0


def test_a_request_that_would_not_fit_is_a_refusal_and_nobody_notices():
    rig = SchedulerRig(LIMITS)
    rig.submit("long", (1,) * 30, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        rig.cycle()
    vacated = stand_still(rig, 10)
    assert "KV of 30 tokens is too little" in vacated.refusal
    rig.pump()
    rig.drain()
    rig.check_baseline()
    assert rig.endings["long"].finish_reason is FinishReason.LENGTH
    assert rig.endings["long"].stats.num_preemptions == 0


@pytest.mark.parametrize(
    ("emptied", "suspect"),
    [((), ActorName.GPU_EXECUTOR), ((ActorName.KV_ALLOCATOR,), ActorName.EXPERT_CACHE)],
)
def test_who_does_not_answer_in_time_is_suspected(emptied, suspect):
    rig = SchedulerRig(LIMITS)
    rig.submit("one", (1, 2, 3))
    stand_still(rig, 30)
    for name in emptied:
        rig.scheduler.emptied(PoolEmptied(1, 7, name.value, rig.allocator.stats()))
    due_s = rig.scheduler.deadline_s()
    assert due_s == rig.now + LIMITS.step_timeout_s
    assert rig.scheduler.check_stalled(due_s - 1) is None
    assert rig.scheduler.check_stalled(due_s) is suspect
    assert rig.scheduler.deadline_s() is None
