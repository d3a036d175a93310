from dataclasses import replace

from freetoken.messages import SamplingParams
from freetoken.scheduling import SchedulerLimits
from freetoken.scheduling.admission import MAX_ADMISSIONS_PER_STEP, MAX_BYPASSED, plan_admissions
from freetoken.scheduling.queue import RequestQueue
from freetoken.scheduling.request import Request, RequestState

LIMITS = SchedulerLimits(
    max_num_running=64,
    max_num_waiting=64,
    max_num_batched_tokens=512,
    prefill_chunk_tokens=256,
    step_timeout_s=10.0,
    max_context_tokens=100_000,
    block_size=16,
    num_kv_blocks=1000,
    vocab_size=100,
)


def queue(*lengths):
    waiting = RequestQueue()
    for arrival, length in enumerate(lengths):
        waiting.add(
            Request(
                f"r{arrival}",
                (1,) * length,
                SamplingParams(),
                priority=0,
                arrival=arrival,
                max_context_tokens=100_000,
                eos_token_ids=(),
                now=0.0,
            )
        )
    return waiting


def plan(waiting, available, *, running=1, tokens=256, lingering=(), limits=LIMITS):
    admissions = plan_admissions(
        waiting, lingering, num_running=running, prefill_tokens=tokens, available_blocks=available, limits=limits
    )
    return {admission.request.id: admission.num_new_tokens for admission in admissions}


def test_admits_by_the_next_chunk_and_leaves_the_watermark():
    assert plan(queue(50_000), 16 + 4) == {"r0": 256}
    assert plan(queue(50_000), 16 + 3) == {}
    assert plan(queue(50_000), 0, running=0) == {"r0": 256}  # nothing to wait for


def test_later_requests_get_what_is_left_but_a_block_at_least():
    assert plan(queue(100, 50_000, 50_000, 5), 900) == {"r0": 100, "r1": 156, "r2": 16, "r3": 5}


def test_slots_and_walks_per_step_are_limited():
    assert len(plan(queue(*[10] * 20), 900)) == MAX_ADMISSIONS_PER_STEP
    assert len(plan(queue(*[10] * 20), 900, running=61)) == 3
    assert plan(queue(10), 900, running=64) == {}


def test_former_life_must_be_over():
    waiting = queue(10, 20)
    waiting[1].num_in_flight = 1
    assert plan(waiting, 900, lingering={"r0": None}) == {}


def test_preempted_request_waits_until_all_it_had_fits():
    waiting = queue(1600)
    waiting[0].state = RequestState.PREEMPTED
    assert plan(waiting, 50) == {}
    assert plan(waiting, 104) == {"r0": 256}
    assert plan(waiting, 10, running=0) == {"r0": 256}


def test_refused_request_is_asked_for_again_only_when_more_is_free():
    waiting = queue(100)
    waiting[0].blocked_at_blocks = 200
    assert plan(waiting, 200) == {}
    assert plan(waiting, 201) == {"r0": 100}


def test_smaller_ones_pass_a_request_that_does_not_fit_but_not_for_ever():
    waiting = queue(50_000, 16)
    assert plan(waiting, 10) == {"r1": 16}
    assert waiting[0].num_bypassed == 1
    waiting[0].num_bypassed = MAX_BYPASSED
    assert plan(waiting, 10) == {}


def test_tiny_pools_have_a_tiny_watermark():
    limits = replace(LIMITS, num_kv_blocks=8)
    assert plan(queue(16), 2, limits=limits) == {"r0": 16}
    assert plan(queue(16), 1, limits=limits) == {}
