"""Any order of arrivals, aborts, replies, results and faults gives each request the tokens it would get alone."""

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.messages import FinishReason, SamplingParams
from freetoken.scheduling import SchedulerLimits
from freetoken.testing.fake_executor import expected_answer
from freetoken.testing.scheduler_rig import SchedulerRig

VOCAB = 4  # few tokens: equal prefixes, early stops

limits = st.builds(
    SchedulerLimits,
    max_num_running=st.integers(1, 6),
    max_num_waiting=st.integers(2, 6),
    max_num_batched_tokens=st.integers(4, 24),
    prefill_chunk_tokens=st.integers(1, 12),
    step_timeout_s=st.just(1000.0),
    max_context_tokens=st.integers(12, 40),
    block_size=st.integers(1, 5),
    num_kv_blocks=st.integers(6, 24),
    vocab_size=st.just(VOCAB),
    eos_token_ids=st.sampled_from([(), (0,)]),
    prefix_cache=st.booleans() | st.just(True),
    ride_along_tokens=st.sampled_from([None, 0, 2, 5]),
)


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int


arrivals = st.builds(
    Arrival,
    # Repetitive prompts: long common prefixes that end within blocks and chunks.
    st.builds(lambda head, length, tail: (head * 40)[:length] + tail,
              st.sampled_from([(1,), (1, 2), (1, 1, 3)]), st.integers(1, 30),
              st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple)),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.sampled_from([(), (1,)]),
        ignore_eos=st.booleans(),
    ),
    st.integers(0, 2),
)  # fmt: skip

events = st.one_of(
    arrivals,
    st.sampled_from(["reply", "step", "step", "step", "cycle", "cycle", "cycle", "background"]),
    st.sampled_from(["fail", "stall", "fail background"])
    | st.tuples(st.sampled_from(["abort", "numeric"]), st.integers(0, 20)),
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(limits, st.lists(events, max_size=60), st.integers(1, 3))
def test_tokens_do_not_depend_on_the_order_of_events(limits, script, weight):
    rig = SchedulerRig(replace(limits, prefill_chunk_tokens=min(limits.prefill_chunk_tokens, 16)))
    sent: dict[str, Arrival] = {}
    faulty: set[str] = set()

    for event in script:
        match event:
            case Arrival():
                name = f"r{len(sent)}"
                sent[name] = event
                rig.submit(name, event.prompt, event.sampling, event.priority)
            case "reply":
                rig.deliver_reply()
            case "step":
                rig.run_step()
            case "cycle":
                for _ in range(weight):
                    rig.cycle()
            case "fail":
                plan = rig.plans[0] if rig.plans else None
                if rig.fail_step():
                    faulty |= {row.request_id for row in plan.rows}
            case "background":
                rig.end_background()
            case "fail background":
                plan = rig.background
                if rig.end_background("out of luck"):
                    faulty |= {row.request_id for row in plan.rows}
            case "stall":
                rig.now += 2000.0
                before = set(rig.endings)
                rig.scheduler.check_stalled(rig.now)
                rig.pump()
                faulty |= rig.endings.keys() - before
            case ("abort", index):
                rig.abort(f"r{index}")
            case ("numeric", index):
                rig.device.numeric_faults.add(f"r{index}")
        rig.allocator.check_integrity()
    rig.drain(5000)
    rig.check_baseline()

    for name, arrival in sent.items():
        ending = rig.endings[name]
        tokens, reason = expected_answer(
            arrival.prompt,
            arrival.sampling,
            vocab_size=VOCAB,
            max_context_tokens=limits.max_context_tokens,
            eos_token_ids=limits.eos_token_ids,
        )
        got = rig.tokens[name]
        assert got == tokens[: len(got)], f"{name} got other tokens than alone"
        if ending.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (got, ending.finish_reason) == (tokens, reason)
        elif ending.finish_reason is FinishReason.ERROR:
            kind = ending.failure.kind
            assert kind in ("internal", "numeric", "context_length_exceeded", "queue_full")
            if kind == "context_length_exceeded":
                longest = min(limits.kv_capacity_tokens, limits.max_context_tokens - 1)
                assert len(arrival.prompt) > longest or len(arrival.prompt) + len(got) > limits.kv_capacity_tokens
            assert kind != "internal" or name in faulty, ending.failure.message


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(limits, st.lists(arrivals, min_size=2, max_size=12))
def test_most_important_request_is_never_preempted(limits, requests):
    rig = SchedulerRig(replace(limits, max_num_waiting=20))
    for index, arrival in enumerate(requests):
        rig.submit(f"r{index}", arrival.prompt, arrival.sampling)
    rig.drain(5000)
    rig.check_baseline()
    accepted = [f"r{index}" for index in range(len(requests)) if rig.endings[f"r{index}"].stats is not None]
    if accepted:
        assert rig.endings[accepted[0]].stats.num_preemptions == 0
