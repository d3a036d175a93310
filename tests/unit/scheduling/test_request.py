from freetoken.messages import FinishReason, SamplingParams
from freetoken.scheduling.request import Request


def make(**sampling):
    return Request(
        "a",
        (1, 2, 3),
        SamplingParams(seed=0, **sampling),
        priority=0,
        arrival=1,
        max_context_tokens=20,
        eos_token_ids=(9,),
        now=1.0,
    )


def endings(request, *tokens):
    return [request.append_token(token, 2.0 + index) for index, token in enumerate(tokens)]


def test_stop_tokens_count_only_from_min_tokens_on():
    assert endings(make(max_tokens=10, min_tokens=2, stop_token_ids=(8,)), 9, 8, 8) == [None, None, FinishReason.STOP]
    assert endings(make(max_tokens=10), 9) == [FinishReason.STOP]
    assert endings(make(max_tokens=3, ignore_eos=True), 9, 9, 9) == [None, None, FinishReason.LENGTH]


def test_stop_goes_before_length_and_the_context_bounds_both():
    assert endings(make(max_tokens=1), 9) == [FinishReason.STOP]
    assert endings(make(max_tokens=100), *[5] * 17)[-2:] == [None, FinishReason.LENGTH]


def test_repeats_count_the_last_token_only():
    request = make(max_tokens=10)
    counts = []
    for token_id in (5, 5, 6, 5, 5, 5):
        request.append_token(token_id, 2.0)
        counts.append(request.num_repeats)
    assert counts == [1, 2, 1, 1, 2, 3]


def test_init_names_all_stop_tokens_for_masking_and_what_is_known():
    request = make(max_tokens=10, stop_token_ids=(4,))
    request.append_token(5, 2.0)
    request.begin_admission(0, 2.0)
    row = request.plan_row(1, 4)
    assert row.init.eos_token_ids == (4, 9) and row.init.token_ids == (1, 2, 3, 5) and row.init.num_prompt_tokens == 3
    assert (row.start, row.sample, row.use_last_sampled) == (0, True, False)
    row = request.plan_row(2, 1)
    assert (row.start, row.init, row.use_last_sampled) == (4, None, True)


def test_figures():
    request = make(max_tokens=10)
    request.begin_admission(0, 3.0)
    request.append_token(5, 4.0)
    request.append_token(5, 6.0)
    stats = request.stats(9.0)
    assert (stats.queue_s, stats.prefill_s, stats.decode_s, stats.num_output_tokens) == (2.0, 1.0, 2.0, 2)
    unstarted = make(max_tokens=10).stats(4.0)
    assert (unstarted.queue_s, unstarted.prefill_s, unstarted.decode_s) == (3.0, 0.0, 0.0)
