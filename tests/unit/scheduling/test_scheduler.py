"""Behaviours of the core one by one, against the real allocator and a device that checks every plan."""

from dataclasses import replace
from itertools import pairwise

import pytest

from freetoken.messages import (
    ActorName,
    FinishReason,
    RequestFailure,
    RowResult,
    SamplingParams,
    StepResult,
    SubmitRequest,
)
from freetoken.scheduling import SchedulerLimits
from freetoken.scheduling.arena_changes import block_pressure
from freetoken.testing.fake_executor import expected_answer
from freetoken.testing.scheduler_rig import SchedulerRig

BLOCK = 4
EOS = 3
LIMITS = SchedulerLimits(
    max_num_running=8,
    max_num_waiting=8,
    max_num_batched_tokens=32,
    prefill_chunk_tokens=16,
    step_timeout_s=10.0,
    max_context_tokens=200,
    block_size=BLOCK,
    num_kv_blocks=100,
    vocab_size=50,
)


def greedy(max_tokens=10, **kwargs):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **kwargs)


def prompt(length, salt=0):
    return tuple((salt * 7 + index * index) % 50 for index in range(length))


def expected(tokens, sampling, limits=LIMITS):
    return expected_answer(
        tokens,
        replace(sampling, seed=0),
        vocab_size=limits.vocab_size,
        max_context_tokens=limits.max_context_tokens,
        eos_token_ids=limits.eos_token_ids,
    )


def check_answer(rig, request_id, tokens, sampling):
    wanted, reason = expected(tokens, sampling, rig.limits)
    assert rig.tokens[request_id] == wanted
    assert rig.endings[request_id].finish_reason is reason
    assert rig.endings[request_id].failure is None


def make(**changes):
    return SchedulerRig(replace(LIMITS, **changes))


# ---------------------------------------------------------------------------------------------- KV that may grow


def test_a_prompt_that_kv_could_grow_to_hold_waits_aside_until_it_has():
    rig = make(num_kv_blocks=10, growable_kv_blocks=30)
    rig.submit("a", prompt(50), greedy(8))
    rig.submit("small", prompt(9), greedy(3))
    rig.drain()
    assert rig.endings["small"].failure is None and "a" not in rig.endings  # nobody waits for it
    assert block_pressure(rig.scheduler.book) == (1, -(-59 // BLOCK) - 10)
    assert rig.scheduler.metrics()["waiting"] == 1
    rig.submit("never", prompt(121), greedy(8))
    rig.submit("a", prompt(50), greedy(8))
    rig.drain()
    assert rig.endings["never"].failure.kind == "context_length_exceeded"
    assert "is in use" in rig.endings["a"].failure.message
    book = rig.scheduler.book
    book.set_limits(replace(book.limits, num_kv_blocks=12))  # too little yet
    assert book.oversized and not len(book.waiting)
    book.set_limits(replace(book.limits, num_kv_blocks=15))
    assert not book.oversized and [request.id for request in book.waiting] == ["a"]


def test_a_prompt_that_kv_does_not_grow_for_is_refused_in_time():
    rig = make(num_kv_blocks=10, growable_kv_blocks=30)
    book = rig.scheduler.book
    for number, name in enumerate(("a", "b", "c")):
        rig.now = float(number)
        rig.submit(name, prompt(50), greedy(8))
    book.end_oversized(9.9)
    rig.scheduler.abort("b", 9.9)
    book.end_oversized(10.0)
    batch = rig.scheduler.take_batch()
    assert [(delta.request_id, delta.finish_reason) for delta in batch.deltas] == [
        ("b", FinishReason.ABORT),
        ("a", FinishReason.ERROR),
    ]
    assert batch.deltas[1].failure.message == (
        "the prompt has 50 tokens; the KV cache holds 40 tokens (10 blocks of 4, kv.num_tokens) "
        "and did not grow within 10 s"
    )
    batch = rig.scheduler.drop_all(RequestFailure("engine_restarted", "gone", retryable=True), 11.0)
    assert [(delta.request_id, delta.failure.kind) for delta in batch.deltas] == [("c", "engine_restarted")]
    assert not book.oversized


def test_those_that_wait_aside_count_as_waiting():
    rig = make(num_kv_blocks=10, growable_kv_blocks=30, max_num_running=1, max_num_waiting=1)
    for name in ("a", "b", "c"):
        rig.submit(name, prompt(50), greedy(8))
    rig.drain()
    assert list(rig.endings) == ["c"] and rig.endings["c"].failure.kind == "queue_full"
    rig.scheduler.abort_all(1.0)
    batch = rig.scheduler.take_batch()
    assert [(delta.request_id, delta.finish_reason) for delta in batch.deltas] == [
        ("a", FinishReason.ABORT),
        ("b", FinishReason.ABORT),
    ]
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- overlap


def test_next_step_is_queued_before_the_result_of_this_one():
    rig = make()
    rig.submit("a", prompt(5), greedy(6))
    rig.settle_replies()
    assert [plan.step_id for plan in rig.plans] == [1, 2]
    first, second = (plan.rows[0] for plan in rig.plans)
    assert (first.start, first.num_tokens, first.sample, first.use_last_sampled) == (0, 5, True, False)
    assert (second.start, second.num_tokens, second.sample, second.use_last_sampled) == (5, 1, True, True)
    while rig.run_step():
        left_to_plan = rig.scheduler.book.running and rig.scheduler.book.running[0].num_planned_tokens < 11
        rig.settle_replies()
        assert len(rig.plans) == 2 or not left_to_plan
    check_answer(rig, "a", prompt(5), greedy(6))
    rig.check_baseline()


def test_row_known_to_be_superfluous_is_never_planned():
    rig = make()
    rig.submit("a", prompt(5), greedy(4))
    rig.drain()
    assert rig.device.num_steps == 4 + 1  # the last plan only retires
    assert rig.notices[-1].num_tokens == 0 and rig.notices[-1].last
    assert [notice.last for notice in rig.notices[:4]] == [False, False, False, True]


def test_context_limit_is_known_in_advance():
    rig = make(max_context_tokens=12)
    rig.submit("a", prompt(9), greedy(100))
    rig.drain()
    assert len(rig.tokens["a"]) == 3 and rig.endings["a"].finish_reason is FinishReason.LENGTH
    assert rig.device.num_steps == 3 + 1
    rig.check_baseline()


def test_stop_token_wastes_one_row_whose_blocks_stay_until_it_is_answered():
    sampling = greedy(20)
    answer, _ = expected(prompt(6), sampling)
    stop = answer[2]
    rig = make()
    rig.submit("a", prompt(6), greedy(20, stop_token_ids=(stop,)))
    for _ in range(1 + answer.index(stop)):
        rig.cycle()
    assert rig.endings["a"].finish_reason is FinishReason.STOP
    assert rig.tokens["a"] == answer[: 1 + answer.index(stop)]
    assert len(rig.plans) == 1 and rig.plans[0].rows[0].request_id == "a"  # the wasted row
    rig.settle_replies()
    assert rig.allocator.num_requests == 1
    rig.drain()
    assert rig.tokens["a"] == answer[: 1 + answer.index(stop)]
    rig.check_baseline()


def test_result_that_arrives_while_room_is_reserved_spares_the_wasted_row():
    rig = make(block_size=1, num_kv_blocks=200)
    answer, _ = expected(prompt(6), greedy(20))
    rig.submit("a", prompt(6), greedy(20, stop_token_ids=(answer[0],)))
    rig.deliver_reply()
    assert len(rig.plans) == 1 and len(rig.replies) == 1  # step 2 is being planned
    rig.run_step()
    rig.deliver_reply()
    assert rig.endings["a"].finish_reason is FinishReason.STOP
    rig.drain()
    assert rig.device.num_steps == 1 + 1
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- finishing


def test_eos_ends_a_request_unless_ignored():
    limits = {"eos_token_ids": (expected(prompt(6), greedy(20))[0][3],)}
    rig = make(**limits)
    rig.submit("a", prompt(6), greedy(20))
    rig.submit("b", prompt(6), greedy(20, ignore_eos=True))
    rig.drain()
    assert rig.endings["a"].finish_reason is FinishReason.STOP and len(rig.tokens["a"]) <= 4
    assert rig.endings["b"].finish_reason is FinishReason.LENGTH and len(rig.tokens["b"]) == 20
    rig.check_baseline()


def test_min_tokens_masks_stops_on_the_device_and_ignores_them_here():
    rig = make(eos_token_ids=tuple(range(0, 50, 2)))
    sampling = greedy(30, min_tokens=7)
    rig.submit("a", prompt(6), sampling)
    rig.drain()
    check_answer(rig, "a", prompt(6), sampling)
    assert len(rig.tokens["a"]) > 7


def test_zero_max_tokens_ends_at_once():
    rig = make()
    rig.submit("a", prompt(6), greedy(0))
    assert rig.endings["a"].finish_reason is FinishReason.LENGTH and rig.tokens["a"] == []
    rig.check_baseline()


def test_last_delta_has_figures_and_the_first_the_cached_tokens():
    rig = make()
    rig.submit("warm", prompt(10), greedy(1))
    rig.drain()
    rig.submit("a", prompt(10), greedy(3))
    rig.drain()
    assert rig.first_deltas["a"].num_cached_tokens == 8
    stats = rig.endings["a"].stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (10, 8, 3)
    assert (stats.queue_s, stats.prefill_s, stats.decode_s) == (0.0, 1.0, 2.0)


def test_logprobs_are_passed_on():
    rig = make()
    rig.submit("a", prompt(4), greedy(2, top_logprobs=0))
    rig.drain()
    assert rig.first_deltas["a"].logprobs[0].token_id == rig.tokens["a"][0]


# ---------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("length", [*range(1, 10), 15, 16, 17, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65])
def test_prompt_of_any_length_cold_and_resent(length):
    rig = make()
    rig.submit("other", prompt(3, salt=5), greedy(60))  # so that prefill comes in chunks of 16
    rig.cycle()
    for turn in range(3):
        rig.submit(f"t{turn}", prompt(length), greedy(5))
        while f"t{turn}" not in rig.endings:
            rig.cycle()
        check_answer(rig, f"t{turn}", prompt(length), greedy(5))
        cached = 0 if turn == 0 else (length - 1) // BLOCK * BLOCK
        assert rig.endings[f"t{turn}"].num_cached_tokens == cached
    rig.drain()
    rig.check_baseline()


def test_next_turn_reuses_prompt_and_answer():
    rig = make()
    rig.submit("a", prompt(10), greedy(9))
    rig.drain()
    history = prompt(10) + tuple(rig.tokens["a"]) + prompt(5, salt=9)
    rig.submit("b", history, greedy(4))
    rig.drain()
    check_answer(rig, "b", history, greedy(4))
    assert rig.endings["b"].num_cached_tokens == 16  # 18 tokens have KV: the last sampled one was never computed


def test_chunks_become_reusable_before_the_prompt_is_done():
    rig = make()
    rig.submit("long", prompt(150), greedy(2))
    for _ in range(3):
        rig.cycle()
    rig.submit("same", prompt(150), greedy(2))
    rig.drain()
    assert rig.endings["same"].num_cached_tokens >= 64
    check_answer(rig, "same", prompt(150), greedy(2))


def test_without_prefix_cache_nothing_is_committed():
    rig = make(prefix_cache=False)
    for name in ("a", "b"):
        rig.submit(name, prompt(20), greedy(5))
        rig.drain()
        check_answer(rig, name, prompt(20), greedy(5))
        assert rig.endings[name].num_cached_tokens == 0
    assert not any(reservation.commits for reservation in rig.reservations)
    assert rig.allocator.stats().free_blocks == 100


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("tokens", "changes", "kind", "words"),
    [
        (prompt(200), {}, "context_length_exceeded", ["200 tokens", "199"]),
        (prompt(120), {"num_kv_blocks": 25}, "context_length_exceeded", ["120 tokens", "100 tokens"]),
        ((), {}, "internal", ["no tokens"]),
        ((1, 50, 2), {}, "internal", ["50", "[0, 50)"]),
        ((1, -7, 2), {}, "internal", ["-7", "[0, 50)"]),
    ],
)
def test_impossible_prompts_are_refused_naming_the_numbers(tokens, changes, kind, words):
    rig = make(**changes)
    rig.submit("a", tokens)
    failure = rig.endings["a"].failure
    assert rig.endings["a"].finish_reason is FinishReason.ERROR and failure.kind == kind and not failure.retryable
    assert all(word in failure.message for word in words), failure.message
    rig.check_baseline()


def test_longest_possible_prompt_gets_its_one_token():
    rig = make()
    rig.submit("a", prompt(199), greedy(50))
    rig.drain()
    check_answer(rig, "a", prompt(199), greedy(50))
    assert len(rig.tokens["a"]) == 1


def test_full_queue_refuses_retryably():
    rig = make(max_num_running=2, max_num_waiting=3)
    for index in range(6):
        rig.submit(f"r{index}", prompt(4), greedy(3))
    assert list(rig.endings) == ["r5"]
    failure = rig.endings["r5"].failure
    assert (failure.kind, failure.retryable) == ("queue_full", True) and "max_num_waiting" in failure.message
    rig.drain()
    assert all(rig.endings[f"r{index}"].failure is None for index in range(5))


def test_no_waiting_allowed_still_serves_what_can_run():
    rig = make(max_num_running=2, max_num_waiting=0)
    for index in range(3):
        rig.submit(f"r{index}", prompt(4), greedy(3))
    rig.drain()
    assert [rig.endings[f"r{index}"].failure is None for index in range(3)] == [True, True, False]


def test_duplicate_id_is_refused_and_the_first_goes_on():
    rig = make()
    rig.submit("a", prompt(6), greedy(5))
    rig.cycle()
    rig.submit("b", prompt(6), greedy(5))
    batch_before = dict(rig.tokens)
    rig.scheduler.submit(SubmitRequest("a", (1,), greedy()), 0.0)
    batch = rig.scheduler.take_batch()
    assert batch.deltas[0].failure.kind == "internal" and "'a'" in batch.deltas[0].failure.message
    assert rig.tokens == batch_before
    rig.drain()
    check_answer(rig, "a", prompt(6), greedy(5))
    rig.check_baseline()


def test_id_may_return_after_its_request_ended_even_with_a_row_in_flight():
    rig = make()
    rig.submit("a", prompt(6), greedy(50))
    rig.cycle()
    rig.settle_replies()
    rig.abort("a")
    first_ending = rig.endings.pop("a")
    assert first_ending.finish_reason is FinishReason.ABORT and len(rig.scheduler.book.lingering) == 1
    rig.tokens.pop("a")
    rig.submit("a", prompt(9, salt=2), greedy(5))
    rig.drain()
    check_answer(rig, "a", prompt(9, salt=2), greedy(5))
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- aborts


def test_abort_at_every_moment_of_a_request():
    for moment in range(60):
        rig = make()
        rig.submit("other", prompt(30, salt=3), greedy(12))
        rig.submit("a", prompt(40), greedy(12))
        for tick in range(moment):  # replies and results take turns, so that all phases are met
            (rig.deliver_reply if tick % 3 else rig.run_step)()
        was_over = "a" in rig.endings
        rig.abort("a")
        rig.abort("a")
        assert rig.endings["a"].finish_reason is (FinishReason.LENGTH if was_over else FinishReason.ABORT)
        rig.drain()
        check_answer(rig, "other", prompt(30, salt=3), greedy(12))
        rig.check_baseline()


def test_abort_of_an_unknown_id_is_nothing():
    rig = make()
    rig.abort("nobody")
    assert not rig.endings and not rig.reservations


def test_blocks_of_an_aborted_prompt_stay_cached():
    rig = make()
    rig.submit("a", prompt(150), greedy(5))
    for _ in range(3):
        rig.cycle()
    rig.abort("a")
    rig.drain()
    rig.check_baseline()
    rig.submit("b", prompt(150), greedy(5))
    rig.drain()
    assert rig.endings["b"].num_cached_tokens >= 64


# ---------------------------------------------------------------------------------------------- faults


def test_failed_step_ends_its_requests_and_no_others():
    rig = make(max_num_batched_tokens=16)
    rig.submit("a", prompt(5), greedy(20))
    for _ in range(3):
        rig.cycle()
    rig.submit("b", prompt(50, salt=1), greedy(6))
    rig.settle_replies()  # two steps with a alone are out
    rig.fail_step("the mailbox was silent")
    failure = rig.endings["a"].failure
    assert failure.kind == "internal" and failure.retryable and "the mailbox was silent" in failure.message
    rig.drain()
    check_answer(rig, "b", prompt(50, salt=1), greedy(6))
    rig.check_baseline()
    rig.submit("again", prompt(5), greedy(20))
    rig.drain()
    check_answer(rig, "again", prompt(5), greedy(20))


def test_failed_chunk_is_not_cached():
    rig = make()
    rig.submit("a", prompt(150), greedy(5))
    rig.cycle()  # the first 32 tokens are good
    rig.settle_replies()
    rig.fail_step()
    rig.drain()
    rig.check_baseline()
    rig.submit("b", prompt(150), greedy(5))
    rig.drain()
    assert rig.endings["b"].num_cached_tokens == 32
    check_answer(rig, "b", prompt(150), greedy(5))


def test_numeric_failure_ends_one_request_and_its_prefix_is_never_reused():
    rig = make()
    rig.submit("bad", prompt(30), greedy(20))
    rig.submit("good", prompt(20, salt=4), greedy(20))
    for _ in range(5):
        rig.cycle()
    rig.device.numeric_faults.add("bad")
    rig.drain()
    failure = rig.endings["bad"].failure
    assert (failure.kind, failure.message) == ("numeric", "the logits are not finite")
    check_answer(rig, "good", prompt(20, salt=4), greedy(20))
    rig.check_baseline()
    rig.submit("again", prompt(30), greedy(20))
    rig.drain()
    assert rig.endings["again"].num_cached_tokens == 0
    check_answer(rig, "again", prompt(30), greedy(20))


def test_prefix_is_out_of_reach_while_the_failed_request_still_lingers():
    rig = make()
    rig.submit("bad", prompt(30), greedy(20))
    for _ in range(4):
        rig.cycle()
    rig.settle_replies()
    rig.device.numeric_faults.add("bad")
    rig.run_step()
    assert rig.endings["bad"].failure.kind == "numeric" and rig.scheduler.book.lingering
    rig.submit("again", prompt(30), greedy(2))
    rig.settle_replies()
    assert rig.scheduler.book.live["again"].num_cached_tokens == 0
    rig.drain()
    rig.check_baseline()


def test_model_that_repeats_one_token_is_ended_and_leaves_nothing_in_the_cache():
    rig = make(max_repeated_tokens=12)
    rig.device.stuck["bad"] = 9
    rig.submit("bad", prompt(30), greedy(100))
    rig.submit("good", prompt(20, salt=4), greedy(40))
    rig.drain()
    assert rig.tokens["bad"] == [9] * 12
    failure = rig.endings["bad"].failure
    assert (failure.kind, failure.retryable) == ("repetition", False)
    assert "token 9 12 times" in failure.message and "scheduler.max_repeated_tokens" in failure.message
    check_answer(rig, "good", prompt(20, salt=4), greedy(40))
    rig.check_baseline()
    rig.submit("again", (*prompt(30), *[9] * 10), greedy(20))
    rig.drain()
    assert rig.endings["again"].num_cached_tokens == 0
    check_answer(rig, "again", (*prompt(30), *[9] * 10), greedy(20))


@pytest.mark.parametrize(
    "sampling", [greedy(40, ignore_eos=True), greedy(40, min_tokens=40)], ids=["ignore_eos", "min_tokens"]
)
def test_request_whose_client_forbids_an_end_may_repeat_one_token(sampling):
    rig = make(max_repeated_tokens=12)
    rig.device.stuck["a"] = 9
    rig.submit("a", prompt(30), sampling)
    rig.drain()
    assert rig.tokens["a"] == [9] * 40 and rig.endings["a"].finish_reason is FinishReason.LENGTH


def test_row_missing_from_a_result_fails_its_request():
    rig = make()
    rig.submit("a", prompt(5), greedy(5))
    rig.submit("b", prompt(5, salt=1), greedy(5))
    rig.deliver_reply()
    rig.deliver_reply()
    plan = rig.plans.popleft()
    result = rig.device.run(plan)
    kept = tuple(row for row in result.rows if row.request_id != "a")
    rig.scheduler.step_done(replace(result, rows=(*kept, RowResult("nobody", 1))), 1.0)
    rig.pump()
    assert "lacks" in rig.endings["a"].failure.message
    rig.drain()
    rig.check_baseline()


def test_unexpected_results_are_ignored_and_a_lost_one_fails_its_requests():
    rig = make()
    rig.scheduler.step_done(StepResult(77, 1, (RowResult("a", 1),), 0, 1), 0.0)
    rig.submit("a", prompt(5), greedy(20))
    rig.settle_replies()
    rig.device.run(rig.plans.popleft())  # its result never arrives
    rig.run_step()
    assert "lost" in rig.endings["a"].failure.message
    rig.drain()
    rig.check_baseline()


def test_stalled_step_fails_its_requests_but_keeps_their_blocks_until_it_is_answered():
    rig = make()
    rig.submit("a", prompt(5), greedy(20))
    rig.settle_replies()
    rig.now = 9.9
    assert rig.scheduler.check_stalled(rig.now) is None and rig.scheduler.deadline_s() == 10.0
    rig.now = 10.0
    assert rig.scheduler.check_stalled(rig.now) is ActorName.GPU_EXECUTOR
    rig.pump()
    failure = rig.endings["a"].failure
    assert failure.retryable and "scheduler.step_timeout_s" in failure.message
    assert rig.scheduler.metrics()["stalled_steps_total"] == 1
    rig.submit("b", prompt(5, salt=1), greedy(4))
    rig.settle_replies()
    assert len(rig.plans) == 2 and rig.allocator.num_requests >= 1
    assert rig.scheduler.deadline_s() == 20.0  # the next one had its turn only since
    rig.drain()  # the late answers arrive after all
    check_answer(rig, "b", prompt(5, salt=1), greedy(4))
    rig.check_baseline()
    assert rig.scheduler.deadline_s() is None


def test_silent_allocator_is_noticed_and_may_still_answer():
    rig = make()
    rig.submit("a", prompt(5), greedy(20))
    assert rig.scheduler.deadline_s() == 10.0
    rig.now = 10.0
    assert rig.scheduler.check_stalled(rig.now) is ActorName.KV_ALLOCATOR
    assert rig.scheduler.check_stalled(rig.now) is None
    rig.pump()
    failure = rig.endings["a"].failure
    assert failure.retryable and "KV allocator" in failure.message
    assert rig.scheduler.metrics()["stalled_steps_total"] == 1
    rig.submit("b", prompt(5, salt=1), greedy(4))
    rig.drain()
    check_answer(rig, "b", prompt(5, salt=1), greedy(4))
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- blocks run out


def test_preempted_requests_finish_with_the_same_tokens():
    rig = make(num_kv_blocks=20)  # 80 tokens
    samplings = {f"r{index}": (prompt(20, salt=index), greedy(30)) for index in range(5)}
    for name, (tokens, sampling) in samplings.items():
        rig.submit(name, tokens, sampling)
    rig.drain()
    for name, (tokens, sampling) in samplings.items():
        check_answer(rig, name, tokens, sampling)
    assert rig.scheduler.metrics()["preemptions_total"] > 0
    assert rig.endings["r0"].stats.num_preemptions == 0  # the oldest is never the victim
    assert max(ending.stats.num_preemptions for ending in rig.endings.values()) > 0
    rig.check_baseline()


def test_victim_is_the_latest_arrival_and_restarts_from_its_cached_prefix():
    rig = make(num_kv_blocks=24)
    for index, name in enumerate(("first", "second", "third")):
        rig.submit(name, prompt(20, salt=index), greedy(60))
    while not rig.scheduler.book.preemptions_total:
        rig.cycle()
    victim = rig.scheduler.book.live["third"]
    assert [request.id for request in rig.scheduler.book.running] == ["first", "second"]
    assert [request.id for request in rig.scheduler.book.waiting] == ["third"]
    known = victim.num_known_tokens
    rig.abort("second")
    while victim.admission == 1:
        rig.cycle()
    # At most the block that made room was evicted, and the last token is computed again.
    assert victim.num_computed_tokens >= (known // BLOCK - 2) * BLOCK > 16
    assert victim.num_cached_tokens == 0  # what its client is told is about the prompt as it came
    rig.drain()
    check_answer(rig, "first", prompt(20), greedy(60))
    check_answer(rig, "third", prompt(20, salt=2), greedy(60))
    rig.check_baseline()


def test_priority_decides_who_is_served_and_who_is_preempted():
    rig = make(num_kv_blocks=20, max_num_running=4)
    for index in range(3):
        rig.submit(f"late{index}", prompt(16, salt=index), greedy(40), priority=5)
    rig.submit("urgent", prompt(16, salt=8), greedy(40), priority=-1)
    rig.drain()
    assert rig.endings["urgent"].stats.num_preemptions == 0
    assert rig.token_steps["urgent"][-1] < min(rig.token_steps[f"late{index}"][-1] for index in range(3))
    for index in range(3):
        check_answer(rig, f"late{index}", prompt(16, salt=index), greedy(40))


def test_request_that_outgrows_the_pool_fails_naming_both_numbers():
    rig = make(num_kv_blocks=10)  # 40 tokens
    rig.submit("a", prompt(30), greedy(100))
    rig.drain()
    failure = rig.endings["a"].failure
    assert failure.kind == "context_length_exceeded" and not failure.retryable
    assert "41 tokens" in failure.message and "40 tokens" in failure.message
    assert rig.tokens["a"] == expected(prompt(30), greedy(11))[0]
    rig.check_baseline()


def test_prompt_as_long_as_the_pool_gets_a_token():
    rig = make(num_kv_blocks=10)
    rig.submit("a", prompt(40), greedy(1))
    rig.drain()
    check_answer(rig, "a", prompt(40), greedy(1))


def test_waiting_requests_are_admitted_by_need_not_by_max_tokens():
    rig = make(num_kv_blocks=40)
    for index in range(4):
        rig.submit(f"r{index}", prompt(8, salt=index), greedy(150))
    for _ in range(4):
        rig.cycle()
    assert len(rig.scheduler.book.running) == 4
    for index in range(4):
        rig.abort(f"r{index}")
    rig.drain()
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- fairness


def test_stream_keeps_its_pace_beside_a_long_prompt():
    rig = make(max_context_tokens=20_000, num_kv_blocks=3000, max_num_batched_tokens=512, prefill_chunk_tokens=256)
    rig.submit("stream", prompt(8), greedy(120))
    for _ in range(4):
        rig.cycle()
    rig.submit("long", prompt(10_000, salt=2), greedy(2))
    step = rig.device.num_steps
    rig.device.max_step_tokens = 0
    rig.drain()
    check_answer(rig, "long", prompt(10_000, salt=2), greedy(2))
    steps = [at for at in rig.token_steps["stream"] if at >= step]
    assert max(b - a for a, b in pairwise(steps)) == 1  # a token in every step
    assert rig.device.max_step_tokens <= 257
    # The prompt had a full chunk in every step, apart from the two that were out when it came.
    assert rig.token_steps["long"][0] <= step + 2 + -(-10_000 // 256)


def test_short_prompt_passes_a_long_one():
    rig = make(max_context_tokens=300_000, num_kv_blocks=80_000, max_num_batched_tokens=512, prefill_chunk_tokens=256)
    rig.device.audit = False
    rig.submit("long", prompt(200_000), greedy(2))
    for _ in range(3):
        rig.cycle()
    rig.submit("short", prompt(100, salt=3), greedy(3))
    step = rig.device.num_steps
    while "short" not in rig.endings:
        rig.cycle()
    assert rig.token_steps["short"][0] <= step + 3  # the two steps that were out, and its own
    check_answer(rig, "short", prompt(100, salt=3), greedy(3))
    rig.abort("long")
    rig.drain()
    rig.check_baseline()


def test_long_prompt_advances_under_a_flood_of_short_ones():
    rig = make(max_context_tokens=4000, num_kv_blocks=1000, max_num_batched_tokens=64, prefill_chunk_tokens=32)
    rig.submit("long", prompt(1000), greedy(2))
    step = rig.device.num_steps
    count = 0
    while "long" not in rig.endings:
        if len(rig.scheduler.book.live) < 6:
            rig.submit(f"s{count}", prompt(20, salt=count + 1), greedy(3))
            count += 1
        rig.cycle()
    assert rig.token_steps["long"][0] <= step + 2 + 1000 // 16  # half of the prefill share is its own
    assert count > 20
    rig.drain()
    rig.check_baseline()


def test_cached_conversation_starts_at_once_behind_a_long_prompt():
    rig = make(max_context_tokens=20_000, num_kv_blocks=8000, max_num_batched_tokens=512, prefill_chunk_tokens=256)
    rig.submit("warm", prompt(5000, salt=1), greedy(1))
    rig.drain()
    rig.submit("long", prompt(15_000), greedy(2))
    rig.cycle()
    rig.submit("turn", prompt(5000, salt=1) + prompt(50), greedy(2))
    step = rig.device.num_steps
    while "turn" not in rig.endings:
        rig.cycle()
    assert rig.token_steps["turn"][0] <= step + 3
    rig.abort("long")
    rig.drain()


def test_more_streams_than_a_step_holds_take_turns():
    rig = make(max_num_running=40, max_num_waiting=40, max_num_batched_tokens=16, prefill_chunk_tokens=16)
    rig.allocator.check_integrity()
    for index in range(40):
        rig.submit(f"r{index}", prompt(3, salt=index), greedy(12))
    rig.drain()
    for index in range(40):
        check_answer(rig, f"r{index}", prompt(3, salt=index), greedy(12))
        steps = rig.token_steps[f"r{index}"]
        assert max(b - a for a, b in pairwise(steps)) <= 5
    assert rig.device.max_step_tokens <= 16
    rig.check_baseline()


# ---------------------------------------------------------------------------------------------- economy


def test_decoding_asks_the_allocator_once_a_block():
    rig = make()
    rig.submit("a", prompt(8), greedy(41))
    rig.drain()
    assert len(rig.reservations) == 1 + 10 + 1  # prompt, one for each new block, release


def test_seeds_are_derived_reproducibly_and_kept_when_given():
    seeds = []
    for _ in range(2):
        rig = make(seed=42)
        for index in range(3):
            rig.submit(f"r{index}", prompt(4), SamplingParams(max_tokens=2, seed=5 if index == 1 else None))
        rig.settle_replies()
        seeds.append([row.init.sampling.seed for row in rig.plans[0].rows + rig.plans[1].rows if row.init])
        rig.drain()
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3 and 5 in seeds[0]


def test_sixty_four_streams_with_aborts_return_to_the_baseline():
    rig = make(
        max_num_running=64, max_num_waiting=64, max_num_batched_tokens=128, prefill_chunk_tokens=64, num_kv_blocks=300
    )
    for index in range(64):
        rig.submit(f"r{index}", prompt(5 + index % 40, salt=index % 9), greedy(8 + index % 30))
    for step in range(60):
        rig.cycle()
        if step % 3 == 0:
            rig.abort(f"r{step}")
    rig.drain()
    for index in range(64):
        if rig.endings[f"r{index}"].finish_reason is not FinishReason.ABORT:
            check_answer(rig, f"r{index}", prompt(5 + index % 40, salt=index % 9), greedy(8 + index % 30))
    rig.check_baseline()


def test_drop_all_ends_everything_and_a_new_epoch_starts_clean():
    rig = make()
    rig.submit("a", prompt(6), greedy(20))
    rig.submit("b", prompt(60), greedy(20))
    for _ in range(4):
        rig.cycle()
    rig.settle_replies()
    batch = rig.scheduler.drop_all(RequestFailure("engine_restarted", "again, please", retryable=True), 9.0)
    assert {delta.request_id for delta in batch.deltas} == {"a", "b"}
    assert all(delta.failure.kind == "engine_restarted" for delta in batch.deltas)
    assert all(delta.stats is not None for delta in batch.deltas)
    rig.plans.clear()
    rig.replies.clear()
    rig.device.reset()
    rig.allocator.release_all()
    rig.scheduler.epoch = 2
    rig.submit("c", prompt(6), greedy(5))
    rig.drain()
    check_answer(rig, "c", prompt(6), greedy(5))
    rig.check_baseline()
