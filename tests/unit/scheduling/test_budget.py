from hypothesis import given
from hypothesis import strategies as st

from freetoken.scheduling.budget import PrefillWork, derive_seed, plan_prefill_chunks, plan_shares, plan_turns


def work(*remaining, priority=0):
    return [PrefillWork(priority, tokens, tokens) for tokens in remaining]


def test_prefill_beside_decodes_is_capped_and_alone_takes_the_step():
    assert plan_shares(10, True, 512, 256) == (10, 256)
    assert plan_shares(400, True, 512, 256) == (384, 128)
    assert plan_shares(0, True, 512, 256) == (0, 512)
    assert plan_shares(10, False, 512, 256) == (10, 0)


@given(st.integers(0, 5000), st.booleans(), st.integers(16, 4096), st.integers(16, 4096))
def test_shares_fit_the_step_and_starve_nobody(decodes, any_prefill, batched, chunk):
    shares = plan_shares(decodes, any_prefill, batched, chunk)
    assert 0 <= shares.decode_rows <= decodes and shares.decode_rows + shares.prefill_tokens <= batched
    assert not any_prefill or shares.prefill_tokens >= 1
    assert not decodes or shares.decode_rows >= 1
    assert not (decodes and any_prefill) or shares.prefill_tokens <= chunk


def test_short_prompt_passes_a_long_one_which_keeps_half():
    assert plan_prefill_chunks(work(200_000), 256) == [256]
    assert plan_prefill_chunks(work(200_000, 30), 256) == [226, 30]
    assert plan_prefill_chunks(work(200_000, 3000, 30), 256) == [128, 98, 30]
    assert plan_prefill_chunks(work(20, 200_000), 256) == [20, 236]


def test_equal_prompts_finish_one_after_the_other():
    assert plan_prefill_chunks(work(1000, 1000, 1000), 100) == [50, 50, 0]


def test_priority_goes_before_length():
    items = [*work(500, 500), *work(10, priority=1)]
    assert plan_prefill_chunks(items, 100) == [50, 50, 0]


def test_limits_are_respected_and_the_rest_goes_to_others():
    items = [PrefillWork(0, 500, 0), PrefillWork(0, 400, 16), PrefillWork(0, 300, 300)]
    assert plan_prefill_chunks(items, 100) == [0, 16, 84]
    assert plan_prefill_chunks(items, 0) == [0, 0, 0]
    assert plan_prefill_chunks([], 100) == []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300), st.integers(0, 300)), max_size=8), st.integers(0, 600)
)
def test_chunks_use_the_whole_budget_within_the_limits(items, budget):
    items = [PrefillWork(priority, remaining, min(remaining, limit)) for priority, remaining, limit in items]
    chunks = plan_prefill_chunks(items, budget)
    assert all(0 <= chunk <= item.limit_tokens for chunk, item in zip(chunks, items, strict=True))
    assert sum(chunks) == min(budget, sum(item.limit_tokens for item in items))
    first = next((i for i, item in enumerate(items) if item.limit_tokens), None)
    if first is not None:
        assert chunks[first] >= min(items[first].limit_tokens, budget // 2)


def test_turns_go_to_those_who_waited_longest():
    assert plan_turns([5, 5, 5], 3) == [0, 1, 2]
    assert plan_turns([5, 3, 4, 3], 2) == [1, 3]
    assert plan_turns([5, 3, 4, 3], 3) == [1, 2, 3]


def test_seeds_differ_and_are_reproducible():
    seeds = {derive_seed(base, counter) for base in range(10) for counter in range(100)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, 4) == derive_seed(3, 4)
