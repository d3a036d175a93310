"""Logits and greedy tokens equal those of `transformers` on the same tiny random weights.

The oracle computes in float32. Float32 models agree within 1e-4 everywhere. BFloat16 models do so too as long as only
the weights are bfloat16 (native kernels, float32 KV); with bfloat16 KV and bfloat16 products, see ``BF16_TOLERANCE``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.execution.arena import Arena
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.experts import ExpertRunner, NoExperts, StoreExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ReferenceOps
from freetoken.messages import ExpertCounters
from freetoken.models.decoder import Decoder, DecoderBatch, DecoderOps
from freetoken.testing.expert_group import ExpertGroup
from freetoken.testing.paged_sequences import PagedRunner, PagedSequence
from freetoken.testing.tiny_checkpoints import TinyCheckpoint, load_tiny_checkpoint, pack_expert_store
from freetoken.testing.tiny_models import TINY_MODELS, TINY_MOE_MODELS, VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 8, 96, 96
TOLERANCE = 1e-4
# Logits have a standard deviation of about 1. Rounding keys, values and the activations of large products to 8 bits of
# mantissa moves them by up to 0.05 on these models; a token whose router is near a tie may take another expert.
BF16_TOLERANCE = 0.15
LENGTHS = (61, 1, 17, 8)


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.WorkerPool]:
    pool = _native.WorkerPool(2)
    yield pool
    pool.close()


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(5, VOCAB_SIZE) for _ in range(length)]


def geometry(tiny: TinyCheckpoint, kv_dtype: str) -> KVGeometry:
    spec = tiny.spec
    return KVGeometry(NUM_BLOCKS, spec.num_layers, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, kv_dtype)


def paged(tiny: TinyCheckpoint, ops: DecoderOps) -> PagedRunner:
    return PagedRunner(Decoder(tiny.spec, tiny.dense, 512, ops.prepare), ops, BLOCK_SIZE, NUM_BLOCKS)


def cpu_ops(
    tiny: TinyCheckpoint, pool: _native.WorkerPool, deterministic: bool = False, kv_dtype: str = "f32"
) -> CpuOps:
    """On the native kernels, experts straight from the store."""
    experts: ExpertRunner = NoExperts()
    if tiny.spec.is_moe:
        experts = StoreExperts(pool, pack_expert_store(tiny)[0], deterministic)
    return CpuOps(pool, Arena(geometry(tiny, kv_dtype), 0, 0), experts, deterministic)


def in_chunks(run: PagedRunner, tokens: list[int], chunk: int) -> Tensor:
    """All logits of one sequence, computed alone."""
    sequence = PagedSequence(tokens)
    parts = []
    while sequence.num_computed < len(tokens):
        parts += run.run([(sequence, min(chunk, len(tokens) - sequence.num_computed))])
    run.release(sequence)
    return torch.cat(parts)


def batched(run: PagedRunner, prompts: list[list[int]], budget: int) -> list[Tensor]:
    """All logits of several sequences in mixed batches: a different share of each in every step."""
    sequences = [PagedSequence(tokens) for tokens in prompts]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for step in itertools.count():
        todo = [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]
        if not todo:
            break
        left, chunks = budget, []
        for i in todo[step % len(todo) :] + todo[: step % len(todo)]:
            count = min(1 + (5 * step + 3 * i) % 11, left, len(sequences[i].tokens) - sequences[i].num_computed)
            if count:
                chunks.append((i, count))
                left -= count
        logits = run.run([(sequences[i], count) for i, count in chunks])
        for (i, _), part in zip(chunks, logits, strict=True):
            parts[i].append(part)
    for sequence in sequences:
        run.release(sequence)
    return [torch.cat(part) for part in parts]


def worst(ours: Tensor, oracle: Tensor) -> float:
    return float((ours - oracle).abs().max())


def assert_greedy_equal(ours: Tensor, oracle: Tensor, tolerance: float) -> None:
    """Wherever the oracle prefers its token by more than twice the tolerance, so do we."""
    best = oracle.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * tolerance
    assert clear.float().mean() > 0.3
    assert torch.equal(ours.argmax(-1)[clear], oracle.argmax(-1)[clear])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_reference_operations(name: str) -> None:
    tiny = load_tiny_checkpoint(name)
    tokens = prompt(61, 1)
    expected = tiny.oracle_logits(tokens)
    run = paged(tiny, ReferenceOps(geometry(tiny, "f32"), tiny.experts))
    for chunk in (61, 7):
        assert worst(in_chunks(run, tokens, chunk), expected) < TOLERANCE


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_float32(name: str, deterministic: bool, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name)
    prompts = [prompt(length, length) for length in LENGTHS]
    expected = [tiny.oracle_logits(tokens) for tokens in prompts]
    for logits in every_way(paged(tiny, cpu_ops(tiny, pool, deterministic)), prompts, deterministic):
        for ours, oracle in zip(logits, expected, strict=True):
            assert worst(ours, oracle) < TOLERANCE
            assert torch.equal(ours.argmax(-1), oracle.argmax(-1))


def every_way(run: PagedRunner, prompts: list[list[int]], same_bits: bool) -> list[list[Tensor]]:
    """Logits of the prompts whole, in several chunk sizes, token by token, and in mixed batches of two sizes."""
    results = [[in_chunks(run, tokens, chunk) for tokens in prompts] for chunk in (96, 24, 7, 1)]
    results += [batched(run, prompts, budget) for budget in (96, 19)]
    if same_bits:
        for logits in results[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(logits, results[0], strict=True))
    return results


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "mixtral", "qwen3_moe"])
def test_bfloat16_weights_are_used_exactly(name: str, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name, "bfloat16")
    prompts = [prompt(length, length) for length in LENGTHS]
    expected = [tiny.oracle_logits(tokens) for tokens in prompts]
    for logits in every_way(paged(tiny, cpu_ops(tiny, pool, deterministic=True)), prompts, same_bits=True):
        for ours, oracle in zip(logits, expected, strict=True):
            assert worst(ours, oracle) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "mixtral", "qwen3_moe", "qwen3_moe_mixed"])
def test_bfloat16_throughout(name: str, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name, "bfloat16")
    prompts = [prompt(length, length) for length in LENGTHS]
    expected = torch.cat([tiny.oracle_logits(tokens) for tokens in prompts])
    for logits in every_way(paged(tiny, cpu_ops(tiny, pool, kv_dtype="bf16")), prompts, same_bits=False):
        ours = torch.cat(logits)
        per_token = (ours - expected).abs().amax(dim=-1)
        usual = per_token < BF16_TOLERANCE
        assert usual.float().mean() > (0.9 if tiny.spec.is_moe else 0.999), per_token.max()
        assert float((ours - expected).abs().mean()) < 0.02
        assert_greedy_equal(ours[usual], expected[usual], BF16_TOLERANCE)


@pytest.mark.parametrize("name", ["llama_bias_yarn", "mistral", "qwen3_moe"])
def test_chunks_large_enough_for_the_large_batch_products(name: str, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name)
    tokens = prompt(260, 3)
    expected = tiny.oracle_logits(tokens)
    run = paged(tiny, cpu_ops(tiny, pool))
    for chunk in (260, 130, 101):
        assert worst(in_chunks(run, tokens, chunk), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe"])
def test_greedy_continuation(name: str, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name)
    run = paged(tiny, cpu_ops(tiny, pool))
    prompts = [prompt(length, 100 + length) for length in (30, 5)]
    sequences = [PagedSequence(list(tokens)) for tokens in prompts]
    for _ in range(12):
        logits = run.run([(s, len(s.tokens) - s.num_computed) for s in sequences])
        for sequence, rows in zip(sequences, logits, strict=True):
            sequence.tokens.append(int(rows[-1].argmax()))
    for sequence, tokens in zip(sequences, prompts, strict=True):
        assert sequence.tokens[len(tokens) :] == tiny.oracle_greedy(tokens, 12)


# ---------------------------------------------------------------------------------- experts through the mailbox


class CountedOps(CpuOps):
    """Starts a step of the expert runner for every forward pass and keeps its figures."""

    def __init__(self, pool: _native.WorkerPool, arena: Arena, experts: ExpertRunner, deterministic: bool) -> None:
        super().__init__(pool, arena, experts, deterministic)
        self.steps: list[ExpertCounters] = []

    def upload(self, batch: DecoderBatch) -> DecoderBatch:
        self.collect()
        self.expert_runner.begin_step(len(self.steps) + 1)
        return super().upload(batch)

    def collect(self) -> None:
        """Note the figures of the step that ended."""
        counters = self.expert_runner.step_counters()
        if counters.layer_steps:
            self.steps.append(counters)


@dataclass(frozen=True)
class Place:
    """A state of the expert cache. ``slots`` as a fraction of all experts, or a number of slots."""

    slots: float | int
    fetch_fraction: float
    in_place: bool = False
    policy: str = "crf"
    split_records: bool = False


PLACES = {
    # One layer of these models uses 8 or 16 experts for a chunk.
    "fewer slots than one layer needs": Place(3, 1.0),
    "everything resident": Place(1.0, 1.0, policy="lru"),
    "everything on the CPU": Place(0.5, 0.0),
    "no slots": Place(0, 0.5),
    "in place": Place(0, 0.5, in_place=True),
    "a mix": Place(0.4, 0.5),
    "records in parts": Place(0.4, 0.4, split_records=True),
    "records in parts, no slots": Place(0, 0.3, split_records=True),
    "a mix under lru": Place(0.4, 0.3, policy="lru"),
}


def in_place_of(
    stack: ExitStack, tiny: TinyCheckpoint, pool: _native.WorkerPool, place: Place, deterministic: bool
) -> tuple[PagedRunner, CountedOps]:
    """The model with its experts behind a mailbox, until ``stack`` closes."""
    # Nothing is split then, and how a record is tiled shows in the bits.
    small_tiles = place.split_records and not deterministic
    store, layout = pack_expert_store(tiny, 8 if small_tiles else None)
    total = len(tiny.spec.moe_layers) * tiny.spec.num_experts
    slots = int(place.slots * total) if isinstance(place.slots, float) else place.slots
    arena = Arena(geometry(tiny, "f32"), slots, layout.stride_bytes)
    group = ExpertGroup(
        tiny.spec,
        store,
        layout,
        arena,
        pool,
        fetch_fraction=place.fetch_fraction,
        max_tokens=MAX_TOKENS,
        in_place=place.in_place,
        policy=place.policy,
        deterministic=deterministic,
        split_records=place.split_records,
    )
    stack.enter_context(group)
    ops = CountedOps(pool, arena, group.experts, deterministic)
    return paged(tiny, ops), ops


@pytest.mark.parametrize("name", TINY_MOE_MODELS)
@pytest.mark.parametrize("place", PLACES)
def test_experts_through_the_mailbox(name: str, place: str, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name)
    prompts = [prompt(length, length) for length in LENGTHS]
    expected = [tiny.oracle_logits(tokens) for tokens in prompts]
    with ExitStack() as stack:
        run, ops = in_place_of(stack, tiny, pool, PLACES[place], deterministic=False)
        for logits in every_way(run, prompts, same_bits=False):
            for ours, oracle in zip(logits, expected, strict=True):
                assert worst(ours, oracle) < TOLERANCE
                assert torch.equal(ours.argmax(-1), oracle.argmax(-1))
        ops.collect()
    layers = len(tiny.spec.moe_layers)
    assert all(step.layer_steps == layers for step in ops.steps)
    total = sum(ops.steps, ExpertCounters())
    if PLACES[place].split_records:
        misses = total.fetches + total.cpu
        stride = (total.fetched_bytes + total.cpu_bytes) // misses
        assert total.fetched_bytes % stride != 0  # so a part of some record
    if place == "fewer slots than one layer needs":
        assert total.fetches > 0 and total.admitted > 0 and total.cpu == 0
    elif place == "everything resident":
        assert all(step.fetches == step.cpu == 0 and step.hits > 0 for step in ops.steps[-10:])
    elif place == "records in parts, no slots":
        assert total.hits == 0 and abs(total.fetched_bytes / (misses * stride) - 0.3) < 0.1
    elif place in ("everything on the CPU", "no slots"):
        assert total.hits == total.admitted == 0 and total.cpu > 0
        assert (total.fetches > 0) == (place == "no slots")
    elif place == "in place":
        assert total.hits > 0 and total.fetches == total.cpu == 0
    else:
        assert any(step.hits and step.fetches and step.cpu for step in ops.steps)
        assert total.fetched_bytes > 0 and total.cpu_bytes > 0
        assert total.evicted > 0 or place != "a mix under lru"  # by scores, little of a few prompts deserves it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_mixed"])
def test_deterministic_bits_do_not_depend_on_where_experts_run(name: str, dtype: str, pool: _native.WorkerPool) -> None:
    tiny = load_tiny_checkpoint(name, dtype)
    prompts = [prompt(length, length) for length in LENGTHS]
    direct = [in_chunks(paged(tiny, cpu_ops(tiny, pool, deterministic=True)), tokens, 96) for tokens in prompts]
    mixed = 0
    for place in PLACES.values():
        with ExitStack() as stack:
            run, ops = in_place_of(stack, tiny, pool, place, deterministic=True)
            for logits in every_way(run, prompts, same_bits=True):
                assert all(torch.equal(ours, first) for ours, first in zip(logits, direct, strict=True))
            ops.collect()
        mixed += sum(bool(step.hits and step.fetches and step.cpu) for step in ops.steps)
    assert mixed > 0


def test_deterministic_bits_do_not_depend_on_threads() -> None:
    tiny = load_tiny_checkpoint("qwen3_moe", "bfloat16")
    tokens = prompt(61, 5)
    results = []
    for threads in (1, 2, 3):
        pool = _native.WorkerPool(threads)
        results.append(in_chunks(paged(tiny, cpu_ops(tiny, pool, deterministic=True, kv_dtype="bf16")), tokens, 40))
        pool.close()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
