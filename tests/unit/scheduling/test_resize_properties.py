"""KV may change its size between any two steps, also in vain: every request gets the tokens it would get alone."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.messages import ActorName, ArenaPrepared, FinishReason, ResizeApplied, SamplingParams
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
    st.sampled_from(["cycle", "cycle", "cycle", "step", "reply"]),
    st.tuples(st.integers(MIN_BLOCKS, 40), st.sampled_from([False, False, True])),
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, max_size=60), st.booleans())
def test_tokens_do_not_depend_on_the_size_of_kv(script, prefix_cache):
    rig = SchedulerRig(replace(LIMITS, prefix_cache=prefix_cache))
    sent = {}
    for event in script:
        if event == "cycle":
            rig.cycle()
        elif event == "step":
            rig.run_step()
        elif event == "reply":
            rig.deliver_reply()
        elif isinstance(event[0], int):
            blocks, fails = event
            before = rig.allocator.stats()
            held = before.total_blocks - before.free_blocks - before.cached_blocks
            done = rig.resize(blocks, fails)
            assert rig.allocator.stats().total_blocks == (blocks if done else before.total_blocks)
            assert rig.scheduler.limits.num_kv_blocks == rig.allocator.stats().total_blocks
            assert done or fails or blocks < held + 12  # steps until the hold may have taken some more
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
        assert rig.endings[name].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), rig.endings[name].failure
        assert (rig.tokens[name], rig.endings[name].finish_reason) == (tokens, reason)


def test_blocks_granted_but_not_sent_move_too():
    rig = SchedulerRig(LIMITS)
    for index in range(4):
        rig.submit(f"r{index}", (1, 2, index), SamplingParams(max_tokens=20, seed=0, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        rig.cycle()
    assert rig.resize(MIN_BLOCKS)
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
    assert rig.resize(4)
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
    assert not rig.resize(5)
    assert rig.allocator.block_table("a")[: len(before)] == before
    assert rig.scheduler.limits.num_kv_blocks == 24
    rig.drain()
    rig.check_baseline()


def test_a_waiting_request_that_fits_no_more_is_told_so_and_disturbs_nobody():
    rig = SchedulerRig(LIMITS)
    sampling = SamplingParams(max_tokens=6, seed=0, temperature=0.0, ignore_eos=True)
    for index in range(5):
        rig.submit(f"r{index}", (1, 2, index % 4), sampling)
    rig.cycle()
    rig.submit("long", (1,) * 30, sampling)
    assert rig.resize(8)
    rig.drain()
    failure = rig.endings.pop("long").failure
    assert failure.kind == "context_length_exceeded" and "30 tokens; the KV cache holds 24 tokens" in failure.message
    assert [ending.finish_reason for ending in rig.endings.values()] == [FinishReason.LENGTH] * 5
    rig.check_baseline()


def test_an_owner_that_never_answers_is_suspected():
    rig = SchedulerRig(LIMITS)
    scheduler = rig.scheduler
    scheduler.hold(ArenaPrepared(1, 7, 3, 20))
    assert scheduler.take_vacate(0.0) is not None and scheduler.take_vacate(0.0) is None
    assert scheduler.deadline_s() == 1000.0
    scheduler.applied(ResizeApplied(1, 7, "KVAllocator", stats=rig.allocator.stats()))
    assert scheduler.check_stalled(1000.0) is ActorName.EXPERT_CACHE
    scheduler.hold(ArenaPrepared(1, 8, 3, 20))
    assert scheduler.take_vacate(0.0) is not None
    assert scheduler.check_stalled(1000.0) is ActorName.GPU_EXECUTOR
