"""KV may change its size while steps run, also in vain: every request gets the tokens it would get alone."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.messages import ActorName, FinishReason, PoolVacated, SamplingParams, ShrinkKV, VacatePool
from freetoken.scheduling import SchedulerLimits
from freetoken.testing.fake_executor import expected_answer
from freetoken.testing.scheduler_rig import SchedulerRig

LIMITS = SchedulerLimits(
    max_num_running=5,
    max_num_waiting=50,
    max_num_batched_tokens=16,
    prefill_chunk_tokens=8,
    step_timeout_s=1000.0,
    max_context_tokens=36,
    block_size=3,
    num_kv_blocks=24,
    vocab_size=4,
)
MIN_BLOCKS = 14  # one request of full length, a spare copy of its prefix, and one block

requests = st.builds(
    lambda head, length, tail, new, seed: (
        (head * 40)[:length] + tail,
        SamplingParams(max_tokens=new, seed=seed, temperature=1.0 if seed else 0.0),
    ),
    st.sampled_from([(1,), (1, 2), (1, 1, 3)]),
    st.integers(1, 24),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(1, 20),
    st.integers(0, 3),
)
events = st.one_of(
    requests,
    st.sampled_from(["cycle", "cycle", "cycle", "step", "reply", "background"]),
    st.integers(MIN_BLOCKS, 40),
)


def run_event(rig, sent, event):
    if event == "cycle":
        rig.cycle()
    elif event == "step":
        rig.run_step()
    elif event == "reply":
        rig.deliver_reply()
    elif event == "background":
        rig.end_background()
    elif isinstance(event, int):
        if not rig.is_resizing:
            rig.resize(event)
    else:
        name = f"r{len(sent)}"
        sent[name] = event
        rig.submit(name, *event)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, max_size=60), st.booleans(), st.sampled_from([None, 2]))
def test_tokens_do_not_depend_on_the_size_of_kv(script, prefix_cache, ride_along_tokens):
    rig = SchedulerRig(replace(LIMITS, prefix_cache=prefix_cache, ride_along_tokens=ride_along_tokens))
    sent = {}
    for event in script:
        run_event(rig, sent, event)
        rig.allocator.check_integrity()
        assert rig.scheduler.limits.num_kv_blocks == rig.allocator.stats().total_blocks or rig.replies
    rig.drain(5000)
    rig.check_baseline()
    for name, (prompt, sampling) in sent.items():
        tokens, reason = expected_answer(
            prompt, sampling, vocab_size=LIMITS.vocab_size, max_context_tokens=LIMITS.max_context_tokens
        )
        assert rig.endings[name].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), rig.endings[name].failure
        assert (rig.tokens[name], rig.endings[name].finish_reason) == (tokens, reason)


mishaps = st.one_of(st.sampled_from(["fail", "fail background"]), st.tuples(st.integers(0, 12)))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(events, events, mishaps, st.integers(1, 40)), max_size=80),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
)
def test_changes_end_whoever_is_aborted_or_fails_meanwhile(script, prefix_cache, ride_along_tokens):
    """And what those got that ended early is the beginning of what they would have got."""
    rig = SchedulerRig(replace(LIMITS, prefix_cache=prefix_cache, ride_along_tokens=ride_along_tokens))
    sent = {}
    for event in script:
        if event == "fail":
            rig.fail_step()
        elif event == "fail background":
            rig.end_background("out of luck")
        elif isinstance(event, tuple) and len(event) == 1:
            rig.abort(f"r{event[0]}")
        else:
            run_event(rig, sent, event)
        rig.allocator.check_integrity()
    rig.drain(5000)
    rig.check_baseline()
    for name, (prompt, sampling) in sent.items():
        ending, tokens = rig.endings[name], tuple(rig.tokens[name])
        expected, reason = expected_answer(
            prompt, sampling, vocab_size=LIMITS.vocab_size, max_context_tokens=LIMITS.max_context_tokens
        )
        if ending.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (tokens, ending.finish_reason) == (tuple(expected), reason)
        else:
            assert tokens == tuple(expected[: len(tokens)])
            failure = ending.failure
            assert failure is None or failure.kind == "context_length_exceeded" or "out of luck" in failure.message


def test_blocks_granted_but_not_sent_move_too():
    rig = SchedulerRig(LIMITS)
    for index in range(4):
        rig.submit(f"r{index}", (1, 2, index), SamplingParams(max_tokens=20, seed=0, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        rig.cycle()
    rig.resize(MIN_BLOCKS)
    assert rig.is_resizing and rig.plans
    assert rig.finish_resize()
    assert rig.scheduler.metrics()["resizes_total"] == 1
    rig.drain()
    rig.check_baseline()


def test_a_cached_prefix_survives_and_the_oldest_goes_first():
    rig = SchedulerRig(LIMITS)
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    for name, token in (("old", 1), ("new", 2)):
        rig.submit(name, (token,) * 12, sampling)
        rig.drain()
    assert rig.allocator.stats().cached_blocks == 8
    rig.resize(4)
    assert rig.finish_resize()
    assert rig.allocator.stats().cached_blocks == 4
    for name, token in (("new again", 2), ("old again", 1)):
        rig.submit(name, (token,) * 12, sampling)
        rig.drain()
    assert rig.endings["new again"].num_cached_tokens == 9
    assert rig.endings["old again"].num_cached_tokens == 0


def test_too_small_is_refused_and_nothing_changes():
    rig = SchedulerRig(LIMITS)
    rig.submit("a", (1,) * 30, SamplingParams(max_tokens=6, seed=0, temperature=0.0, ignore_eos=True))
    for _ in range(2):
        rig.cycle()
    before = rig.allocator.block_table("a")
    rig.resize(5)
    assert not rig.finish_resize() and "5 blocks are too few" in rig.refusal
    assert rig.allocator.block_table("a")[: len(before)] == before
    assert rig.scheduler.limits.num_kv_blocks == 24
    rig.drain()
    rig.check_baseline()


def test_a_change_that_waits_for_a_reservation_is_made_when_that_leads_to_no_step():
    rig = SchedulerRig(LIMITS)
    rig.submit("a", (1, 2, 3), SamplingParams(max_tokens=5, seed=0, temperature=0.0))
    rig.resize(MIN_BLOCKS)
    rig.abort("a")
    assert rig.finish_resize()  # no other event comes
    rig.drain()
    rig.check_baseline()


def test_a_waiting_request_that_fits_no_more_is_told_so_and_disturbs_nobody():
    rig = SchedulerRig(LIMITS)
    sampling = SamplingParams(max_tokens=6, seed=0, temperature=0.0, ignore_eos=True)
    for index in range(5):
        rig.submit(f"r{index}", (1, 2, index % 4), sampling)
    rig.cycle()
    rig.submit("long", (1,) * 30, sampling)
    rig.resize(8)
    assert rig.finish_resize()
    rig.drain()
    failure = rig.endings.pop("long").failure
    assert failure.kind == "context_length_exceeded" and "30 tokens; the KV cache holds 24 tokens" in failure.message
    assert [ending.finish_reason for ending in rig.endings.values()] == [FinishReason.LENGTH] * 5
    rig.check_baseline()


def test_an_owner_that_never_answers_is_suspected():
    rig = SchedulerRig(LIMITS)
    scheduler = rig.scheduler
    scheduler.changes.shrink_kv(ShrinkKV(1, 7, 20))
    assert scheduler.advance(0.0) == VacatePool(1, 7, 20) and scheduler.advance(0.0) is None
    assert scheduler.deadline_s() == 1000.0
    assert scheduler.check_stalled(1000.0) is ActorName.KV_ALLOCATOR
    assert scheduler.deadline_s() is None
    assert not scheduler.blocks_vacated(PoolVacated(1, 6, "KVAllocator"))
    assert scheduler.blocks_vacated(PoolVacated(1, 7, "KVAllocator", refusal="no"))
    assert scheduler.limits.num_kv_blocks == LIMITS.num_kv_blocks
